"""A simulation that has finished: whether a folder holds one, and its files, which are read without its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.storage import read_json

from ..state.store import StateFolder
from ..text import counted
from ..views.runs import RunRecord, replay
from .figures import RESULT, Summary
from .plan import Plan
from .setup import read_plan


@dataclass(frozen=True)
class FinishedRun:
    """A run that has finished, with all figures of its files.

    Attributes:
        record: Where the journal says that it stands.
        summary: The content of ``result.json``.
        recorded: The content of the run's ``summary.json``, which has all clients.
    """

    record: RunRecord
    summary: Summary
    recorded: Mapping[str, Any]

    @classmethod
    def find(cls, folder: Path, plan: Plan) -> FinishedRun | None:
        """Return the run in ``folder`` where it has finished as ``plan`` says, and all its files are there.

        None: there is none, it has rounds left, its files are not all there, or it has another name, tags or note now.
        Its settings are not compared.

        Raises:
            UsageError: There is a file instead of the folder.
            StateError: The plan of the run is damaged.
        """
        if read_plan(folder) is None:
            return None
        # Whoever resumes the run says what is wrong with its journal.
        try:
            record = _record_in(folder)
            if record is None or not _has_finished(record, plan):
                return None
            run = cls._read(folder, record)
        except StateError:
            return None
        if run is None or _is_called_otherwise(run.summary, plan):
            return None
        return run

    @classmethod
    def open(cls, folder: Path) -> FinishedRun:
        """Return the run in ``folder``.

        Raises:
            UsageError: There is no simulation, or it has not finished.
            StateError: Files are damaged, or missing.
        """
        record = finished_record(folder)
        run = cls._read(folder, record)
        if run is None:
            raise StateError(
                f"{folder / RESULT}: missing, or not of this run; 'headwater simulate --resume --out {folder}' writes "
                "it again"
            )
        return run

    @classmethod
    def _read(cls, folder: Path, record: RunRecord) -> FinishedRun | None:
        """Return the run with its files; None where ``result.json`` is missing, or of the run before it was continued.

        It is written last, so all other files are there with it.

        Raises:
            StateError: A file is damaged.
        """
        content = read_json(folder / RESULT)
        if not isinstance(content, dict) or content.get("last", {}).get("rounds_done") != record.round:
            return None
        with StateFolder(folder).look() as state:
            recorded = state.run(record.run).summary() or {}
        return cls(record, cast("Summary", content), recorded)


def finished_record(folder: Path) -> RunRecord:
    """Return where the finished run of the simulation in ``folder`` stands.

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
    record = _record_in(folder)
    if record is None or not _has_finished(record, plan):
        closed = 0 if record is None else record.round
        raise UsageError(
            f"{folder}: the simulation has not finished ({closed} of {counted(plan.rounds, 'round')}); "
            f"simulate(..., resume=True) or 'headwater simulate --resume --out {folder}' resumes it"
        )
    return record


def _record_in(folder: Path) -> RunRecord | None:
    """Return where the run of the simulation in ``folder`` stands; None: it was killed before its run began."""
    with StateFolder(folder).look() as state:
        runs = state.journal.runs()
        return replay(state.journal, runs[0]) if runs else None


def _has_finished(record: RunRecord, plan: Plan) -> bool:
    return record.status == "finished" and record.request.rounds == plan.rounds


def _is_called_otherwise(summary: Summary, plan: Plan) -> bool:
    """Return whether what the files say of a run's name, tags and note is not what its plan says now."""
    written = (summary.get("name", ""), summary.get("tags", {}), summary.get("note", ""))
    return written != (plan.name, plan.tags, plan.note)
