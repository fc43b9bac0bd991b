"""What is published when, and that Home Assistant's rules of discovery are kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from serving_site import png, square

from edge_agent.core.errors import BrokerAway
from edge_agent.serving.answer import ClassAnswer, NumberAnswer, PairId
from edge_agent.serving.mqtt.discovery import UNKNOWN, DeviceDescription, discovery_message
from edge_agent.serving.mqtt.publisher import Publisher, offline_will, remove_device, state_message
from edge_agent.serving.mqtt.topics import AnswerTopics
from edge_agent.serving.pair import Pair
from edge_agent.serving.vote import State
from edge_agent.wire.transport import Connected, Disconnected, Message

TOPICS = AnswerTopics("porch-1")
PAIR = PairId("b" * 12, "lr", "a" * 12)
CONFIG = "homeassistant/device/headwater_porch-1/config"


class Broker:
    """A transport that keeps what is published, in order, and gives the events that a test says."""

    def __init__(self):
        self.published = []
        self.events = []
        self.filters = []
        self.is_started = self.is_closed = False

    def start(self):
        self.is_started = True

    def close(self):
        self.is_closed = True

    def subscribe(self, *filters):
        self.filters += filters

    def publish(self, topic, payload, *, qos=1, retain=False):
        self.published.append((topic, payload, retain))

    def receive(self, timeout_s):
        return self.events.pop(0) if self.events else None

    def wake(self):
        pass

    def topics(self):
        """The topics published since the last call."""
        topics = [topic for topic, _, _ in self.published]
        self.published.clear()
        return topics


@pytest.fixture
def time():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def publisher(broker, time, bundle, head):
    result = Publisher(broker, TOPICS, DeviceDescription("Porch", (), has_image=True), lambda: time.now)
    result.on_pair(Pair.open(bundle, head))
    return result


def answer(label="red", is_unknown=False):
    shares = {"red": 0.9, "green": 0.1}
    return ClassAnswer(label, shares[label], shares, is_unknown, PAIR)


def state(label="red", **more):
    given = answer(label, **more)
    return State(given.state, given, 0.0)


def observation(raw=b""):
    return SimpleNamespace(raw=raw, answer=answer())


def connect(publisher, broker):
    broker.events.append(Connected(1))
    publisher.step(0)


def test_a_connection_hears_everything_in_the_order_that_home_assistant_needs(publisher, broker):
    publisher.on_answer(observation())
    publisher.on_state(state(), is_change=True)
    connect(publisher, broker)
    assert [(topic, retain) for topic, _, retain in broker.published] == [
        (CONFIG, True),
        ("headwater-answers/porch-1/availability", True),
        ("headwater-answers/porch-1/state", False),
    ]


def test_nothing_is_published_while_there_is_no_connection(publisher, broker):
    publisher.on_state(state(), is_change=True)
    publisher.step(0)
    connect(publisher, broker)
    broker.topics()
    broker.events.append(Disconnected("gone", 1.0))
    publisher.step(0)
    publisher.on_state(state("green"), is_change=True)
    publisher.step(0)
    assert broker.topics() == []


@pytest.mark.parametrize("event", [Connected(2), Message("homeassistant/status", b"online")])
def test_after_a_new_start_of_broker_or_home_assistant_all_is_said_again(publisher, broker, event):
    publisher.on_answer(observation())
    publisher.on_state(state(), is_change=True)
    connect(publisher, broker)
    broker.topics()
    broker.events.append(event)
    publisher.step(0)
    assert broker.topics() == [CONFIG, TOPICS.availability, TOPICS.state]


def test_a_state_is_said_again_after_a_description_which_home_assistant_takes_in_its_own_time(publisher, broker, time):
    publisher.on_answer(observation())
    publisher.on_state(state(), is_change=True)
    connect(publisher, broker)
    assert TOPICS.state in broker.topics()
    for later, is_said in ((1.0, False), (2.0, True), (3.0, False), (10.0, True), (11.0, False)):
        time.now = later
        publisher.step(0)
        assert (TOPICS.state in broker.topics()) is is_said, later


def test_other_messages_cause_nothing(publisher, broker):
    connect(publisher, broker)
    broker.topics()
    for message in (Message("homeassistant/status", b"offline"), Message("elsewhere", b"online")):
        broker.events.append(message)
        publisher.step(0)
    assert broker.topics() == []


def test_only_changes_are_published_until_the_state_would_expire(publisher, broker, time):
    connect(publisher, broker)
    publisher.on_answer(observation())
    publisher.on_state(state(), is_change=True)
    for second in (0.0, 2.0, 10.0):  # what follows a description
        time.now = second
        publisher.step(0)
    broker.topics()
    for second in range(11, 100):
        time.now = float(second)
        publisher.on_answer(observation())
        publisher.on_state(state(), is_change=False)
        publisher.step(0)
    assert broker.topics() == []
    time.now = 110.0
    publisher.step(0)
    assert broker.topics() == [TOPICS.state]


def test_without_answers_the_device_is_offline_until_one_comes(publisher, broker, time):
    connect(publisher, broker)
    publisher.on_answer(observation())
    publisher.on_state(state(), is_change=True)
    publisher.step(0)
    broker.topics()
    time.now = 301.0
    publisher.step(0)
    assert broker.published == [(TOPICS.availability, b"offline", True)]
    broker.topics()
    publisher.on_answer(observation())
    publisher.on_state(state(), is_change=False)
    publisher.step(0)
    assert broker.topics() == [TOPICS.availability, TOPICS.state]


def test_a_new_class_is_described_before_it_is_a_state(publisher, broker, bundle, bundle_path, tmp_path):
    import numpy as np

    from edge_agent.personal.personalizer import Personalizer

    connect(publisher, broker)
    broker.topics()
    labels = ["red", "green", "blue", "brick"] * 10
    shown = {"red": "red", "green": "green", "blue": "blue", "brick": "red"}
    inputs = np.stack([square(shown[label], number) for number, label in enumerate(labels)])
    personal = Personalizer.open(bundle_path, cache=tmp_path / "cache")
    personal.fit(inputs, np.array(labels), head="lr", own_classes=True).save(tmp_path / "four")
    publisher.on_pair(Pair.open(bundle, tmp_path / "four"))
    publisher.on_state(state(), is_change=True)
    publisher.step(0)
    described = json.loads(broker.published[0][1])
    assert "brick" in described["components"]["answer"]["options"]
    assert broker.topics() == [CONFIG, TOPICS.state]


def test_the_same_classes_are_not_described_again(publisher, broker, bundle, head):
    connect(publisher, broker)
    broker.topics()
    publisher.on_pair(Pair.open(bundle, head))
    publisher.step(0)
    assert broker.topics() == []


def test_the_last_image_goes_out_with_the_state(publisher, broker):
    connect(publisher, broker)
    broker.topics()
    picture = png(square("red"))
    publisher.on_answer(observation(picture))
    publisher.on_state(state(), is_change=True)
    publisher.step(0)
    assert broker.published[-1][:2] == (TOPICS.image, picture)


def test_changed_inputs_are_published_once(publisher, broker):
    connect(publisher, broker)
    broker.topics()
    for have_changed in (False, True, True):
        publisher.on_inputs(have_changed)
        publisher.step(0)
    assert [(topic, payload) for topic, payload, _ in broker.published if topic == TOPICS.inputs] == [
        (TOPICS.inputs, b"OFF"),
        (TOPICS.inputs, b"ON"),
    ]


def test_at_the_end_it_is_offline(publisher, broker):
    publisher.start()
    publisher.close()
    assert broker.published[-1] == (TOPICS.availability, b"offline", True)
    assert broker.is_closed
    assert broker.filters == ["homeassistant/status"]


def test_the_last_will_is_offline_and_retained():
    will = offline_will(TOPICS)(1)
    assert (will.topic, will.payload, will.retain) == (TOPICS.availability, b"offline", True)


# --- the rules of discovery, one by one ---


DESCRIBED = [
    DeviceDescription("Porch", ("cat", "dog")),
    DeviceDescription("Porch", ("cat", "dog"), has_image=True, page="http://10.0.0.5:8480/"),
    DeviceDescription("Porch", ()),
    DeviceDescription("Porch", (), is_score=True),
]


@pytest.mark.parametrize("described", DESCRIBED)
def test_the_message_keeps_home_assistants_rules(described):
    message = discovery_message(TOPICS, described)
    assert re.fullmatch(r"homeassistant/device/[a-zA-Z0-9_-]+/config", TOPICS.discovery)
    assert {"device", "origin", "components"} <= message.keys()
    assert message["device"]["identifiers"]
    assert message["origin"]["name"]
    assert "availability" in message
    assert "availability_topic" not in message
    identities = set()
    for component in message["components"].values():
        domain = component["platform"]
        assert component["default_entity_id"].startswith(f"{domain}.")
        assert re.fullmatch(rf"{domain}\.[a-z0-9_]+", component["default_entity_id"])
        assert "object_id" not in component
        identities.add(component["unique_id"])
    assert len(identities) == len(message["components"])


def test_the_classes_and_unknown_are_the_options():
    component = discovery_message(TOPICS, DESCRIBED[0])["components"]["answer"]
    assert (component["device_class"], component["options"]) == ("enum", ["cat", "dog", UNKNOWN])
    assert "unit_of_measurement" not in component
    assert "state_class" not in component


def test_a_class_with_the_name_of_the_option_for_unknown_inputs_is_one_option():
    message = discovery_message(TOPICS, replace(DESCRIBED[0], classes=("cat", UNKNOWN)))
    assert message["components"]["answer"]["options"] == ["cat", UNKNOWN]


def test_a_state_is_always_one_of_the_options():
    described = discovery_message(TOPICS, DeviceDescription("Porch", ("red", "green")))["components"]["answer"][
        "options"
    ]
    for given in (state("red"), state("green"), state("red", is_unknown=True)):
        assert state_message(given)["class"] in described


def test_an_unknown_input_says_what_it_is_likeliest():
    message = state_message(state("red", is_unknown=True))
    assert (message["class"], message["unknown"], message["likeliest"]) == (UNKNOWN, True, "red")
    assert message["probability"] == 90.0


def test_numbers_and_anomalies():
    odd = NumberAnswer(5.0, is_score=True, is_anomaly=True, threshold=3.0, pair=PAIR)
    message = state_message(State(odd.state, odd, 0.0))
    assert (message["value"], message["anomaly"], message["since"]) == (5.0, True, "1970-01-01T00:00:00+00:00")
    number = NumberAnswer(21.5, is_score=False, is_anomaly=None, threshold=None, pair=PAIR)
    assert "anomaly" not in state_message(State(number.state, number, 0.0))


# --- a device that leaves ---


def test_a_forgotten_device_leaves_no_retained_message(broker):
    broker.events = [None, Connected(1)]
    remove_device(broker, TOPICS, 30, iter(range(100)).__next__)
    assert {(topic, payload, retain) for topic, payload, retain in broker.published} == {
        (topic, b"", True) for topic in (CONFIG, TOPICS.availability, TOPICS.inputs, TOPICS.image)
    }
    assert broker.is_closed


def test_a_broker_that_is_away_is_said_and_nothing_is_removed(broker):
    with pytest.raises(BrokerAway, match="has not answered within 30 s; nothing was removed"):
        remove_device(broker, TOPICS, 30, iter(range(0, 1000, 10)).__next__)
    assert broker.published == []
    assert broker.is_closed


def test_entities_do_not_expire_when_they_are_described_anew():
    """Home Assistant showed them as unavailable whenever a class was added, until the answer changed."""
    for described in DESCRIBED:
        components = discovery_message(TOPICS, described)["components"]
        assert not any("expire_after" in component for component in components.values())
