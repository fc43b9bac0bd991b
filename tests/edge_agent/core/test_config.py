from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.config import (
    AgentConfig,
    BrokerConfig,
    TlsConfig,
    check_tls,
    default_agent_id,
    load,
    parse,
    urls_of,
)
from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.core.storage import read_toml
from edge_agent.core.task import Task
from edge_agent.wire.topics import Topics

MINIMAL = {"data": {"source": "folder:pictures"}}


def mistakes(model, raw) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(model, raw, where="agent.toml")
    assert str(caught.value).startswith(f"agent.toml: {len(caught.value.mistakes)} mistake")
    return sorted(caught.value.mistakes)


def written(tmp_path, text: str) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_where_the_data_are_is_all_that_has_to_be_said():
    config = parse(AgentConfig, MINIMAL, where="test")
    assert (config.tier, config.federation, config.broker.url) == ("auto", "home", "mqtt://127.0.0.1:1883")
    assert (config.broker.wait, config.broker.keepalive_s, config.heartbeat_s) == (True, 30, 15.0)
    assert config.id == default_agent_id()


def test_all_mistakes_are_told_at_once_each_with_the_nearest_known_key():
    raw = {
        "iid": "porch",
        "id": "Porch!",
        "heartbeat_s": 0,
        "broker": {"ulr": "mqtt://a", "keepalive_s": "soon", "tls": {"ca_file": "x"}},
        "head": {"precison": "int8", "precision": "int7"},
        "qqqqqq": 1,
    }
    found = mistakes(AgentConfig, raw)
    assert len(found) == 10
    expected = [
        "broker.keepalive_s = 'soon': ",
        "broker.tls.ca_file: unknown key; known: ca, cert, key",
        "broker.ulr: unknown key; did you mean 'url'?",
        "data: is missing",
        "head.precision = 'int7': Input should be 'auto', 'fp32' or 'int8'",
        "head.precison: unknown key; did you mean 'precision'?",
        "heartbeat_s = 0: ",
        "id = 'Porch!': ",
        "iid: unknown key; did you mean 'id'?",
    ]
    found_texts = [line for line in found if not line.startswith("qqqqqq")]
    assert all(line.startswith(start) for line, start in zip(found_texts, expected, strict=True)), found


def test_where_nothing_is_near_all_known_keys_are_listed():
    (found,) = mistakes(TlsConfig, {"zzzzzz": 1})
    assert found == "zzzzzz: unknown key; known: ca, cert, key"


def test_a_typo_inside_one_of_several_kinds_is_explained_by_that_kind():
    raw = {"class_names": ["a"], "input": {"kind": "window", "lenght": 5}}
    assert mistakes(Task, raw) == ["input.window.lenght: unknown key; did you mean 'length'?"]


def test_a_mistake_in_a_long_value_is_told_shortly():
    (found,) = mistakes(AgentConfig, {**MINIMAL, "id": "X" * 10_000})
    assert len(found) < 200


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="heartbeat_s"):
        load(AgentConfig, written(tmp_path, f'heartbeat_s = {value}\n[data]\nsource = "a:b"\n'))


# --- the broker's address --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, host, port, uses_tls",
    [
        ("mqtt://broker.example", "broker.example", 1883, False),
        ("mqtts://broker.example", "broker.example", 8883, True),
        ("mqtt://10.0.0.7:11883/", "10.0.0.7", 11883, False),
        ("mqtts://[fe80::1]:99", "fe80::1", 99, True),
        ("mqtt://[::1]", "::1", 1883, False),
    ],
)
def test_a_url_names_host_port_and_tls(url, host, port, uses_tls):
    config = BrokerConfig(url=url)
    assert (config.host, config.port, config.uses_tls) == (host, port, uses_tls)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "broker.example",
        "broker.example:1883",
        "http://broker.example",
        "mqtt:broker.example",
        "mqtt://",
        "mqtt://:1883",
        "mqtt://a:port",
        "mqtt://a:0",
        "mqtt://a:65536",
        "mqtt://a:-1",
        "mqtt://[::1",
        "mqtt://a/path",
        "mqtt://a?tls=1",
        "mqtt://a#x",
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url):
    (found,) = mistakes(BrokerConfig, {"url": url})
    assert found.startswith("url = ")
    assert "Value error" not in found


def test_several_brokers_are_a_list_and_one_stays_what_it_was(tmp_path):
    path = written(tmp_path, '[broker]\nurl = ["mqtts://a", "mqtts://b:99"]\n[data]\nsource = "a:b"\n')
    broker = load(AgentConfig, path).broker
    assert broker.url == broker.urls == ("mqtts://a", "mqtts://b:99")
    assert (broker.names, broker.uses_tls, broker.is_local) == ("mqtts://a, mqtts://b:99", True, False)
    assert [(broker.at(url).host, broker.at(url).port) for url in broker.urls] == [("a", 8883), ("b", 99)]
    assert BrokerConfig(url=["mqtt://a"]) == BrokerConfig(url="mqtt://a")
    assert BrokerConfig(url="mqtt://a").urls == ("mqtt://a",)
    assert BrokerConfig(url=["mqtt://127.0.0.1", "mqtt://[::1]"]).is_local
    assert urls_of("mqtt://a") == "mqtt://a"
    assert urls_of("mqtt://a, mqtt://b") == ["mqtt://a", "mqtt://b"]


def test_the_address_of_a_list_is_no_single_one():
    with pytest.raises(UsageError, match=r"has 2 brokers .*name one"):
        _ = BrokerConfig(url=["mqtt://a", "mqtt://b"]).host


@pytest.mark.parametrize(
    "urls, reason",
    [
        ([], "list of 0 brokers; expected 1..16"),
        ([f"mqtt://b{number}" for number in range(17)], "list of 17 brokers; expected 1..16"),
        (["mqtt://a", "mqtt://A:1883"], "'mqtt://A:1883' is the broker 'mqtt://a' again"),
        (["mqtt://a", "mqtt://a"], "'mqtt://a' is the broker 'mqtt://a' again"),
        (["mqtts://a", "mqtt://b"], "'mqtt://b' is without TLS, and others of the list have it"),
        (["mqtts://a", "http://b"], "'http://b' is not mqtt://host"),
        (["mqtts://a", 7], "7 is no text; expected mqtt://host"),
        (7, "7 is no text; expected mqtt://host"),
    ],
)
def test_a_list_that_is_no_way_to_one_federation_is_refused_with_the_broker_that_is_wrong(urls, reason):
    (mistake,) = mistakes(BrokerConfig, {"url": urls})
    assert mistake.startswith("url = ")
    assert reason in mistake


def test_each_broker_on_another_machine_needs_tls():
    with pytest.raises(UsageError, match="mqtt://b is without TLS"):
        check_tls(BrokerConfig(url=["mqtt://127.0.0.1", "mqtt://b"]))
    check_tls(BrokerConfig(url=["mqtts://a", "mqtts://b"]))


def test_a_password_in_the_url_is_refused_and_not_repeated():
    for url in ("mqtt://porch:hunter2@broker.example", "mqtts://hunter2@broker.example"):
        for raw in ({"url": url}, {"url": url, "tls": {"key": "x"}, "keepalive_s": 0}):
            text = "\n".join(mistakes(BrokerConfig, raw))
            assert "use user and password_file" in text
            assert "hunter2" not in text


def test_tls_settings_that_the_url_would_not_use_are_refused():
    (found,) = mistakes(BrokerConfig, {"url": "mqtt://a", "tls": {"ca": "ca.pem"}})
    assert "connects without it; write mqtts://" in found
    assert BrokerConfig(url="mqtts://a", tls=TlsConfig(ca=Path("ca.pem"))).uses_tls


def test_a_key_without_its_certificate_is_refused():
    (found,) = mistakes(BrokerConfig, {"url": "mqtts://a", "tls": {"key": "k.pem"}})
    assert found.startswith("tls = ")
    assert TlsConfig(cert=Path("both.pem")).key is None


# --- files -----------------------------------------------------------------------------------------------------------


def test_relative_paths_count_from_the_file_and_absolute_ones_stay(tmp_path):
    text = (
        'state = "kept"\n[data]\nsource = "a:b"\n[broker]\nurl = "mqtts://a"\npassword_file = "/etc/secret"\n'
        '[broker.tls]\nca = "certs/ca.pem"\n'
    )
    config = load(AgentConfig, written(tmp_path, text))
    assert config.state == tmp_path / "kept"
    assert config.data.folder == tmp_path
    assert config.broker.tls is not None
    assert config.broker.tls.ca == tmp_path / "certs/ca.pem"
    assert config.broker.tls.cert is None
    assert config.broker.password_file == Path("/etc/secret")


def test_what_is_given_beside_the_file_wins_over_it(tmp_path):
    path = written(tmp_path, '[data]\nsource = "a:b"\nseed = 3\n[broker]\nurl = "mqtt://a"\nuser = "u"\n')
    config = load(AgentConfig, path, {"broker": {"url": "mqtt://b"}, "data": {"seed": 4}, "tier": "head"})
    assert (config.broker.url, config.broker.user, config.tier) == ("mqtt://b", "u", "head")
    assert (config.data.source, config.data.seed) == ("a:b", 4)


def test_a_mistake_beside_the_file_is_told_like_one_in_it(tmp_path):
    path = written(tmp_path, '[data]\nsource = "a:b"\n')
    with pytest.raises(
        ConfigError, match=r"agent.toml: 1 mistake\n  - broker.wiat: unknown key; did you mean 'wait'\?"
    ):
        load(AgentConfig, path, {"broker": {"wiat": False}})


@pytest.mark.parametrize(
    "content, complaint",
    [(b"a = ", "is not TOML"), (b"\xff\xfe", "cannot be read"), (b"a = 1\na = 2\n", "is not TOML")],
)
def test_a_file_that_is_not_toml_is_told_with_its_name(tmp_path, content, complaint):
    path = tmp_path / "agent.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file; 'edge-agent enroll -' makes it .*'edge-agent import"):
        load(AgentConfig, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(AgentConfig, tmp_path)


@pytest.mark.parametrize(
    "content, password",
    [
        (b"secret", "secret"),
        (b"secret\n", "secret"),
        (b"p\xc3\xa4ss\r\nsecond\n", "päss"),
        (b" a ", " a "),
    ],
)
def test_the_password_is_the_first_line_of_its_file(tmp_path, content, password):
    (tmp_path / "secret").write_bytes(content)
    assert BrokerConfig(password_file=tmp_path / "secret").password() == password


@pytest.mark.parametrize("content", [None, b"", b"\nx", b"\xff\xfe\x00"])
def test_a_password_file_that_cannot_be_read_is_told_without_its_content(tmp_path, content):
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read a line from"):
        BrokerConfig(password_file=tmp_path / "secret").password()


def test_no_password_file_means_no_password():
    assert BrokerConfig().password() is None


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, name",
    [
        ("raspberrypi", "raspberrypi"),
        ("Jetson-Nano.local", "jetson-nano-local"),
        ("bäckerei", "b-ckerei"),
        ("--x--", "x"),
        ("", "agent"),
        ("...", "agent"),
        ("a" * 80, "a" * 63),
    ],
)
def test_a_host_name_becomes_an_agent_name(monkeypatch, host, name):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert default_agent_id() == name


@given(st.text(max_size=100))
def test_whatever_the_host_is_called_the_agent_can_be_spoken_to(host):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        config = AgentConfig.model_validate(MINIMAL)
    topics = Topics("home")
    assert topics.sender(topics.up(config.id)) == (config.id, "up")


@pytest.mark.parametrize("name", ["", "Porch", "a b", "a/b", "porch\n", "-a", "+", "é", "a" * 64])
def test_a_name_that_cannot_be_a_topic_is_refused(name):
    assert len(mistakes(AgentConfig, {**MINIMAL, "id": name, "federation": name})) == 2


def test_a_configuration_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        parse(AgentConfig, MINIMAL, where="test").tier = "head"
