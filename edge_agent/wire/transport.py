"""The seam between what is said and what carries it: publish, subscribe, and one stream of events.

Promises are few on purpose. A publish while disconnected is dropped (and counted), a message may come twice or not at
all, and a broker's acknowledgement proves nothing: everything that matters is said again after `Connected` and
confirmed by the other side in its own words. That is what lets any MQTT broker carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """Something arrived."""

    topic: str
    payload: bytes
    retained: bool = False


@dataclass(frozen=True)
class Connected:
    """A new session; subscriptions made earlier are in force again. ``connection`` counts the sessions up."""

    connection: int = 0


@dataclass(frozen=True)
class Disconnected:
    """The session is gone; the transport tries again by itself after ``retry_in_s`` seconds."""

    reason: str
    retry_in_s: float


@dataclass(frozen=True)
class Subscribed:
    """The broker has confirmed these filters: what is published from now on arrives."""

    filters: tuple[str, ...]


@dataclass(frozen=True)
class Woken:
    """Somebody called `Transport.wake`."""


Event = Message | Connected | Disconnected | Subscribed | Woken


@dataclass(frozen=True)
class Will:
    """What the broker says on our behalf when we vanish."""

    topic: str
    payload: bytes
    retain: bool = False


WillOf = Callable[[int], Will]
"""The will of each connection, which has its number: a broker may publish that of an old one when a new one stands."""


@dataclass
class Traffic:
    """Payload bytes and messages in both directions since the start, and what was dropped."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0
    dropped: int = 0


class Transport(Protocol):
    """Carries messages for one side. Methods are called from one thread, except `wake`; `start` does the work."""

    max_payload_bytes: int
    traffic: Traffic

    def start(self) -> None:
        """Begin connecting; `Connected` follows as an event.

        Raises:
            BrokerAway: the transport was told not to wait and the broker does not answer.
        """

    def close(self) -> None:
        """Leave politely (no will is published)."""

    def subscribe(self, *filters: str) -> None:
        """Ask for messages under ``filters``; kept across reconnects. `Subscribed` follows as an event."""

    def unsubscribe(self, *filters: str) -> None:
        """Ask for no more of them."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Hand over one message; never waits.

        Raises:
            MessageError: the payload is larger than ``max_payload_bytes``.
        """

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, waiting at most ``timeout_s`` seconds; None when there was none."""

    def wake(self) -> None:
        """Make a waiting `receive` return at once with `Woken`; may be called from any thread."""
