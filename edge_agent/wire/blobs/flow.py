"""Flow control of transfers: how much may be under way on a link, what is sent again and when, and when to report.

A sender measures the rate at which a link delivers, and keeps about one second of it under way, so that a control
message never waits much longer behind chunks. It begins with two chunks and at most triples with each round trip. The
receiver says which chunks it lacks; those of them that are under way are sent again only when two later frames
have arrived, when the link has had twice the time that it needs, or when the connection was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..messages.fields import MAX_RANGES
from .chunks import Frame, Incoming, Outgoing, chunks_per_frame, flags_of

WINDOW_BYTES = 1 << 20
"""How much one upload may have under way; a broken link costs at most this much again."""

AHEAD_BYTES = 4 << 20
"""How much may be under way to one agent: brokers drop silently beyond some 1,000 queued messages for a client."""

QUEUE_S = 1.0
"""How long the link takes for what may be under way."""

FIRST_BYTES = 8192
"""What may be under way on a link of which nothing is known: one second of 64 kbit/s."""

SLOW_DECLINE = 0.7  # a measured rate falls by at most so much with one report: one late report proves little
LEAST_ELAPSED_S = 0.001
GRACE_S = 0.5
LONGEST_PATIENCE_S = 60.0


@dataclass(slots=True)
class Flown:
    """A frame under way: its chunks ``start..stop``, and what its link had delivered when it was sent."""

    start: int
    stop: int
    size: int
    sent_at: float
    ahead: int
    delivered: int
    delivered_at: float
    is_again: bool
    passed_by: int = 0
    """How many frames that were sent later have arrived."""


MEASURED_S = 2.0
"""A shorter transfer does not tell the rate of its link."""

LONGEST_GAP_S = 2.0
"""A longer one between bytes is an interruption; it does not count as time that the link needs."""


RECENT_S = 10.0
"""The rate of a transfer is that of so many last seconds: links change."""


class Meter:
    """Bytes per second of one transfer while it flows."""

    def __init__(self) -> None:
        self._spans = deque[tuple[float, int]]()  # seconds and bytes of about a second each, the newest last
        self._last_at: float | None = None

    def begin(self, now: float) -> None:
        """Bytes may come from now on, unless they did already."""
        if self._last_at is None:
            self._last_at = now

    def add(self, size: int, now: float) -> None:
        """So many bytes have arrived; the first ones tell when others began to come, unless `begin` did."""
        if self._last_at is None:
            self._last_at = now
            return
        took_s = min(now - self._last_at, LONGEST_GAP_S)
        self._last_at = now
        if self._spans and self._spans[-1][0] < 1:
            before_s, before = self._spans.pop()
            took_s = took_s + before_s
            size = size + before
        self._spans.append((took_s, size))
        while self._took_s - self._spans[0][0] >= RECENT_S:
            self._spans.popleft()

    @property
    def rate(self) -> float:
        """0: not yet known."""
        took_s = self._took_s
        return sum(size for _, size in self._spans) / took_s if took_s >= MEASURED_S else 0.0

    @property
    def _took_s(self) -> float:
        return sum(took_s for took_s, _ in self._spans)


class Pace:
    """One direction of one link: the rate at which it delivers, and how many bytes may be under way on it.

    All transfers in that direction share it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.restart()

    def restart(self) -> None:
        """The link is a new one: nothing is under way on it, and nothing known of it."""
        self.rate = 0.0
        """Bytes per second; 0: unknown."""

        self.under_way = self.samples = 0
        self.round_trip_s = float("inf")
        """The shortest time until a frame was reported to have arrived."""

        self._window = FIRST_BYTES
        self._delivered = 0
        self._delivered_at = 0.0
        self._expired = 0

    def window(self, chunk_bytes: int) -> int:
        """Return bytes that may be under way: at least two chunks."""
        return max(min(self._window, self.limit_bytes), 2 * chunk_bytes)

    def room(self, chunk_bytes: int) -> int:
        """Return bytes that may still be sent."""
        return self.window(chunk_bytes) - self.under_way

    def is_ready(self, chunk_bytes: int) -> bool:
        """Return whether a quarter of the window is free: then the next burst is worth a report."""
        return 4 * self.room(chunk_bytes) >= self.window(chunk_bytes)

    def sent(self, start: int, stop: int, size: int, now: float, *, is_again: bool = False) -> Flown:
        """A frame was handed to the transport; ``is_again``: an earlier one with the same chunks may yet arrive."""
        if not self.under_way:
            self._delivered_at = now
        self.under_way += size
        return Flown(start, stop, size, now, self.under_way, self._delivered, self._delivered_at, is_again)

    def arrived(self, frames: Sequence[Flown], now: float) -> None:
        """The receiver has these, in the order in which they were sent."""
        size = sum(frame.size for frame in frames)
        newest = frames[-1]
        self.under_way -= size
        self._delivered += size
        self._delivered_at = now
        if newest.is_again:  # which of the two has arrived is unknown
            return
        self._expired = 0
        self.samples += 1
        took_s = max(now - newest.sent_at, LEAST_ELAPSED_S)
        is_queued = took_s > 1.5 * self.round_trip_s + 0.05  # else the window may have been the limit, not the link
        self.round_trip_s = min(self.round_trip_s, took_s)
        measured = (self._delivered - newest.delivered) / max(now - newest.delivered_at, LEAST_ELAPSED_S)
        self.rate = max(measured, self.rate * SLOW_DECLINE if is_queued else self.rate)
        if is_queued or self.samples == 1:
            target = self.rate * max(QUEUE_S, 2 * self.round_trip_s)
            self._window = int(max(FIRST_BYTES, min(target, self._window + 2 * size)))
        elif 2 * newest.ahead >= self._window:  # it was used, and the link had no queue
            self._window = min(self._window + 2 * size, self.limit_bytes)

    def lost(self, frames: Iterable[Flown]) -> None:
        """These will not arrive any more."""
        self.under_way -= sum(frame.size for frame in frames)

    def expired(self, frames: Sequence[Flown]) -> None:
        """These should have arrived long ago: they are likely to be lost, and the next ones get twice the time."""
        self.lost(frames)
        self._expired += bool(frames)

    def patience_s(self, frame: Flown) -> float:
        """Seconds after which a frame that has not arrived counts as lost: twice what the link needs, and a little."""
        needed = frame.ahead / (self.rate or FIRST_BYTES / QUEUE_S)
        trip = self.round_trip_s if self.rate else 0.0
        return min((GRACE_S + 2 * (needed + trip)) * 2.0 ** min(self._expired, 8), LONGEST_PATIENCE_S + 2 * needed)


PASSED_BY = 2
"""So many later frames have arrived when one counts as lost: some brokers exchange neighbours."""

STALL_S = 2.0
"""Time without progress after which a receiver no longer holds up the others of a broadcast."""


class Sending:
    """What one receiver lacks of a blob, and what of it is under way."""

    def __init__(self, blob: Outgoing, pace: Pace) -> None:
        self.blob = blob
        self.pace = pace
        self.need = bytearray(blob.count)
        """One byte for each chunk, 1: it is to be sent."""

        self.moved_at = float("-inf")
        """When something was last heard to have arrived, or was sent after a pause."""

        self.meter = Meter()
        self._first = self._unasked = 0
        self._flight = deque[Flown]()
        self._doubtful = bytearray(blob.count)  # sent again though the first try may still arrive

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be sent, for all that is known."""
        return self.need.find(1, self._first) < 0

    def is_moving(self, now: float) -> bool:
        """Return whether what is under way arrives, as far as is known; nothing can be known before one round trip."""
        trip_s = self.pace.round_trip_s if self.pace.samples else 0.0
        return not self._flight or now - self.moved_at < max(STALL_S, 2 * trip_s)

    def is_abandoned(self, now: float) -> bool:
        """Return whether the receiver should have reported everything that is under way long ago."""
        return bool(self._flight) and all(now - frame.sent_at >= self.pace.patience_s(frame) for frame in self._flight)

    @property
    def remaining_bytes(self) -> int:
        """About how many bytes have yet to arrive."""
        return self.need.count(1) * self.blob.ref.chunk_bytes + sum(frame.size for frame in self._flight)

    @property
    def frame_chunks(self) -> int:
        """How many chunks a frame has: a quarter of the window, so that the next one is here when one is done."""
        size = self.blob.ref.chunk_bytes
        return max(1, min(self.pace.window(size) // 4 // size, chunks_per_frame(self.blob.ref)))

    def lacks(self, ranges: Sequence[tuple[int, int]], now: float) -> None:
        """The receiver lacks these chunks, and has all others up to the last of `MAX_RANGES` ranges.

        Raises:
            ChunkError: A range lies outside the blob; nothing changes.
        """
        missing = flags_of(ranges, self.blob.count)
        known = self.blob.count if len(ranges) < MAX_RANGES else ranges[-1][1]
        missing[known:] = self.need[known:]
        is_here = [frame.start < known and not missing[frame.start] for frame in self._flight]
        arrived = [frame for frame, here in zip(self._flight, is_here, strict=True) if here]
        later = len(arrived)
        lost = list[Flown]()
        left = list[Flown]()
        for frame, here in zip(self._flight, is_here, strict=True):
            later -= here
            if not here:
                frame.passed_by += later
                (lost if frame.passed_by >= PASSED_BY else left).append(frame)
        if arrived:  # the others are behind these, also where the receiver was busy for long
            self.moved_at = now
        waited = [(frame, now - max(frame.sent_at, self.moved_at) >= self.pace.patience_s(frame)) for frame in left]
        left = [frame for frame, is_late in waited if not is_late]
        late = [frame for frame, is_late in waited if is_late]
        for frame in (*lost, *late):
            unknown = max(frame.start, known)
            missing[unknown : frame.stop] = b"\1" * (frame.stop - unknown)
        for frame in left:
            missing[frame.start : frame.stop] = bytes(frame.stop - frame.start)
        self._flight = deque(left)
        self.need = missing
        self._first = 0
        self.pace.lost(lost)
        self.pace.expired(late)
        for frame in late:
            self._doubtful[frame.start : frame.stop] = b"\1" * (frame.stop - frame.start)
        self._settle(arrived, now)

    def arrived(self, now: float) -> None:
        """The receiver has the whole blob."""
        frames = list(self._flight)
        self._flight.clear()
        self.need = bytearray(self.blob.count)
        self._settle(frames, now)

    def cut(self) -> None:
        """The connection was lost, and what was under way with it: it is to be sent again, perhaps on another link."""
        self.meter = Meter()
        for frame in self._flight:
            for flags in (self.need, self._doubtful):
                flags[frame.start : frame.stop] = b"\1" * (frame.stop - frame.start)
        self.pace.lost(self._flight)
        self._flight.clear()
        self._first = 0

    def sent(self, start: int, stop: int, size: int, now: float) -> None:
        """A frame of these chunks was published to the receiver."""
        self.need[start:stop] = bytes(stop - start)
        is_again = self._doubtful.find(1, start, stop) >= 0
        self.meter.begin(now)
        if not self._flight:
            self.moved_at = now
        self._flight.append(self.pace.sent(start, stop, size, now, is_again=is_again))

    def due(self, now: float) -> Iterator[bytes]:
        """Frames that may be published now, in ascending order; a report is asked for after each half of a window."""
        size = self.blob.ref.chunk_bytes
        if not self.pace.is_ready(size):
            return
        while (start := self.need.find(1, self._first)) >= 0:
            most = self.frame_chunks
            stop = self.need.find(0, start, start + most)
            stop = min(start + most, self.blob.count) if stop < 0 else stop
            if (stop - start) * size > self.pace.room(size):
                return
            self._first = stop
            self.sent(start, stop, (stop - start) * size, now)
            self._unasked += (stop - start) * size
            is_half = 2 * self._unasked >= self.pace.window(size)
            report = is_half or self.is_over or most * size > self.pace.room(size)
            self._unasked = 0 if report else self._unasked
            yield self.blob.frame(start, stop, report=report)

    def _settle(self, frames: Sequence[Flown], now: float) -> None:
        if frames:
            self.pace.arrived(frames, now)
            self.meter.add(sum(frame.size for frame in frames), now)
            self.moved_at = now


UPLOAD_REPORT_BYTES = WINDOW_BYTES // 2
"""A receiver reports after so much, where no frame asks for it; then a full window never runs dry."""

DOWNLOAD_REPORT_BYTES = AHEAD_BYTES // 2
"""The same for a broadcast: each report costs the coordinator as much as three frames."""

REPORT_AFTER_S = 0.5
IDLE_S = 1.0
"""Silence after which a receiver asks again for what it lacks.

Longer where frames come more slowly than four times that, or where an answer was seen to take more than half of it.
"""

LONGEST_IDLE_S = 8.0


class Receiving:
    """Chunks coming in for one blob, and when to report or to ask again."""

    def __init__(self, incoming: Incoming, now: float, report_bytes: int, answer_s: float = 0.0) -> None:
        """``answer_s``: how long the last request on this link took to be answered; 0: not known."""
        self.incoming = incoming
        self._report_bytes = report_bytes
        self.answer_s = answer_s
        """How long the last request took until a frame came: at least one round trip."""

        self._requested_at: float | None = None
        """When the first request was sent that has no answer yet; None: all are answered."""

        self._gap_s = 0.0
        self._asked = 0
        self._frame_at: float | None = None
        self.meter = Meter()
        self.restart(now)

    def restart(self, now: float) -> None:
        """What is missing has just been asked for."""
        self._unreported = 0
        self._is_wanted = False
        self._reported_at = self._heard_at = now
        if self._requested_at is None:
            self._requested_at = now

    def add(self, frame: Frame, now: float) -> bool:
        """Store the chunks of a frame; True when the blob is complete.

        Raises:
            ChunkError: The frame is not of this blob.
        """
        self.incoming.add(frame)
        size = len(frame.data)
        self.meter.add(size, now)
        if self._frame_at is not None:
            self._gap_s = max(now - self._frame_at, 0.75 * self._gap_s)
        self._unreported += size
        if self._requested_at is not None:
            self.answer_s = now - self._requested_at
            self._requested_at = None
        self._heard_at = self._frame_at = now
        self._asked = 0
        self._is_wanted |= frame.report
        return self.incoming.chunks.complete

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """What has not arrived."""
        return self.incoming.chunks.missing()

    @property
    def missing_bytes(self) -> int:
        """About how many bytes have not arrived."""
        chunks = self.incoming.chunks
        return (chunks.count - chunks.present) * self.incoming.ref.chunk_bytes

    def report_due(self, now: float) -> bool:
        """Return whether to report to the sender what has arrived; True counts as reported."""
        is_late = self._unreported and now - self._reported_at >= REPORT_AFTER_S
        if self._is_wanted or self._unreported >= self._report_bytes or is_late:
            self._unreported = 0
            self._reported_at = now
            self._is_wanted = False
            return True
        return False

    def ask_due(self, now: float) -> bool:
        """Return whether to ask (again) for what is missing, after silence. True counts as asked."""
        if self.incoming.chunks.complete or now - self._heard_at < self._idle_s():
            return False
        self._heard_at = now
        self._asked += 1
        return True

    def due_in(self, now: float) -> float:
        """Return seconds until a report or a request may be due."""
        report = self._reported_at + REPORT_AFTER_S - now if self._unreported else IDLE_S
        return max(0.0, min(report, self._heard_at + self._idle_s() - now))

    def _idle_s(self) -> float:
        least = max(IDLE_S, 4 * min(self._gap_s, LONGEST_IDLE_S), 2 * min(self.answer_s, LONGEST_IDLE_S))
        return min(least * 2.0 ** min(self._asked, 8), max(least, LONGEST_IDLE_S))
