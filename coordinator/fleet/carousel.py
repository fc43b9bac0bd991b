"""A broadcast as a carousel: the chunks of a blob in a circle, which agents join where it is and leave when done.

Each chunk is published once for all who need it. The circle starts again only for those who joined late, and when the
others have left: they would receive the beginning twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_agent.wire.blobs.chunks import Outgoing, chunks_per_frame
from edge_agent.wire.blobs.flow import STALL_S, Sending

BYTES_OF_A_REPORT = 16
"""Bytes of a broadcast that may be under way for each of its listeners, however slow these seem.

Each of them reports once for every half of a window. From thousands the reports alone take seconds to arrive, which
looks like slow links: the windows shrank to two chunks, and each chunk of 5 kB was followed by 4,000 reports.
"""


class Carousel:
    """The listeners to one blob's broadcast, what they need, and what is published next.

    The slowest listener that makes progress sets the pace: what is published is under way to every one of them.
    """

    def __init__(self, blob: Outgoing) -> None:
        self.blob = blob
        self.listeners: dict[str, Sending] = {}
        self._wanted = 0
        """A bit for each chunk: whether any listener needs it."""

        self._position = 0
        """The chunk that is looked at next."""

        self._unasked = 0
        """Bytes that were published since the last chunk that asked for reports."""

        self._is_current = True
        """Whether the bits of needed chunks are right; otherwise they are computed when they are needed."""

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
        """Have an agent listen from now on; ``sending``: what it needs and how fast it can take that."""
        sending.moved_at = now
        self._wanted = self.wanted | bits_of(sending.need)
        self.listeners[agent] = sending

    def leave(self, agent: str) -> Sending | None:
        """Drop an agent that has the blob, or listens no longer; returns what was under way to it."""
        sending = self.listeners.pop(agent, None)
        if sending is not None and not sending.is_over:
            self.changed()
        return sending

    def changed(self) -> None:
        """Note that a listener needs other chunks than before."""
        self._is_current = False

    def due(self, now: float) -> Iterator[bytes]:
        """Yield the frames that may be published now; reports are asked for after each half of a window."""
        chunk_bytes = self.blob.ref.chunk_bytes
        # Step 1: how much may be under way. The slowest link decides, but for what thousands of reports would cost.
        paces = [sending.pace for sending in self._pacemakers(now)]
        if not paces:
            return
        least_window = BYTES_OF_A_REPORT * len(self.listeners)
        windows = [max(least_window, pace.window(chunk_bytes)) for pace in paces]
        rooms = [size - pace.under_way for size, pace in zip(windows, paces, strict=True)]
        is_ready = all(4 * room >= size for room, size in zip(rooms, windows, strict=True))
        if not is_ready:
            return
        room = min(rooms)
        window = min(windows)
        most_chunks = max(1, min(window // 4 // chunk_bytes, chunks_per_frame(self.blob.ref)))
        # Step 2: frames of chunks in a row, until there is no room for another one.
        while True:
            start = self._next(now)
            if start is None:
                return
            count = min(most_chunks, _run(self.wanted >> start))
            stop = start + count
            frame_bytes = count * chunk_bytes
            if frame_bytes > room:
                return
            room -= frame_bytes
            self._note_published(start, stop, now)
            # A report is asked for half a window after the last one, and with the last frame for now: no other frame
            # would ask for it.
            self._unasked += frame_bytes
            is_last = most_chunks * chunk_bytes > room or not self._wanted >> stop
            asks_for_report = is_last or 2 * self._unasked >= window
            if asks_for_report:
                self._unasked = 0
            yield self.blob.frame(start, stop, report=asks_for_report)

    def _pacemakers(self, now: float) -> list[Sending]:
        """Return what is sent to the listeners that set the pace.

        Those that have stopped answering hold back nobody, unless all listeners have.
        """
        everyone = list(self.listeners.values())
        moving = [sending for sending in everyone if sending.is_moving(now)]
        return moving or everyone

    def _note_published(self, start: int, stop: int, now: float) -> None:
        """Note that the chunks from ``start`` up to ``stop`` are under way to every listener."""
        count = stop - start
        for sending in self.listeners.values():
            sending.sent(start, stop, count * self.blob.ref.chunk_bytes, now)
        published = ((1 << count) - 1) << start
        self._wanted &= ~published
        self._position = stop

    def _next(self, now: float) -> int | None:
        """Return the first chunk to publish from the position on.

        None where no chunk is needed, or where the circle starts again while those who have all are still listening:
        they would receive the beginning twice.
        """
        ahead = self.wanted >> self._position
        if ahead:
            return self._position + _lowest(ahead)
        if not self._wanted:
            return None
        for sending in self.listeners.values():
            if sending.is_over and now - sending.moved_at < STALL_S:
                return None
        return _lowest(self._wanted)


def bits_of(flags: bytes | bytearray) -> int:
    """Return a number with bit ``i`` set where byte ``i`` is not 0."""
    return int(flags[::-1].translate(_DIGITS) or b"0", 2)


_DIGITS = bytes([ord("0"), *[ord("1")] * 255])
"""Byte -> the digit of a binary number: 0 for byte 0, 1 for any other one."""


def _lowest(bits: int) -> int:
    """Return the place of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def _run(bits: int) -> int:
    """Return how many of the lowest bits are set in a row."""
    return _lowest(~bits)
