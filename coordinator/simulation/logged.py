"""What of a simulation goes to its logs: its description, its rounds by the observer, and how it has ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edge_agent.core.errors import HeadwaterError, StateError
from edge_agent.core.storage import read_json
from edge_agent.data.partition import Division

from ..loggers.delivery import LogOutcome
from ..loggers.records import RunDescription, RunEnd, Scalar
from ..loggers.run_logs import RunLogs
from ..state.store import StateFolder
from ..text import reason_of
from ..views.runs import replay
from .figures import RESULT
from .plan import ABOUT, HOW_NOT_WHAT, Plan
from .results import round_result, spread_of
from .run import Simulation
from .setup import PARTITION, read_plan

NO_TAGS: Mapping[str, str] = MappingProxyType({})


class Ending:
    """The end of a simulation that is logged. Call `finish` with its result."""

    def __init__(self, simulation: Simulation, logs: RunLogs) -> None:
        self._simulation = simulation
        self._logs = logs
        self._is_done = False

    def finish(self, result: Mapping[str, Any]) -> list[LogOutcome]:
        """Log a result, whose files have been written, and return what the logs have."""
        self._is_done = True
        if self._logs.is_empty:
            return []
        return self._logs.end(_end_of(self._simulation.state, self._simulation.run, result))

    def abort(self, error: BaseException) -> None:
        """Log that the run has failed or was stopped; nothing where its result was logged."""
        if self._is_done or self._logs.is_empty:
            return
        closed = 0
        with contextlib.suppress(HeadwaterError, OSError):  # where the journal is what has failed
            closed = replay(self._simulation.state.journal, self._simulation.run).round
        if not isinstance(error, Exception):  # Ctrl-C, or an exit of the program
            self._logs.abort(RunEnd("stopped", "stopped before its end", closed))
            return
        reason = str(error) if isinstance(error, HeadwaterError) else reason_of(error)
        self._logs.abort(RunEnd("failed", reason, closed))


@contextlib.contextmanager
def logged(simulation: Simulation, logs: RunLogs) -> Iterator[Ending]:
    """Log a simulation to ``logs`` inside the block, which ends with a call of `Ending.finish`, or with an error."""
    ending = Ending(simulation, logs)
    if not logs.is_empty:
        prepared = simulation.prepared
        params = prepared.method.all_params()
        logs.begin(describe_run(simulation.state, simulation.run, prepared.plan, prepared.division, params))
        simulation.observer.add(logs.log_round)
    try:
        yield ending
    except BaseException as error:
        ending.abort(error)
        raise


def log_finished(
    folder: Path, logs: RunLogs, *, name: str = "", tags: Mapping[str, str] = NO_TAGS, plan: Plan | None = None
) -> list[LogOutcome]:
    """Log a simulation that is over from what is in its folder, without its data; returns what the logs have.

    Args:
        folder: The folder, which holds a simulation with its result.
        logs: Where it is logged, opened and not begun.
        name: What it is called there; empty: as it was called when it was simulated.
        tags: Tags beside its own.
        plan: Its settings with what it is called now; None: as they are in the folder.

    Raises:
        StateError: The folder holds no result, or is damaged.
    """
    plan = plan or read_plan(folder)
    result = read_json(folder / RESULT)
    if plan is None or result is None:
        raise StateError(f"{folder} holds no simulation that is over; resume it first (headwater simulate --resume)")
    division = Division.read(folder / PARTITION)
    with StateFolder(folder).look() as state:
        run = state.journal.runs()[0]
        params = (state.run(run).summary() or {}).get("params", {})
        description = describe_run(state, run, plan, division, params)
        logs.begin(replace(description, name=name or description.name, tags={**description.tags, **tags}))
        for number in range(1, replay(state.journal, run).round + 1):
            logs.log_round(round_result(state, run, number, division, plan.rounds, is_replayed=True))
        return logs.end(_end_of(state, run, result))


def _end_of(state: StateFolder, run: str, result: Mapping[str, Any]) -> RunEnd:
    """Return how a run has ended that has a result, whose files are written."""
    summary = state.run(run).summary() or {}
    clients: dict[str, dict[str, float]] = {}
    for agent in summary.get("agents", []):
        scores = agent["acc"].items()
        clients[agent["id"]] = {f"acc.{scope}": float(value) for scope, value in scores if value is not None}
    paths = (state.path / RESULT, state.path / "curves.svg", state.run(run).report_path)
    return RunEnd(
        status="finished",
        reason=result.get("stopped") or "",
        round=result["last"]["rounds_done"],
        figures=final_figures(result),
        clients=clients,
        artefacts={path.name: path for path in paths},
    )


def describe_run(
    state: StateFolder, run: str, plan: Plan, division: Division, params: Mapping[str, Any]
) -> RunDescription:
    """Return what logs are told of a simulation before its first round; ``params``: all of the method's."""
    request = replay(state.journal, run).request
    settings = plan.model_dump(mode="json", exclude={"folder", "params", *HOW_NOT_WHAT, *ABOUT}, exclude_none=True)
    shown: dict[str, Scalar] = {}
    for name, value in settings.items():
        shown |= dict(_flatten(name, value))
    shown["clients"] = len(division.clients)
    shown["partition_hash"] = division.sha256[:16]
    for name, value in params.items():
        shown |= dict(_flatten(f"params.{name}", value))
    default = f"{plan.method_name}-{Path(plan.partition).stem}-seed{plan.seed}"
    # A run of an earlier version has no id of its own; the folder is unique on this machine.
    uid = request.id or str(state.path)
    return RunDescription(uid, plan.name or default, state.path.absolute(), shown, plan.tags, plan.note)


def final_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a result after the last round by name, such as ``last.acc.personal.mean``."""
    figures: dict[str, float] = {}
    for scope, scores in result["last"]["acc"].items():
        for name, value in vars(spread_of(scores)).items():
            figures[f"last.acc.{scope}.{name}"] = value
    figures["rounds_done"] = result["last"]["rounds_done"]
    figures["total_seconds"] = result["seconds"]
    return figures


def _flatten(name: str, value: object) -> Iterator[tuple[str, Scalar]]:
    """Yield a setting as values that every log can hold: tables by their keys, lists as JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    elif value is None or isinstance(value, str | int | float | bool):
        yield name, value
    else:
        yield name, json.dumps(value)
