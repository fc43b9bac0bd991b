"""A broker in memory that is as bad as a real network can be, repeatably from a seed, and records what it carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edge_agent.wire.memory import MemoryBroker, MemoryTransport
from edge_agent.wire.transport import Message


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


class FaultyBroker(MemoryBroker):
    """``captured`` holds every (topic, payload) published while ``capture`` is on."""

    def __init__(self, faults: Faults | None = None, *, capture: bool = False) -> None:
        super().__init__()
        self.faults = faults
        self.capture = capture
        self.captured: list[tuple[str, bytes]] = []

    def transport(self, *args, **kwargs) -> FaultyTransport:
        return FaultyTransport(self, *args, **kwargs)

    def route(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        with self._lock:
            if self.capture:
                self.captured.append((topic, payload))
            super().route(topic, payload, retain=retain)


@dataclass
class FaultyTransport(MemoryTransport):
    """A client of a `FaultyBroker`."""

    _held_back: list[Message] = field(default_factory=list)

    def accept(self, message: Message) -> None:
        messages, late = self.broker.faults.deliveries(message) if self.broker.faults else ([message], False)
        if late:
            self._held_back += messages
            return
        for delivered in messages + self._held_back:
            super().accept(delivered)
        self._held_back = []
