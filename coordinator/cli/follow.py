"""Following a run by its journal and its status file, without asking the coordinator."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from edge_agent.core.errors import RunFailed, StateError
from edge_agent.core.locks import folder_lock
from edge_agent.core.time_and_text import show_time

from ..journal.store import Journal, utc_now
from ..runs.result_notes import describe_progress
from ..state.fleet_rows import HeardAgent, Presence
from ..state.status_file import Awaited, RunUnderWay, Status, read_status
from ..state.store import StateFolder
from ..text import SaidBefore, about_time, counted, listed
from ..views.candidate import SCOPES
from ..views.runs import OpenRound, RunRecord, replay
from .output import console, fitted, is_live, table

LOOK_EVERY_S = 0.2
SILENT_S = 15.0
"""A coordinator updates its status file each second, unless it is busy with long work."""
WAIT_IS_LONG_S = 5.0


def follow(
    state: StateFolder, run: str, step: Callable[[], object] | None = None, stop: threading.Event | None = None
) -> RunRecord:
    """Show progress until the run is over, or ``stop`` is set: then the record is of a run that is not over.

    ``step`` continues the run where this process is the coordinator itself.

    Raises:
        RunFailed: it failed or was cancelled.
        StateError: its state folder was removed or replaced: what is there now says nothing of this run.
    """
    pause = threading.Event()
    record = RunRecord(run)
    last_id = -1
    with _progress(run) as show_progress:
        while not record.is_over:
            if step is not None:
                step()
            else:
                pause.wait(LOOK_EVERY_S)
            if not state.journal.is_in_place:
                raise lost(state, run)
            if stop is not None and stop.is_set():
                return replay(state.journal, run)
            newest = state.journal.last_id()
            status = read_status(state.path)
            waiting = _waiting(status, run)
            if newest != last_id:
                record = replay(state.journal, run)
                last_id = newest
            show_progress(record, waiting, status)
    if record.status != "finished":
        raise RunFailed(f"{run} {record.status}: {record.reason or 'no reason was noted'}")
    return record


def result_of(state: StateFolder, record: RunRecord) -> dict[str, Any]:
    """Return the result of a run that has finished.

    Raises:
        StateError: the result in the folder belongs to a run with another id.
    """
    summary = state.run(record.run).summary() or {}
    run_id = record.request.id
    if summary.get("id", run_id) != run_id:
        raise lost(state, record.run)
    return summary


def lost(state: StateFolder, run: str) -> StateError:
    """Return the error that says that the state folder of a run is not there any more."""
    return StateError(
        f"{run} can no longer be followed: its state folder {state.path} was removed or replaced, so its end is not "
        f"known here, and a {run} there now is another run; 'headwater status' shows what is there"
    )


class _TimeLeft:
    """An estimate of how long the rest of a run takes, from the rounds that were closed while this command watched."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        """The first round that was seen closed, and when."""

    def after(self, closed: int, rounds: int) -> float | None:
        """Return the seconds that are left once ``closed`` of ``rounds`` are; None before a second one was seen."""
        now = time.monotonic()
        if closed == 0:
            return None  # the first round includes the start of the agents and the model, and says little of the others
        if self._first is None or closed < self._first[0]:
            self._first = (closed, now)
            return None
        first_round, began_at = self._first
        if closed == first_round:
            return None
        return (now - began_at) / (closed - first_round) * (rounds - closed)


class _Lines:
    """Progress for a pipe or a log file: one line for each closed round, and one for each wait that lasts."""

    def __init__(self, run: str) -> None:
        self._time_left = _TimeLeft()
        self._run = run
        self._closed = -1
        self._since = time.monotonic()
        self._is_shown = False
        self._has_said_who = False
        self._last: tuple[RunRecord | None, str] = None, ""
        self._without: dict[str, str] = {}
        self._said = SaidBefore()

    def __call__(self, record: RunRecord, waiting: str) -> None:
        """Show what is new in the run, and what it waits for where that lasts."""
        if record.round != self._closed:
            self._closed = record.round
            self._show(self._closed_line(record.round, record.request.rounds))
        if record.open_round is not None:
            self._show_first_cohort(record.open_round)
            self._show_left_out(record.open_round)
        self._show_long_wait(record, waiting)

    def _show_first_cohort(self, opened: OpenRound) -> None:
        """Show once who takes part: a run of one round may have begun while a device was still on its way."""
        if self._has_said_who:
            return
        self._has_said_who = True
        who = f"{counted(len(opened.cohort), 'agent')}: {listed(opened.cohort)}"
        self._show(f"round {opened.round} begins with {who}")

    def _show_left_out(self, opened: OpenRound) -> None:
        """Show the agents that are left out of a round, but for those that were left out of the one before, too."""
        before = self._without
        self._without = dict(opened.fact.left_out)
        for agent, reason in self._without.items():
            if agent not in before:
                why = self._said.reason(agent, reason)
                self._show(f"round {opened.round} continues without {agent}: {why}")

    def _show_long_wait(self, record: RunRecord, waiting: str) -> None:
        """Show once what the run waits for, where nothing has changed for `WAIT_IS_LONG_S`."""
        if record is not self._last[0] or waiting != self._last[1]:
            self._last = (record, waiting)
            self._since = time.monotonic()
            self._is_shown = False
        elif waiting and not self._is_shown and time.monotonic() - self._since >= WAIT_IS_LONG_S:
            self._show(f"waits: {waiting}")
            self._is_shown = True

    def _closed_line(self, closed: int, rounds: int) -> str:
        """Return how far the run is, with the time that the rest takes where that can be estimated."""
        left_s = self._time_left.after(closed, rounds)
        if not closed:
            return f"queued with {counted(rounds, 'round')}"
        line = f"round {closed} of {rounds} is closed"
        return line if left_s is None or closed == rounds else f"{line}; about {about_time(left_s)} left"

    def _show(self, line: str) -> None:
        console.print(f"{self._run}: {line}", soft_wrap=True)


MOST_ROWS = 20
"""Of a larger fleet the table of agents is left out."""


@contextlib.contextmanager
def _progress(run: str) -> Iterator[Callable[[RunRecord, str, Status], None]]:
    """Yield a function of the run's state, what it waits for, and the status; a terminal shows these drawn again."""
    if not is_live(console):
        lines = _Lines(run)
        yield lambda record, waiting, _status: lines(record, waiting)
        return
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    counts = (MofNCompleteColumn(), "rounds", TimeElapsedColumn())
    columns = ("{task.description}", BarColumn(), *counts, "left", TimeRemainingColumn())
    progress = Progress(*columns, console=console, auto_refresh=False)
    bar = progress.add_task(run, total=None)
    newest: tuple[str, Status] = "", Status({})

    def drawn() -> RenderableType:
        waiting, status = newest
        parts: list[RenderableType] = [progress, *([Text(f"waits: {waiting}")] if waiting else [])]
        under_way = status.run
        if under_way is not None and under_way.id == run and 0 < len(status.agents) <= MOST_ROWS:
            agents = [row.agent for row in status.agents]
            parts.append(fitted(agents_now(under_way, agents), console.width))
        return Group(*parts)

    # Drawn a few times a second, whatever happens in between: one round of a fleet is a thousand messages.
    with Live(get_renderable=drawn, console=console, refresh_per_second=4, transient=True, vertical_overflow="crop"):

        def update(record: RunRecord, waiting: str, status: Status) -> None:
            nonlocal newest
            newest = waiting, status
            progress.update(bar, total=record.request.rounds, completed=record.round)

        yield update


def agents_now(run: RunUnderWay, agents: Sequence[HeardAgent]) -> Table:
    """Return what each agent does in the run under way, and its newest accuracies."""
    rows = []
    for agent in agents:
        accuracies = agent.acc or {}
        rows.append((agent.id, _does(agent, run), *(accuracies.get(scope) for scope in SCOPES)))
    return table("", ("agent", "is", *(f"acc.\n{scope}" for scope in SCOPES)), rows, left=2)


def _does(agent: HeardAgent, run: RunUnderWay) -> str:
    """Say in few words what an agent does in the run under way."""
    if not agent.is_present:
        return Presence.OFFLINE.value
    if agent.condition != "ok":
        error = "" if agent.fault is None else agent.fault.error
        return error or agent.condition
    for members, word in ((run.rejected, "rejected"), (run.accepted, "sent"), (run.cohort, "at work")):
        if agent.id in members:
            return f"{word}, {run.round}"
    return f"bundle {agent.bundle_id[:8]}" if agent.bundle_id else "ready"


def _waiting(status: Status, run: str) -> str:
    """Say what a run waits for and from whom, and what to try where nothing is heard.

    Args:
        status: What the coordinator wrote about itself last.
        run: The run that is followed. Another one may be under way.
    """
    tips = advice(status)
    tries = f"; {tips}" if tips else ""
    silent_since = _silent_since(status)
    if silent_since is not None:
        return f"nothing heard from the coordinator since {silent_since}; does 'headwater serve' still run?{tries}"
    under_way = status.run
    is_under_way = under_way is not None and under_way.id == run
    if is_under_way or status.is_broker_away:
        awaited = status.awaited or Awaited()
        whom = listed(awaited.whom, "")
        return f"{awaited.what}, not yet from {whom}{tries}" if whom else f"{awaited.what}{tries}"
    if under_way is not None and under_way.id:
        return f"queued behind {under_way.id}, which is in round {under_way.round} of {under_way.rounds}"
    return "the coordinator has not begun with it"


def advice(status: Status) -> str:
    """Return what to try where coordinator, broker, or every agent of a run is not heard; empty where they are."""
    if _silent_since(status) is not None or status.is_broker_away:
        return "'headwater doctor --config FILE' tries the coordinator's way to the broker"
    if status.run is not None and status.fleet is not None and not status.fleet.online:
        return (
            "no agent is heard: 'edge-agent doctor --config FILE' on a device says what keeps it away, "
            "'headwater doctor --config FILE' tries the broker from here"
        )
    return ""


def _silent_since(status: Status) -> str | None:
    """Return when the coordinator was heard last, if that is too long ago."""
    silent_s = status.age_s(utc_now())
    if status.at is None or silent_s is None or silent_s <= SILENT_S:
        return None
    return show_time(status.at)


def is_serving(state: Path) -> bool:
    """Return whether a coordinator holds the state folder now."""
    try:
        with folder_lock(state, "headwater run"):
            return False
    except StateError:
        return True


@dataclass(frozen=True)
class Invocation:
    """The options that name a command's state folder."""

    config: Path | None
    state: Path | None

    def command(self, command: str) -> str:
        """Return another command for the same state folder, in quotation marks."""
        parts = [f"headwater {command}"]
        if self.config is not None:
            parts.append(f"--config {shlex.quote(str(self.config))}")
        if self.state is not None:
            parts.append(f"--state {shlex.quote(str(self.state))}")
        return f"'{' '.join(parts)}'"


def ahead_of(journal: Journal, run: str) -> list[str]:
    """Return the unfinished runs that were requested before ``run``: they are done first."""
    unfinished = journal.unfinished()
    return unfinished[: unfinished.index(run)] if run in unfinished else []


def behind(journal: Journal, run: str, invocation: Invocation) -> str:
    """Return which runs are ahead of ``run`` and how to cancel the first one; empty when ``run`` is next."""
    ahead = ahead_of(journal, run)
    if not ahead:
        return ""
    first = ahead[0]
    others = f" and {listed(ahead[1:])}" if len(ahead) > 1 else ""
    what = f"{first}, which {describe_progress(replay(journal, first))}{others}"
    return f"{run} is queued behind {what}; {invocation.command(f'cancel {first}')} takes it out of the queue"
