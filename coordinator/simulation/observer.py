"""Functions of the caller that see each closed round of a simulation, and may end it: ``on_round``, and its logs.

A function gets one `RoundResult` for each closed round, in order, before the next round opens. In a run that is resumed
it first gets those of the rounds that were closed before, so that what it remembers is complete: in each process every
round comes exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from edge_agent.core.errors import HeadwaterError, RunFailed, StopRun
from edge_agent.data.partition import Division

from ..loggers.records import RoundResult
from ..rounds.context import Run, RunHooks
from ..state.store import StateFolder
from ..text import reason_of
from .client_pool import RESUMABLE
from .failures import Failure
from .results import round_result

OnRound: TypeAlias = Callable[[RoundResult], object]
"""A function that sees each closed round. What it returns is ignored; `StopRun` ends the run."""

NO_REASON = "on_round asked for it"


class RoundObserver(RunHooks):
    """Calls functions after each closed round, and asks the run to end where one of them does."""

    def __init__(
        self, state: StateFolder, run: str, division: Division, rounds: int, admit: Callable[[], None] = lambda: None
    ) -> None:
        """Make an observer without functions.

        Args:
            state: The state folder of the simulation.
            run: Name of the run.
            division: Each client's samples.
            rounds: Number of rounds that are planned.
            admit: Registers the clients that are evaluated at the end alone, before agents are asked for results.
        """
        self._state = state
        self._run = run
        self._division = division
        self._rounds = rounds
        self._admit = admit
        self._functions: list[OnRound] = []
        self._reason = ""

    def add(self, function: OnRound) -> None:
        """Call ``function`` after each closed round from now on."""
        self._functions.append(function)

    def replay(self, closed: int) -> None:
        """Give all functions the rounds that were closed before this process, 1 to ``closed``.

        Raises:
            RunFailed: A function has failed.
        """
        for number in range(1, closed + 1):
            self._show(number, is_replayed=True)

    def after_round(self, run: Run, number: int) -> None:  # noqa: ARG002 - the journal has what is shown
        """Give all functions a round that was just closed.

        Raises:
            RunFailed: A function has failed.
        """
        self._show(number, is_replayed=False)

    def reason_to_stop(self, run: Run) -> str:
        """Return why a function wants the run to end; empty: none does.

        Raises:
            RunFailed: The method has a result after its last round alone.
        """
        if self._reason and run.method.needs_last_round:
            raise RunFailed(
                f"on_round asked to end the run ({self._reason}), but method '{run.method.name}' has a result only "
                "after its last round; simulate it again with fewer rounds"
            )
        return self._reason

    def before_reports(self, run: Run) -> None:  # noqa: ARG002 - the clients are those of the simulation
        """Register the clients that never train: where the run ends early, no last round has done so."""
        self._admit()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _show(self, number: int, *, is_replayed: bool) -> None:
        """Give all functions one round; all get it, also after one of them has asked for the end."""
        if not self._functions:
            return
        row = round_result(self._state, self._run, number, self._division, self._rounds, is_replayed=is_replayed)
        for function in self._functions:
            try:
                function(row)
            except StopRun as request:
                self._reason = self._reason or str(request) or NO_REASON
            # A function of the caller's may raise anything. The round is closed, so nothing is lost with it.
            except Exception as error:
                raise _failure(function, number, error) from error


def _failure(function: OnRound, number: int, error: Exception) -> RunFailed:
    """Return what is raised where a function has failed: its name, the round, and where in the caller's code."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    reason = str(error) if isinstance(error, HeadwaterError) else reason_of(error)
    where = Failure.of(error).where
    return RunFailed(
        f"on_round function '{name}' has failed after round {number}: {reason}{where}; the rounds until then are kept, "
        f"correct the function{RESUMABLE}"
    )
