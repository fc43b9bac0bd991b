"""``headwater cancel``."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from ..fleet.release_commands import current_user
from ..runs.cancel import cancel_run
from ..state.store import StateFolder
from .options import Config, Json, State, state_path
from .output import present

Run = Annotated[str, typer.Argument(help="Run to end, as 'headwater status' names it.")]

LOOK_EVERY_S, TIMEOUT_S = 0.1, 30.0
"""How long the command waits for a coordinator to come to the next safe point of its run; the request stays."""


def cancel(run: Run, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """End a run for good, queued or under way: nothing more is asked of agents for it, and the next run begins.

    A queued run ends at once. One under way ends at the next safe point of its round, and its closed rounds stay: they
    can be exported. With no coordinator at work the run ends here and now.

    Example: headwater cancel run-0003 --config coordinator.toml
    """
    pause = threading.Event()
    by = f"by {current_user()}, 'headwater cancel'"
    with StateFolder(state_path(config, state)).look() as folder:
        record = cancel_run(folder, run, lambda: pause.wait(LOOK_EVERY_S), int(TIMEOUT_S / LOOK_EVERY_S), by)
    line = f"{run} will be cancelled as soon as the coordinator has done what it is at; see 'headwater status'"
    if record.is_over:
        line = f"{run} is cancelled after round {record.round} of {record.request.rounds}"
    result = {"run_id": run, "status": record.status, "round": record.round, "cancelled": record.is_over}
    present(result, [line], as_json=as_json)
