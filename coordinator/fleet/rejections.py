"""Counts of what was rejected, by cause, which bound the lines in the log and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable

AGAIN_S = 60.0
"""The same rejection is logged again after this time, with its count."""

LINES_AT_ONCE = 30
"""Lines within `AGAIN_S` in total: a thousand unknown senders cause no thousand lines."""

MAX_COUNTED = 1000
"""Different rejections that are counted: a bound on the memory that unknown senders can use."""


class Rejections:
    """Rejections by what they are about. ``total`` counts all since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total = 0
        self.counts: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}
        self._window = float("-inf")
        self._lines = 0

    def note(self, what: str, times: int = 1) -> int | None:
        """Count so many; how often it has happened if that is worth a line in the log now, else None."""
        if len(self.counts) >= MAX_COUNTED and what not in self.counts:
            self.counts.clear()
            self._logged_at.clear()
        self.total += times
        self.counts[what] = self.counts.get(what, 0) + times
        now = self._clock()
        if now - self._window >= AGAIN_S:
            self._window = now
            self._lines = 0
        if self._lines >= LINES_AT_ONCE or now - self._logged_at.get(what, float("-inf")) < AGAIN_S:
            return None
        self._lines += 1
        self._logged_at[what] = now
        return self.counts[what]

    def top(self, most: int = 5) -> dict[str, int]:
        """Return the most frequent ones with their counts, the most frequent first."""
        return dict(sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:most])
