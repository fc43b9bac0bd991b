"""Flow control of one blob's way: how far ahead a sender may be, and when a receiver speaks up.

Neither class does any input or output: they say what to send, and are told what has come and what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .chunks import Frame, Incoming, Outgoing, expand

WINDOW_BYTES = 1 << 20
"""How much one upload may have under way unacknowledged; a broken link costs at most this much again."""

AHEAD_BYTES = 4 << 20
"""How far a broadcast may be ahead of the slowest receiver that still makes progress: brokers drop silently beyond some
1,000 queued messages for a client."""

REPORT_EVERY = 8  # frames between two reports of a receiver: twice in each upload window, so that it never runs dry
DOWNLOAD_REPORT_EVERY = 32  # the same for a broadcast; each report costs the coordinator as much as three chunks
REPORT_AFTER_S = 0.5
IDLE_S = 1.0
"""Silence after which a receiver asks again for what it lacks."""
STALL_S = 2.0
"""Time without progress after which a receiver no longer holds up the others of a broadcast."""


class Sending:
    """Chunks on their way to one or more receivers."""

    def __init__(
        self,
        blob: Outgoing,
        ranges: Iterable[tuple[int, int]],
        receivers: Iterable[str],
        *,
        ahead_bytes: int,
        now: float,
    ) -> None:
        self.blob = blob
        self.ahead = max(2, ahead_bytes // blob.ref.chunk_bytes)
        self.sent = 0
        self._queue = deque(expand(ranges, blob.count))
        self._flight, self._settled = deque[int](), 0
        self._seen = dict.fromkeys(receivers, 0)
        self._moved = dict.fromkeys(self._seen, now)

    @property
    def receivers(self) -> tuple[str, ...]:
        """Those that have not said that they are done."""
        return tuple(self._seen)

    @property
    def done(self) -> bool:
        """Everything is sent, or nobody is left."""
        return not self._queue or not self._seen

    def due(self, now: float) -> Iterator[bytes]:
        """Frames that may be published now."""
        limit = self._floor(now) + self.ahead
        while self._queue and self._seen and self.sent < limit:
            self.sent += 1
            index = self._queue.popleft()
            self._flight.append(index)
            yield self.blob.frame(index)

    def saw(self, receiver: str, seen: int, now: float) -> None:
        """A receiver reports how many frames it has seen."""
        if receiver in self._seen and seen > self._seen[receiver]:
            self._seen[receiver] = min(seen, self.sent)
            self._moved[receiver] = now

    def leave(self, receiver: str) -> None:
        """A receiver is done or gone."""
        self._seen.pop(receiver, None)

    def again(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The receivers lack these: those that were lost go to the front and no longer count as under way.

        Frames arrive in the order in which they were sent, so of the first ``seen`` that arrived, and of what went out
        between them, everything that is missing was lost; whatever went out later may still come.
        """
        missing, lost = set(expand(ranges, self.blob.count)), list[int]()
        seen = min(self._seen.values(), default=0)
        while self._flight and self._settled < seen:
            index = self._flight.popleft()
            if index in missing:
                lost.append(index)
            else:
                self._settled += 1
        self._queue.extendleft(reversed(lost))
        self.sent -= len(lost)

    def _floor(self, now: float) -> int:
        moving = [seen for name, seen in self._seen.items() if now - self._moved[name] < STALL_S]
        return min(moving or self._seen.values(), default=0)


class Receiving:
    """Chunks coming in for one blob, and when to report or to ask again."""

    def __init__(self, incoming: Incoming, now: float, report_every: int = REPORT_EVERY) -> None:
        self.incoming, self._every = incoming, report_every
        self.seen = 0
        self._reported, self._reported_at, self._heard_at = 0, now, now
        self._last, self._highest = -1, 0
        self._passed = False

    def restart(self, now: float) -> None:
        """What is missing has just been asked for."""
        self.seen = self._reported = 0
        self._reported_at = self._heard_at = now
        self._last = max((stop for _, stop in self.incoming.chunks.missing()), default=0) - 1
        self._highest = 0
        self._passed = False

    def add(self, frame: Frame, now: float) -> bool:
        """Keep a chunk; True when the blob is complete.

        Raises:
            ChunkError: the frame is not of this blob.
        """
        self.incoming.add(frame)
        self.seen += 1
        self._heard_at = now
        self._highest = max(self._highest, frame.index + 1)
        self._passed = self._passed or frame.index == self._last
        return self.incoming.chunks.complete

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """What is missing below the highest chunk seen since the last question: those were lost on the way."""
        return self.incoming.chunks.missing(below=self._highest)

    def report_due(self, now: float) -> bool:
        """Whether to tell the sender how much has been seen; saying True counts as telling."""
        news = self.seen - self._reported
        if news >= self._every or (news and now - self._reported_at >= REPORT_AFTER_S):
            self._reported, self._reported_at = self.seen, now
            return True
        return False

    def ask_due(self, now: float) -> bool:
        """Whether to ask (again) for what is missing: after silence, or when the last chunk asked for has passed.

        Chunks are sent in ascending order, so once the last one is here, what is missing was lost. Saying True counts
        as asking.
        """
        if self.incoming.chunks.complete:
            return False
        if self._passed or now - self._heard_at >= IDLE_S:
            self._passed = False
            self._heard_at = now
            return True
        return False

    def due_in(self, now: float) -> float:
        """Seconds until a report or a question may be due."""
        report = self._reported_at + REPORT_AFTER_S - now if self.seen > self._reported else IDLE_S
        return max(0.0, min(report, self._heard_at + IDLE_S - now))
