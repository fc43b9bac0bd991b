"""A broker in memory that keeps the transport's contract, for simulations and tests."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from edge_agent.wire.transport import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    Connected,
    Disconnected,
    Event,
    Message,
    Subscribed,
    Traffic,
    WillOf,
    Woken,
)

from ..core.errors import MessageError
from .topics import matches


class MemoryBroker:
    """A broker for tests, for simulations, and for programs that embed both sides in one process.

    It behaves like the simplest real broker: QoS 1 within one session, retained messages, wills, and no queue for a
    client that is offline.
    """

    def __init__(self) -> None:
        self._clients: list[MemoryTransport] = []
        self._retained: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def transport(
        self, will: WillOf | None = None, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    ) -> MemoryTransport:
        """Return a transport for one more client."""
        return MemoryTransport(self, will, max_payload_bytes)

    def attach(self, client: MemoryTransport) -> None:
        """Connect a client; it calls this when it starts."""
        with self._lock:
            self._clients.append(client)

    def detach(self, client: MemoryTransport, *, politely: bool) -> None:
        """Disconnect a client; unless it leaves ``politely``, its will is published."""
        with self._lock:
            if client not in self._clients:
                return
            self._clients.remove(client)
            if not politely and client.will is not None:
                will = client.will(client.connection)
                self.route(will.topic, will.payload, retain=will.retain)

    def route(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Deliver a message to every client that has subscribed to its topic."""
        with self._lock:
            if retain:
                self._retained[topic] = payload
            for client in self._clients:
                if client.wants(topic):
                    client.accept(Message(topic, payload))

    def retained_for(self, filters: tuple[str, ...]) -> list[Message]:
        """Return the retained messages under ``filters``; an empty payload has cleared one."""
        messages = []
        with self._lock:
            for topic, payload in self._retained.items():
                if payload and any(matches(topic_filter, topic) for topic_filter in filters):
                    messages.append(Message(topic, payload, retained=True))
        return messages


@dataclass
class MemoryTransport:
    """One client of a `MemoryBroker`; a `wire.transport.Transport`."""

    broker: MemoryBroker
    will: WillOf | None = None
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    traffic: Traffic = field(default_factory=Traffic)
    _filters: list[str] = field(default_factory=list)
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _connected: bool = False
    connection: int = 0
    unread_s: float = 0.0
    """Always 0 unless a test sets it: both sides share one process."""

    def start(self) -> None:
        """Connect to the broker in memory, which is there at once."""
        self._connected = True
        self.connection += 1
        self.broker.attach(self)
        self._events.put(Connected(self.connection))
        if self._filters:
            self._confirm(tuple(self._filters))

    def close(self) -> None:
        """Disconnect on purpose, so that the broker publishes no will."""
        self._connected = False
        self.broker.detach(self, politely=True)

    def cut(self) -> None:
        """Lose the connection as in a power cut, so that the will is published; `start` reconnects."""
        self._connected = False
        self.broker.detach(self, politely=False)
        self._events.put(Disconnected("cut by the test", 0.0))

    def subscribe(self, *filters: str) -> None:
        """Receive messages under ``filters`` from now on, also after reconnects."""
        self._filters += [f for f in filters if f not in self._filters]
        if self._connected:
            self._confirm(filters)

    def unsubscribe(self, *filters: str) -> None:
        """Receive no messages under ``filters`` from now on."""
        self._filters = [f for f in self._filters if f not in filters]

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:  # noqa: ARG002 - one quality here
        """Deliver a message before returning; it is dropped while there is no connection.

        Raises:
            MessageError: The payload is larger than ``max_payload_bytes``.
        """
        if len(payload) > self.max_payload_bytes:
            raise MessageError(
                f"payload of {len(payload)} bytes, this transport carries at most {self.max_payload_bytes}"
            )
        if not self._connected:
            self.traffic.dropped += 1
            return
        self.traffic.bytes_up += len(payload)
        self.traffic.messages_up += 1
        self.broker.route(topic, bytes(payload), retain=retain)

    def wake(self) -> None:
        """Make a waiting `receive` return at once."""
        self._events.put(Woken())

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event; None if there is none within ``timeout_s``, without waiting if that is 0."""
        try:
            if timeout_s > 0:
                return self._events.get(timeout=timeout_s)
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def wants(self, topic: str) -> bool:
        """Return whether any filter of this client covers ``topic``."""
        return any(matches(f, topic) for f in self._filters)

    def accept(self, message: Message) -> None:
        """Queue a message; the broker calls this to deliver it."""
        self.traffic.bytes_down += len(message.payload)
        self.traffic.messages_down += 1
        self._events.put(message)

    def _confirm(self, filters: tuple[str, ...]) -> None:
        """Report that filters are in force, and deliver the messages that were retained under them."""
        self._events.put(Subscribed(filters))
        for message in self.broker.retained_for(filters):
            self._events.put(message)
