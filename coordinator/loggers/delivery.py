"""The delivery of a run's rows to one log, by a thread of its own: a log that is slow or away delays no round.

Calls wait in the order in which they were given. One that fails stays the first and is tried again after a pause, which
doubles each time. Only so many lines wait as memory bears (`WAITING_LIMIT`); rounds after these are not logged, and
neither is the end. At the end everything that waits is tried once more, for a bounded time. What is left then is
reported, and can be logged later, for the journal of the run has all of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_agent.core.errors import HeadwaterError

from ..text import reason_of
from .base import Logger
from .records import RoundResult, RunDescription, RunEnd

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 2.0
"""The pause after a call that failed; each following one is twice as long, up to `LONGEST_PAUSE_S`."""

LONGEST_PAUSE_S = 60.0

END_LIMIT_S = 30.0
"""How long the end of a run waits for its logs at most, beside `ROW_LIMIT_S` for each row that waits."""

ROW_LIMIT_S = 0.05
"""The time that a row may take: a server on the same machine takes 0.01 s."""

AWAY_LIMIT_S = 5.0
"""How long the end of a run tries a log whose calls fail: a server that restarts takes seconds, a broken one for ever.
"""

ABORT_LIMIT_S = 5.0
"""How long the end of a run that has failed or was stopped tries such a log: the run is resumed, and logged again."""


WAITING_LIMIT = 100_000
"""Lines that wait for a log at most, a round and each of its clients being one: some 50 MB."""

LONGEST_REASON = 300
"""Characters of a reason: some packages quote the whole page that a server has answered with."""


@dataclass(frozen=True)
class LogOutcome:
    """What a log has of a run."""

    logger: str
    """Its name, as in ``--log``."""

    where: str
    rounds: int
    """Rounds that were logged."""

    unsent: int
    """Rounds that were not."""

    is_complete: bool
    """Whether the end was logged, too: final figures and artefacts."""

    reason: str = ""
    """Why something is missing; empty: nothing is."""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON, for ``result.json``."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, outcome: Mapping[str, Any]) -> LogOutcome:
        """Return the outcome in JSON that `to_json` has made."""
        return cls(**outcome)

    def describe(self) -> str:
        """Return the outcome as a line for people."""
        if self.is_complete:
            return f"logged to {self.logger}: {self.where}"
        missing = "the end of the run is"
        if self.unsent:
            missing = f"{self.unsent} of {self.rounds + self.unsent} rounds and the end of the run are"
        return f"not all is logged to {self.logger} ({self.where}): {missing} missing: {self.reason}"


@dataclass(frozen=True)
class _Call:
    """A call that a log is to get."""

    make: Callable[[], None]
    rounds: int = 0
    """Closed rounds in it: 0 or 1."""

    lines: int = 0
    """What it counts of `WAITING_LIMIT`."""


class Delivery:
    """Gives rows to one log. Call `begin`, `log_round` for each row, `end` and `wait`."""

    def __init__(self, name: str, logger: Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """``name``: of the log, as in ``--log``; ``clock``: seconds that never go back."""
        self.name = name
        self.logger = logger
        self._clock = clock
        self._calls = deque[_Call]()
        self._changed = threading.Condition()
        self._ends_at: float | None = None
        """When to give up, once the run has ended; None: it has not."""

        self._spared_s = 0.0
        """How much earlier to give up where calls fail."""

        self._logged = 0
        self._left_out = 0
        """Rounds that came when too many waited."""

        self._reason = ""
        """Why the first call in the queue has failed; empty: it has not been tried, or nothing waits."""

        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)

    def begin(self, run: RunDescription) -> None:
        """Start the thread, and open the log."""
        self._give(_Call(lambda: self.logger.begin(run)))
        self._thread.start()

    def log_round(self, row: RoundResult) -> None:
        """Log a row soon, unless too many lines wait; returns at once."""
        taken = row if self.logger.takes_clients else row.without_clients()
        call = _Call(lambda: self.logger.log_round(taken), rounds=1, lines=1 + len(taken.per_client))
        with self._changed:
            waiting = sum(earlier.lines for earlier in self._calls)
            # A log that lacks a round gets none after it: it would show a run that nobody has made.
            if self._left_out or (waiting and waiting + call.lines > WAITING_LIMIT):
                self._left_out += 1
                return
        self._give(call)

    def flush(self, limit_s: float) -> None:
        """Wait until all calls so far were made or the first of them has failed, at most ``limit_s`` seconds."""
        until = self._clock() + limit_s
        with self._changed:
            while self._calls and not self._reason and self._clock() < until:
                self._changed.wait(max(0.0, until - self._clock()))

    def end(self, end: RunEnd, limit_s: float = END_LIMIT_S) -> None:
        """Log the end soon, and give up what was not logged after ``limit_s`` seconds, and `ROW_LIMIT_S` for each row.

        It returns at once.
        """
        with self._changed:
            self._ends_at = self._clock() + limit_s + ROW_LIMIT_S * len(self._calls)
            if not self._left_out:
                self._calls.append(_Call(lambda: self.logger.end(end)))
            self._spared_s = max(0.0, limit_s - AWAY_LIMIT_S)
            self._changed.notify_all()

    def wait(self) -> LogOutcome:
        """Wait until all is logged, or is given up, and return what was; call `end` before."""
        limit_s = 0.0
        if self._ends_at is not None:
            limit_s = max(0.0, self._ends_at - self._clock())
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        with self._changed:
            unsent = self._left_out + sum(call.rounds for call in self._calls)
            is_complete = unsent == 0 and not self._calls
            reason = self._reason
            if self._calls and not reason:
                reason = "it did not answer in time"
            elif self._left_out and not reason:
                reason = "it was away for so long that memory had no room for more rounds"
            self._calls.clear()  # a thread that hangs in a call finds nothing more to do
        return LogOutcome(self.name, self.logger.where, self._logged, unsent, is_complete, reason)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _give(self, call: _Call) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def _run(self) -> None:
        """Make the calls until the end was logged, or the time for it is over."""
        pause_s = FIRST_PAUSE_S
        while True:
            call = self._next()
            if call is None:
                return
            try:
                call.make()
            # A log of another author may raise anything, and none may end a run.
            except Exception as error:  # noqa: BLE001 - as the line above says
                self._note_failure(error)
                if not self._pause(pause_s):
                    return
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                self._note_done(call)

    def _next(self) -> _Call | None:
        """Wait for a call and return it; None once all were made after the end."""
        with self._changed:
            while not self._calls:
                if self._ends_at is not None:
                    return None
                self._changed.wait()
            return self._calls[0]

    def _pause(self, pause_s: float) -> bool:
        """Wait before the next try, and return whether there is one. The end of the run shortens the wait once."""
        with self._changed:
            was_over = self._ends_at is not None
            until = min(self._clock() + pause_s, self._gives_up_at())
            while self._clock() < until and was_over == (self._ends_at is not None):
                self._changed.wait(until - self._clock())
            return self._clock() < self._gives_up_at()

    def _gives_up_at(self) -> float:
        """Return when calls that fail are not tried again."""
        return math.inf if self._ends_at is None else self._ends_at - self._spared_s

    def _note_failure(self, error: Exception) -> None:
        """Keep the reason, and log the first failure of a series: as a warning only once in a run."""
        text = str(error) if isinstance(error, HeadwaterError) else reason_of(error)
        reason = text[:LONGEST_REASON]
        with self._changed:
            is_first = not self._reason
            self._reason = reason
            self._changed.notify_all()
        if is_first:
            level = logging.INFO if self._has_warned else logging.WARNING
            log.log(level, "log_away log=%s where=%s reason=%s", self.name, self.logger.where, reason)
            self._has_warned = True

    def _note_done(self, call: _Call) -> None:
        with self._changed:
            if self._calls and self._calls[0] is call:
                self._calls.popleft()
                self._logged += call.rounds
            was_away = bool(self._reason)
            self._reason = ""
            self._changed.notify_all()
        if was_away:
            log.info("log_back log=%s where=%s", self.name, self.logger.where)
