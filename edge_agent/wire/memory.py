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
    """Connects `MemoryTransport`s: for tests, for simulations, and for programs that embed both sides in one process.

    It behaves like the plainest real broker: QoS 1 within one session, retained messages, wills, and nothing is queued
    for a client that is offline.
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
        """Called by a client that starts."""
        with self._lock:
            self._clients.append(client)

    def detach(self, client: MemoryTransport, *, politely: bool) -> None:
        """Called by a client that leaves, or by a test that cuts it off (its will is then published)."""
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
                if not politely and client.will is not None:
                    will = client.will(client.connection)
                    self.route(will.topic, will.payload, retain=will.retain)

    def route(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Deliver to every client that has subscribed to the topic."""
        with self._lock:
            if retain:
                self._retained[topic] = payload
            for client in self._clients:
                if client.wants(topic):
                    client.accept(Message(topic, payload))

    def retained_for(self, filters: tuple[str, ...]) -> list[Message]:
        """Retained messages under ``filters``; empty ones were cleared."""
        with self._lock:
            return [
                Message(topic, payload, retained=True)
                for topic, payload in self._retained.items()
                if payload and any(matches(f, topic) for f in filters)
            ]


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
    """Always 0, but where a test says otherwise: both sides share one process."""

    def start(self) -> None:
        """Connect at once."""
        self._connected = True
        self.connection += 1
        self.broker.attach(self)
        self._events.put(Connected(self.connection))
        if self._filters:
            self._confirm(tuple(self._filters))

    def close(self) -> None:
        """Disconnect without a will."""
        self._connected = False
        self.broker.detach(self, politely=True)

    def cut(self) -> None:
        """Lose the connection as a device does whose power goes: the will is published. `start` reconnects."""
        self._connected = False
        self.broker.detach(self, politely=False)
        self._events.put(Disconnected("cut by the test", 0.0))

    def subscribe(self, *filters: str) -> None:
        """Effective at once."""
        self._filters += [f for f in filters if f not in self._filters]
        if self._connected:
            self._confirm(filters)

    def unsubscribe(self, *filters: str) -> None:
        """Effective at once."""
        self._filters = [f for f in self._filters if f not in filters]

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:  # noqa: ARG002 - one quality here
        """Deliver before returning; dropped while disconnected.

        Raises:
            MessageError: The payload is larger than ``max_payload_bytes``.
        """
        if len(payload) > self.max_payload_bytes:
            raise MessageError(f"payload of {len(payload)} bytes, this transport carries {self.max_payload_bytes}")
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
        """Return the next event; with ``timeout_s`` 0 it never waits."""
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def wants(self, topic: str) -> bool:
        """Return whether any filter of this client covers ``topic``."""
        return any(matches(f, topic) for f in self._filters)

    def accept(self, message: Message) -> None:
        """Called by the broker to deliver."""
        self.traffic.bytes_down += len(message.payload)
        self.traffic.messages_down += 1
        self._events.put(message)

    def _confirm(self, filters: tuple[str, ...]) -> None:
        self._events.put(Subscribed(filters))
        for message in self.broker.retained_for(filters):
            self._events.put(message)
