"""Runs that end without a result: noted in the journal first, then in the run's folder for people."""

from __future__ import annotations

import logging
from typing import Literal

from edge_agent.errors import HeadwaterError

from .exclusion import Exclusions
from .journal import FINAL, RunRecord, utc_now
from .store import StateFolder
from .tally import restore

log = logging.getLogger(__name__)


def end_run(state: StateFolder, run: str, kind: Literal["run_failed", "run_cancelled"], reason: str) -> None:
    """End ``run`` for good. Only for the process that holds the folder's lock: nobody else may end a run.

    Raises:
        StateError: the journal cannot be written. (A summary that cannot be written is only logged.)
    """
    state.journal.append(kind, run=run, body={"reason": reason})
    try:
        restore(state, run)
        left_out = Exclusions.replay(state.journal, run).body()
        state.run(run).write_summary({**_summary(state.journal.replay(run), FINAL[kind], reason), "left_out": left_out})
    except (HeadwaterError, OSError) as error:
        log.warning("summary_not_written run=%s reason=%s", run, error)


def requested_cancels(state: StateFolder, after: int) -> tuple[dict[str, str], int]:
    """Run -> reason of the unfinished runs that somebody wants cancelled, and the journal entry looked at last."""
    entries = state.journal.entries(kinds=("cancel_requested",), after=after)
    if not entries:
        return {}, after
    unfinished = set(state.journal.unfinished())
    wanted = {e.run: str(e.body.get("reason", "")) for e in entries if e.run is not None and e.run in unfinished}
    return wanted, entries[-1].id


def _summary(record: RunRecord, status: str, reason: str) -> dict[str, object]:
    asked = record.request
    return {
        "run_id": record.run,
        **{key: asked.get(key) for key in ("method", "params", "rounds", "seed")},
        "status": status,
        "reason": reason,
        "round": record.round,
        "at": utc_now().isoformat(timespec="seconds"),
        "agents": [],
    }
