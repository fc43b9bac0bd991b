"""What of a simulation goes to its logs: its description, its rounds by the observer, and how it has ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_agent.core.errors import HeadwaterError

from ..loggers.delivery import LogOutcome
from ..loggers.records import RunDescription, RunEnd, Scalar
from ..loggers.run_logs import RunLogs
from ..text import reason_of
from ..views.runs import replay
from .plan import ABOUT, HOW_NOT_WHAT
from .results import spread_of
from .run import Simulation


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
        simulation = self._simulation
        summary = simulation.state.run(simulation.run).summary() or {}
        clients: dict[str, dict[str, float]] = {}
        for agent in summary.get("agents", []):
            scores = agent["acc"].items()
            clients[agent["id"]] = {f"acc.{scope}": float(value) for scope, value in scores if value is not None}
        folder = simulation.state.path
        paths = (folder / "result.json", folder / "curves.svg", simulation.state.run(simulation.run).report_path)
        return self._logs.end(
            RunEnd(
                "finished",
                result["stopped"] or "",
                result["last"]["rounds_done"],
                final_figures(result),
                clients,
                {path.name: path for path in paths},
            )
        )

    def abort(self, error: BaseException) -> None:
        """Log that the run has failed or was stopped; nothing where its result was logged."""
        if self._is_done or self._logs.is_empty:
            return
        reason = str(error) if isinstance(error, HeadwaterError) else reason_of(error)
        closed = replay(self._simulation.state.journal, self._simulation.run).round
        is_failure = isinstance(error, Exception)  # others are Ctrl-C, and exits of the program
        self._logs.abort(RunEnd("failed" if is_failure else "stopped", reason, closed))


@contextlib.contextmanager
def logged(simulation: Simulation, logs: RunLogs) -> Iterator[Ending]:
    """Log a simulation to ``logs`` inside the block, which ends with a call of `Ending.finish`, or with an error."""
    ending = Ending(simulation, logs)
    if not logs.is_empty:
        logs.begin(describe_run(simulation))
        simulation.observer.add(logs.log_round)
    try:
        yield ending
    except BaseException as error:
        ending.abort(error)
        raise


def describe_run(simulation: Simulation) -> RunDescription:
    """Return what logs are told of a simulation before its first round."""
    prepared = simulation.prepared
    plan = prepared.plan
    request = replay(simulation.state.journal, simulation.run).request
    settings = plan.model_dump(mode="json", exclude={"folder", "params", *HOW_NOT_WHAT, *ABOUT}, exclude_none=True)
    params: dict[str, Scalar] = {}
    for name, value in settings.items():
        params |= dict(_flatten(name, value))
    params["clients"] = len(prepared.division.clients)
    params["partition_hash"] = prepared.division.sha256[:16]
    for name, value in prepared.method.all_params().items():
        params |= dict(_flatten(f"params.{name}", value))
    default = f"{plan.method_name}-{Path(plan.partition).stem}-seed{plan.seed}"
    # A run of an earlier version has no id of its own; the folder is unique on this machine.
    uid = request.id or str(simulation.state.path)
    return RunDescription(
        uid=uid,
        name=plan.name or default,
        folder=simulation.state.path.absolute(),
        params=params,
        tags=plan.tags,
        note=plan.note,
    )


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
