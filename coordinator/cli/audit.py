"""``headwater audit``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edge_agent.core.errors import UsageError

from ..text import counted
from .options import Config, Json, State, state_path
from .output import present, table

if TYPE_CHECKING:
    from ..runs.audit import Audit


Run = Annotated[str, typer.Argument(help="Run to check, as 'headwater status' names it.")]
Agents = Annotated[
    list[Path] | None,
    typer.Option("--agent", help="State folder of an agent, or a copy of it, whose receipts are compared; repeatable."),
]


def audit(run: Run, config: Config = None, state: State = None, agent: Agents = None, as_json: Json = False) -> None:
    """Check that every update of a run was aggregated once, and that all hashes agree; print OK or the row that breaks.

    The journal's chain is verified and joined with the figures, the checkpoints, and the receipts that agents noted
    (hosted clients always, others with --agent). A round whose updates and previous checkpoint are on disk is
    aggregated again; with keep_updates these are all rounds of a run. Exit code 1 when a row breaks.

    Example: headwater audit run-0001 --config coordinator.toml
    """
    from ..runs.audit import audit as audit_run
    from ..state.store import StateFolder

    if missing := [str(one) for one in agent or () if not one.is_dir()]:
        raise UsageError(f"no folder {', '.join(missing)}; --agent names an agent's state folder, or a copy of it")
    with StateFolder(state_path(config, state)).look() as folder:
        result = audit_run(folder, run, agent or ())
    present(result.as_json(), _parts(result), as_json=as_json)
    if not result.is_ok:
        raise typer.Exit(1)


def _parts(result: Audit) -> Iterator[Table | str]:
    again = {True: "equal", False: "different", None: "no updates on disk"}
    rows = [(one.round, one.checkpoint, again[one.is_aggregation], one.updates, one.confirmed) for one in result.rounds]
    columns = ("round", "checkpoint", "aggregated again", "updates", "confirmed by agents")
    yield table(f"{result.run}, {result.status}", columns, rows, left=3)
    receipts = "no receipts of agents (--agent DIR compares them)"
    if result.agents:
        receipts = f"{counted(result.receipts, 'receipt')} of {', '.join(result.agents)}"
    if result.unreadable_receipts:
        receipts += f", {counted(result.unreadable_receipts, 'torn line')} left out"
    yield (
        f"{counted(result.entries, 'row')} of the journal, {counted(result.blobs, 'blob')}, "
        f"{receipts}; final encoder {result.encoder}"
    )
    if result.is_ok:
        if result.without_receipts:
            yield f"note: no receipts of {result.run} in {', '.join(result.without_receipts)}"
        yield f"OK: every update of {counted(len(result.rounds), 'round')} was aggregated once"
    yield from (f"BREAKS: {row}" for row in result.breaks)
