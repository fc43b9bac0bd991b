"""One page about one run: ``report.html`` beside its figures, self-contained, readable on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path

from edge_agent.errors import StateError
from edge_agent.store import write_atomic

from ..store import RunFolder
from .figures import read_run
from .page import render

__all__ = ["write_report"]


def write_report(folder: RunFolder) -> Path:
    """Where the page was written; it may be written again at any time, also while the run goes on.

    Raises:
        StateError: there are no figures yet, or they are damaged.
    """
    summary, metrics = folder.summary(), folder.metrics()
    if summary is None and not metrics:
        raise StateError(f"{folder.folder}: no figures yet; a report can be made after the first round")
    page = render(read_run(folder.run, summary or {}, metrics))
    write_atomic(folder.report_path, page.encode(errors="replace"))
    return folder.report_path
