"""The events that a client's network thread has received and its program has not handled yet.

Memory is bounded, and messages that say that an agent is alive are handled first. To stop reading from the connection
would not help: brokers keep some 1,000 messages for a client that does not read, and drop all others, heartbeats
included. So everything is read, a message that repeats a waiting one replaces it, and beyond the bound ordinary
messages are dropped. Their senders repeat them, because they get no answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .transport import Event, Message, Woken

LIMIT_BYTES = 64 << 20
"""The most bytes of all waiting messages together, with `MESSAGE_BYTES` for each."""

MESSAGE_BYTES = 600
"""The bytes, roughly, that Python takes for a message beside its payload."""

RESERVED_SHARE = 1 / 8
"""The share of the bound that is kept for urgent messages."""


@dataclass(frozen=True)
class Rank:
    """The treatment of a message while it waits.

    Attributes:
        is_urgent: Whether it is handled before all messages that are not urgent.
        replaces: Messages with the same text here replace each other, so that only the newest counts; empty: none.
    """

    is_urgent: bool = False
    replaces: str = ""


ORDINARY = Rank()

RankOf = Callable[[Message], Rank]


@dataclass(frozen=True)
class _Waiting:
    """An event that waits, the time since when it does, and the bytes that are counted for it."""

    event: Event
    since: float
    size: int = 0


class Inbox:
    """A bounded queue with two lanes. One thread puts, another one gets; both may do so at any time."""

    def __init__(
        self,
        rank_of: RankOf = lambda _: ORDINARY,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an empty inbox.

        Args:
            rank_of: Returns the treatment of a message; called in the thread that puts.
            limit_bytes: The most bytes of all waiting messages together.
            clock: Returns monotonic seconds, for `oldest_s`.
            on_event: Called after each event that was added, in the thread that puts.
        """
        self._rank_of = rank_of
        self._on_event = on_event
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._urgent: OrderedDict[str, _Waiting] = OrderedDict()
        self._ordinary: OrderedDict[str, _Waiting] = OrderedDict()
        self._tickets = 0
        self._bytes = 0
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        """Add an event of the transport itself; such events are few and never dropped."""
        key = "woken" if isinstance(event, Woken) else ""
        with self._changed:
            if key not in self._ordinary:
                self._add(self._ordinary, key, _Waiting(event, self._clock()))
        self._on_event()

    def put_message(self, message: Message) -> bool:
        """Add a message, in place of the one that it replaces, and return whether there was room for it."""
        has_room = self._try_to_put(message)
        if has_room:
            self._on_event()
        return has_room

    def _try_to_put(self, message: Message) -> bool:
        """Add a message as `put_message` does, without telling anybody."""
        rank = self._rank_of(message)
        size = len(message.payload) + MESSAGE_BYTES
        with self._changed:
            lane = self._urgent if rank.is_urgent else self._ordinary
            before = lane.get(rank.replaces) if rank.replaces else None
            # A replacement needs room, too: otherwise small messages would open the way for any number of large ones.
            added_bytes = size if before is None else size - before.size
            if added_bytes > 0 and self._bytes + added_bytes > self._room_for(rank):
                return False
            if before is not None:
                # It keeps its place: whoever repeats himself often is not handled later for that.
                lane[rank.replaces] = _Waiting(message, before.since, size)
                self._bytes += added_bytes
                return True
            self._add(lane, rank.replaces, _Waiting(message, self._clock(), size))
            return True

    def get(self, timeout_s: float) -> Event:
        """Remove and return the next event, waiting at most ``timeout_s`` seconds.

        Raises:
            queue.Empty: No event arrived in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._urgent or self._ordinary, max(0.0, timeout_s)):
                raise queue.Empty
            lane = self._urgent or self._ordinary
            _, waiting = lane.popitem(last=False)
            self._bytes -= waiting.size
            return waiting.event

    @property
    def oldest_s(self) -> float:
        """The seconds that the oldest waiting event has waited; 0 where none waits."""
        with self._changed:
            oldest = [next(iter(lane.values())).since for lane in (self._urgent, self._ordinary) if lane]
            return self._clock() - min(oldest) if oldest else 0.0

    @property
    def waiting_bytes(self) -> int:
        """The bytes of all waiting messages together."""
        with self._changed:
            return self._bytes

    def _room_for(self, rank: Rank) -> int:
        """Return how many bytes may wait together once a message of this rank has been added."""
        if rank.is_urgent:
            return self._limit_bytes
        return self._limit_bytes - int(self._limit_bytes * RESERVED_SHARE)

    def _add(self, lane: OrderedDict[str, _Waiting], key: str, waiting: _Waiting) -> None:
        """Put an event at the end of a lane; the caller holds the lock."""
        if not key:
            self._tickets += 1
            key = f"#{self._tickets}"
        lane[key] = waiting
        self._bytes += waiting.size
        self._changed.notify()
