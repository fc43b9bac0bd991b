"""What a client can see of a broker, from which a person is told which one it is.

Each trait is what the protocol itself allows to see: a client subscribes to topics of its own, and says which version
of MQTT it would like to speak. `mqtt.observe_broker` looks; nothing that a federation does depends on the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AnswerTo5(Enum):
    """The answer of a broker to a client that wants to speak MQTT 5."""

    SPOKEN = "spoken"
    """It lets the client in, and speaks it."""

    REFUSED = "refused"
    """It answers that it does not speak it."""

    CLOSED = "closed"
    """It closes the connection without an answer."""

    NONE = "none"
    """It leaves the client waiting."""


@dataclass(frozen=True)
class BrokerTraits:
    """The behaviour that one broker has shown.

    Attributes:
        version: What it says on ``$SYS/broker/version``; empty where it says nothing, or does not let this user read.
        answer_to_5: What it did with a client of MQTT 5.
        highest_qos: The quality of service that it grants to a subscription with QoS 2; None where it refuses that.
        takes_spaces: Whether it grants a filter that has a space in it; None where it leaves it unanswered.
    """

    version: str
    answer_to_5: AnswerTo5
    highest_qos: int | None
    takes_spaces: bool | None
