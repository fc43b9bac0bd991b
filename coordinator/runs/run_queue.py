"""The runs of a journal, one after another: started, continued, stalled by file errors, cancelled, ended."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_agent.core.errors import HeadwaterError, StateError
from edge_agent.core.limits import give_freed_memory_back

from ..fleet.rejections import Rejections
from ..journal.entries import PruneRequested
from ..journal.store import facts_of
from ..rounds.context import Steps, Waiting
from ..rounds.request import Request
from ..state.retention import prune_runs, runs_beyond
from ..state.store import StateFolder
from ..text import reason_of
from ..views.runs import replay
from .results import end_run, requested_cancels
from .run_loop import RunLoop

log = logging.getLogger(__name__)

LOOK_FOR_REQUESTS_S = 0.2
NO_RUN = Waiting("no run is queued; start one with 'headwater run'", is_idle=True)

Make = Callable[[str, Request], RunLoop]
"""The loop of a run; it resumes from the journal."""


class Runs:
    """Executes the runs of a coordinator. Call `advance` again and again.

    A run ends when it is finished or cancelled, or when its method or its agents fail. Files that cannot be read or
    written do not end it: the run is stalled, retried with pauses, and resumes from the journal.
    """

    def __init__(
        self, state: StateFolder, storage: Storage, clock: Callable[[], float], make: Make, keep_runs: int
    ) -> None:
        """``keep_runs``: how many ended runs keep their checkpoints and bundles."""
        self.loop: RunLoop | None = None
        """The active run; while it is stalled, as it was before."""

        self._state = state
        self._storage = storage
        self._clock = clock
        self._make = make
        self._waiting = NO_RUN
        self._steps: Steps | None = None
        self._read_at = float("-inf")
        self._cancels_seen = 0
        self._read: object = None
        """`Journal.version` before it was read last: whatever is done about an entry appends another one."""
        self._keep_runs = keep_runs
        self._prunes_seen = 0
        self._is_pruned = False

    @property
    def waiting(self) -> Waiting:
        """What is waited for now: by the active run, or by the one that is stalled."""
        stall = self._storage.stall
        return self._waiting if stall is None else stall.waiting()

    def advance(self) -> None:
        """Cancel runs on request, start the next one, and continue the active one."""
        # 1. What other processes have requested.
        try:
            self._read_journal()
        except (StateError, OSError) as error:
            self.trouble(error)
        # 2. A run that is stalled resumes from the journal when its pause is over.
        stall = self._storage.stall
        if stall is not None and self._clock() >= stall.until:
            if self.loop is not None:
                self.loop.withdraw()
            self._begin(stall.run)
        # 3. The active run goes on.
        if self.loop is not None and self._steps is not None:
            self._step(self.loop, self._steps)

    def _step(self, loop: RunLoop, steps: Steps) -> None:
        """Take one step of the active run. Whatever fails in it costs a pause or the run, not the service."""
        try:
            if loop.failure is not None:
                raise loop.failure
            self._waiting = next(steps)
            self._storage.resume()
        except StopIteration:
            self._end()
        except (StateError, OSError) as error:
            self.stall(loop.run.id, error)
        except HeadwaterError as error:
            self.fail(loop.run.id, error)
        except Exception as error:  # a method of another author may raise anything; it costs its run
            log.exception("run_broke run=%s", loop.run.id)
            self.fail(loop.run.id, error)

    def fail(self, run: str, error: BaseException) -> None:
        """End a run for good that has failed."""
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
        """Have the run wait until files can be read and written again. Agents continue their tasks."""
        self._storage.stall_run(run, error)
        self._steps = None

    def trouble(self, error: StateError | OSError) -> None:
        """Note that the journal could not be read or written, which is retried soon."""
        self._storage.note(error, "the journal")

    # --- inside ----------------------------------------------------------------------------------------------------

    def _read_journal(self) -> None:
        """Read the requests of other processes: runs to cancel, and the next run."""
        if self._clock() - self._read_at < LOOK_FOR_REQUESTS_S:
            return
        self._read_at = self._clock()
        version = self._state.journal.version()
        if version == self._read:
            return
        cancels, seen = requested_cancels(self._state, self._cancels_seen)
        for run, reason in cancels.items():
            self._cancel(run, reason)
        self._cancels_seen = seen  # only now: a request that could not be recorded is read again
        if self._steps is None and self._storage.stall is None:
            for run in self._state.journal.unfinished()[:1]:
                self._begin(run)
        self._prune()
        self._read = version

    def _cancel(self, run: str, reason: str) -> None:
        """Record that a run is cancelled, and end it if it is the active one or the one that is stalled."""
        end_run(self._state, run, "run_cancelled", reason)
        log.warning("run_cancelled run=%s reason=%s", run, reason)
        stall = self._storage.stall
        if self.loop is not None and self.loop.run.id == run:
            self.loop.abandon()
            self._end()
        elif stall is not None and stall.run == run:
            self._end()

    def _prune(self) -> None:
        """Remove files of ended runs: by the configuration after each run, and those that a command has named."""
        requests = self._state.journal.entries(kinds=("prune_requested",), after=self._prunes_seen)
        if self._is_pruned and not requests:
            return
        to_prune = set(runs_beyond(self._state, self._keep_runs))
        for fact in facts_of(requests, PruneRequested):
            to_prune.update(fact.runs)
        # A command may name a run that has not ended: such a one keeps its files.
        ended_runs = runs_beyond(self._state, 0)
        prune_runs(self._state, [run for run in ended_runs if run in to_prune])
        self._is_pruned = True
        if requests:
            self._prunes_seen = requests[-1].id

    def _begin(self, run: str) -> None:
        """Begin a run, or resume it from the journal."""
        try:
            record = replay(self._state.journal, run)
            if record.open_round is not None:
                # The agents of these updates have receipts, and have removed them: they cannot be sent again.
                for update in record.open_round.updates.values():
                    self._state.blobs.check(update.blob)
            self.loop = self._make(run, Request.from_fact(record.request))
        except (StateError, OSError) as error:
            self.stall(run, error)
        except (HeadwaterError, KeyError, ValueError) as error:
            self.fail(run, error)
        else:
            self._steps = self.loop.steps()

    def _end(self) -> None:
        """Forget the active run, which has ended, and look for the next one at once."""
        if self.loop is not None:
            self.loop.hooks.on_end(self.loop.run.id)
        self.loop = None
        self._steps = None
        self._waiting = NO_RUN
        self._storage.resume()
        self._storage.wrote()  # its end is in the journal
        self._read_at = float("-inf")
        self._is_pruned = False
        give_freed_memory_back()  # states and updates of the run; a coordinator may be idle for days


FIRST_PAUSE_S = 1.0
"""The pause before the first new try; each following one is twice as long, up to `LONGEST_PAUSE_S`."""

LONGEST_PAUSE_S = 15.0
"""The longest pause between two tries: a person who has made room on the disk does not wait for longer."""

OVER_S = 120.0
"""A resumed run that is stalled again within this time continues the series of growing pauses."""

RECENT_S = 20.0
"""How long the status reports a file error after its last occurrence: agents repeat messages every 5 s.

That the disk was full is over as soon as something could be written again.
"""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Stall:
    """A run that waits until files can be read and written again. ``until``: time of the next try, monotonic."""

    run: str
    reason: str
    times: int
    until: float

    def waiting(self) -> Waiting:
        """Return what is waited for, as text with the time of the next try."""
        text = f"{self.run} is stalled: {self.reason} Nothing is lost; it is retried and resumes by itself"
        return Waiting(text, (), self.until, "stalled")

    def body(self) -> dict[str, Any]:
        """Return reason and number of tries as JSON, for the status."""
        return {"reason": self.reason, "times": self.times}


class Storage:
    """Errors of files in the state folder: the run that is stalled by one, and the latest error."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stall: Stall | None = None
        self._clock = clock
        self._logged = Rejections(clock)
        self._last: tuple[float, str] = (float("-inf"), "")
        self._is_full = False
        """Whether the last error was that there is no room on the disk."""

        self._times = 0
        self._stalled_at = float("-inf")

    def is_stalled(self) -> bool:
        """Return whether the active run is stalled."""
        return self.stall is not None

    @property
    def trouble(self) -> str:
        """What cannot be read or written, as text; empty when there was no error lately."""
        seen_at, reason = self._last
        if self.stall is not None:
            return self.stall.reason
        return reason if self._clock() - seen_at < RECENT_S else ""

    def stall_run(self, run: str, error: BaseException) -> None:
        """Retry ``run`` after a pause, which grows with each failed try."""
        reason = self.note(error, run)
        now = self._clock()
        is_over = now - self._stalled_at >= OVER_S
        if is_over:
            self._times = 0
        self._stalled_at = now
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._times, 10))
        self._times += 1
        self.stall = Stall(run, reason, self._times, now + pause_s)

    def resume(self) -> None:
        """Note that the run continues, or has ended."""
        if self.stall is not None:
            log.info("run_resumed run=%s after=%s", self.stall.run, self.stall.reason)
        self.stall = None

    def wrote(self) -> None:
        """Note that something was written that takes room: a disk that was full is so no longer."""
        if self._is_full:
            self._last = (float("-inf"), "")
            self._is_full = False

    def note(self, error: BaseException, what: str) -> str:
        """Record an error; returns it as text, which is logged at most once a minute for each cause."""
        message = reason_of(error) if isinstance(error, OSError) else str(error)
        self._is_full = getattr(error, "errno", None) in _NO_ROOM
        remedy = ": make room on that disk." if self._is_full else "."
        reason = message.rstrip(".") + remedy
        self._last = (self._clock(), reason)
        times = self._logged.note(reason)
        if times is not None:
            log.warning("files_unusable for=%s times=%d reason=%s", what, times, reason)
        return reason


def of_storage(error: BaseException) -> HeadwaterError | OSError | None:
    """Return the file error that an error is or was caused by; None where there is none."""
    for candidate in (error, error.__cause__):
        # Errors of connections are OSErrors, too.
        is_of_connection = isinstance(candidate, ConnectionError | TimeoutError)
        if isinstance(candidate, OSError | StateError) and not is_of_connection:
            return candidate
    return None
