"""A coordinator that speaks another protocol version: asked again with growing pauses, for some minutes.

One message proves nothing: it may be forged, late, or of a coordinator that is being upgraded. Only a mismatch that
every hello is answered with, for `FINAL_S` and without a welcome in between, is one that waiting does not cure.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
FINAL_S = 300.0
LEAST_ANSWERS = 5
FORGOTTEN_S = 2 * LONGEST_PAUSE_S
"""Silence after which a mismatch is over: whoever it came from is not there any more."""


class Mismatch:
    """``reason`` is what the other side speaks; empty while there is no mismatch."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self.clear()

    def clear(self) -> None:
        """A coordinator that is understood has answered."""
        self.reason = ""
        self._since = self._heard_at = 0.0
        self._ask_at, self._pause_s = float("inf"), FIRST_PAUSE_S
        self._has_asked, self._answers = False, 0

    def note(self, reason: str) -> bool:
        """Something of another version has come; True when this is the first of it."""
        now, is_new = self._clock(), not self.reason
        if is_new:
            self._since = now
            self._plan(now)
        elif self._has_asked:
            self._answers += 1
        self.reason, self._heard_at, self._has_asked = reason, now, False
        return is_new

    def is_final(self) -> bool:
        """Whether it has been heard for so long, as the answer to so many hellos, that asking again is in vain."""
        return self._answers >= LEAST_ANSWERS and self._heard_at - self._since >= FINAL_S

    def is_due(self) -> bool:
        """Whether it is time for another hello, which then counts as said."""
        now = self._clock()
        if self.reason and now - self._heard_at >= FORGOTTEN_S:
            self.clear()
        if now < self._ask_at:
            return False
        self._has_asked = True
        self._plan(now)
        return True

    def next_s(self) -> float:
        """Seconds until the next hello."""
        return max(0.0, self._ask_at - self._clock())

    def _plan(self, now: float) -> None:
        self._ask_at = now + self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
