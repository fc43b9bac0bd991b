"""Which broker it is that a client sees, and what is known of its limits; for people, nothing depends on it.

Each kind is a class: it says what the broker is recognized by, and what an operator should know about it. A broker that
no kind recognizes is not known: Headwater asks nothing of a broker but MQTT 3.1.1 with QoS 0 and 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..core.formats import printable
from .broker_traits import AnswerTo5, BrokerTraits


class BrokerKind(ABC):
    """A broker program that a person may have chosen."""

    name: str
    """Its name, as its makers write it."""

    limits: tuple[str, ...]
    """What an operator should know, each a phrase; the first one is the one that is met first."""

    configurations: tuple[str, ...] = ()
    """Files for it in the folder ``configs`` of the project."""

    @abstractmethod
    def is_told_by(self, traits: BrokerTraits) -> bool:
        """Return whether only this kind shows these traits, of those that are known."""


class Mosquitto(BrokerKind):
    """Mosquitto calls itself so on ``$SYS``."""

    name = "Mosquitto"
    limits = (
        "one thread and no cluster, but two share their messages by a bridge",
        "drops messages of a slow client beyond max_queued_messages, 1,000 where none is set",
    )
    configurations = ("mosquitto.conf", "mosquitto.acl")

    def is_told_by(self, traits: BrokerTraits) -> bool:
        """Return whether the broker calls itself Mosquitto."""
        return traits.version.lower().startswith("mosquitto ")


class Amqtt(BrokerKind):
    """amqtt calls itself so on ``$SYS``, where that is switched on."""

    name = "amqtt"
    limits = ("one thread of Python and no cluster, for trials and single hosts",)

    def is_told_by(self, traits: BrokerTraits) -> bool:
        """Return whether the broker calls itself amqtt."""
        return traits.version.lower().startswith("amqtt ")


class Nats(BrokerKind):
    """NATS has no ``$SYS`` for MQTT. It refuses MQTT 5, and spaces in topics, which separate words of its protocol."""

    name = "NATS"
    limits = (
        "with QoS 1 each subscription is a consumer of JetStream: set qos = 0 in [broker] with a cluster",
        "after the loss of a node it answers no login until leaders are elected",
        "takes messages of any size, also from a client that means harm",
        "topic rules are an entry for each agent",
    )
    configurations = ("brokers/nats.conf", "brokers/nats-cluster.conf", "brokers/nats-users.conf")

    def is_told_by(self, traits: BrokerTraits) -> bool:
        """Return whether the broker refuses MQTT 5, and a space in a topic."""
        return traits.answer_to_5 is AnswerTo5.REFUSED and traits.takes_spaces is False


class RabbitMq(BrokerKind):
    """RabbitMQ before 3.13 closes connections of MQTT 5 without an answer, and grants QoS 1 where 2 is asked for."""

    name = "RabbitMQ before 3.13"
    limits = (
        "each client has a queue of its own, of which mqtt.prefetch messages, 10 if none is set, are under way at once",
        "with pause_minority a cluster stops that has lost half of its nodes",
        "retained messages stay on their node",
        "disconnects a client that subscribes to a topic that its rules forbid",
    )
    configurations = ("brokers/rabbitmq.conf", "brokers/rabbitmq-cluster.conf", "brokers/rabbitmq-users.json")

    def is_told_by(self, traits: BrokerTraits) -> bool:
        """Return whether the broker closes connections of MQTT 5, and grants QoS 1 where 2 is asked for."""
        return traits.answer_to_5 is AnswerTo5.CLOSED and traits.highest_qos == 1


KINDS: tuple[BrokerKind, ...] = (Mosquitto(), Amqtt(), Nats(), RabbitMq())


def describe_kind(kind: type[BrokerKind]) -> str:
    """Return a kind of broker that is known without looking, and its limits, in a line."""
    return _line(kind.name, kind.limits)


def _line(name: str, limits: tuple[str, ...]) -> str:
    return f"{name}: {'; '.join(limits)}"


def describe_broker(traits: BrokerTraits) -> str:
    """Return which broker shows these traits, and its limits, in a line; 'not known' where they tell none."""
    recognized = [kind for kind in KINDS if kind.is_told_by(traits)]
    if len(recognized) != 1:
        version = f"; it calls itself '{printable(traits.version)}'" if traits.version else ""
        return f"not known, which is no fault{version}"
    (kind,) = recognized
    return _line(printable(traits.version) or kind.name, kind.limits)
