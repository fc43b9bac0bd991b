"""``headwater backup``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..state.backup import back_up
from ..state.store import StateFolder
from ..text import counted
from .options import Config, Json, State, state_path
from .output import present

Target = Annotated[
    Path, typer.Argument(metavar="DIR", help="New folder, or one with an earlier backup to bring up to date.")
]


def backup(target: Target, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Copy the state folder, also while a coordinator works on it.

    The copy has the journal as of one moment and the blobs that it needs, compared with their hashes, with the results
    of runs and the client state of hosted clients. To restore it, stop the coordinator and start one with the copy as
    its state folder: it resumes the runs.

    Example: headwater backup backups/home --config coordinator.toml
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder:
        made = back_up(folder, target)
    line = (
        f"{target}: {made.entries} journal entries, {counted(made.runs, 'run')}, {counted(made.blobs, 'blob')}, "
        f"{made.size_bytes / 1e6:.1f} MB, of which {made.copied_bytes / 1e6:.1f} MB are new; to restore, stop the "
        "coordinator and start 'headwater serve --state DIR' on a copy of it"
    )
    present({"path": str(target), "state": str(path), **made.as_json()}, [line], as_json=as_json)
