"""Ending a run on request, whether or not a coordinator is at work on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.locks import folder_lock

from ..journal.entries import CancelRequested
from ..state.store import StateFolder
from ..views.runs import RunRecord, replay
from .result_notes import describe_progress
from .results import end_run


def cancel_run(folder: StateFolder, run: str, wait: Callable[[], object], looks: int, reason: str) -> RunRecord:
    """Cancel a run, here or through the coordinator at work on the folder; returns where the run stands then.

    Args:
        folder: The state folder.
        run: Name of the run.
        wait: Called between two looks at whether the coordinator has cancelled the run.
        looks: How often to look at most; after the last one the run may still be unfinished.
        reason: Why it is cancelled, for the journal.

    Raises:
        UnknownName: no such run.
        UsageError: the run is over, or was over before the coordinator read the request.
    """
    record = replay(folder.journal, run)
    if record.is_over:
        raise UsageError(f"{run} is {record.status} already; only a queued run or one under way can be cancelled")
    if _try_to_end(folder, run, reason):
        return replay(folder.journal, run)
    # A coordinator is at work: it reads the request. If it stops meanwhile, the run is ended here after all.
    folder.journal.append(CancelRequested(reason=reason), run=run)
    for _ in range(looks):
        record = replay(folder.journal, run)
        if record.is_over or _try_to_end(folder, run, reason):
            break
        wait()
    record = replay(folder.journal, run)
    if record.is_over and record.status != "cancelled":
        raise UsageError(
            f"{run} is {record.status}: that came before it could be cancelled; it {describe_progress(record)}"
        )
    return record


def _try_to_end(folder: StateFolder, run: str, reason: str) -> bool:
    """End the run if no coordinator is at work on the folder, and return whether none was.

    Only who holds the folder's lock may end a run.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder.path, "headwater cancel"))
        except StateError:
            return False
        if not replay(folder.journal, run).is_over:
            end_run(folder, run, "run_cancelled", reason)
    return True
