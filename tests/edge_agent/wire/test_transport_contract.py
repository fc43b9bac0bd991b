"""One contract for every transport: in memory, over the embedded broker, Mosquitto, NATS and RabbitMQ."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from configured_brokers import NEEDS_NATS, NEEDS_RABBITMQ, FromNats, FromRabbitMq
from mqtt_harness import NEEDS_MOSQUITTO, PATIENCE_S, wait_for

from coordinator.broker import EmbeddedBroker, MosquittoBroker
from edge_agent.core.errors import MessageError
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed, Will, Woken

OPEN_FILES = Path("/proc/self/fd")
SUPERVISED = {"embedded": EmbeddedBroker, "mosquitto": MosquittoBroker}
CONFIGURED = {"nats": FromNats, "rabbitmq": FromRabbitMq}
REAL = [
    pytest.param("embedded", marks=pytest.mark.broker),
    pytest.param("mosquitto", marks=[pytest.mark.broker, NEEDS_MOSQUITTO]),
]
FOREIGN = [
    pytest.param("nats", marks=[pytest.mark.broker, NEEDS_NATS]),
    pytest.param("rabbitmq", marks=[pytest.mark.broker, NEEDS_RABBITMQ]),
]
ALL = ["memory", *REAL, *FOREIGN]
RETAINING = pytest.mark.parametrize("network", ["memory", REAL[1], *FOREIGN], indirect=True)
"""The embedded broker retains nothing: a retained command would reach each agent that connects."""


class InMemory:
    """The memory broker behind the few verbs that the contract needs."""

    def __init__(self):
        self.broker = MemoryBroker()

    def transport(self, name, will=None):
        return self.broker.transport(will)

    def cut(self, transport):
        transport.cut()
        transport.start()

    def vanish(self, transport):
        transport.cut()

    def stop(self):
        pass


class OverMqtt:
    """A real broker process on its own port."""

    def __init__(self, broker):
        self.broker = broker
        self.broker.start()

    def transport(self, name, will=None):
        return MqttTransport(self.broker.config(), name, will=will)

    def cut(self, transport):
        """As a router does that forgets a connection; the transport finds back by itself."""
        transport._client.socket().shutdown(socket.SHUT_RDWR)

    def vanish(self, transport):
        """As a device does whose power goes: no goodbye, and no return."""
        transport._stopping.set()
        transport._client.socket().shutdown(socket.SHUT_RDWR)

    def stop(self):
        self.broker.stop()


@pytest.fixture(scope="module")
def networks():
    """Each kind once, started when it is first asked for: tests come in random order."""
    made = {}
    yield made
    for network in made.values():
        network.stop()


@pytest.fixture(params=ALL)
def network(request, networks, tmp_path_factory):
    kind = request.param
    if kind in networks:
        return networks[kind]
    if kind == "memory":
        networks[kind] = InMemory()
    elif kind in CONFIGURED:
        networks[kind] = OverMqtt(CONFIGURED[kind](tmp_path_factory.mktemp(kind)))
    else:
        networks[kind] = OverMqtt(SUPERVISED[kind]())
    return networks[kind]


@pytest.fixture
def connect(network):
    """A function that starts one more client and waits until its filters are confirmed."""
    open_ones = []

    def make(name, *filters, will=None):
        transport = network.transport(name, will)
        open_ones.append(transport)
        if filters:
            transport.subscribe(*filters)
        transport.start()
        wait_for(transport, Connected)
        if filters:
            confirmed_all(transport, filters)
        return transport

    yield make
    for transport in open_ones:
        transport.close()


@pytest.fixture
def root(request):
    """Topics of this test alone: brokers live longer than one test."""
    return f"fl/1/{abs(hash(request.node.nodeid)) % 10**9}"


def confirmed_all(transport, filters):
    """Wait until each filter is confirmed; one packet may confirm some of them."""
    lacking = set(filters)
    while lacking:
        lacking -= set(wait_for(transport, Subscribed).filters)


def heard_until(transport, sentinel):
    """All messages up to the one with payload ``sentinel``, as (topic, payload)."""
    found = []
    while True:
        message = wait_for(transport, Message)
        if message.payload == sentinel:
            return found
        found.append((message.topic, message.payload))


def test_what_one_says_the_other_hears_and_nobody_else(connect, root):
    alice = connect("alice", f"{root}/alice")
    bob = connect("bob", f"{root}/bob")
    alice.publish(f"{root}/bob", b"hello")
    bob.publish(f"{root}/alice", b"hello yourself")
    assert wait_for(bob, Message) == Message(f"{root}/bob", b"hello")
    assert wait_for(alice, Message) == Message(f"{root}/alice", b"hello yourself")
    alice.publish(f"{root}/nobody", b"lost")
    alice.publish(f"{root}/alice", b"end")
    assert heard_until(alice, b"end") == []


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("payload", [b"", bytes(range(256)), b"\x00" * 7, b"\xff\xfe{"], ids=["empty", "all", "0", "f"])
def test_payloads_are_bytes_and_stay_what_they_are(connect, root, payload, qos):
    ears = connect("ears", f"{root}/#")
    mouth = connect("mouth")
    mouth.publish(f"{root}/x", payload, qos=qos)
    found = wait_for(ears, Message)
    assert found == Message(f"{root}/x", payload)
    assert type(found.payload) is bytes


def test_messages_of_one_sender_arrive_in_order(connect, root):
    ears = connect("ears", f"{root}/+/n")
    mouth = connect("mouth")
    for number in range(400):
        mouth.publish(f"{root}/{number % 3}/n", str(number).encode())
    found = [int(wait_for(ears, Message).payload) for _ in range(400)]
    assert found == list(range(400))


def test_the_largest_payload_goes_through_and_a_larger_one_is_refused_before_it_is_sent(connect, root):
    ears = connect("ears", f"{root}/#")
    mouth = connect("mouth")
    largest = os.urandom(mouth.max_payload_bytes)
    mouth.publish(f"{root}/x", largest)
    with pytest.raises(MessageError, match=r"payload of 122881 bytes"):
        mouth.publish(f"{root}/x", largest + b"x")
    mouth.publish(f"{root}/x", b"end")
    assert heard_until(ears, b"end") == [(f"{root}/x", largest)]
    assert (mouth.traffic.messages_up, mouth.traffic.bytes_up) == (2, len(largest) + 3)


def test_a_plus_stands_for_one_level_and_a_hash_for_the_rest(connect, root):
    plus = connect("plus", f"{root}/a/+/up")
    rest = connect("rest", f"{root}/#")
    mouth = connect("mouth")
    for topic in ("a/x/up", "a/x/dn", "a/x/y/up", "a/up"):
        mouth.publish(f"{root}/{topic}", topic.encode())
    mouth.publish(f"{root}/a/y/up", b"end")
    assert [payload for _, payload in heard_until(plus, b"end")] == [b"a/x/up"]
    assert [payload for _, payload in heard_until(rest, b"end")] == [b"a/x/up", b"a/x/dn", b"a/x/y/up", b"a/up"]


def test_more_filters_than_fit_into_one_packet_are_all_confirmed(connect, root):
    filters = [f"{root}/{number}" for number in range(20)]
    ears = connect("ears", *filters)
    mouth = connect("mouth")
    for topic in filters:
        mouth.publish(topic, topic.encode())
    assert {wait_for(ears, Message).topic for _ in filters} == set(filters)


def test_filters_may_be_added_and_taken_back_later(connect, root):
    ears = connect("ears", f"{root}/one")
    mouth = connect("mouth")
    ears.subscribe(f"{root}/two")
    confirmed_all(ears, [f"{root}/two"])
    mouth.publish(f"{root}/two", b"2")
    assert wait_for(ears, Message).payload == b"2"
    ears.unsubscribe(f"{root}/two")
    ears.subscribe(f"{root}/three")  # its confirmation means that the one before has been read
    confirmed_all(ears, [f"{root}/three"])
    mouth.publish(f"{root}/two", b"again")
    mouth.publish(f"{root}/one", b"end")
    assert heard_until(ears, b"end") == []


def test_a_filter_asked_for_again_is_confirmed_again(connect, root):
    ears = connect("ears", f"{root}/one")
    ears.subscribe(f"{root}/one")
    confirmed_all(ears, [f"{root}/one"])


@RETAINING
def test_a_retained_message_is_there_for_those_who_come_later(connect, root):
    early = connect("early", f"{root}/ann")
    mouth = connect("mouth")
    mouth.publish(f"{root}/ann", b"here", retain=True)
    assert wait_for(early, Message) == Message(f"{root}/ann", b"here", retained=False)
    late = connect("late")
    late.subscribe(f"{root}/ann")
    assert wait_for(late, Message) == Message(f"{root}/ann", b"here", retained=True)
    mouth.publish(f"{root}/ann", b"", retain=True)
    assert wait_for(early, Message).payload == b""
    later = connect("later", f"{root}/ann", f"{root}/x")
    mouth.publish(f"{root}/x", b"end")
    assert heard_until(later, b"end") == []


def test_what_is_retained_under_the_filters_of_others_is_not_heard(connect, root):
    early = connect("early", f"{root}/secret")
    mouth = connect("mouth")
    mouth.publish(f"{root}/secret", b"kept", retain=True)
    wait_for(early, Message)
    late = connect("late", f"{root}/mine")
    mouth.publish(f"{root}/mine", b"end")
    assert heard_until(late, b"end") == []
    mouth.publish(f"{root}/secret", b"", retain=True)
    wait_for(early, Message)


def test_wake_makes_a_waiting_reader_return(connect):
    reader = connect("reader")
    reader.wake()
    assert isinstance(wait_for(reader, Woken), Woken)
    caller = threading.Thread(target=reader.wake)
    began = time.monotonic()
    caller.start()
    assert isinstance(reader.receive(PATIENCE_S), Woken)
    assert time.monotonic() - began < PATIENCE_S / 2
    caller.join()
    assert reader.receive(0) is None


def test_the_will_of_a_client_that_vanishes_is_told(connect, network, root):
    ears = connect("ears", f"{root}/s/+")
    device = connect("device", will=lambda _: Will(f"{root}/s/device", b"offline 1"))
    network.vanish(device)
    assert wait_for(ears, Message) == Message(f"{root}/s/device", b"offline 1")


def test_each_connection_has_a_number_which_its_will_has_too(connect, network, root):
    """A broker publishes the will of a broken connection late, when the next one may stand for long."""
    ears = connect("ears", f"{root}/s")
    device = connect("device", will=lambda connection: Will(f"{root}/s", f"offline {connection}".encode()))
    network.cut(device)
    wait_for(device, Disconnected)
    second = wait_for(device, Connected).connection
    network.vanish(device)
    earlier = heard_until(ears, f"offline {second}".encode())
    assert all(int(payload.split()[1]) < second for _, payload in earlier)


def test_a_client_that_says_goodbye_has_no_will_and_its_last_words_arrive(connect, root):
    ears = connect("ears", f"{root}/#")
    mouth = connect("mouth")
    device = connect("device", will=lambda _: Will(f"{root}/s", b"offline"))
    device.publish(f"{root}/up", b"bye")
    device.close()
    assert wait_for(ears, Message) == Message(f"{root}/up", b"bye")
    mouth.publish(f"{root}/x", b"end")
    assert heard_until(ears, b"end") == []


@RETAINING
def test_a_retained_will_is_there_for_those_who_come_later(connect, network, root):
    ears = connect("ears", f"{root}/s")
    device = connect("device", will=lambda _: Will(f"{root}/s", b"offline", retain=True))
    network.vanish(device)
    wait_for(ears, Message)
    late = connect("late")
    late.subscribe(f"{root}/s")
    assert wait_for(late, Message) == Message(f"{root}/s", b"offline", retained=True)


def test_after_a_break_the_filters_are_in_force_again(connect, network, root):
    filters = [f"{root}/{number}" for number in range(10)]
    ears = connect("ears", *filters)
    mouth = connect("mouth")
    ears.unsubscribe(filters[0])
    network.cut(ears)
    assert wait_for(ears, Disconnected).reason
    wait_for(ears, Connected)
    confirmed_all(ears, filters[1:])
    for topic in filters:
        mouth.publish(topic, topic.encode())
    # In any order: NATS has a queue for each filter, and keeps the order within each of them alone.
    assert {wait_for(ears, Message).topic for _ in filters[1:]} == set(filters[1:])


def test_what_is_published_without_a_session_is_dropped_and_counted(network, root):
    transport = network.transport("early")
    transport.publish(f"{root}/x", b"too early")
    assert (transport.traffic.dropped, transport.traffic.messages_up) == (1, 0)
    transport.close()


def test_a_transport_that_was_never_started_can_be_closed(network):
    network.transport("idle").close()


def test_traffic_is_counted_on_both_sides(connect, root):
    ears = connect("ears", f"{root}/#")
    mouth = connect("mouth")
    for size in (1, 10, 100):
        mouth.publish(f"{root}/x", bytes(size))
        wait_for(ears, Message)
    assert (mouth.traffic.messages_up, mouth.traffic.bytes_up) == (3, 111)
    assert (ears.traffic.messages_down, ears.traffic.bytes_down, ears.traffic.dropped) == (3, 111, 0)


def test_bulk_in_both_directions_at_once_arrives_whole_and_in_order(connect, root):
    """Chunks go out from one thread while others come in on another; neither may tear the other's packets apart."""
    one = connect("one", f"{root}/one")
    two = connect("two", f"{root}/two")
    chunks = [os.urandom(60_000) for _ in range(8)]
    got = {"one": [], "two": []}
    for burst in range(6):
        for chunk in chunks:
            one.publish(f"{root}/two", chunk)
            two.publish(f"{root}/one", chunk)
        for name, side in (("one", one), ("two", two)):
            while len(got[name]) < (burst + 1) * len(chunks):
                got[name].append(wait_for(side, Message | Disconnected))
    for events in got.values():
        assert [event.payload for event in events if isinstance(event, Message)] == chunks * 6


@pytest.mark.parametrize("kind", REAL)
def test_a_broker_that_is_killed_and_comes_back_is_found_again(kind):
    with SUPERVISED[kind]() as broker:
        ears = MqttTransport(broker.config(), "ears")
        mouth = MqttTransport(broker.config(), "mouth")
        ears.subscribe("fl/1/home/a/+/up", "fl/1/home/ann")
        for transport in (ears, mouth):
            transport.start()
            wait_for(transport, Connected)
        confirmed_all(ears, ["fl/1/home/a/+/up", "fl/1/home/ann"])
        port = broker.port
        os.kill(broker.pid, signal.SIGKILL)
        for transport in (ears, mouth):
            gone = wait_for(transport, Disconnected)
            assert gone.reason
            assert 0 < gone.retry_in_s <= 1
        confirmed_all(ears, ["fl/1/home/a/+/up", "fl/1/home/ann"])
        wait_for(mouth, Connected)
        mouth.publish("fl/1/home/a/porch/up", b"here again")
        assert wait_for(ears, Message) == Message("fl/1/home/a/porch/up", b"here again")
        assert broker.port == port
        for transport in (ears, mouth):
            transport.close()


def open_now():
    """Open files and threads; what other tests left for the garbage collector does not count."""
    gc.collect()
    return len(list(OPEN_FILES.iterdir())), threading.active_count()


@pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="this system does not show open files in /proc")
@pytest.mark.parametrize("kind", REAL)
def test_reconnecting_again_and_again_leaks_no_files_and_no_threads(kind):
    with SUPERVISED[kind]() as broker:
        transport = MqttTransport(broker.config(), "porch")
        transport.start()
        wait_for(transport, Connected)
        before = open_now()
        for _ in range(6):
            transport._client.socket().shutdown(socket.SHUT_RDWR)
            wait_for(transport, Connected)
        assert open_now() == before
        transport.close()


def test_a_reader_that_only_looks_never_waits(network):
    assert network.transport("idle").receive(0) is None
