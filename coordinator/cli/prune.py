"""``headwater prune``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from edge_agent.core.errors import StateError
from edge_agent.core.locks import folder_lock

from ..config import DEFAULT_CONFIG, RetentionConfig, load_config
from ..journal.entries import PruneRequested
from ..state.retention import on_offer, prunable, prune_runs, runs_beyond, usage
from ..state.store import StateFolder
from ..text import counted
from ..views.runs import replay
from .options import Config, Json, State, state_path
from .output import present, table

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")]
Keep = Annotated[
    int | None,
    typer.Option("--keep", min=0, help="Ended runs whose checkpoints and bundles stay; default: retention.runs."),
]

LOOK_EVERY_S, TIMEOUT_S = 0.1, 30.0
"""How long the command waits for a coordinator at work, which removes the files itself; the request stays."""


def prune(
    config: Config = None, state: State = None, keep: Keep = None, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Remove checkpoints, retained updates and bundles of ended runs, but of the newest ones.

    Nothing of a run that has not ended is removed, nor of runs whose releases devices run or may return to. Metrics,
    summaries and the journal of all runs stay. A coordinator does this by itself after each run.

    Example: headwater prune --config coordinator.toml --keep 3 --dry-run
    """
    path = state_path(config, state)
    pause = threading.Event()
    if keep is None:
        has_config = config is not None or DEFAULT_CONFIG.exists()
        keep = (load_config(config, state).retention if has_config else RetentionConfig()).runs
    with StateFolder(path).look() as folder:
        runs = runs_beyond(folder, keep)
        listed = prunable(folder, runs)
        removed = not dry_run and removed_by(
            folder, runs, lambda: pause.wait(LOOK_EVERY_S), int(TIMEOUT_S / LOOK_EVERY_S)
        )
        size = sum(one.size_bytes for one in listed)
        left = usage(folder)
        kept = on_offer(folder)
    what = "removed" if removed else "would be removed" if dry_run else "will be removed by the coordinator soon"
    line = f"{size / 1e6:.1f} MB of {counted(len(runs), 'run')} {what}; {left.free_bytes / 1e6:.0f} MB are free"
    line += "".join(f"; {run} stays, because its release is in use" for run in kept)
    rows = [(one.run, one.status, len(one.files), f"{one.size_bytes / 1e6:.1f}") for one in listed]
    tables = [table("runs", ("run", "status", "files", "MB"), rows, left=2)] if rows else []
    result = {
        "keep": keep,
        "dry_run": dry_run,
        "removed": removed,
        "bytes": size,
        "runs": [one.as_json() for one in listed],
        "left": left.to_json(),
    }
    present(result, [*tables, line], as_json=as_json)


def removed_by(folder: StateFolder, runs: list[str], wait: Callable[[], object], looks: int) -> bool:
    """Return whether these runs were pruned: here and now, or within ``looks`` looks by a coordinator at work.

    Only who holds the folder's lock may remove blobs: one that is being written now may be in no entry yet.
    """
    if not runs or _removed_here(folder, runs):
        return True
    folder.journal.append(PruneRequested(runs=tuple(runs)))
    for _ in range(looks):
        if all(replay(folder.journal, run).is_pruned for run in runs) or _removed_here(folder, runs):
            return True
        wait()
    return False


def _removed_here(folder: StateFolder, runs: list[str]) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder.path, "headwater prune"))
        except StateError:
            return False
        prune_runs(folder, [run for run in runs_beyond(folder, 0) if run in runs])
    return True
