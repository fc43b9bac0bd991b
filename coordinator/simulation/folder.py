"""The folder of a simulation: what it holds, whether that belongs together, and whether it can be gone on with.

Plan and partition are written first, then the journal hears of the run; what clients keep and what the coordinator
stores follows from the journal. So a folder without a run is a beginning, unless there is more in it than that leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_agent.agent.tasks import LAST_ROUND
from edge_agent.config import parse
from edge_agent.errors import StateError, UsageError
from edge_agent.storage import read_json, write_atomic, write_json

from ..state.journal import RunRecord
from ..state.run_request import Weights
from ..state.store import StateFolder
from .duties import kept_in
from .plan import HOW_NOT_WHAT, Plan
from .prepared import WEIGHTS, Prepared

PLAN, PARTITION, CLIENTS = "simulation.json", "partition.json", "clients"

_LOCK = "lock"
_JOURNAL = ("journal.db", "journal.db-journal", "journal.db-shm", "journal.db-wal")
_LEFT_BY_A_BEGINNING = {_LOCK, *_JOURNAL, PLAN, PARTITION, WEIGHTS}
_LEFT_BY_ROUNDS = (CLIENTS, "blobs", "runs")
_MAY_DIFFER = (*HOW_NOT_WHAT, "folder", "data", "weights")
"""Data may be moved: what they hold is told by the partition, and what the weights hold by their hash."""


def planned(folder: Path) -> Plan | None:
    """The plan of the simulation in ``folder``; None where there is none, or one that was torn before it ever began.

    Raises:
        UsageError: there is a file in place of the folder.
        ConfigError: the plan has mistakes.
        StateError: the plan of a run is damaged.
    """
    content = _plan_in(folder)
    return None if content is None else parse(Plan, content, where=str(folder / PLAN))


def check_is_free(folder: Path) -> None:
    """Return quietly where a simulation can begin, or begin once more after it was killed before its run began.

    Raises:
        UsageError: the folder holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not _is_beginning(folder):
        raise UsageError(f"{folder} is not empty and holds no simulation; choose another with --out")


def begin(prepared: Prepared, folder: Path) -> None:
    """Write what a run is gone on with: partition, weights, and the plan last."""
    plan = prepared.plan
    prepared.division.write(folder / PARTITION)
    if plan.weights_place is not None:
        write_atomic(folder / WEIGHTS, plan.weights_place.read_bytes())
    write_json(folder / PLAN, _as_json(plan))


def run_in(state: StateFolder, prepared: Prepared) -> str:
    """The one run of the folder: that of its journal, else a new one.

    Raises:
        UsageError: the run was asked for otherwise than plan and partition say now.
        StateError: the journal was lost, or an older one was put in its place.
    """
    if runs := state.journal.runs():
        record = state.journal.replay(runs[0])
        _check_is_asked_for(state.path, record, prepared)
        _check_is_newest(state.path, record, prepared)
        return runs[0]
    if left := [name for name in _LEFT_BY_ROUNDS if any((state.path / name).glob("*"))]:
        raise StateError(
            f"{state.path}: its journal knows of no run, but there are {', '.join(left)}: it was lost, in a power cut "
            f"perhaps; remove {state.path} to begin anew, or choose another folder with --out"
        )
    weights = Weights.of(state.path / WEIGHTS) if prepared.plan.weights is not None else None
    asked = {
        "plan": _as_json(prepared.plan),
        "partition_sha256": prepared.division.sha256,
        "precision": prepared.settled_precision(),
    }
    return state.journal.request_run(replace(prepared.request(), weights=weights).body() | {"simulation": asked})


def computing_as_begun(state: StateFolder, run: str, prepared: Prepared) -> Prepared:
    """The same, with precision and parameters that the run began with, on whatever machine and version it is resumed.

    The plan tells only parameters that were given; the journal has all of them, as the jobs of clients do.

    Raises:
        ConfigError: the method has no such parameters any more.
    """
    request = state.journal.replay(run).request
    asked = request.get("simulation") or {}
    plan = prepared.plan.model_copy(update={"precision": asked.get("precision", prepared.plan.precision)})
    return replace(prepared, plan=plan).with_params(request["params"])


# --- inside ----------------------------------------------------------------------------------------------------------


def _plan_in(folder: Path) -> dict[str, Any] | None:
    if (file := next((place for place in (folder, *folder.parents) if place.is_file()), None)) is not None:
        raise UsageError(f"{file} is a file; choose another --out")
    try:
        return read_json(folder / PLAN)
    except StateError as error:
        if _is_beginning(folder):
            return None
        raise StateError(
            f"{folder / PLAN}: damaged; put it back from a backup, or remove {folder} to begin anew"
        ) from error


def _is_beginning(folder: Path) -> bool:
    """Whether nothing is there but what is left of a simulation that was killed before its run was asked for."""
    names = {path.name for path in folder.iterdir()}
    left = {name for name in names if not (name.startswith(".") and name.endswith(".tmp"))}
    if _LOCK not in left or not left <= _LEFT_BY_A_BEGINNING:
        return False
    if "journal.db" not in left:
        return True
    with StateFolder(folder).look() as state:
        return state.journal.last_id() == 0


def _as_json(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json", exclude_defaults=True)


def _check_is_asked_for(folder: Path, record: RunRecord, prepared: Prepared) -> None:
    """Runs of earlier versions do not tell what they were asked for."""
    asked = record.request.get("simulation")
    if asked is None:
        return
    begun = parse(Plan, asked["plan"], where=f"the plan in {folder}'s journal")
    if other := list(_differences(begun, prepared.plan)):
        raise UsageError(
            f"{folder}: the run was asked for otherwise than {PLAN} says ({'; '.join(other[:5])}); "
            "put it back as it was, or choose another folder with --out"
        )
    if asked["partition_sha256"] != (now := prepared.division.sha256):
        raise UsageError(
            f"{folder}: {PARTITION} gives clients other samples (hash {now[:16]}) than the run began with "
            f"({asked['partition_sha256'][:16]}); put it back as it was, or choose another folder with --out"
        )


def _differences(begun: Plan, now: Plan) -> Iterator[str]:
    for name in Plan.model_fields:
        before, after = getattr(begun, name), getattr(now, name)
        if name not in _MAY_DIFFER and before != after:
            yield f"{name} {before}, now {after}"


def _check_is_newest(folder: Path, record: RunRecord, prepared: Prepared) -> None:
    """No client can have kept what came out of a round that has not been opened."""
    newest = LAST_ROUND if record.round >= int(record.request["rounds"]) else record.round + 1
    if record.is_over:
        return
    for client in prepared.division.clients:
        kept = kept_in(folder / CLIENTS, client, record.run).rounds()
        if kept and kept[-1] > newest:
            when = "the end" if kept[-1] == LAST_ROUND else f"round {kept[-1]}"
            raise StateError(
                f"{folder}: its journal stands in round {newest}, but client '{client}' has kept something of {when}: "
                f"the journal is an older one; put back the newer one, or remove {folder} to begin anew, or choose "
                "another folder with --out"
            )
