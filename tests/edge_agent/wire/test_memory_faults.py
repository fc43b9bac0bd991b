from __future__ import annotations

import numpy as np
import pytest
from faulty_broker import Faults, FaultyBroker

from edge_agent.wire.transport import Message

COUNT = 2000


def heard(**probabilities) -> list[bytes]:
    faults = Faults(np.random.default_rng(5), **probabilities)
    broker = FaultyBroker(faults)
    ears = broker.transport()
    mouth = broker.transport()
    for transport in (ears, mouth):
        transport.subscribe("a") if transport is ears else None
        transport.start()
    for number in range(COUNT):
        mouth.publish("a", number.to_bytes(2, "big"))
    found = []
    while (event := ears.receive(0)) is not None:
        if isinstance(event, Message):
            found.append(event.payload)
    return found


SENT = [number.to_bytes(2, "big") for number in range(COUNT)]


def test_without_faults_everything_arrives_once_and_in_order():
    assert heard() == SENT


def test_losses_are_as_frequent_as_asked_for():
    found = heard(lose=0.25)
    assert abs(len(found) - 0.75 * COUNT) < 100  # five standard deviations of a binomial: 97
    assert found == sorted(set(found))


def test_duplicates_are_as_frequent_as_asked_for():
    found = heard(duplicate=0.25)
    assert sorted(set(found)) == SENT
    assert abs(len(found) - 1.25 * COUNT) < 100


def test_a_reordered_message_comes_behind_the_next_one():
    found = heard(reorder=0.25)
    assert sorted(found) == SENT or sorted(found) == SENT[: len(found)]
    assert found != sorted(found)


def test_a_flip_changes_exactly_one_bit():
    found = heard(flip=0.5)
    changed = [
        (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_count() for a, b in zip(found, SENT, strict=True)
    ]
    assert set(changed) == {0, 1}
    assert abs(sum(changed) - COUNT / 2) < 112


def test_the_same_seed_gives_the_same_faults():
    probabilities = {"lose": 0.1, "duplicate": 0.1, "reorder": 0.1, "flip": 0.1}
    assert heard(**probabilities) == heard(**probabilities)


@pytest.mark.parametrize("topic, arrives", [("a", False), ("b", True)])
def test_faults_can_be_kept_to_some_topics(topic, arrives):
    broker = FaultyBroker(Faults(np.random.default_rng(1), lose=1.0, only=lambda name: name == "a"))
    ears = broker.transport()
    ears.subscribe("#")
    ears.start()
    ears.publish(topic, b"x")
    events = [ears.receive(0) for _ in range(3)]
    assert (Message(topic, b"x") in events) is arrives


def test_what_was_published_is_captured_when_asked_for():
    broker = FaultyBroker(capture=True)
    mouth = broker.transport()
    mouth.start()
    mouth.publish("a", b"1")
    mouth.publish("b", b"2")
    assert broker.captured == [("a", b"1"), ("b", b"2")]
