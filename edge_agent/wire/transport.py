"""The contract of transports, which carry messages, and the events that they report.

It promises little on purpose. A publish while disconnected is dropped (and counted), a message may arrive twice or not
at all, and a broker's acknowledgement proves nothing: everything that matters is sent again after `Connected` and
confirmed by the other side in its own message. So any MQTT broker fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Message:
    """A message that has arrived."""

    topic: str
    payload: bytes
    retained: bool = False


@dataclass(frozen=True)
class LeftBroker:
    """A broker of a list that was lost or not reached at the last try, and why."""

    url: str
    reason: str


@dataclass(frozen=True)
class BrokerConnection:
    """The broker that is connected, since when (ISO 8601), and the others of a list that were lost or not reached."""

    url: str
    since: str
    left: tuple[LeftBroker, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the connection as status files have it; `core.formats.broker` shows it."""
        return asdict(self)


@dataclass(frozen=True)
class Connected:
    """The event that a session has begun, number ``connection``; subscriptions made earlier are in force again."""

    connection: int = 0
    broker: str = ""
    """The URL of the broker; empty for one in memory."""

    left: tuple[LeftBroker, ...] = ()
    """The other brokers of a list that were lost or not reached."""

    def connection_since(self, since: str) -> BrokerConnection | None:
        """Return the connection for a status file, with the time (ISO 8601) of this event; None for one in memory."""
        return BrokerConnection(self.broker, since, self.left) if self.broker else None


@dataclass(frozen=True)
class Disconnected:
    """The event that the session has ended; the transport connects again by itself after ``retry_in_s`` seconds."""

    reason: str
    retry_in_s: float
    remedy: str = ""
    """The remedy where the broker has refused the login; empty otherwise."""

    clocks_differ: bool = False
    """Whether a certificate was refused because it does not hold at the time of this machine's clock."""


@dataclass(frozen=True)
class Subscribed:
    """The event that the broker has confirmed filters: messages under them that are published from now on arrive."""

    filters: tuple[str, ...]


@dataclass(frozen=True)
class Woken:
    """The event that `Transport.wake` was called."""


Event = Message | Connected | Disconnected | Subscribed | Woken


@dataclass(frozen=True)
class Will:
    """The message that the broker publishes for a client whose connection breaks."""

    topic: str
    payload: bytes
    retain: bool = False


WillOf = Callable[[int], Will]
"""A function from the number of a connection to its will: brokers may publish that of an old connection late."""


@dataclass
class Traffic:
    """Counters since the start: payload bytes and messages in both directions, and dropped messages."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0
    dropped: int = 0


class Transport(Protocol):
    """A connection of one side to the broker. All methods but `wake` are called from one thread."""

    max_payload_bytes: int
    traffic: Traffic

    @property
    def unread_s(self) -> float:
        """The seconds that the oldest event has waited for `receive`; 0 where none waits."""

    def start(self) -> None:
        """Begin connecting; `Connected` follows as an event.

        Raises:
            BrokerAway: The broker does not answer, and the transport is configured not to wait.
        """

    def close(self) -> None:
        """Disconnect without publishing the will."""

    def subscribe(self, *filters: str) -> None:
        """Receive messages under ``filters``, also after reconnects. `Subscribed` follows as an event."""

    def unsubscribe(self, *filters: str) -> None:
        """Receive no more messages under ``filters``."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Hand over one message without waiting.

        Raises:
            MessageError: The payload is larger than ``max_payload_bytes``.
        """

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event, waiting at most ``timeout_s`` seconds; None when there was none."""

    def wake(self) -> None:
        """Make a waiting `receive` return at once with `Woken`; may be called from any thread."""


DEFAULT_MAX_PAYLOAD_BYTES = 122_880
"""The largest payload of a transport that is not configured otherwise."""
