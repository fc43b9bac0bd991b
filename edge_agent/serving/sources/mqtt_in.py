"""Inputs from an MQTT topic: images or recordings, one a message, or samples of a sensor, one a line."""

from __future__ import annotations

from collections import deque

from ...core.errors import SourceLost
from ...core.formats import printable
from ...wire.transport import Disconnected, Message, Transport
from .source import Frame

_MOST_LINES = 20_000
"""The most lines in one message. A message with more is dropped, and the source counts as lost for a while."""


_MOST_WAITING = 16
"""Messages of a topic that wait to be answered; each may have some megabytes."""


class _Subscription:
    """A subscription to one topic; messages arrive as soon as the transport is connected."""

    def __init__(self, transport: Transport, topic: str) -> None:
        self.topic = topic
        self._transport = transport
        self._is_open = False

    def open(self) -> None:
        """Subscribe and connect, if that was not done before; the transport reconnects by itself."""
        if not self._is_open:
            self._transport.subscribe(self.topic)
            self._transport.start()
            self._is_open = True

    def next_message(self, wait_s: float) -> Message | None:
        """Return the next message that is not retained; None if nothing happens for ``wait_s`` seconds.

        Raises:
            SourceLost: The connection to the broker is lost.
        """
        while True:
            event = self._transport.receive(wait_s)
            if event is None:
                return None
            if isinstance(event, Disconnected):
                raise SourceLost(f"the broker is away: {event.reason}")
            # The broker sends a retained message at each subscription: it is an old input.
            if isinstance(event, Message) and not event.retained:
                return event

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


class MqttSource:
    """A source whose frames are the messages of a topic. Retained messages are old, and are not answered.

    Each message is answered, in the order of arrival. Where they come faster than that, at most `_MOST_WAITING` wait;
    the oldest ones beyond that are dropped, and counted.
    """

    needs_every_frame = True

    def __init__(self, transport: Transport, topic: str) -> None:
        """Create a source that is not open, for a topic on the broker of ``transport``; it may have wildcards."""
        self.name = f"mqtt {topic}"
        self._subscription = _Subscription(transport, topic)
        self._waiting: deque[Message] = deque()

    def open(self) -> None:
        """Subscribe; see `Source.open`."""
        self._subscription.open()

    def read(self, wait_s: float) -> Frame | None:
        """Return the oldest message that waits; see `Source.read`."""
        dropped = self._take_arrived(0.0 if self._waiting else wait_s)
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        # With wildcards, each frame is named by its topic. Other clients choose that text, so it is made printable.
        name = "" if message.topic == self._subscription.topic else printable(message.topic)
        return Frame(message.payload, name, dropped)

    def _take_arrived(self, wait_s: float) -> int:
        """Let the messages that have arrived wait here; return how many were dropped because too many wait."""
        dropped = 0
        message = self._subscription.next_message(wait_s)
        while message is not None:
            self._waiting.append(message)
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                dropped += 1
            message = self._subscription.next_message(0.0)
        return dropped

    def close(self) -> None:
        """Do nothing: the transport reconnects in the background, and ends with the program."""


class MqttLineSource:
    """A source of lines from a topic; a message holds one or more lines."""

    def __init__(self, transport: Transport, topic: str) -> None:
        """Create a source that is not open, for a topic on the broker of ``transport``."""
        self.name = f"mqtt {topic}"
        self._subscription = _Subscription(transport, topic)
        self._waiting: deque[bytes] = deque()

    def open(self) -> None:
        """Subscribe; see `LineSource.open`."""
        self._subscription.open()

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; see `LineSource.read`."""
        if self._waiting:
            return self._waiting.popleft()
        message = self._subscription.next_message(wait_s)
        if message is None:
            return None
        lines = message.payload.splitlines()
        if len(lines) > _MOST_LINES:
            raise SourceLost(
                f"a message has {len(lines)} lines, at most {_MOST_LINES} are accepted; send fewer at once"
            )
        self._waiting.extend(lines)
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Close the connection."""
        self._subscription.close()
