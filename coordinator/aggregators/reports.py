"""What an aggregator has to tell its coordinator of updates: once, and again until the coordinator has noted it.

An agent offers its update again and again while no receipt comes, and a coordinator may be away for hours. So what is
said again changes nothing, and of each agent little is kept: what was dropped comes with the agent's next offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_agent.wire.messages.proven import MAX_BYTES

from .messages import MOST_UPDATES, Stored, Updates

AGAIN_S = 2.0
"""Seconds without an answer after which a message about stored updates is sent again; twice as many each time."""

LONGEST_AGAIN_S = 30.0
"""The most seconds until a message is sent again: nobody hears it while the coordinator is away."""

MOST_KEPT = 1 << 16
"""The most updates that wait for the coordinator, of all agents together."""

_MESSAGE_BYTES = MAX_BYTES - 2048
"""The most bytes of the updates in one message, beside which there are its other fields and its proof."""

_Key = tuple[str, bool]
"""An agent, and whether its update is stored."""


@dataclass
class _Message:
    """Updates that were sent to the coordinator, which has not confirmed them yet."""

    updates: tuple[Stored, ...]
    due_at: float
    again_s: float = AGAIN_S


class Reports:
    """The updates that the coordinator has yet to note."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[_Key, Stored] = {}
        """What is in no message yet."""

        self._under_way: dict[_Key, Stored] = {}
        """What is in a message that the coordinator has not confirmed."""

        self._later: dict[_Key, Stored] = {}
        """What an agent has sent since, while a message of the same kind about it is under way."""

        self._messages: dict[int, _Message] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way) + len(self._later)

    def add(self, stored: Stored) -> None:
        """Tell the coordinator of an update, unless a message about it is under way already."""
        key = (stored.agent, stored.is_stored)
        before = self._under_way.get(key)
        is_known = before is not None and _content(before) == _content(stored)
        places = self._waiting if before is None else self._later
        is_full = len(self) >= MOST_KEPT and key not in places
        if not is_known and not is_full:
            places[key] = stored

    def due(self, name: str, boot: str) -> Iterator[Updates]:
        """Yield the messages that are to be sent now, and note each as sent.

        Args:
            name: The name of the aggregator.
            boot: Its start.
        """
        now = self._clock()
        for updates in self._packed():
            self._number += 1
            self._messages[self._number] = _Message(updates, now)
        for number, message in self._messages.items():
            if now >= message.due_at:
                message.due_at = now + message.again_s
                message.again_s = min(2 * message.again_s, LONGEST_AGAIN_S)
                yield Updates(name=name, boot=boot, number=number, updates=message.updates)

    def say_again(self) -> None:
        """Send everything again at once, because another coordinator listens now, or another connection is there."""
        for message in self._messages.values():
            message.due_at = self._clock()
            message.again_s = AGAIN_S

    def noted(self, number: int) -> tuple[Stored, ...]:
        """Forget the updates of a message that the coordinator has confirmed, and return them."""
        message = self._messages.pop(number, None)
        if message is None:
            return ()
        for stored in message.updates:
            key = (stored.agent, stored.is_stored)
            self._under_way.pop(key, None)
            if key in self._later:
                self._waiting[key] = self._later.pop(key)
        return message.updates

    def _packed(self) -> Iterator[tuple[Stored, ...]]:
        """Yield what waits in parts that fit into a message each; from then on it is under way."""
        waiting = self._waiting
        self._waiting = {}
        self._under_way.update(waiting)
        packed: list[Stored] = []
        packed_bytes = 0
        for stored in waiting.values():
            size = len(stored.model_dump_json().encode())
            is_full = len(packed) == MOST_UPDATES or packed_bytes + size > _MESSAGE_BYTES
            if packed and is_full:
                yield tuple(packed)
                packed = []
                packed_bytes = 0
            packed.append(stored)
            packed_bytes += size + 1
        if packed:
            yield tuple(packed)


def _content(stored: Stored) -> tuple[str, str, int, str, str]:
    """Return what a report says, without what differs each time that an agent says it."""
    manifest = stored.manifest
    return (manifest.run, manifest.session, manifest.round, manifest.blob.digest, stored.refused)
