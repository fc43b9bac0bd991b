"""The runs of a journal, one after another: begun, carried on, held up by trouble with files, cancelled, ended."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_agent import methods
from edge_agent.errors import HeadwaterError, StateError
from edge_agent.methods import Method

from ..fleet.registry import Rejections
from ..fleet.transfers import reason_of
from ..state.store import StateFolder
from .context import Steps, Waiting
from .request import Request
from .results import end_run, requested_cancels
from .round_loop import RunLoop

log = logging.getLogger(__name__)

LOOK_FOR_REQUESTS_S = 0.2
NO_RUN = Waiting("a run is requested ('headwater run')")

Make = Callable[[str, Request, Method], RunLoop]
"""The loop of a run; it finds its place in the journal."""


class Runs:
    """What a coordinator does of its runs. `advance` again and again.

    A run ends when it is done, cancelled, or when its method or its agents cannot do it. Files that cannot be read or
    written end nothing: the run is stalled, tried again with pauses, and resumes from the journal.
    """

    def __init__(self, state: StateFolder, storage: Storage, clock: Callable[[], float], make: Make) -> None:
        self.loop: RunLoop | None = None
        """The run under way; while it is stalled, as it was before."""

        self._state, self._storage, self._clock, self._make = state, storage, clock, make
        self._waiting = NO_RUN
        self._steps: Steps | None = None
        self._looked_at, self._cancels_seen = float("-inf"), 0

    @property
    def waiting(self) -> Waiting:
        """What is waited for now."""
        return self._waiting if self._storage.stall is None else self._storage.stall.waiting()

    def advance(self) -> None:
        """Whatever is due: cancel what is to be cancelled, begin the next run, carry on the one under way."""
        try:
            self._look_into_journal()
        except (StateError, OSError) as error:
            self.trouble(error)
        stall = self._storage.stall
        if stall is not None and not self._storage.is_held_up:
            if self.loop is not None:
                self.loop.pause()
            self._begin(stall.run)
        self._go_on()

    def fail(self, run: str, error: BaseException) -> None:
        """The run cannot be done: end it for good."""
        reason = reason_of(error)
        log.error("run_failed run=%s reason=%s", run, reason)
        try:
            end_run(self._state, run, "run_failed", reason)
        except (StateError, OSError) as trouble:
            self.stall(run, trouble)
            return
        if self.loop is not None:
            self.loop.abandon()
        self._end()

    def stall(self, run: str, error: BaseException) -> None:
        """The run waits until files can be read and written again. Agents continue their tasks."""
        self._storage.hold_up(run, error)
        self._steps = None

    def trouble(self, error: StateError | OSError) -> None:
        """The journal could not be read or written: that is tried again soon."""
        self._storage.note(error, "the journal")

    # --- inside ----------------------------------------------------------------------------------------------------

    def _look_into_journal(self) -> None:
        """What commands beside us have asked for: runs to be cancelled, and the next one to do."""
        if self._clock() - self._looked_at < LOOK_FOR_REQUESTS_S:
            return
        self._looked_at = self._clock()
        cancels, seen = requested_cancels(self._state, self._cancels_seen)
        for run, reason in cancels.items():
            self._cancel(run, reason)
        self._cancels_seen = seen  # only now: what could not be noted is looked at again
        if self._steps is None and self._storage.stall is None:
            for run in self._state.journal.unfinished()[:1]:
                self._begin(run)

    def _cancel(self, run: str, reason: str) -> None:
        end_run(self._state, run, "run_cancelled", reason)
        log.warning("run_cancelled run=%s reason=%s", run, reason)
        stall = self._storage.stall
        if self.loop is not None and self.loop.run.id == run:
            self.loop.abandon()
            self._end()
        elif stall is not None and stall.run == run:
            self._end()

    def _begin(self, run: str) -> None:
        try:
            request = Request.from_body(self._state.journal.replay(run).request)
            method = methods.create(request.method, request.params)
            self.loop = self._make(run, request, method)
        except (StateError, OSError) as error:
            self.stall(run, error)
        except (HeadwaterError, KeyError, ValueError) as error:
            self.fail(run, error)
        else:
            self._steps = self.loop.steps()

    def _go_on(self) -> None:
        loop, steps = self.loop, self._steps
        if loop is None or steps is None:
            return
        try:
            self._waiting = next(steps)
            self._storage.go_on()
        except StopIteration:
            self._end()
        except (StateError, OSError) as error:
            self.stall(loop.run.id, error)
        except HeadwaterError as error:
            self.fail(loop.run.id, error)
        except Exception as error:  # a method of somebody else may raise anything; it costs its run
            log.exception("run_broke run=%s", loop.run.id)
            self.fail(loop.run.id, error)

    def _end(self) -> None:
        if self.loop is not None:
            self.loop.hooks.on_end(self.loop.run.id)
        self.loop = self._steps = None
        self._waiting = NO_RUN
        self._storage.go_on()
        self._looked_at = float("-inf")


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
        self._told = Rejections(clock)
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
