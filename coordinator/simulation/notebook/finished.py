"""Whether a folder holds a simulation that has finished."""

from __future__ import annotations

from pathlib import Path

from edge_agent.core.errors import UsageError

from ...state.store import StateFolder
from ...text import counted
from ...views.runs import replay
from ..setup import read_plan


def finished_run(folder: Path) -> str:
    """Return the name of the finished run of the simulation in ``folder``.

    Raises:
        UsageError: There is no simulation, or it has not finished.
        StateError: Files are damaged.
    """
    if folder.is_file():
        raise UsageError(f"{folder} is a file; expected the folder of a simulation")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; expected the folder of a simulation (simulate(..., out=FOLDER))")
    plan = read_plan(folder)
    if plan is None:
        raise UsageError(
            f"{folder} holds no simulation; expected the folder of one (simulate(..., out=FOLDER), or "
            "'headwater simulate --out FOLDER')"
        )
    with StateFolder(folder).look() as state:
        runs = state.journal.runs()
        record = replay(state.journal, runs[0]) if runs else None
    if record is None or record.status != "finished" or record.request.rounds != plan.rounds:
        closed = 0 if record is None else record.round
        raise UsageError(
            f"{folder}: the simulation has not finished ({closed} of {counted(plan.rounds, 'round')}); "
            f"simulate(..., resume=True) or 'headwater simulate --resume --out {folder}' resumes it"
        )
    return record.run
