"""A broker in memory whose clients have links with a rate and a delay, on a simulated clock; a federation on it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faulty_broker import Faults, FaultyBroker, FaultyTransport
from federation_harness import Clock, Federation

from edge_agent.agent.event_loop import Agent
from edge_agent.wire.transport import Message

PACKET_BYTES = 7
"""What MQTT adds to topic and payload: fixed header, length of the topic, packet id."""


@dataclass
class Line:
    """One direction of a link: bytes pass one after another at ``rate`` (bytes/s), and arrive ``delay_s`` later."""

    rate: float = float("inf")
    delay_s: float = 0.0
    free_at: float = 0.0
    bytes: int = 0
    slowest_control_s: float = 0.0
    """The longest time that a control message took."""

    is_down: bool = False
    """Whether what is sent waits, as behind a radio without a signal."""

    def pass_s(self, now: float, size: int) -> float:
        """When so many bytes, sent now, have passed."""
        self.bytes += size
        self.free_at = max(now, self.free_at) + size / self.rate
        return self.free_at + self.delay_s


class LinkBroker(FaultyBroker):
    """Delivers what has passed a link when `advance` is called at or after that time."""

    def __init__(self, clock: Clock, faults: Faults | None = None, *, capture: bool = False) -> None:
        super().__init__(faults, capture=capture)
        self.clock = clock
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = itertools.count()

    def transport(self, *args: Any, **kwargs: Any) -> LinkTransport:
        return LinkTransport(self, *args, **kwargs)

    def later(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._under_way, (at, next(self._tickets), action))

    def next_at(self) -> float:
        """When the next message arrives."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def advance(self) -> bool:
        """Deliver what has arrived by now; True when there was anything."""
        delivered = False
        while self.next_at() <= self.clock() + 1e-9:
            heapq.heappop(self._under_way)[2]()
            delivered = True
        return delivered


@dataclass
class LinkTransport(FaultyTransport):
    """A client of a `LinkBroker`."""

    up: Line = field(default_factory=Line)
    down: Line = field(default_factory=Line)
    subscribes_late: bool = False
    """Whether requests to subscribe take the time of the link, as with a real broker."""

    def subscribe(self, *filters: str) -> None:
        deliver = super().subscribe
        if not self.subscribes_late or not self._connected:
            deliver(*filters)
            return
        connection = self.connection
        now = self.broker.clock()
        confirmed_at = now + self.up.delay_s + self.down.delay_s
        self.broker.later(now + self.up.delay_s, lambda: self._note_filters(connection, filters))
        self.broker.later(confirmed_at, lambda: self._is(connection) and self._confirm(filters))

    def unsubscribe(self, *filters: str) -> None:
        deliver = super().unsubscribe
        if not self.subscribes_late:
            deliver(*filters)
            return
        self.broker.later(self.broker.clock() + self.up.delay_s, lambda: deliver(*filters))

    def _note_filters(self, connection: int, filters: tuple[str, ...]) -> None:
        if self._is(connection):
            self._filters += [wanted for wanted in filters if wanted not in self._filters]

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        connection = self.connection
        deliver = super().publish
        if not self._connected:
            deliver(topic, payload)  # counts it as dropped
            return
        self._carry(self.up, topic, payload, lambda: self._is(connection) and deliver(topic, payload, retain=retain))

    def accept(self, message: Message) -> None:
        connection = self.connection
        deliver = super().accept
        self._carry(self.down, message.topic, message.payload, lambda: self._is(connection) and deliver(message))

    def reconnect(self) -> None:
        """The connection breaks and stands again at once; what was under way is lost."""
        self.cut()
        self.up.free_at = self.down.free_at = 0.0
        self.start()

    def _is(self, connection: int) -> bool:
        return self._connected and self.connection == connection

    def _carry(self, line: Line, topic: str, payload: bytes, action: Callable[[], object]) -> None:
        now = self.broker.clock()
        at = line.pass_s(now, len(topic) + len(payload) + PACKET_BYTES)
        if not topic.endswith(("/ub", "/db")) and "/b/" not in topic:
            line.slowest_control_s = max(line.slowest_control_s, at - now)
        if at <= now:
            action()
        else:
            self.broker.later(at, action)


class LinkedFederation(Federation):
    """A federation whose agents have the links of ``rates`` (bytes/s, both directions; unlimited for others)."""

    def __init__(self, *args: Any, rates: dict[str, float], delay_s: float = 0.05, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rates = rates
        self.delay_s = delay_s
        self.broker = LinkBroker(self.clock, self.broker.faults, capture=self.broker.capture)

    def add(self, name: str, tier: str = "train", **options: Any) -> Agent:
        agent = super().add(name, tier, **options)
        rate = self.rates.get(name, float("inf"))
        agent.transport.up = Line(rate, self.delay_s)
        agent.transport.down = Line(rate, self.delay_s)
        return agent

    def line(self, name: str, way: str) -> Line:
        """One direction of an agent's link."""
        return getattr(self.agents[name].transport, way)

    def step(self) -> bool:
        delivered = self.broker.advance()
        return super().step() or delivered

    def _pause(self) -> float:
        return max(1e-4, min(super()._pause(), self.broker.next_at() - self.clock.now))
