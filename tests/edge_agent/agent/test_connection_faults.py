"""Why an agent is alone: what the broker or the other protocol says is a fault with its remedy in its own status."""

from __future__ import annotations

import json
import signal as signals
import subprocess
import sys
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from federation_disturbances import Stranger
from federation_harness import Federation

from edge_agent.agent import certificate, event_loop
from edge_agent.agent.app import refused_topics_of
from edge_agent.agent.health import ASK_RULES_S, OtherClock
from edge_agent.cli import main as edge_agent
from edge_agent.core.children import is_stopped
from edge_agent.core.config import AgentConfig, BrokerConfig, DataConfig, TlsConfig
from edge_agent.core.errors import SET_CLOCK, StateError
from edge_agent.wire.messages import codec, down
from edge_agent.wire.transport import Disconnected


def local(agent):
    agent.write_status()
    return json.loads((agent.config.state / "status.json").read_bytes())


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=("a0",)) as federation:
        federation.settle()
        yield federation


def cut(agent, reason, remedy=""):
    agent.transport._events.put(Disconnected(reason, 1.0, remedy, clocks_differ=remedy == SET_CLOCK))
    agent.step(0)


def test_refused_login_is_a_fault_until_the_broker_lets_the_agent_in(fed):
    agent = fed.agents["a0"]
    cut(agent, "broker refuses user 'a0' (Not authorized): why; make a password", "make a password")
    found = local(agent)
    assert (found["condition"], found["fault"]["error"]) == ("fault", "LoginRefused")
    assert found["fault"]["message"] == "broker refuses user 'a0' (Not authorized): why"
    assert found["fault"]["remedy"] == "make a password"
    since = found["fault"]["at"]
    cut(agent, "broker refuses user 'a0' (Not authorized): why; make a password", "make a password")
    assert local(agent)["fault"]["at"] == since, "it is the same fault"
    cut(agent, "Connection refused")
    assert local(agent)["fault"] is None, "a broker that is away is no fault of the device"
    cut(agent, "broker refuses a login without a user (Not authorized); set it", "set it")
    agent.transport.start()
    fed.settle()
    assert (local(agent)["condition"], local(agent)["fault"]) == ("ok", None)
    assert agent.condition.name == "ok", "the coordinator hears of none"


def test_refused_login_of_another_user_names_both(fed):
    agent = fed.agents["a0"]
    agent.config = agent.config.model_copy(update={"broker": BrokerConfig(user="porch")})
    cut(agent, "broker refuses user 'porch' (Not authorized): why; do it", "do it")
    found = local(agent)["fault"]
    assert found["message"] == "broker refuses user 'porch' (Not authorized): why"
    assert "does not let this user speak for id 'a0'" in found["remedy"]


@pytest.mark.parametrize("answer", [{"up": "Not authorized"}, {}, None])
def test_broker_is_asked_for_its_rules_once_in_a_silence(fed, answer):
    agent = fed.agents["a0"]
    asked = []

    def refused(messages):
        asked.append(sorted(messages))
        return answer

    agent.refused_topics = refused
    fed.kill_coordinator()
    agent._begin_alone()
    fed.wait(ASK_RULES_S - 1)
    assert not asked
    fed.wait(60)
    assert asked == [sorted([fed.topics.up("a0"), fed.topics.heartbeat("a0")])]
    found = local(agent)
    if answer:
        assert (found["condition"], found["fault"]["error"]) == ("fault", "TopicsRefused")
        assert "speak for id 'a0' in 'home' (Not authorized)" in found["fault"]["message"]
        assert "broker.user" in found["fault"]["remedy"]
        assert found["waits_for"].startswith(found["fault"]["message"])
    else:
        assert (found["condition"], found["fault"]) == ("ok", None)
    fed.start_coordinator()
    fed.wait(5)
    assert (local(agent)["condition"], local(agent)["fault"]) == ("ok", None)


def test_broker_is_not_asked_where_the_id_comes_from_the_certificate():
    config = AgentConfig(id="a", data=DataConfig(source="none:"))
    assert refused_topics_of(config, None) is not None
    tls = BrokerConfig(url="mqtts://there", tls=TlsConfig(cert="x.pem"))
    assert refused_topics_of(config.model_copy(update={"broker": tls}), None) is None


def test_other_protocol_is_a_fault_while_no_coordinator_answers(fed):
    agent = fed.agents["a0"]
    fed.kill_coordinator()
    agent._begin_alone()
    refusal = down.Refused(error="ProtocolMismatch", message="coordinator 9 speaks protocol 5..5: upgrade this side")
    Stranger(fed, "newer").raw(codec.encode(refusal), fed.topics.down("a0"))
    fed.settle()
    found = local(agent)
    assert (found["condition"], found["fault"]["error"]) == ("fault", "ProtocolMismatch")
    assert "protocol 5..5" in found["fault"]["message"]
    assert found["fault"]["remedy"] == "upgrade the side that speaks the older protocol"
    fed.start_coordinator()
    fed.wait(5)
    assert (local(agent)["condition"], local(agent)["fault"]) == ("ok", None)


def test_status_of_a_device_without_data_shows_what_there_is(tmp_path, capsys):
    """As 'edge-agent enroll' without --data leaves it: it was refused with 'data.source: is missing'."""
    config = tmp_path / "agent.toml"
    config.write_text('id = "porch"\nstate = "state"\n[data]\nfolder = "."\n')
    assert edge_agent(["status", "--config", str(config)]) == 1
    said = capsys.readouterr().out
    assert "no data are named" in said
    assert f"name this device's data in {config}, [data] source" in said
    config.write_text('id = "porch"\nstate = "state"\n')
    assert edge_agent(["status", "--config", str(config), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["running"], found["fault"]["error"]) == ("porch", False, "ConfigError")
    config.write_text('id = "porch"\nstate = "state"\n[data]\nsorce = "x"\n')
    assert edge_agent(["status", "--config", str(config)]) == 2, "other mistakes are mistakes"
    assert "did you mean 'source'" in capsys.readouterr().err


def died(number):
    """The error of a renewal whose child ended by that signal, which it really got."""
    # Where the tests run in the background of a script, SIGINT is ignored, which children inherit.
    as_by_default = "" if number == signals.SIGKILL else f"signal.signal({number}, signal.SIG_DFL); "
    child = [sys.executable, "-c", f"import os, signal; {as_by_default}os.kill(os.getpid(), {number})"]
    try:
        subprocess.run(child, check=True)
    except subprocess.CalledProcessError as error:
        failed = StateError("the renewal of the certificate has failed")
        failed.__cause__ = error
        return failed
    raise AssertionError


@pytest.mark.parametrize("signal, level", [(15, "INFO"), (2, "INFO"), (9, "ERROR")])
def test_stop_during_a_renewal_is_no_error(fed, monkeypatch, caplog, signal, level):
    """systemd sends SIGTERM to all processes of the unit, the renewal's among them."""
    failure = died(signal)
    assert is_stopped(failure) is (level == "INFO")

    def renew(*_):
        raise failure

    agent = fed.agents["a0"]
    monkeypatch.setattr(certificate, "renew_beside", renew)
    agent.certificate.renewal = SimpleNamespace(is_due=lambda _: True, is_expired=lambda: False)
    with caplog.at_level("INFO", logger="edge_agent"):
        agent.step(0)
    assert {record.levelname for record in caplog.records if "certificate" in record.message} == {level}


@pytest.mark.parametrize("days, words", [(400, "400.0 days ahead of"), (-0.5, "12.0 hours behind")])
def test_a_wrong_clock_is_a_fault_of_the_device_alone_until_it_is_set(tmp_path, monkeypatch, capsys, days, words):
    shift = [days * 86_400]
    with Federation(tmp_path, agents=()) as federation:
        federation.settle()
        monkeypatch.setattr(
            event_loop, "OtherClock", lambda _, clock: OtherClock(lambda: time.time() + shift[0], clock)
        )
        agent = federation.add("a0")
        federation.settle()
        found = local(agent)
        assert (found["condition"], found["fault"]["error"]) == ("fault", "WrongClock")
        assert found["fault"]["message"] == f"this device's clock is {words} the coordinator's"
        assert "timedatectl set-ntp true" in found["fault"]["remedy"]
        assert agent.condition.name == "ok", "it does its work"
        shift[0] = 0.0
        assert (local(agent)["condition"], local(agent)["fault"]) == ("ok", None)


@pytest.mark.parametrize(
    "text", ["", "now", "2030-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00+23:59"]
)
def test_no_time_of_a_peer_ends_the_agent(text):
    clock = OtherClock(lambda: 0.0, lambda: 0.0)
    clock.heard(text)
    assert text[:1] in {"9", "0"} or clock.problem() is None


def test_a_certificate_of_another_time_names_the_clock(fed):
    agent = fed.agents["a0"]
    cut(agent, "the certificate is not trusted (certificate has expired; compare the clocks)", SET_CLOCK)
    found = local(agent)["fault"]
    assert found["error"] == "WrongClock"
    assert f"this device's clock says {datetime.now(timezone.utc):%Y-%m-%d}" in found["message"]
    assert found["remedy"].startswith("set the clock that is wrong ('timedatectl set-ntp true')")
