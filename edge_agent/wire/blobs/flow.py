"""Flow control of transfers: how many bytes may be under way on a link, what is sent again when, and when to report.

A sender measures the rate at which a link delivers, and keeps the bytes of about one second under way, so that a
control message never waits much longer behind chunks. It begins with two chunks and at most triples with each round
trip. The receiver reports which chunks it lacks. Those of them that are under way are sent again only when two later
frames have arrived, when the link has had twice the time that it needs, or when the connection was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..messages.fields import MAX_RANGES
from .chunks import Frame, Incoming, Outgoing, chunks_per_frame, flags_of

WINDOW_BYTES = 1 << 20
"""The most bytes of one upload under way; a broken link costs at most as many again."""

AHEAD_BYTES = 4 << 20
"""The most bytes under way to one agent: brokers silently drop messages beyond some 1,000 queued for a client."""

QUEUE_S = 1.0
"""The seconds that a link takes for the bytes that may be under way on it."""

FIRST_BYTES = 8192
"""The bytes that may be under way on a link of which nothing is known: one second of 64 kbit/s."""

SLOW_DECLINE = 0.7
"""The factor by which a measured rate falls at most with one report, because a single late one proves little."""

LEAST_ELAPSED_S = 0.001
"""The shortest time in seconds from which a rate is computed."""

GRACE_S = 0.5
"""The seconds that are added to the time after which a frame counts as lost."""

LONGEST_PATIENCE_S = 60.0
"""The most seconds, beside the time that a link needs, after which a frame counts as lost."""


@dataclass(slots=True)
class Flown:
    """A frame under way: its chunks ``start..stop``, and the bytes that its link had delivered when it was sent."""

    start: int
    stop: int
    size: int
    sent_at: float
    ahead: int
    delivered: int
    delivered_at: float
    is_again: bool
    passed_by: int = 0
    """The number of frames that were sent later and have arrived."""


MEASURED_S = 2.0
"""The seconds that a transfer has to take before it tells the rate of its link."""

LONGEST_GAP_S = 2.0
"""The longest gap in seconds that counts as time of a transfer; a longer one is an interruption."""

RECENT_S = 10.0
"""The number of last seconds from which the rate of a transfer is computed: links change."""


class Meter:
    """A meter of the bytes per second of one transfer."""

    def __init__(self) -> None:
        self._spans = deque[tuple[float, int]]()  # seconds and bytes of about a second each, the newest last
        self._last_at: float | None = None

    def begin(self, now: float) -> None:
        """Start the time of the transfer, unless it has started already."""
        if self._last_at is None:
            self._last_at = now

    def add(self, size: int, now: float) -> None:
        """Note that ``size`` bytes have arrived; the first ones only start the time, unless `begin` has."""
        if self._last_at is None:
            self._last_at = now
            return
        took_s = min(now - self._last_at, LONGEST_GAP_S)
        self._last_at = now
        # Spans shorter than a second are joined with the next one.
        if self._spans and self._spans[-1][0] < 1:
            previous_s, previous_bytes = self._spans.pop()
            took_s = took_s + previous_s
            size = size + previous_bytes
        self._spans.append((took_s, size))
        while self._took_s - self._spans[0][0] >= RECENT_S:
            self._spans.popleft()

    @property
    def rate(self) -> float:
        """The bytes per second of the transfer; 0 while they are not known."""
        took_s = self._took_s
        if took_s < MEASURED_S:
            return 0.0
        return sum(size for _, size in self._spans) / took_s

    @property
    def _took_s(self) -> float:
        return sum(took_s for took_s, _ in self._spans)


class Pace:
    """The pace of one direction of a link: its rate, and how many bytes may be under way on it.

    All transfers in that direction share it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.restart()

    def restart(self) -> None:
        """Begin with a new link, on which nothing is under way, and of which nothing is known."""
        self.rate = 0.0
        """The bytes per second that the link delivers; 0 while they are not known."""

        self.under_way = 0
        """The bytes that are under way."""

        self.samples = 0
        """The number of reports from which the link was measured."""

        self.round_trip_s = float("inf")
        """The shortest time in seconds until a frame was reported to have arrived."""

        self._window = FIRST_BYTES
        self._delivered = 0
        self._delivered_at = 0.0
        self._expired = 0

    def window(self, chunk_bytes: int) -> int:
        """Return how many bytes may be under way: at least two chunks."""
        return max(min(self._window, self.limit_bytes), 2 * chunk_bytes)

    def room(self, chunk_bytes: int) -> int:
        """Return how many bytes may be sent now."""
        return self.window(chunk_bytes) - self.under_way

    def is_ready(self, chunk_bytes: int) -> bool:
        """Return whether a quarter of the window is free, so that the next burst is worth a report."""
        return 4 * self.room(chunk_bytes) >= self.window(chunk_bytes)

    def sent(self, start: int, stop: int, size: int, now: float, *, is_again: bool = False) -> Flown:
        """Note that a frame was handed to the transport, and return its record.

        Args:
            start: Its first chunk.
            stop: The chunk behind its last one.
            size: Its bytes.
            now: The time in seconds.
            is_again: Whether an earlier frame with the same chunks may still arrive.
        """
        if not self.under_way:
            self._delivered_at = now
        self.under_way += size
        return Flown(start, stop, size, now, self.under_way, self._delivered, self._delivered_at, is_again)

    def arrived(self, frames: Sequence[Flown], now: float) -> None:
        """Note that frames, in the order in which they were sent, have arrived, and measure the link by them."""
        size = sum(frame.size for frame in frames)
        newest = frames[-1]
        self.under_way -= size
        self._delivered += size
        self._delivered_at = now
        if newest.is_again:  # it is unknown which of the two has arrived
            return
        self._expired = 0
        self.samples += 1
        # 1. The rate. It falls only if frames had to queue: otherwise the window may have been the limit, not the link.
        took_s = max(now - newest.sent_at, LEAST_ELAPSED_S)
        is_queued = took_s > 1.5 * self.round_trip_s + 0.05
        self.round_trip_s = min(self.round_trip_s, took_s)
        measured = (self._delivered - newest.delivered) / max(now - newest.delivered_at, LEAST_ELAPSED_S)
        least = self.rate * SLOW_DECLINE if is_queued else self.rate
        self.rate = max(measured, least)
        # 2. The window: what the link delivers in `QUEUE_S`, or twice the bytes where it was full and nothing queued.
        if is_queued or self.samples == 1:
            target = self.rate * max(QUEUE_S, 2 * self.round_trip_s)
            self._window = int(max(FIRST_BYTES, min(target, self._window + 2 * size)))
        elif 2 * newest.ahead >= self._window:  # it was used, and the link had no queue
            self._window = min(self._window + 2 * size, self.limit_bytes)

    def lost(self, frames: Iterable[Flown]) -> None:
        """Note that frames will no longer arrive."""
        self.under_way -= sum(frame.size for frame in frames)

    def expired(self, frames: Sequence[Flown]) -> None:
        """Note that frames should have arrived long ago: they count as lost, and the next ones get twice the time."""
        self.lost(frames)
        if frames:
            self._expired += 1

    def patience_s(self, frame: Flown) -> float:
        """Return the seconds after which a frame counts as lost: twice the time that the link needs, and `GRACE_S`."""
        rate = self.rate or FIRST_BYTES / QUEUE_S
        needed_s = frame.ahead / rate
        trip_s = self.round_trip_s if self.rate else 0.0
        patience_s = (GRACE_S + 2 * (needed_s + trip_s)) * 2.0 ** min(self._expired, 8)
        return min(patience_s, LONGEST_PATIENCE_S + 2 * needed_s)


PASSED_BY = 2
"""The number of later frames that have arrived when a frame counts as lost: some brokers exchange neighbours."""

STALL_S = 2.0
"""The seconds without progress after which a receiver no longer holds up the others of a broadcast."""


class Sending:
    """The transfer of a blob to one receiver: the chunks that it lacks, and those under way."""

    def __init__(self, blob: Outgoing, pace: Pace) -> None:
        """Begin a transfer of which nothing is to be sent yet."""
        self.blob = blob
        self.pace = pace
        self.need = bytearray(blob.count)
        """One byte for each chunk; 1: it is to be sent."""

        self.moved_at = float("-inf")
        """The time at which chunks were last reported to have arrived, or were sent after a pause."""

        self.meter = Meter()
        self._first = 0
        """The chunk before which none is to be sent."""

        self._unasked = 0
        """The bytes that were sent since a report was requested."""

        self._flight = deque[Flown]()
        self._doubtful = bytearray(blob.count)
        """One byte for each chunk; 1: an earlier frame with it may still arrive, although it counts as lost."""

    @property
    def is_over(self) -> bool:
        """Whether no chunk is to be sent, as far as is known."""
        return self.need.find(1, self._first) < 0

    def is_moving(self, now: float) -> bool:
        """Return whether the frames under way arrive, as far as is known; before one round trip, nothing is known."""
        trip_s = self.pace.round_trip_s if self.pace.samples else 0.0
        return not self._flight or now - self.moved_at < max(STALL_S, 2 * trip_s)

    def is_abandoned(self, now: float) -> bool:
        """Return whether the receiver should have reported all frames under way long ago."""
        if not self._flight:
            return False
        return all(now - frame.sent_at >= self.pace.patience_s(frame) for frame in self._flight)

    @property
    def remaining_bytes(self) -> int:
        """The bytes that have yet to arrive, roughly."""
        return self.need.count(1) * self.blob.ref.chunk_bytes + sum(frame.size for frame in self._flight)

    @property
    def frame_chunks(self) -> int:
        """The number of chunks in a frame: a quarter of the window, so that the link always has the next frame."""
        size = self.blob.ref.chunk_bytes
        return max(1, min(self.pace.window(size) // 4 // size, chunks_per_frame(self.blob.ref)))

    def lacks(self, ranges: Sequence[tuple[int, int]], now: float) -> None:
        """Note a report of the receiver, which lacks these chunks.

        It has all others; but if it names `MAX_RANGES` ranges, nothing is known of the chunks behind the last one.

        Raises:
            ChunkError: A range lies outside the blob; nothing changes.
        """
        # 1. The chunks to send: those reported as missing, and behind the report those that were to be sent before.
        missing = flags_of(ranges, self.blob.count)
        reported_until = self.blob.count if len(ranges) < MAX_RANGES else ranges[-1][1]
        missing[reported_until:] = self.need[reported_until:]
        # 2. The frames under way: arrived, lost because later ones have passed them, or still coming.
        arrived = [frame for frame in self._flight if frame.start < reported_until and not missing[frame.start]]
        lost, coming = self._pass_by(arrived)
        # The frames still coming were behind those that have arrived, also if the receiver was busy for long.
        if arrived:
            self.moved_at = now
        # 3. Of the frames still coming, those that should have been here count as lost, but may still arrive.
        late = list[Flown]()
        waiting = list[Flown]()
        for frame in coming:
            if now - max(frame.sent_at, self.moved_at) >= self.pace.patience_s(frame):
                late.append(frame)
            else:
                waiting.append(frame)
        for frame in (*lost, *late):
            first_unreported = max(frame.start, reported_until)
            missing[first_unreported : frame.stop] = b"\1" * (frame.stop - first_unreported)
        for frame in waiting:
            missing[frame.start : frame.stop] = bytes(frame.stop - frame.start)
        self._flight = deque(waiting)
        self.need = missing
        self._first = 0
        self.pace.lost(lost)
        self.pace.expired(late)
        for frame in late:
            _mark(self._doubtful, frame)
        self._settle(arrived, now)

    def _pass_by(self, arrived: Sequence[Flown]) -> tuple[list[Flown], list[Flown]]:
        """Count for each frame under way the later ones that have arrived; return the lost ones, and those coming."""
        lost = list[Flown]()
        coming = list[Flown]()
        later = len(arrived)
        arrived_ids = {id(frame) for frame in arrived}
        for frame in self._flight:
            if id(frame) in arrived_ids:
                later -= 1
                continue
            frame.passed_by += later
            if frame.passed_by >= PASSED_BY:
                lost.append(frame)
            else:
                coming.append(frame)
        return lost, coming

    def arrived(self, now: float) -> None:
        """Note that the receiver has the whole blob."""
        frames = list(self._flight)
        self._flight.clear()
        self.need = bytearray(self.blob.count)
        self._settle(frames, now)

    def cut(self) -> None:
        """Note that the connection was lost: all frames under way are sent again, perhaps on another link."""
        self.meter = Meter()
        for frame in self._flight:
            _mark(self.need, frame)
            _mark(self._doubtful, frame)
        self.pace.lost(self._flight)
        self._flight.clear()
        self._first = 0

    def sent(self, start: int, stop: int, size: int, now: float) -> None:
        """Note that a frame of the chunks ``start..stop`` with ``size`` bytes was published to the receiver."""
        self.need[start:stop] = bytes(stop - start)
        is_again = self._doubtful.find(1, start, stop) >= 0
        self.meter.begin(now)
        if not self._flight:
            self.moved_at = now
        self._flight.append(self.pace.sent(start, stop, size, now, is_again=is_again))

    def due(self, now: float) -> Iterator[bytes]:
        """Yield the frames that may be published now, in ascending order, and note each as sent.

        A report is requested after each half of a window, and with the last frame that may be sent now.
        """
        size = self.blob.ref.chunk_bytes
        if not self.pace.is_ready(size):
            return
        start = self.need.find(1, self._first)
        while start >= 0:
            most = self.frame_chunks
            stop = self.need.find(0, start, start + most)
            if stop < 0:
                stop = min(start + most, self.blob.count)
            if (stop - start) * size > self.pace.room(size):
                return
            self._first = stop
            self.sent(start, stop, (stop - start) * size, now)
            self._unasked += (stop - start) * size
            is_half = 2 * self._unasked >= self.pace.window(size)
            report = is_half or self.is_over or most * size > self.pace.room(size)
            if report:
                self._unasked = 0
            yield self.blob.frame(start, stop, report=report)
            start = self.need.find(1, self._first)

    def _settle(self, frames: Sequence[Flown], now: float) -> None:
        """Measure link and transfer by the frames that have arrived."""
        if frames:
            self.pace.arrived(frames, now)
            self.meter.add(sum(frame.size for frame in frames), now)
            self.moved_at = now


def _mark(flags: bytearray, frame: Flown) -> None:
    """Set the flags of the chunks of a frame."""
    flags[frame.start : frame.stop] = b"\1" * (frame.stop - frame.start)


UPLOAD_REPORT_BYTES = WINDOW_BYTES // 2
"""The bytes after which the receiver of an upload reports unasked, so that a full window never runs dry."""

DOWNLOAD_REPORT_BYTES = AHEAD_BYTES // 2
"""The bytes after which the receiver of a broadcast reports unasked; a report costs as much as three frames."""

REPORT_AFTER_S = 0.5
"""The seconds after which a receiver reports bytes that have arrived."""

IDLE_S = 1.0
"""The seconds of silence after which a receiver requests again what it lacks.

They are more where frames arrive more slowly than four times that, or where an answer has taken more than half of it.
"""

LONGEST_IDLE_S = 8.0
"""The most seconds of silence after which a receiver requests again what it lacks."""


class Receiving:
    """The transfer of a blob at its receiver: the chunks that arrive, and when to report or to request again."""

    def __init__(self, incoming: Incoming, now: float, report_bytes: int, answer_s: float = 0.0) -> None:
        """Begin to receive, just after what is missing was requested.

        Args:
            incoming: The blob.
            now: The time in seconds.
            report_bytes: The bytes after which to report unasked.
            answer_s: The seconds until the last request on this link was answered; 0: not known.
        """
        self.incoming = incoming
        self._report_bytes = report_bytes
        self.answer_s = answer_s
        """The seconds from the last request to a frame: at least one round trip."""

        self._requested_at: float | None = None
        """The time of the first request that has no answer yet; None: all are answered."""

        self._gap_s = 0.0
        self._asked = 0
        self._frame_at: float | None = None
        self.meter = Meter()
        self.restart(now)

    def restart(self, now: float) -> None:
        """Note that what is missing has just been requested."""
        self._unreported = 0
        self._is_wanted = False
        self._reported_at = now
        self._heard_at = now
        if self._requested_at is None:
            self._requested_at = now

    def add(self, frame: Frame, now: float) -> bool:
        """Store the chunks of a frame, and return whether the blob is complete.

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
        self._heard_at = now
        self._frame_at = now
        self._asked = 0
        self._is_wanted |= frame.report
        return self.incoming.chunks.complete

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of chunks that have not arrived, at most `MAX_RANGES`."""
        return self.incoming.chunks.missing()

    @property
    def missing_bytes(self) -> int:
        """The bytes that have not arrived, roughly."""
        chunks = self.incoming.chunks
        return (chunks.count - chunks.present) * self.incoming.ref.chunk_bytes

    def report_due(self, now: float) -> bool:
        """Return whether to report to the sender what has arrived; if so, it counts as reported."""
        is_late = self._unreported and now - self._reported_at >= REPORT_AFTER_S
        if not (self._is_wanted or self._unreported >= self._report_bytes or is_late):
            return False
        self._unreported = 0
        self._reported_at = now
        self._is_wanted = False
        return True

    def ask_due(self, now: float) -> bool:
        """Return whether to request again what is missing, after silence; if so, it counts as requested."""
        if self.incoming.chunks.complete or now - self._heard_at < self._idle_s():
            return False
        self._heard_at = now
        self._asked += 1
        return True

    def due_in(self, now: float) -> float:
        """Return the seconds until a report or a request may be due."""
        report = self._reported_at + REPORT_AFTER_S - now if self._unreported else IDLE_S
        return max(0.0, min(report, self._heard_at + self._idle_s() - now))

    def _idle_s(self) -> float:
        """Return the seconds of silence after which to request again, twice as many after each request in a row."""
        least = max(IDLE_S, 4 * min(self._gap_s, LONGEST_IDLE_S), 2 * min(self.answer_s, LONGEST_IDLE_S))
        return min(least * 2.0 ** min(self._asked, 8), max(least, LONGEST_IDLE_S))
