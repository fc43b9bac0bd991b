"""What is special about MQTT: sockets that break and brokers that misbehave."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import threading
import time

import paho.mqtt.client as paho
import pytest
from mqtt_harness import CONNACK, NEEDS_MOSQUITTO, PATIENCE_S, packet, url_of, wait_for

from coordinator.broker import MosquittoBroker
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import BrokerAway
from edge_agent.wire import mqtt
from edge_agent.wire.failover import longest_pause_s
from edge_agent.wire.inbox import MESSAGE_BYTES, RESERVED_SHARE, Inbox, Rank
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed


def test_pauses_grow_and_stay_below_half_a_minute_for_ever():
    assert [longest_pause_s(failures) for failures in (0, 1, 2, 3)] == [0.5, 1.0, 2.0, 4.0]
    assert {longest_pause_s(failures) for failures in (6, 100, 1023, 1024, 10**6)} == {30.0}


def test_who_does_not_want_to_wait_is_told_at_once_that_nobody_listens(open_transport):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = url_of(server)
    began = time.monotonic()
    with pytest.raises(BrokerAway, match=rf"broker {url}: no program listens on that port .*is it running"):
        open_transport(BrokerConfig(url=url, wait=False)).start()
    assert time.monotonic() - began < mqtt.CONNECT_TIMEOUT_S / 2
    assert BrokerAway.exit_code == 75


def test_who_does_not_want_to_wait_gives_up_on_a_broker_that_says_nothing(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(mqtt, "LEAVE_TIMEOUT_S", 0.1)
    with pytest.raises(BrokerAway, match="no answer within"):
        open_transport(BrokerConfig(url=url_of(listener), wait=False)).start()


def test_who_waits_is_told_of_each_attempt_and_why_it_failed(open_transport):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = url_of(server)
    transport = open_transport(BrokerConfig(url=url), rng=random.Random(1))
    transport.start()
    for _ in range(2):
        gone = wait_for(transport, Disconnected)
        assert gone.reason == "no program listens on that port (connection refused)"
        assert 0 < gone.retry_in_s <= 30


@pytest.mark.parametrize(
    "nonsense", [b"", b"\xff" * 64, b"\x20\x02\x00", b"\x20\x7f", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_a_broker_that_talks_nonsense_is_left_and_tried_again(open_transport, listener, nonsense):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(nonsense)
    assert wait_for(transport, Disconnected).reason
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)


BROKEN = {
    "a publish without a topic": b"\x32\x01\x00",
    "a publish whose topic is longer than itself": b"\x32\x04\xff\xffab",
    "a topic that is not UTF-8": b"\x30\x05\x00\x02\xff\xfex",
    "a suback without a number": b"\x90\x01\x00",
    "a suback that nobody asked for": b"\x90\x03\x12\x34\x01",
    "an unknown packet": b"\xf0\x00",
    "a second connack": b"\x20\x01\x00",
    "a length without an end": b"\x30\xff\xff\xff\xff\xff",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_no_broken_packet_ends_the_transport(open_transport, listener, broken):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.subscribe("t")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        peer.sendall(broken)
    wait_for(transport, Disconnected)
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        peer.sendall(b"\x30\x05\x00\x01txy")
        assert wait_for(transport, Message) == Message("t", b"xy")


def test_the_log_says_once_that_the_broker_is_back(open_transport, listener, caplog):
    caplog.set_level("INFO")
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with accepted(listener, transport):
        pass
    wait_for(transport, Disconnected)
    with accepted(listener, transport):
        lines = [record.message.split()[0] for record in caplog.records if "broker_" in record.message]
        assert lines == ["broker_away", "broker_back"]


@contextlib.contextmanager
def accepted(listener, transport):
    """The broker's end of the next connection, which the transport knows."""
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        yield peer


def test_each_connection_is_a_clean_session_of_a_client_of_its_own(open_transport, listener):
    """A broker that holds an old queue for the old client id must not be able to keep us out (RabbitMQ does)."""
    transport = open_transport(BrokerConfig(url=url_of(listener)), "porch")
    transport.start()
    ids = []
    for _ in range(2):
        with listener.accept()[0] as peer:
            first, body = packet(peer)
            assert first == 0x10
            assert body[:7] == b"\x00\x04MQTT\x04", "MQTT 3.1.1"
            assert body[7] == 0b10, "clean session, nothing else"
            assert int.from_bytes(body[8:10], "big") == 30, "keepalive"
            ids.append(body[12:].decode())
    assert all(name.startswith("porch-") for name in ids)
    assert len(set(ids)) == 2


def test_two_threads_never_tear_each_others_packets_apart(open_transport, listener):
    """The reader is slow, so packets go out in parts: each must be continued with its own rest."""
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    count = 200
    size = 61_440
    payloads = queue.SimpleQueue()

    def read_slowly(peer):
        try:
            for _ in range(count):
                first, body = packet(peer)
                payloads.put((first, body[3:]))
        except BaseException as error:
            payloads.put(error)
            raise

    peer = listener.accept()[0]
    with peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        reader = threading.Thread(target=read_slowly, args=(peer,), daemon=True)
        reader.start()
        sent = [bytes([number]) * size for number in range(count)]
        for payload in sent:
            transport.publish("t", payload, qos=0)
        for payload in sent:
            assert payloads.get(timeout=PATIENCE_S) == (0x30, payload)
        reader.join(PATIENCE_S)


def test_confirmations_are_never_missed_however_fast_the_broker_is(open_transport, listener):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    rounds = 200

    def confirm(peer):
        for _ in range(rounds):
            first, body = packet(peer)
            assert first == 0x82
            peer.sendall(b"\x90\x03" + body[:2] + b"\x01")

    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        broker = threading.Thread(target=confirm, args=(peer,), daemon=True)
        broker.start()
        for number in range(rounds):
            transport.subscribe(f"t/{number}")
            assert wait_for(transport, Subscribed).filters == (f"t/{number}",)
        broker.join(PATIENCE_S)


def test_a_refused_filter_is_not_reported_as_confirmed(open_transport, listener, caplog):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.subscribe("good", "bad")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        _, body = packet(peer)
        peer.sendall(b"\x90\x04" + body[:2] + b"\x01\x80")
        assert wait_for(transport, Subscribed).filters == ("good",)
    assert "subscription_refused filters=bad" in caplog.text


def test_a_broker_that_hangs_up_on_a_subscription_is_asked_ever_more_seldom(open_transport, listener):
    """RabbitMQ does that where its rules forbid a filter; a fleet with a wrong rule would keep it busy."""
    transport = open_transport(BrokerConfig(url=url_of(listener)), rng=LongestPause())
    transport.subscribe("forbidden")
    transport.start()
    pauses = []
    for _ in range(3):
        with listener.accept()[0] as peer:
            packet(peer)
            peer.sendall(CONNACK)
            packet(peer)
        gone = wait_for(transport, Disconnected)
        assert "before the broker answered the subscription; its topic rules may forbid it" in gone.reason
        pauses.append(gone.retry_in_s)
    assert pauses == [1.0, 2.0, 4.0]


def test_a_session_whose_subscription_was_answered_is_made_again_soon_after_a_break(open_transport, listener):
    transport = open_transport(BrokerConfig(url=url_of(listener)), rng=LongestPause())
    transport.subscribe("t")
    transport.start()
    for _ in range(2):
        with listener.accept()[0] as peer:
            packet(peer)
            peer.sendall(CONNACK)
            _, body = packet(peer)
            peer.sendall(b"\x90\x03" + body[:2] + b"\x01")
            wait_for(transport, Subscribed)
        gone = wait_for(transport, Disconnected)
        assert (gone.reason, gone.retry_in_s) == ("The connection was lost.", 0.5)


class LongestPause(random.Random):
    """Draws the largest number that it may."""

    def uniform(self, _least, most):
        return most


def test_a_refused_filter_is_asked_for_again_until_the_broker_grants_it_and_logged_once(
    open_transport, listener, monkeypatch, caplog
):
    """NATS refuses filters for some seconds after its cluster has lost a node."""
    monkeypatch.setattr(mqtt, "SUBSCRIBE_AGAIN_S", 0.1)
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.subscribe("good", "late", "given up")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        _, body = packet(peer)
        transport._filters.remove("given up")
        peer.sendall(b"\x90\x05" + body[:2] + b"\x01\x80\x80")
        for answer in (b"\x80", b"\x01"):
            _, body = packet(peer)
            assert body[2:] == b"\x00\x04late\x01", "neither those that are granted nor those that nobody wants"
            peer.sendall(b"\x90\x03" + body[:2] + answer)
        assert wait_for(transport, Subscribed, lambda event: "late" in event.filters).filters == ("late",)
    assert [record.message for record in caplog.records if "subscription_refused" in record.message] == [
        "subscription_refused filters=late,given up"
    ]


@pytest.mark.parametrize("qos", [0, 1])
def test_filters_are_asked_for_with_the_quality_of_service_of_the_configuration(open_transport, listener, qos):
    transport = open_transport(BrokerConfig(url=url_of(listener), qos=qos))
    transport.subscribe("t")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        assert packet(peer)[1][2:] == b"\x00\x01t" + bytes([qos])


def test_a_reader_that_is_stuck_costs_messages_but_not_memory(open_transport, listener):
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    room_bytes = 5 * (200 + MESSAGE_BYTES)
    transport._inbox = Inbox(limit_bytes=int(room_bytes / (1 - RESERVED_SHARE)) + 1)
    transport.subscribe("t")
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        for _ in range(10):
            peer.sendall(b"\x30\xcb\x01" + b"\x00\x01t" + bytes(200))
        peer.sendall(b"\xd0\x00")
        deadline = time.monotonic() + PATIENCE_S
        while transport.traffic.messages_down < 10 and time.monotonic() < deadline:
            os.sched_yield()
        assert transport.traffic.dropped == 5
        assert [len(wait_for(transport, Message).payload) for _ in range(5)] == [200] * 5
        peer.sendall(b"\x30\x04\x00\x01tx")
        assert wait_for(transport, Message).payload == b"x", "once it reads again, all is well"


def test_close_comes_back_soon_even_when_the_broker_has_stopped_reading(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "LEAVE_TIMEOUT_S", 0.1)
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)
        peer.sendall(CONNACK)
        wait_for(transport, Connected)
        for _ in range(300):
            transport.publish("t", bytes(61_440), qos=0)
        began = time.monotonic()
        transport.close()
        assert time.monotonic() - began < 5
        assert not transport._thread.is_alive()


def test_close_while_a_connection_is_being_made_ends_the_thread(open_transport, listener, monkeypatch):
    monkeypatch.setattr(mqtt, "LEAVE_TIMEOUT_S", 0.1)
    transport = open_transport(BrokerConfig(url=url_of(listener)))
    transport.start()
    with listener.accept()[0] as peer:
        packet(peer)  # it has asked, and waits for an answer that never comes
        transport.close()
    assert not transport._thread.is_alive()


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_a_broker_that_hangs_is_noticed_and_found_again(open_transport):
    """Stopped, not killed: the connection stands and nothing comes. Only the keepalive can tell."""
    with MosquittoBroker() as broker:
        impatient = BrokerConfig(url=broker.url).model_copy(update={"keepalive_s": 1})
        transport = open_transport(impatient, "porch")
        transport.start()
        wait_for(transport, Connected)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            wait_for(transport, Disconnected)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        wait_for(transport, Connected)


def arrived(topic, payload=b"x"):
    """A message as paho hands it over."""
    message = paho.MQTTMessage(mid=1, topic=topic.encode())
    message.payload = payload
    return message


def test_urgent_messages_are_received_before_all_that_wait():
    transport = MqttTransport(BrokerConfig(), "c", rank_of=lambda m: Rank(is_urgent=m.topic.startswith("h/")))
    transport.subscribe("#")
    for topic in ("a", "b", "h/1", "c", "h/2"):
        transport._on_message(None, None, arrived(topic))
    received = [transport.receive(0) for _ in range(5)]
    assert [event.topic for event in received] == ["h/1", "h/2", "a", "b", "c"]
    assert transport.receive(0) is None
    assert transport.receive(0.01) is None
    assert transport.unread_s == 0


def test_messages_that_are_not_admitted_are_not_received():
    transport = MqttTransport(BrokerConfig(), "c", admits=lambda topic, payload: (topic, payload) != ("a", b"2"))
    transport.subscribe("#")
    for topic, payload in (("a", b"1"), ("a", b"2"), ("b", b"2")):
        transport._on_message(None, None, arrived(topic, payload))
    assert [(e.topic, e.payload) for e in (transport.receive(0), transport.receive(0))] == [("a", b"1"), ("b", b"2")]
    assert transport.receive(0) is None
    assert transport.traffic.messages_down == 2
