"""The MQTT transport over a list of brokers: brokers that a test plays by hand are lost, silent, strange, and back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from mqtt_harness import CONNACK, NEEDS_MOSQUITTO, PATIENCE_S, packet, wait_for
from proxy import Proxy

from coordinator.broker import MosquittoBroker
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import BrokerAway, UsageError
from edge_agent.wire import mqtt
from edge_agent.wire.failover import order_for
from edge_agent.wire.transport import Connected, Disconnected, LeftBroker, Message, Subscribed

PINGREQ = (0xC0, b"")
PINGRESP = b"\xd0\x00"
LIMIT_S = 5.0
"""Within so many seconds another broker is connected: the default of ``failover_s``."""


class Played:
    """A broker in a thread that lets everybody in and confirms filters, until a test has it do something else."""

    def __init__(self, server):
        self.server = server
        self.url = f"mqtt://127.0.0.1:{server.getsockname()[1]}"
        self.connack = CONNACK
        self.answers_pings = True
        self.subscribing = threading.Event()
        self.subscribing.set()
        self.filters = []
        self.pings = 0
        self.logins = 0
        self.peers = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.server.accept()
                self.peers.append(peer)
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer):
        with contextlib.suppress(OSError, AssertionError):
            while True:
                first, body = packet(peer)
                if first == 0x10:
                    self.logins += 1
                    peer.sendall(self.connack)
                elif first == 0x82:
                    self.filters.append(body[4:-1].decode())
                    self.subscribing.wait(PATIENCE_S)
                    peer.sendall(b"\x90\x03" + body[:2] + b"\x01")
                elif (first, body) == PINGREQ:
                    self.pings += 1
                    if self.answers_pings:
                        peer.sendall(PINGRESP)

    def say(self, topic, payload):
        raw = len(topic).to_bytes(2, "big") + topic.encode() + payload
        self.peers[-1].sendall(b"\x30" + bytes([len(raw)]) + raw)

    def stop(self):
        """Refuse connections and reset those that stand."""
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()


@pytest.fixture
def brokers():
    """Three brokers in the order in which the client 'porch' tries them."""
    played = [Played(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
    by_url = {broker.url: broker for broker in played}
    yield [by_url[url] for url in order_for("porch", list(by_url))]
    for broker in played:
        broker.stop()


def config_of(brokers, **options):
    """The configuration of a list, with options that are too small for a file."""
    config = BrokerConfig(url=sorted(broker.url for broker in brokers), wait=options.pop("wait", True))
    return config.model_copy(update=options)


def test_a_reset_connection_is_followed_by_one_to_the_next_broker_with_all_filters(open_transport, brokers, caplog):
    transport = open_transport(config_of(brokers))
    transport.subscribe("fl/porch")
    transport.start()
    assert wait_for(transport, Connected) == Connected(2, brokers[0].url)
    wait_for(transport, Subscribed)
    began = time.monotonic()
    brokers[0].stop()
    lost = wait_for(transport, Disconnected)
    assert lost.reason.startswith(f"{brokers[0].url}: ")
    connected = wait_for(transport, Connected)
    assert time.monotonic() - began < LIMIT_S
    assert (connected.broker, [broker.url for broker in connected.left]) == (brokers[1].url, [brokers[0].url])
    assert wait_for(transport, Subscribed).filters == ("fl/porch",)
    assert brokers[1].filters == ["fl/porch"]
    brokers[1].say("fl/porch", b"hello")
    assert wait_for(transport, Message) == Message("fl/porch", b"hello")
    assert f"broker_changed url={brokers[1].url} left={brokers[0].url} reason=" in caplog.text
    assert transport.broker.url == brokers[1].url


def test_while_the_whole_list_is_away_each_broker_is_named_with_its_reason(open_transport, brokers):
    """What is wrong with one says nothing of the others, and one that alternates would be logged at each attempt."""
    for broker in brokers:
        broker.stop()
    transport = open_transport(config_of(brokers))
    transport.start()
    reasons = [wait_for(transport, Disconnected).reason for _ in range(2 * len(brokers))]
    each = [f"{broker.url}: no program listens on that port (connection refused)" for broker in brokers]
    assert reasons[0] == each[0]
    assert set(reasons[2:]) == {"; ".join(each)}


def test_brokers_that_refuse_connections_are_passed_over(open_transport, brokers):
    for broker in brokers[:2]:
        broker.stop()
    transport = open_transport(config_of(brokers))
    began = time.monotonic()
    transport.start()
    connected = wait_for(transport, Connected)
    assert time.monotonic() - began < LIMIT_S
    reason = "no program listens on that port (connection refused)"
    assert connected.left == tuple(LeftBroker(broker.url, reason) for broker in brokers[:2])


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not tell what arrives")
def test_a_broker_that_falls_silent_is_asked_and_left(open_transport, brokers):
    """As one that was stopped: the connection stands, and the machine confirms what it receives."""
    transport = open_transport(config_of(brokers, failover_s=0.6))
    transport.start()
    wait_for(transport, Connected)
    deadline = time.monotonic() + PATIENCE_S
    while brokers[0].pings < 3 and time.monotonic() < deadline:
        assert not isinstance(transport.receive(0.01), Disconnected), "it answers, so it lives"
    assert brokers[0].pings >= 3
    brokers[0].answers_pings = False
    began = time.monotonic()
    assert "it has not answered for" in wait_for(transport, Disconnected).reason
    assert wait_for(transport, Connected).broker == brokers[1].url
    assert time.monotonic() - began < LIMIT_S


def test_a_broker_that_is_busy_with_a_subscription_is_not_left(open_transport, brokers):
    """NATS reads nothing more of a client until then, and it takes seconds while its cluster elects a leader."""
    brokers[0].subscribing.clear()
    transport = open_transport(config_of(brokers, failover_s=0.3))
    transport.subscribe("fl/porch")
    transport.start()
    wait_for(transport, Connected)
    assert transport.receive(1.0) is None, "it is silent for three times the limit, and not left"
    brokers[0].subscribing.set()
    assert wait_for(transport, Subscribed).filters == ("fl/porch",)
    assert transport.broker.url == brokers[0].url


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not tell what arrives")
def test_a_broker_that_never_answers_a_subscription_is_left_after_the_keep_alive(open_transport, brokers):
    brokers[0].subscribing.clear()
    transport = open_transport(config_of(brokers, failover_s=0.3, keepalive_s=1))
    transport.subscribe("fl/porch")
    transport.start()
    wait_for(transport, Connected)
    assert wait_for(transport, Connected).broker == brokers[1].url
    brokers[0].subscribing.set()


def test_a_broker_that_does_not_answer_the_login_is_left_soon(open_transport, brokers):
    brokers[0].connack = b""
    transport = open_transport(config_of(brokers, failover_s=0.6))
    transport.start()
    assert wait_for(transport, Connected).left == (LeftBroker(brokers[0].url, "it does not answer the login"),)


def test_a_broker_that_refuses_the_login_is_skipped_and_named(open_transport, brokers):
    brokers[0].connack = b"\x20\x02\x00\x05"
    transport = open_transport(config_of(brokers))
    transport.start()
    refused = wait_for(transport, Disconnected)
    assert refused.reason.startswith(f"{brokers[0].url}: broker refuses a login without a user")
    assert refused.remedy
    (left,) = wait_for(transport, Connected).left
    assert (left.url, "broker refuses a login" in left.reason) == (brokers[0].url, True)


def test_a_single_broker_is_not_asked_for_signs_of_life(open_transport, brokers):
    """Nothing changes for who has one broker: no further traffic, and the keep-alive judges."""
    transport = open_transport(config_of(brokers[:1], failover_s=0.3))
    transport.start()
    wait_for(transport, Connected)
    transport.receive(1.0)
    assert brokers[0].pings == 0


def test_who_does_not_wait_is_told_why_each_broker_failed(open_transport, brokers):
    urls = [broker.url for broker in brokers]
    for broker in brokers:
        broker.stop()
    transport = open_transport(config_of(brokers, wait=False))
    with pytest.raises(BrokerAway) as failure:
        transport.start()
    assert all(f"{url}: no program listens on that port" in str(failure.value) for url in urls)


def test_who_does_not_wait_is_content_with_any_broker_and_is_told_of_a_login_that_none_lets_in(open_transport, brokers):
    brokers[0].stop()
    open_transport(config_of(brokers, wait=False)).start()
    for broker in brokers[1:]:
        broker.connack = b"\x20\x02\x00\x05"
    with pytest.raises(BrokerAway, match="connection refused"):
        open_transport(config_of(brokers, wait=False)).start()
    with pytest.raises(UsageError, match="broker refuses a login without a user"):
        open_transport(config_of(brokers[1:], wait=False)).start()


def test_a_client_returns_to_its_first_broker_once_that_lets_it_in(open_transport, brokers, monkeypatch, caplog):
    monkeypatch.setattr(mqtt, "VISIT_TIMEOUT_S", 0.2)
    caplog.set_level("INFO")
    brokers[0].connack = b""
    transport = open_transport(config_of(brokers, failover_s=0.6, return_after_s=0.3))
    transport.subscribe("fl/porch")
    transport.start()
    assert wait_for(transport, Connected).broker == brokers[1].url
    deadline = time.monotonic() + PATIENCE_S
    while "broker_not_back" not in caplog.text and time.monotonic() < deadline:
        assert not isinstance(transport.receive(0.01), Disconnected), "a visit that fails costs nothing"
    assert f"broker_not_back url={brokers[0].url} reason=it does not answer the login" in caplog.text
    brokers[0].connack = CONNACK
    left = wait_for(transport, Disconnected)
    assert left.reason == f"{brokers[1].url}: this client returns to its first broker {brokers[0].url}"
    assert wait_for(transport, Connected) == Connected(4, brokers[0].url)
    assert wait_for(transport, Subscribed).filters == ("fl/porch",)
    assert "broker_changed" in caplog.text


def test_a_program_may_leave_a_broker_that_works_for_the_next_one_but_not_its_only_one(open_transport, brokers):
    transport = open_transport(config_of(brokers))
    transport.start()
    wait_for(transport, Connected)
    transport.leave("nobody answers here")
    assert wait_for(transport, Disconnected).reason == f"{brokers[0].url}: nobody answers here"
    connected = wait_for(transport, Connected)
    assert (connected.broker, connected.left) == (brokers[1].url, (LeftBroker(brokers[0].url, "nobody answers here"),))
    single = open_transport(config_of(brokers[2:]))
    single.start()
    wait_for(single, Connected)
    single.leave("nobody answers here")
    assert single.receive(1.5) is None


def test_the_first_broker_follows_the_id_that_is_to_spread_clients(open_transport, brokers):
    transport = open_transport(config_of(brokers), "home-coordinator-1234", spread_by="porch")
    transport.start()
    assert wait_for(transport, Connected).broker == brokers[0].url


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_a_stopped_mosquitto_is_left_within_the_limit_although_its_connection_stands(open_transport):
    with MosquittoBroker() as one, MosquittoBroker() as two:
        brokers = {broker.url: broker for broker in (one, two)}
        transport = open_transport(BrokerConfig(url=list(brokers)))
        transport.start()
        first = brokers[wait_for(transport, Connected).broker]
        os.kill(first.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            assert wait_for(transport, Connected).broker != first.url
            assert time.monotonic() - began < LIMIT_S
        finally:
            os.kill(first.pid, signal.SIGCONT)


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_a_slow_link_is_not_taken_for_a_lost_broker_while_it_drains(open_transport):
    """The question for a sign of life waits behind 360 kB; without acknowledgements nothing arrives meanwhile."""
    with MosquittoBroker() as broker, Proxy(("127.0.0.1", broker.port)) as proxy:
        slow = f"mqtt://127.0.0.1:{proxy.port}"
        urls = [slow, "mqtt://127.0.0.1:1"]
        client = next(name for name in map(str, range(1000)) if order_for(name, urls)[0] == slow)
        transport = open_transport(BrokerConfig(url=urls), client)
        transport.subscribe("done")
        transport.start()
        wait_for(transport, Subscribed)
        proxy.up.rate = 64_000
        for _ in range(6):
            transport.publish("bulk", bytes(60_000), qos=0)
        transport.publish("done", b"", qos=0)
        assert isinstance(wait_for(transport, Message | Disconnected), Message)
        transport.close()
