"""The slots for connections. Where all are taken, the connection that has been idle longest ends for a new one.

Otherwise clients that connect and say nothing would keep everybody else out, without a token. For the same reason the
requests that everybody may make count for nothing: a connection that only made such is idle. Connections that were
never allowed another request end before those that were.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_ENDING_S = 1.0
"""Seconds for which a new connection waits until the idle one has ended that makes room for it."""


@dataclass(eq=False)
class Slot:
    """The slot of an open connection.

    Attributes:
        connection: The connection.
        since: When it was opened, or its last request was answered: seconds of a monotonic clock.
        is_asking: Whether a request is under way: it needs access and has it, and its response has not been sent.
        has_asked: Whether there was such a request.
    """

    connection: socket.socket
    since: float
    is_asking: bool = False
    has_asked: bool = False

    def is_silent(self) -> bool:
        """Return whether nothing has arrived that is still to be read: neither bytes nor the end of the connection."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            return not selector.select(0)


class Slots:
    """The slots of all connections, and which of these are idle."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = threading.BoundedSemaphore(most)
        self._clock = clock
        self._held: list[Slot] = []
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take a slot for a new connection, and return whether there is one."""
        if self._free.acquire(blocking=False):
            return True
        return self._end_idle() and self._free.acquire(timeout=_ENDING_S)

    def leave(self) -> None:
        """Give a slot back."""
        self._free.release()

    @contextlib.contextmanager
    def hold(self, connection: socket.socket) -> Iterator[Slot]:
        """Let a connection, which has a slot, be ended while it is idle, as long as the context lasts."""
        slot = Slot(connection, self._clock())
        with self._lock:
            self._held.append(slot)
        try:
            yield slot
        finally:
            with self._lock:
                if slot in self._held:
                    self._held.remove(slot)

    @contextlib.contextmanager
    def asking(self, slot: Slot) -> Iterator[None]:
        """Keep a connection from being ended while the context lasts, because a request of it was allowed.

        Raises:
            ConnectionAbortedError: It was ended just before.
        """
        with self._lock:
            if slot not in self._held:
                raise ConnectionAbortedError("the connection was idle, and has ended for another one")
            slot.is_asking = True
            slot.has_asked = True
        try:
            yield
        finally:
            with self._lock:
                slot.is_asking = False
                slot.since = self._clock()

    def _end_idle(self) -> bool:
        """End the connection that has been idle longest, and return whether there was one."""
        with self._lock:
            idle = [slot for slot in self._held if not slot.is_asking]
            idle.sort(key=lambda slot: (slot.has_asked, slot.since))
            for slot in idle:
                # The methods of `ssl` may not be called while another thread reads; this one of its base class may.
                with contextlib.suppress(OSError):
                    if slot.is_silent():
                        self._held.remove(slot)
                        socket.socket.shutdown(slot.connection, socket.SHUT_RDWR)
                        return True
        return False
