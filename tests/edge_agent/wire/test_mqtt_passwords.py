"""Passwords over MQTT: who is let in, and what is told to who is not."""

from __future__ import annotations

import pytest
from mqtt_harness import CONNACK, NEEDS_MOSQUITTO, packet, url_of, wait_for

from coordinator.broker import EmbeddedBroker, MosquittoBroker
from coordinator.broker.access import set_password
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.wire.login import LoginAdvice
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.transport import Connected, Disconnected

REAL = [
    pytest.param(EmbeddedBroker, id="embedded", marks=pytest.mark.broker),
    pytest.param(MosquittoBroker, id="mosquitto", marks=[pytest.mark.broker, NEEDS_MOSQUITTO]),
]


@pytest.fixture(scope="module")
def passwords(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passwords")
    set_password(folder / "users", "porch", "right")
    (folder / "right").write_text("right\nsecond line\n", encoding="utf-8")
    (folder / "wrong").write_text("wrong\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", REAL)
def test_only_the_right_password_lets_an_agent_in(open_transport, passwords, kind):
    with kind(password_file=passwords / "users") as broker:
        url = broker.url
        open_transport(BrokerConfig(url=url, user="porch", password_file=passwords / "right", wait=False)).start()
        by_its_id = BrokerConfig(url=url, password_file=passwords / "right", wait=False)
        open_transport(by_its_id, "porch").start()
        for wrong in (
            BrokerConfig(url=url, wait=False),
            BrokerConfig(url=url, user="porch", wait=False),
            BrokerConfig(url=url, user="porch", password_file=passwords / "wrong", wait=False),
            BrokerConfig(url=url, user="garage", password_file=passwords / "right", wait=False),
        ):
            with pytest.raises(UsageError, match="broker refuses"):
                open_transport(wrong).start()


@pytest.mark.parametrize("kind", REAL)
def test_who_waits_with_a_wrong_password_is_told_what_the_broker_says(open_transport, passwords, kind):
    with kind(password_file=passwords / "users") as broker:
        config = BrokerConfig(url=broker.url, user="porch", password_file=passwords / "wrong")
        transport = open_transport(config)
        transport.start()
        assert "refuses" in wait_for(transport, Disconnected).reason


@pytest.mark.parametrize(
    "login, said",
    [
        ({}, "broker refuses a login without a user (Bad user name or password); name a user"),
        ({"user": "porch"}, "another password than the empty one; ask porch"),
        ({"user": "porch", "password_file": "secret"}, "another password than the one in 'secret'; ask porch"),
    ],
)
def test_what_to_do_about_a_refused_login_is_what_the_caller_says(listener, login, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("right", encoding="utf-8")
    advice = LoginAdvice("name a user", "ask {user}")
    transport = MqttTransport(BrokerConfig(url=url_of(listener), **login), "a", advice=advice)
    transport.start()
    try:
        with listener.accept()[0] as peer:
            packet(peer)
            peer.sendall(b"\x20\x02\x00\x04")
            assert said in wait_for(transport, Disconnected).reason
    finally:
        transport.close()


def test_a_password_file_that_is_not_there_is_told_at_once(open_transport, tmp_path):
    with pytest.raises(ConfigError, match="cannot read a line from"):
        open_transport(BrokerConfig(user="porch", password_file=tmp_path / "none")).start()


def test_a_password_file_that_is_being_replaced_does_not_end_the_transport(open_transport, listener, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("old", encoding="utf-8")
    config = BrokerConfig(url=url_of(listener), user="porch", password_file=secret)
    transport = open_transport(config)
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        secret.unlink()
    wait_for(transport, Disconnected)
    assert "cannot read a line from" in wait_for(transport, Disconnected).reason
    secret.write_text("new", encoding="utf-8")
    with listener.accept()[0] as peer:
        assert packet(peer)[1].endswith(b"\x00\x05porch\x00\x03new")
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
