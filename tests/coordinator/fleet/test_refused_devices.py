"""Devices that are kept out: what broker, enrolment port and coordinator say of them is in the status, bounded."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest
from federation_disturbances import Stranger
from federation_harness import Federation
from typer.testing import CliRunner

from coordinator.broker import REFUSED_LINE, EmbeddedBroker, ManagedMosquitto
from coordinator.broker.access import set_password
from coordinator.cli import command_tree
from coordinator.fleet.refusals import FORGOTTEN_S, MOST_LISTED, Refusals
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import UsageError
from edge_agent.wire.messages import codec, fields, up
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.transport import Will

HOSTILE = "kit\x1b[31mchen\n\u202e" + "x" * 500


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=("a0",)) as federation:
        federation.settle()
        yield federation


def shown(fed):
    fed.wait(2)
    fed.coordinator.catch_up()
    return json.loads((fed.config.state / "status.json").read_bytes())["refused_agents"]


def told(fed):
    command = ["status", "--state", str(fed.config.state)]
    result = CliRunner().invoke(command_tree(["status"]), command)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_agent_of_an_old_version_is_shown_with_its_remedy_until_it_is_upgraded(fed):
    old = codec.encode(up.Hello(software="0.1", tier="head", samples=3, boot="b1"), fields.OLDEST_PROTOCOL - 1)
    Stranger(fed, "porch").raw(old, fed.topics.up("porch"))
    fed.settle()
    (found,) = shown(fed)
    assert (found["id"], found["by"], found["error"]) == ("porch", "coordinator", "ProtocolMismatch")
    assert f"speaks protocol {fields.OLDEST_PROTOCOL - 1}" in found["message"]
    assert found["remedy"] == "upgrade the device"
    line = next(line for line in told(fed).splitlines() if line.startswith("refused"))
    assert line.startswith("refused: agent 'porch' by the coordinator (1 ×, last at ")
    assert line.endswith(f"{found['message']}; upgrade the device")
    fed.add("porch", tier="head")
    fed.wait(2)
    assert shown(fed) == []


def test_agent_of_a_newer_version_says_that_the_coordinator_is_to_be_upgraded(fed):
    Stranger(fed, "porch").raw(b'{"v":99,"type":"hello"}', fed.topics.up("porch"))
    fed.settle()
    assert [found["remedy"] for found in shown(fed)] == ["upgrade this coordinator"]


def test_what_is_not_heard_again_is_forgotten():
    clock = Clock()
    refusals = Refusals(clock)
    refusals.note("porch", "broker", "LoginRefused", "why", "do it")
    clock.now = FORGOTTEN_S - 1
    refusals.note("porch", "broker", "LoginRefused", "why not", "do it")
    clock.now = 2 * FORGOTTEN_S - 2
    assert [(one["times"], one["message"]) for one in refusals.body()] == [(2, "why not")]
    clock.now = 2 * FORGOTTEN_S
    assert refusals.body() == []


def test_flood_of_names_is_bounded_escaped_and_does_not_hide_a_device_that_comes_again(caplog):
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(2):
        refusals.note("porch", "broker", "LoginRefused", "why", "do it")
    for number in range(20 * MOST_LISTED):
        clock.now += 0.01
        refusals.note(f"{number}{HOSTILE}", "broker", "LoginRefused", HOSTILE * 9, "do it")
    found = refusals.body()
    assert len(found) == MOST_LISTED
    assert ("porch", 2) in [(one["id"], one["times"]) for one in found]
    assert all(one["id"].isprintable() and len(one["id"]) <= 80 for one in found)
    assert all(one["message"].isprintable() and len(one["message"]) <= 500 for one in found)
    assert len(caplog.records) <= 30, "lines a minute"


class Noted:
    """What a broker reports, from its thread."""

    def __init__(self):
        self.all = []
        self.news = threading.Event()

    def __call__(self, *refusal):
        self.all.append(refusal)
        self.news.set()

    def next(self):
        assert self.news.wait(20)
        self.news.clear()
        return self.all[-1]


def will_for(agent):
    return lambda _: Will(f"fl/1/home/s/{agent}", b"offline")


@pytest.mark.broker
def test_embedded_broker_reports_each_kind_of_refused_login(tmp_path):
    users = tmp_path / "users"
    noted = Noted()
    set_password(users, "porch", "right")
    broker = EmbeddedBroker(password_file=users)
    broker.on_refused = noted
    with broker:
        said = {}
        for what, (agent, user, password) in {
            "right": ("porch", "porch", "right"),
            "password": ("porch", "porch", "wrong"),
            "unknown": ("hall", "hall", "right"),
            "topics": ("kitchen", "porch", "right"),
            "hostile": (HOSTILE, HOSTILE, "x"),
        }.items():
            secret = tmp_path / what
            secret.write_text(password)
            config = BrokerConfig(url=broker.url, user=user, password_file=secret, wait=False)
            client = MqttTransport(config, agent, will=will_for(agent))
            with (
                contextlib.nullcontext() if what == "right" else pytest.raises(UsageError, match="broker refuses user")
            ):
                client.start()
            client.close()
            said[what] = noted.next() if what != "right" else None
        assert len(noted.all) == 4, "a login that is right is none of them"
    assert said["password"][:2] == ("porch", "user 'porch' has another password")
    assert "'headwater password porch" in said["password"][2]
    assert said["unknown"][:2] == ("hall", "no user 'hall' is in the password file")
    assert said["topics"][:2] == ("kitchen", "user 'porch' may not speak for id 'kitchen'")
    assert said["topics"][2] == "give id and broker.user of the device the same name"
    assert said["hostile"][2].startswith("'headwater password NAME"), "a remedy never quotes a name that cannot be"


LINES = {
    "1795458246: Client connection from 10.0.0.7 failed: error:0A000086:SSL routines::certificate verify failed.": (
        "a client at 10.0.0.7 has no certificate that counts here (certificate verify failed)"
    ),
    "OpenSSL Error[0]: error:0A0000C7:SSL routines::peer did not return a certificate": (
        "a client has no certificate that counts here (peer did not return a certificate)"
    ),
    "1795458246: Client connection from ::1 failed: error:0A000126:SSL routines::unexpected eof while reading.": None,
    "1795458246: Warning: ACL pattern 'fl/1/home/ann' does not contain '%c' or '%u'.": None,
    "Client certificate disconnected: Protocol error.": None,
}


@pytest.mark.parametrize("line, message", LINES.items(), ids=range(len(LINES)))
def test_lines_of_mosquitto_about_certificates_are_understood(tmp_path, line, message):
    found = ManagedMosquitto("127.0.0.1", 0, tmp_path).refusal_in(line)
    assert found is None if message is None else found[:2] == ("", message)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"user": 1}', '{"user":"a","id":"b","why":"else"}'])
def test_line_of_the_embedded_broker_that_is_none_is_left_alone(text):
    assert EmbeddedBroker().refusal_in(f"{REFUSED_LINE}{text}") is None
