"""What a broker is called, from what a client sees of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.wire.broker_kinds import KINDS, Mosquitto, describe_broker, describe_kind
from edge_agent.wire.broker_traits import AnswerTo5, BrokerTraits

MOSQUITTO = BrokerTraits("mosquitto version 2.0.11", AnswerTo5.SPOKEN, 2, takes_spaces=True)
AMQTT = BrokerTraits("aMQTT version 0.11.3", AnswerTo5.REFUSED, 2, takes_spaces=True)
NATS = BrokerTraits("", AnswerTo5.REFUSED, 1, takes_spaces=False)
RABBITMQ = BrokerTraits("", AnswerTo5.CLOSED, 1, takes_spaces=True)
"""As nats-server 2.9.10, rabbitmq-server 3.10.8 and the others show them; real ones are asked elsewhere."""


@pytest.mark.parametrize(
    "traits, begin",
    [
        (MOSQUITTO, "mosquitto version 2.0.11: one thread and no cluster"),
        (AMQTT, "aMQTT version 0.11.3: one thread of Python"),
        (NATS, "NATS: with QoS 1 each subscription is a consumer of JetStream: set qos = 0"),
        (RABBITMQ, "RabbitMQ before 3.13: each client has a queue of its own"),
    ],
    ids=["mosquitto", "amqtt", "nats", "rabbitmq"],
)
def test_a_broker_is_named_with_all_its_limits_in_a_line(traits, begin):
    line = describe_broker(traits)
    (kind,) = [kind for kind in KINDS if kind.is_told_by(traits)]
    assert line.startswith(begin)
    assert all(limit in line for limit in kind.limits)
    assert "\n" not in line


@pytest.mark.parametrize(
    "traits",
    [
        BrokerTraits("", AnswerTo5.SPOKEN, 2, takes_spaces=True),
        BrokerTraits("", AnswerTo5.REFUSED, 2, takes_spaces=True),
        BrokerTraits("", AnswerTo5.REFUSED, 1, takes_spaces=None),
        BrokerTraits("", AnswerTo5.CLOSED, None, takes_spaces=None),
        BrokerTraits("", AnswerTo5.NONE, None, takes_spaces=None),
    ],
    ids=["speaks 5", "as amqtt without $SYS", "no answer about spaces", "grants nothing", "silent"],
)
def test_a_broker_that_shows_too_little_is_not_known(traits):
    assert describe_broker(traits) == "not known, which is no fault"


def test_a_broker_of_another_name_is_told_by_that():
    traits = BrokerTraits("hive 4", AnswerTo5.SPOKEN, 2, takes_spaces=True)
    assert describe_broker(traits) == "not known, which is no fault; it calls itself 'hive 4'"


@pytest.mark.parametrize("version", ["mosquitto \x1b[2Jversion 2", "other \x1b[2J\nbroker"])
def test_what_a_broker_calls_itself_cannot_steer_a_terminal(version):
    line = describe_broker(BrokerTraits(version, AnswerTo5.SPOKEN, 2, takes_spaces=True))
    assert line.isprintable()


def test_a_broker_that_is_known_without_a_look_has_the_same_line():
    assert describe_kind(Mosquitto) == describe_broker(MOSQUITTO).replace(MOSQUITTO.version, "Mosquitto")


def test_every_configuration_of_a_broker_belongs_to_its_kind():
    configs = Path(__file__).parents[3] / "configs"
    named = {configs / name for kind in KINDS for name in kind.configurations}
    shipped = {path for path in (configs / "brokers").iterdir() if path.suffix != ".md"}
    assert shipped <= named
    assert [path for path in named if not path.exists()] == []
