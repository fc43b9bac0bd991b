"""The files in configs that start a broker, tried with the real brokers: TLS, users, topic rules, sizes, wills."""

from __future__ import annotations

import os

import pytest
from broker_authority import Authority
from configured_brokers import NEEDS_NATS, NEEDS_RABBITMQ, FromMosquitto, FromNats, FromRabbitMq
from mqtt_harness import NEEDS_MOSQUITTO, PATIENCE_S, wait_for

from coordinator.broker.access import add_rules, set_password
from edge_agent.wire.broker_kinds import describe_broker
from edge_agent.wire.mqtt import MqttTransport, observe_broker
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed, Will

pytestmark = pytest.mark.broker

TOPICS = Topics("home")
PASSWORDS = {"coordinator": "one for the coordinator", "porch": "one for the porch"}
KINDS = [
    pytest.param("mosquitto", marks=NEEDS_MOSQUITTO),
    pytest.param("nats", marks=NEEDS_NATS),
    pytest.param("rabbitmq", marks=NEEDS_RABBITMQ),
]


def made(kind, folder):
    """A broker of that kind with TLS, and with the users 'coordinator' and 'porch'."""
    authority = Authority(folder, "authority")
    if kind == "nats":
        return FromNats(folder, authority=authority, users=PASSWORDS)
    if kind == "rabbitmq":
        return FromRabbitMq(folder, authority=authority, users=PASSWORDS)
    for user, password in PASSWORDS.items():
        set_password(folder / "users", user, password)
    add_rules(folder / "mosquitto.acl", "home")
    return FromMosquitto(folder, authority=authority)


@pytest.fixture(scope="module")
def brokers():
    """Each kind once, started when it is first asked for: tests come in random order."""
    started = {}
    yield started
    for broker in started.values():
        broker.stop()


@pytest.fixture(params=KINDS)
def broker(request, brokers, tmp_path_factory):
    kind = request.param
    if kind not in brokers:
        started = made(kind, tmp_path_factory.mktemp(kind))
        started.start()
        brokers[kind] = started
    return brokers[kind]


@pytest.fixture
def connect(broker):
    """A function that connects a user, and returns the transport, and the filters that the broker grants to it."""
    transports = []

    def make(user, *filters, password="", will=None):
        client_id = "home-coordinator" if user == "coordinator" else user
        config = broker.config(user, password or PASSWORDS[user])
        transport = MqttTransport(config, client_id, will=will)
        transports.append(transport)
        transport.subscribe(*filters)
        transport.start()
        wait_for(transport, Connected)
        if not filters:
            return transport, ()
        # RabbitMQ throws off whoever asks for a topic that is not for him.
        answer = wait_for(transport, Subscribed | Disconnected)
        return transport, answer.filters if isinstance(answer, Subscribed) else ()

    yield make
    for transport in transports:
        transport.close()


def test_coordinator_and_agent_hear_each_other_and_the_largest_chunk_passes(connect):
    coordinator, granted = connect("coordinator", *TOPICS.for_coordinator())
    assert set(granted) == set(TOPICS.for_coordinator())
    blob = TOPICS.broadcast("0123456789abcdef")
    porch, granted = connect("porch", *TOPICS.for_agent("porch"), blob)
    assert set(granted) == {*TOPICS.for_agent("porch"), blob}
    largest = os.urandom(porch.max_payload_bytes)
    for topic in (TOPICS.up("porch"), TOPICS.up_chunks("porch"), TOPICS.presence("porch"), TOPICS.heartbeat("porch")):
        porch.publish(topic, largest)
        assert wait_for(coordinator, Message) == Message(topic, largest)
    for topic in (*TOPICS.for_agent("porch"), blob):
        coordinator.publish(topic, largest)
        assert wait_for(porch, Message) == Message(topic, largest)


def test_the_coordinator_hears_itself_on_the_topic_of_coordinators(connect):
    """By this a standby knows that the broker works."""
    coordinator, _ = connect("coordinator", TOPICS.coordinators)
    coordinator.publish(TOPICS.coordinators, b"who serves?")
    assert wait_for(coordinator, Message) == Message(TOPICS.coordinators, b"who serves?")


def test_the_will_of_an_agent_that_vanishes_reaches_the_coordinator(connect):
    coordinator, _ = connect("coordinator", *TOPICS.for_coordinator())
    porch, _ = connect("porch", will=lambda _: Will(TOPICS.presence("porch"), b"offline 1"))
    porch._stopping.set()
    porch._client.socket().shutdown(2)
    assert wait_for(coordinator, Message, lambda event: event.payload == b"offline 1").topic == TOPICS.presence("porch")


def test_an_agent_does_not_hear_what_is_for_another_one_or_for_the_coordinator(connect):
    coordinator, _ = connect("coordinator", *TOPICS.for_coordinator())
    porch, _ = connect("porch", *TOPICS.for_agent("porch"))
    foreign = (TOPICS.down("attic"), TOPICS.up("attic"), TOPICS.coordinators)
    curious, _ = connect("porch", *foreign)
    for topic in foreign:
        coordinator.publish(topic, b"not for the porch")
    coordinator.publish(TOPICS.down("porch"), b"end")
    assert wait_for(porch, Message).payload == b"end"
    # A broker hands messages on in order: what it has for the curious client is there by now, or never will be.
    assert curious.traffic.messages_down == 0


def test_an_agent_cannot_speak_for_another_one(connect):
    coordinator, _ = connect("coordinator", *TOPICS.for_coordinator())
    porch, _ = connect("porch")
    forged = (TOPICS.up("attic"), TOPICS.up_chunks("attic"), TOPICS.presence("attic"), TOPICS.coordinators)
    for topic in forged:
        porch.publish(topic, b"forged")
        # RabbitMQ throws off whoever does that; the transport comes back.
        honest, _ = connect("porch")
        honest.publish(TOPICS.up("porch"), b"end")
        assert wait_for(coordinator, Message) == Message(TOPICS.up("porch"), b"end")


def test_a_user_with_another_password_is_not_let_in(broker):
    transport = MqttTransport(broker.config("porch", "a guess"), "porch")
    transport.start()
    try:
        refusal = wait_for(transport, Disconnected)
    finally:
        transport.close()
    assert "broker refuses user 'porch'" in refusal.reason


@pytest.mark.parametrize("broker", [KINDS[0], KINDS[2]], indirect=True)
def test_a_message_that_is_larger_than_any_of_ours_does_not_arrive(connect):
    """NATS 2.9 has no such bound for MQTT: its max_payload counts for its own protocol alone."""
    coordinator, _ = connect("coordinator", *TOPICS.for_coordinator())
    porch, _ = connect("porch")
    porch.max_payload_bytes = 2 << 20
    porch.publish(TOPICS.up("porch"), bytes(2 << 20))
    porch.publish(TOPICS.up("porch"), b"after it")
    honest, _ = connect("porch")
    honest.publish(TOPICS.heartbeat("porch"), b"end")
    while (message := wait_for(coordinator, Message)).payload != b"end":
        assert message == Message(TOPICS.up("porch"), b"after it")


def test_doctor_names_the_broker_to_the_coordinator_past_all_topic_rules(broker):
    config = broker.config("coordinator", PASSWORDS["coordinator"])
    traits = observe_broker(config, "home-coordinator", TOPICS.root, PATIENCE_S)
    begin = {"mosquitto": "mosquitto version 2", "nats": "NATS: ", "rabbitmq": "RabbitMQ before 3.13: "}[broker.kind]
    assert describe_broker(traits).startswith(begin)


def test_doctor_names_the_broker_to_an_agent_within_its_topic_rules(broker):
    """Mosquitto says what it is on a topic that agents may not read."""
    config = broker.config("porch", PASSWORDS["porch"])
    traits = observe_broker(config, "porch-doctor", TOPICS.broadcasts, PATIENCE_S)
    begin = {"mosquitto": "not known, which is no fault", "nats": "NATS: ", "rabbitmq": "RabbitMQ before 3.13: "}
    assert describe_broker(traits).startswith(begin[broker.kind])
    assert traits.takes_spaces is (broker.kind != "nats"), "a rule would have refused it, too"


def made_cluster(kind, folder):
    """Three nodes of that kind, with TLS between clients and nodes, and the users of `PASSWORDS`."""
    made_by = {"nats": FromNats, "rabbitmq": FromRabbitMq}[kind]
    return made_by(folder, 3, Authority(folder, "authority"), PASSWORDS)


def at_node(cluster, user, url, *filters):
    """A client of one node, subscribed: a cluster that has just begun refuses some subscriptions for seconds."""
    client_id = "home-coordinator" if user == "coordinator" else user
    config = cluster.config(user, PASSWORDS[user]).model_copy(update={"url": url})
    transport = MqttTransport(config, client_id)
    transport.subscribe(*filters)
    transport.start()
    lacking = set(filters)
    while lacking:
        lacking -= set(wait_for(transport, Subscribed).filters)
    return transport


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_clients_of_two_nodes_hear_each_other_also_when_the_third_node_is_lost(kind, tmp_path):
    with made_cluster(kind, tmp_path) as cluster:
        first, second, third = cluster.urls
        coordinator = at_node(cluster, "coordinator", first, *TOPICS.for_coordinator())
        porch = at_node(cluster, "porch", second, *TOPICS.for_agent("porch"))
        largest = os.urandom(porch.max_payload_bytes)
        porch.publish(TOPICS.up_chunks("porch"), largest)
        assert wait_for(coordinator, Message) == Message(TOPICS.up_chunks("porch"), largest)
        cluster.kill(third)
        coordinator.publish(TOPICS.down_chunks("porch"), largest)
        assert wait_for(porch, Message) == Message(TOPICS.down_chunks("porch"), largest)
        # Who comes back after the loss is let in, and heard.
        porch.close()
        porch = at_node(cluster, "porch", first, *TOPICS.for_agent("porch"))
        porch.publish(TOPICS.up("porch"), b"moved")
        assert wait_for(coordinator, Message) == Message(TOPICS.up("porch"), b"moved")
        porch.close()
        coordinator.close()
