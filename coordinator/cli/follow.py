"""Watching a run from beside the coordinator: by its journal and its status file, never by asking it to wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edge_agent.errors import RunFailed

from ..journal import RunRecord
from ..store import StateFolder
from .options import console

LOOK_EVERY_S = 0.2


def read_status(state: Path) -> dict[str, Any]:
    """The coordinator's own words on what it does; empty before it has said anything."""
    try:
        found = json.loads((state / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def follow(state: StateFolder, run: str, step: Callable[[], object] | None = None) -> RunRecord:
    """Show progress until the run is over. ``step`` makes it go on where this process is the coordinator itself.

    Raises:
        RunFailed: it failed or was cancelled.
    """
    pause = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(run, total=None)
        last_id, said = -1, ""
        while True:
            if step is not None:
                step()
            else:
                pause.wait(LOOK_EVERY_S)
            newest = state.journal.last_id()
            waiting = _waiting(read_status(state.path), run)
            if newest == last_id and waiting == said:
                continue
            record, last_id, said = state.journal.replay(run), newest, waiting
            total = int(record.request.get("rounds", 0))
            progress.update(task, total=total, completed=record.round, description=f"{run}  {said}")
            if record.is_over:
                break
    if record.status != "finished":
        raise RunFailed(f"{run} {record.status}: {record.outcome.get('reason', 'no reason was noted')}")
    return record


def _waiting(status: dict[str, Any], run: str) -> str:
    if (status.get("run") or {}).get("id") != run:
        return "waits for the coordinator"
    waiting = status.get("waiting") or {}
    whom = ", ".join(waiting.get("whom", ()))
    return str(waiting.get("for", "")) + (f" (from {whom})" if whom else "")
