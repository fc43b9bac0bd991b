"""What was not believed: counted for the status, told to the log without flooding it."""

from __future__ import annotations

from collections.abc import Callable

AGAIN_S = 60.0
"""The same refusal is told again after this time, with its count."""

LINES_AT_ONCE = 30
"""Lines within `AGAIN_S`, whoever and whatever they are about: a thousand strangers get no thousand lines."""

MAX_COUNTED = 1000
"""Different refusals that are counted: a bound on what strangers can make us remember."""


class Rejections:
    """Rejections by what they are about. ``total`` counts all since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total = 0
        self.counts: dict[str, int] = {}
        self._told: dict[str, float] = {}
        self._window, self._lines = float("-inf"), 0

    def note(self, what: str) -> int | None:
        """Count one; how often it has happened if that is worth a line in the log now, else None."""
        if len(self.counts) >= MAX_COUNTED and what not in self.counts:
            self.counts.clear()
            self._told.clear()
        self.total += 1
        self.counts[what] = self.counts.get(what, 0) + 1
        return self.counts[what] if self._is_due(what) else None

    def top(self, most: int = 5) -> dict[str, int]:
        """The most frequent ones with their counts, the most frequent first."""
        return dict(sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:most])

    def _is_due(self, what: str) -> bool:
        now = self._clock()
        if now - self._window >= AGAIN_S:
            self._window, self._lines = now, 0
        if self._lines >= LINES_AT_ONCE or now - self._told.get(what, float("-inf")) < AGAIN_S:
            return False
        self._lines += 1
        self._told[what] = now
        return True
