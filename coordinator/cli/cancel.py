"""``headwater cancel``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from edge_agent.errors import StateError, UsageError
from edge_agent.storage import folder_lock

from ..runs.results import end_run
from ..state.journal import RunRecord
from ..state.store import StateFolder
from .follow import standing
from .options import Config, Json, State, state_path
from .output import present

Run = Annotated[str, typer.Argument(help="Run to end, as 'headwater status' names it.")]

REASON = "'headwater cancel'"
LOOK_EVERY_S, TIMEOUT_S = 0.1, 30.0
"""How long the command waits for a coordinator to come to the next safe point of its run; the request stays."""


def cancel(run: Run, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """End a run for good, queued or under way: nothing more is asked of agents for it, and the next run begins.

    A queued run ends at once. One under way ends at the next safe point of its round, and its closed rounds stay: they
    can be exported. With no coordinator at work the run ends here and now.

    Example: headwater cancel run-0003 --config coordinator.toml
    """
    pause = threading.Event()
    with StateFolder(state_path(config, state)).look() as folder:
        record = cancel_run(folder, run, lambda: pause.wait(LOOK_EVERY_S), int(TIMEOUT_S / LOOK_EVERY_S))
    line = f"{run} will be cancelled as soon as the coordinator has done what it is at; see 'headwater status'"
    if record.is_over:
        line = f"{run} is cancelled after round {record.round} of {record.request.get('rounds')}"
    result = {"run_id": run, "status": record.status, "round": record.round, "cancelled": record.is_over}
    present(result, [line], as_json=as_json)


def cancel_run(folder: StateFolder, run: str, wait: Callable[[], object], looks: int) -> RunRecord:
    """Where the run stands after at most ``looks`` looks, with a `wait` between two of them.

    Raises:
        UnknownName: no such run.
        UsageError: the run is over, or was over before the coordinator read the request.
    """
    record = folder.journal.replay(run)
    if record.is_over:
        raise UsageError(f"{run} is {record.status} already; only a queued run or one under way can be cancelled")
    if _ended_here(folder, run):
        return folder.journal.replay(run)
    folder.journal.append("cancel_requested", run=run, body={"reason": REASON})
    for _ in range(looks):
        record = folder.journal.replay(run)
        if record.is_over or _ended_here(folder, run):
            break
        wait()
    record = folder.journal.replay(run)
    if record.is_over and record.status != "cancelled":
        raise UsageError(f"{run} is {record.status}: that came before it could be cancelled; it {standing(record)}")
    return record


def _ended_here(folder: StateFolder, run: str) -> bool:
    """End the run if no coordinator is at work on the folder: only who holds its lock may end a run."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder.path, "headwater cancel"))
        except StateError:
            return False
        if not folder.journal.replay(run).is_over:
            end_run(folder, run, "run_cancelled", REASON)
    return True
