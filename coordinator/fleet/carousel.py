"""A broadcast as a carousel: the chunks of a blob in a circle, which agents join where it is and leave when done.

Each chunk is published once for all who need it. The circle starts again only for those who joined late, and when the
others have left: they would receive the beginning twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.blobs.flow import STALL_S, Sending


class Carousel:
    """The listeners to one blob's broadcast, what they need, and what is published next.

    The slowest listener that makes progress sets the pace: what is published is under way to every one of them.
    """

    def __init__(self, blob: Outgoing) -> None:
        self.blob = blob
        self.listeners: dict[str, Sending] = {}
        self._wanted = 0
        """A bit for each chunk: whether any listener needs it."""

        self._position = self._unasked = 0
        self._is_current = True

    @property
    def wanted(self) -> int:
        """A bit for each chunk that any listener needs."""
        if not self._is_current:
            self._wanted = 0
            self._is_current = True
            for sending in self.listeners.values():
                self._wanted |= bits_of(sending.need)
        return self._wanted

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be published, for all that is known."""
        return not self.wanted

    def join(self, agent: str, sending: Sending, now: float) -> None:
        """An agent listens from now on."""
        sending.moved_at = now
        self._wanted = self.wanted | bits_of(sending.need)
        self.listeners[agent] = sending

    def leave(self, agent: str) -> Sending | None:
        """An agent has the blob, or listens no longer; returns what was under way to it."""
        sending = self.listeners.pop(agent, None)
        if sending is not None and not sending.is_over:
            self.changed()
        return sending

    def changed(self) -> None:
        """A listener needs other chunks than before."""
        self._is_current = False

    def due(self, now: float) -> Iterator[bytes]:
        """Frames that may be published now; reports are asked for after each half of a window."""
        size = self.blob.ref.chunk_bytes
        everyone = list(self.listeners.values())
        moving = [sending for sending in everyone if sending.is_moving(now)] or everyone
        if not moving or not all(sending.pace.is_ready(size) for sending in moving):
            return
        room = min(sending.pace.room(size) for sending in moving)
        window = min(sending.pace.window(size) for sending in moving)
        most = min(sending.frame_chunks for sending in moving)
        while (start := self._next(now)) is not None:
            stop = start + min(most, _run(self.wanted >> start))
            if (stop - start) * size > room:
                return
            room -= (stop - start) * size
            for sending in self.listeners.values():
                sending.sent(start, stop, (stop - start) * size, now)
            self._wanted &= ~(((1 << (stop - start)) - 1) << start)
            self._position = stop
            self._unasked += (stop - start) * size
            report = 2 * self._unasked >= window or most * size > room or not self._wanted >> stop
            self._unasked = 0 if report else self._unasked
            yield self.blob.frame(start, stop, report=report)

    def _next(self, now: float) -> int | None:
        """The first chunk to publish from the position on; None: none, or those who have all are still listening."""
        ahead = self.wanted >> self._position
        if ahead:
            return self._position + _lowest(ahead)
        if not self._wanted or any(
            sending.is_over and now - sending.moved_at < STALL_S for sending in self.listeners.values()
        ):
            return None
        return _lowest(self._wanted)


def bits_of(flags: bytes | bytearray) -> int:
    """A number with bit ``i`` set where byte ``i`` is not 0."""
    return int(flags[::-1].translate(_DIGITS) or b"0", 2)


_DIGITS = bytes([ord("0"), *[ord("1")] * 255])


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _run(bits: int) -> int:
    """How many of the lowest bits are set in a row."""
    return _lowest(~bits)
