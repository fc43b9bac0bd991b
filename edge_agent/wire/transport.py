"""What carries messages: the `Transport` contract, and the events that it reports.

Promises are few on purpose. A publish while disconnected is dropped (and counted), a message may come twice or not at
all, and a broker's acknowledgement proves nothing: everything that matters is sent again after `Connected` and
confirmed by the other side in its own message. So any MQTT broker can carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """A message has arrived."""

    topic: str
    payload: bytes
    retained: bool = False


@dataclass(frozen=True)
class Connected:
    """A new session; subscriptions made earlier are in force again. ``connection`` counts the sessions up."""

    connection: int = 0


@dataclass(frozen=True)
class Disconnected:
    """The session has ended; the transport connects again by itself after ``retry_in_s`` seconds."""

    reason: str
    retry_in_s: float
    remedy: str = ""
    """What to do about a login that the broker refuses; empty: it refused none."""

    clocks_differ: bool = False
    """Whether a certificate was refused because it does not hold at the time of this machine's clock."""


@dataclass(frozen=True)
class Subscribed:
    """The broker has confirmed these filters: what is published from now on arrives."""

    filters: tuple[str, ...]


@dataclass(frozen=True)
class Woken:
    """`Transport.wake` was called."""


Event = Message | Connected | Disconnected | Subscribed | Woken


@dataclass(frozen=True)
class Will:
    """What the broker publishes for a client whose connection breaks."""

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

    @property
    def unread_s(self) -> float:
        """Seconds that the oldest event has waited for `receive`; 0 where none waits."""

    def start(self) -> None:
        """Begin connecting; `Connected` follows as an event.

        Raises:
            BrokerAway: The broker does not answer, and the transport is configured not to wait.
        """

    def close(self) -> None:
        """Disconnect (no will is published)."""

    def subscribe(self, *filters: str) -> None:
        """Receive messages under ``filters``, also after reconnects. `Subscribed` follows as an event."""

    def unsubscribe(self, *filters: str) -> None:
        """Receive no more of them."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Hand over one message; never waits.

        Raises:
            MessageError: The payload is larger than ``max_payload_bytes``.
        """

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event, waiting at most ``timeout_s`` seconds; None when there was none."""

    def wake(self) -> None:
        """Make a waiting `receive` return at once with `Woken`; may be called from any thread."""


DEFAULT_MAX_PAYLOAD_BYTES = 122_880
