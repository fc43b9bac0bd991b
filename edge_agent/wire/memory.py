"""A broker in memory: for tests, for simulation, and for whoever embeds both sides in one process.

It behaves like the plainest real broker: QoS 1 within one session, retained messages, wills, nothing kept for a client
that is away. `Faults` makes it as bad as a real network can be, repeatably from a seed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..errors import MessageError
from .messages import matches
from .transport import Connected, Disconnected, Event, Message, Subscribed, Traffic, WillOf, Woken

DEFAULT_MAX_PAYLOAD_BYTES = 122_880


@dataclass
class Faults:
    """What goes wrong, as probabilities for each delivery, drawn from ``rng``.

    ``only`` limits the faults to topics for which it is true. A reordered message is delivered after the next one for
    the same client.
    """

    rng: np.random.Generator
    lose: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0
    only: Callable[[str], bool] = lambda _topic: True

    def deliveries(self, message: Message) -> tuple[list[Message], bool]:
        """What arrives in place of ``message``, and whether it is delayed behind the next one."""
        if not self.only(message.topic):
            return [message], False
        lose, twice, late, flip = self.rng.random(4) < (self.lose, self.duplicate, self.reorder, self.flip)
        if lose:
            return [], False
        if flip and message.payload:
            message = Message(message.topic, self._flipped(message.payload), message.retained)
        return [message] * (2 if twice else 1), bool(late)

    def _flipped(self, payload: bytes) -> bytes:
        damaged = bytearray(payload)
        damaged[int(self.rng.integers(len(damaged)))] ^= 1 << int(self.rng.integers(8))
        return bytes(damaged)


class MemoryBroker:
    """Connects `MemoryTransport`s. ``captured`` holds every (topic, payload) published while ``capture`` is on."""

    def __init__(self, faults: Faults | None = None, *, capture: bool = False) -> None:
        self.faults, self.capture = faults, capture
        self.captured: list[tuple[str, bytes]] = []
        self._clients: list[MemoryTransport] = []
        self._retained: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def transport(
        self, will: WillOf | None = None, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    ) -> MemoryTransport:
        """A transport for one more client."""
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
        """Deliver to every client that asked for it."""
        with self._lock:
            if self.capture:
                self.captured.append((topic, payload))
            if retain:
                self._retained[topic] = payload
            for client in self._clients:
                if client.wants(topic):
                    self._deliver(client, Message(topic, payload))

    def retained_for(self, filters: tuple[str, ...]) -> list[Message]:
        """Retained messages under ``filters``; empty ones were cleared."""
        with self._lock:
            return [
                Message(topic, payload, retained=True)
                for topic, payload in self._retained.items()
                if payload and any(matches(f, topic) for f in filters)
            ]

    def _deliver(self, client: MemoryTransport, message: Message) -> None:
        messages, late = self.faults.deliveries(message) if self.faults else ([message], False)
        client.accept(messages, late=late)


@dataclass
class MemoryTransport:
    """One client of a `MemoryBroker`; a `wire.transport.Transport`."""

    broker: MemoryBroker
    will: WillOf | None = None
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    traffic: Traffic = field(default_factory=Traffic)
    _filters: list[str] = field(default_factory=list)
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _held_back: list[Message] = field(default_factory=list)
    _connected: bool = False
    connection: int = 0

    def start(self) -> None:
        """Connect at once."""
        self._connected = True
        self.connection += 1
        self.broker.attach(self)
        self._events.put(Connected(self.connection))
        if self._filters:
            self._confirm(tuple(self._filters))

    def close(self) -> None:
        """Leave without a will."""
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
            MessageError: larger than ``max_payload_bytes``.
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
        """The next event; with ``timeout_s`` 0 it never waits."""
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def wants(self, topic: str) -> bool:
        """Whether any filter of this client covers ``topic``."""
        return any(matches(f, topic) for f in self._filters)

    def accept(self, messages: list[Message], *, late: bool) -> None:
        """Called by the broker to deliver."""
        if late:
            self._held_back += messages
            return
        for message in messages + self._held_back:
            self.traffic.bytes_down += len(message.payload)
            self.traffic.messages_down += 1
            self._events.put(message)
        self._held_back = []

    def _confirm(self, filters: tuple[str, ...]) -> None:
        self._events.put(Subscribed(filters))
        for message in self.broker.retained_for(filters):
            self._events.put(message)
