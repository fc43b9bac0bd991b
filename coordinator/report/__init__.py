"""One page about one run: ``report.html`` beside its figures, self-contained, readable on a phone and in the dark.

This room shows what the files of a run say, and computes nothing that they do not hold. It knows no coordinator that
serves: the page of a finished run can be written anywhere.

Read in this order: `figures` (what the page shows, from the run's files), `charts` (charts as plain values, and their
HTML), `run_charts` (those of a run), `page` (all of it in one page), `pictures` (the same charts for documents).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import StateError
from edge_agent.core.storage import write_atomic

from ..state.store import RunFolder
from ..views.runs import RunRecord
from .figures import read_run
from .page import render

if TYPE_CHECKING:
    from ..state.release_rows import ReleaseRow

__all__ = ["write_report"]


def write_report(folder: RunFolder, record: RunRecord | None = None, releases: Sequence[ReleaseRow] = ()) -> Path:
    """Write the page and return its path; it may be written again at any time, also during the run.

    Args:
        folder: The folder of the run.
        record: The state of the run in the journal, for a run that has no summary yet.
        releases: The releases of the run's bundle.

    Raises:
        StateError: There are no figures yet, or they are damaged.
    """
    summary = folder.summary()
    metrics = folder.metrics()
    if summary is None and not metrics:
        raise StateError(f"{folder.folder}: no figures yet; a report can be made after the first round")
    if not summary:
        summary = {} if record is None else _summary_so_far(record)
    page = render(read_run(folder.run, summary, metrics), releases)
    write_atomic(folder.report_path, page.encode(errors="replace"))
    return folder.report_path


def _summary_so_far(record: RunRecord) -> dict[str, Any]:
    """Return what the journal says of a run that has no summary yet, in the form of one."""
    is_unfinished = record.status in {"requested", "running"}
    status = "unfinished" if is_unfinished else record.status
    return {**record.request.settings(), "status": status, "round": record.round, "reason": record.reason}
