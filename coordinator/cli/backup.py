"""``headwater backup``."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.core.children import stop_on_signals
from edge_agent.core.errors import StateError, cause

from ..identity.ledger import identity_folder
from ..state.backup import back_up
from ..state.release_keys import ReleaseKeys
from ..state.store import StateFolder
from ..text import counted
from .options import INTERRUPTED, Config, Json, State, state_path
from .output import console, present

Target = Annotated[
    Path, typer.Argument(metavar="DIR", help="New folder, or one with an earlier backup to bring up to date.")
]
Every = Annotated[
    float | None,
    typer.Option("--every", min=1, max=86_400, help="Go on until stopped, with so many seconds between two backups."),
]


def backup(
    target: Target, config: Config = None, state: State = None, every: Every = None, as_json: Json = False
) -> None:
    """Copy the state folder, also while a coordinator works on it.

    The copy has the journal as of one moment and the blobs that it needs, compared with their hashes, with the results
    of runs and the client state of hosted clients. To restore it, stop the coordinator and start one with the copy as
    its state folder: it resumes the runs. With --every it stays up to date for 'headwater serve --standby'; then an
    error ends the command only the first time, and later ones are reported and tried again.

    With certificates, the copy holds the secret keys of the federation, also root.key where it is still in the state
    folder: without it, release keys could never be changed after a restore. Whoever reads the copy can release bundles.

    Example: headwater backup backups/home --config coordinator.toml

    Example: headwater backup replica --every 60 --config coordinator.toml
    """
    path = state_path(config, state)
    _back_up(path, target, as_json=as_json)
    if every is None:
        return
    with stop_on_signals() as stop:
        _repeat(path, target, every, stop, as_json=as_json)
        if stop.signal == signal.SIGINT:
            raise typer.Exit(INTERRUPTED)


def _repeat(path: Path, target: Path, every_s: float, stop: threading.Event, *, as_json: bool) -> None:
    while not stop.wait(every_s):
        try:
            _back_up(path, target, as_json=as_json)
        except (StateError, OSError) as error:  # a full disk, or the folder is in use: it may be better next time
            reason = cause(error) if isinstance(error, OSError) else str(error)
            console.print(f"no backup was made, the one before stays: {reason}", soft_wrap=True)


def _back_up(path: Path, target: Path, *, as_json: bool) -> None:
    with StateFolder(path).look() as folder:
        made = back_up(folder, target)
    line = (
        f"{target}: {made.entries} journal entries, {counted(made.runs, 'run')}, {counted(made.blobs, 'blob')}, "
        f"{made.size_bytes / 1e6:.1f} MB, of which {made.copied_bytes / 1e6:.1f} MB are new; to restore, stop the "
        "coordinator and start 'headwater serve --state DIR' on a copy of it"
    )
    holds_root_key = ReleaseKeys(target).root_key.exists()
    lines = [line]
    if identity_folder(target).is_dir():
        lines.append(_about_keys(target, holds_root_key=holds_root_key))
    content = {"path": str(target), "state": str(path), **made.as_json(), "holds_root_key": holds_root_key}
    present(content, lines, as_json=as_json)


def _about_keys(target: Path, *, holds_root_key: bool) -> str:
    """Return which secrets are in a backup, and how to keep them."""
    if not holds_root_key:
        return f"{target} holds the federation's secret keys: keep it as safe as the state folder"
    return (
        f"{target} holds the federation's secret keys, root.key among them, which can change all others: keep it as "
        "safe as the state folder, and move root.key to a place without network before the next backup"
    )
