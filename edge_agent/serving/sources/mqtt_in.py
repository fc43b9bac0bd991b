"""Inputs from an MQTT topic: pictures or recordings, one in each message, or samples of a sensor, one in each line."""

from __future__ import annotations

from collections import deque

from ...core.errors import SourceLost
from ...wire.messages.fields import printable
from ...wire.transport import Disconnected, Message, Transport
from .source import Frame

_MOST_LINES = 20_000
"""Lines of one message that wait; a message with more ends the connection, because none may be lost."""


class MqttSource:
    """The newest message of a topic. Retained ones are old inputs, and not answered."""

    are_all_wanted = False

    def __init__(self, transport: Transport, topic: str) -> None:
        """Name a topic, which may have wildcards, of the broker that a transport leads to."""
        self.name = f"mqtt {topic}"
        self._transport = transport
        self._topic = topic
        self._is_open = False
        self.dropped = 0
        """Messages that newer ones came after before they were answered."""

    def open(self) -> None:
        """Subscribe; the transport connects again by itself."""
        if not self._is_open:
            self._transport.subscribe(self._topic)
            self._transport.start()
            self._is_open = True

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest message; see `Source.read`."""
        newest: Frame | None = None
        while True:
            event = self._transport.receive(0.0 if newest is not None else wait_s)
            if event is None:
                return newest
            if isinstance(event, Disconnected):
                raise SourceLost(f"the broker is away: {event.reason}")
            if isinstance(event, Message) and not event.retained:
                self.dropped += newest is not None
                # Of several topics each input says its own, whose text is somebody else's.
                newest = Frame(event.payload, printable(event.topic) if event.topic != self._topic else "")

    def close(self) -> None:
        """Do nothing: the transport looks for the broker, and ends with the program."""


class MqttLines:
    """Lines of samples from a topic; a message holds one or more."""

    def __init__(self, transport: Transport, topic: str) -> None:
        """Name a topic of the broker that a transport leads to."""
        self.name = f"mqtt {topic}"
        self._transport = transport
        self._topic = topic
        self._is_open = False
        self._waiting: deque[bytes] = deque()

    def open(self) -> None:
        """Subscribe; the transport connects again by itself."""
        if not self._is_open:
            self._transport.subscribe(self._topic)
            self._transport.start()
            self._is_open = True

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; see `Lines.read`."""
        if self._waiting:
            return self._waiting.popleft()
        event = self._transport.receive(wait_s)
        if isinstance(event, Disconnected):
            raise SourceLost(f"the broker is away: {event.reason}")
        if not isinstance(event, Message) or event.retained:
            return None
        lines = event.payload.splitlines()
        if len(lines) > _MOST_LINES:
            raise SourceLost(f"a message has {len(lines)} lines, at most {_MOST_LINES} are taken; send fewer at once")
        self._waiting.extend(lines)
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """End the connection."""
        self._transport.close()
