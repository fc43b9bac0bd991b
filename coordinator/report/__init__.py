"""One page about one run: ``report.html`` beside its figures, self-contained, readable on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_agent.errors import StateError
from edge_agent.storage import write_atomic

from ..state.journal import RunRecord
from ..state.store import RunFolder
from .figures import read_run
from .page import render

__all__ = ["write_report"]


def write_report(folder: RunFolder, record: RunRecord | None = None) -> Path:
    """Write the page and return its path; it may be written again at any time, also during the run.

    ``record`` is the run's state in the journal, for a run that has no summary yet.

    Raises:
        StateError: there are no figures yet, or they are damaged.
    """
    summary, metrics = folder.summary(), folder.metrics()
    if summary is None and not metrics:
        raise StateError(f"{folder.folder}: no figures yet; a report can be made after the first round")
    page = render(read_run(folder.run, summary or _so_far(record), metrics))
    write_atomic(folder.report_path, page.encode(errors="replace"))
    return folder.report_path


def _so_far(record: RunRecord | None) -> dict[str, Any]:
    """A summary of a run that has none."""
    if record is None:
        return {}
    asked = {key: record.request.get(key) for key in ("method", "params", "rounds", "seed")}
    status = "unfinished" if record.status in {"requested", "running"} else record.status
    return {**asked, "status": status, "round": record.round, "reason": record.outcome.get("reason")}
