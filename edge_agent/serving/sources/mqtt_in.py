"""Inputs from an MQTT topic: pictures or recordings, one in each message, or samples of a sensor, one in each line."""

from __future__ import annotations

from collections import deque

from ...core.errors import SourceLost
from ...wire.messages.fields import printable
from ...wire.transport import Disconnected, Message, Transport
from .source import Frame

_MOST_LINES = 20_000
"""Lines of one message; none of a message with more is taken, and the source counts as lost for a moment."""


class _Subscription:
    """A topic of a broker, whose messages come as soon as the transport has connected."""

    def __init__(self, transport: Transport, topic: str) -> None:
        self.topic = topic
        self._transport = transport
        self._is_open = False

    def open(self) -> None:
        """Subscribe once; the transport connects again by itself."""
        if not self._is_open:
            self._transport.subscribe(self.topic)
            self._transport.start()
            self._is_open = True

    def next_message(self, wait_s: float) -> Message | None:
        """Return the next message that is new; None where nothing happens within ``wait_s``.

        Raises:
            SourceLost: The broker is away.
        """
        while (event := self._transport.receive(wait_s)) is not None:
            if isinstance(event, Disconnected):
                raise SourceLost(f"the broker is away: {event.reason}")
            # A retained message is an old input.
            if isinstance(event, Message) and not event.retained:
                return event
        return None

    def close(self) -> None:
        """End the connection."""
        self._transport.close()


class MqttSource:
    """The newest message of a topic. Retained ones are old inputs, and not answered."""

    are_all_wanted = False

    def __init__(self, transport: Transport, topic: str) -> None:
        """Name a topic, which may have wildcards, of the broker that a transport leads to."""
        self.name = f"mqtt {topic}"
        self._subscription = _Subscription(transport, topic)

    def open(self) -> None:
        """Subscribe; see `Source.open`."""
        self._subscription.open()

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest message; see `Source.read`."""
        newest = self._subscription.next_message(wait_s)
        if newest is None:
            return None
        while (newer := self._subscription.next_message(0.0)) is not None:
            newest = newer
        # Of several topics each input says its own, whose text is somebody else's.
        name = "" if newest.topic == self._subscription.topic else printable(newest.topic)
        return Frame(newest.payload, name)

    def close(self) -> None:
        """Do nothing: the transport looks for the broker meanwhile, and ends with the program."""


class MqttLines:
    """Lines of samples from a topic; a message holds one or more."""

    def __init__(self, transport: Transport, topic: str) -> None:
        """Name a topic of the broker that a transport leads to."""
        self.name = f"mqtt {topic}"
        self._subscription = _Subscription(transport, topic)
        self._waiting: deque[bytes] = deque()

    def open(self) -> None:
        """Subscribe; see `Lines.open`."""
        self._subscription.open()

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; see `Lines.read`."""
        if self._waiting:
            return self._waiting.popleft()
        message = self._subscription.next_message(wait_s)
        if message is None:
            return None
        lines = message.payload.splitlines()
        if len(lines) > _MOST_LINES:
            raise SourceLost(f"a message has {len(lines)} lines, at most {_MOST_LINES} are taken; send fewer at once")
        self._waiting.extend(lines)
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """End the connection."""
        self._subscription.close()
