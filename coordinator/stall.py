"""Runs that cannot go on for now, because files cannot be read or written: tried again with pauses, never ended."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_agent.errors import HeadwaterError, StateError

from .collect import reason_of
from .fleet import Waiting
from .refusals import Refusals

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
"""Pauses between two tries double from the first to the longest."""

OVER_S = 120.0
"""When a run that went on is stalled again after less than this, the pauses go on growing."""

RECENT_S = 20.0
"""How long the status tells of trouble with files after it was met last: agents repeat themselves every 5 s."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Stall:
    """A run that waits until files can be read and written again. ``until``: when it is tried next, monotonic."""

    run: str
    reason: str
    times: int
    until: float

    def waiting(self) -> Waiting:
        """As it is said to people."""
        what = f"{self.run} is stalled: {self.reason} Nothing is lost; it is tried again and resumes by itself"
        return Waiting(what, (), self.until, "stalled")

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {"reason": self.reason, "times": self.times}


class Storage:
    """Trouble with the files of the state folder: which run it holds up, and what was met last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stall: Stall | None = None
        self._clock = clock
        self._told = Refusals(clock)
        self._last: tuple[float, str] = (float("-inf"), "")
        self._times, self._held_up_at = 0, float("-inf")

    @property
    def is_held_up(self) -> bool:
        """Whether the run under way waits for its next try."""
        return self.stall is not None and self._clock() < self.stall.until

    @property
    def trouble(self) -> str:
        """What cannot be read or written, in words; empty when nothing was met lately."""
        met_at, reason = self._last
        if self.stall is not None:
            return self.stall.reason
        return reason if self._clock() - met_at < RECENT_S else ""

    def hold_up(self, run: str, error: BaseException) -> None:
        """``run`` cannot go on: it is tried again after a pause, which grows as long as that does not help."""
        reason, now = self.note(error, run), self._clock()
        self._times = self._times if now - self._held_up_at < OVER_S else 0
        self._held_up_at = now
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._times, 10))
        self._times += 1
        self.stall = Stall(run, reason, self._times, now + pause_s)

    def go_on(self) -> None:
        """The run continues, or is over."""
        if self.stall is not None:
            log.info("run_resumed run=%s after=%s", self.stall.run, self.stall.reason)
        self.stall = None

    def note(self, error: BaseException, what: str) -> str:
        """Note trouble that was met; returns it in words, which the log gets at most once a minute for each cause."""
        reason = f"{reason_of(error) if isinstance(error, OSError) else error}".rstrip(".")
        remedy = ": make room on that disk." if getattr(error, "errno", None) in _NO_ROOM else "."
        reason += remedy
        self._last = (self._clock(), reason)
        if (times := self._told.note(reason)) is not None:
            log.warning("files_unusable for=%s times=%d reason=%s", what, times, reason)
        return reason


def of_storage(error: BaseException) -> HeadwaterError | OSError | None:
    """The trouble with files that an error is about or was caused by; None where it is about something else."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError | StateError) and not isinstance(one, ConnectionError | TimeoutError):
            return one
    return None
