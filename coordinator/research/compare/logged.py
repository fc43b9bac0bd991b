"""A comparison in the logs of experiments: one parent with its tables, and a child for each method and seed.

It is logged from its record and from the folders of its runs, at any time and as often as wanted: a log knows parent
and runs by their ids, and adds what it lacks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from edge_agent.core.config import parse
from edge_agent.core.errors import StateError
from edge_agent.core.storage import read_json, write_json
from edge_agent.core.task import Frozen

from ...loggers.delivery import LogOutcome
from ...loggers.records import RunDescription, RunEnd
from ...loggers.run_logs import RunLogs, open_parent
from ...simulation.logged import log_finished
from ...text import counted
from .records import Comparison, SeedRun
from .row_statistics import compute_statistics

LOG_ID = "log-id.json"
"""File in the folder of a comparison with the id and the name by which logs know it."""

SHOWN = (".md", ".tex", ".csv", ".parquet", ".html", ".svg")
"""Suffixes of the files of a comparison that people read."""


class LogIdentity(Frozen):
    """The id and the name of a comparison in logs, which stay when methods are added and its title changes.

    Logs that are folders, and the groups of W&B, are named by both.
    """

    id: str
    name: str = Field("", description="its title when it was first logged; empty in files of earlier versions")


def check_logs(choices: Sequence[str], folder: Path) -> None:
    """Return quietly where a comparison in ``folder`` can be logged; called before its first simulation.

    Raises:
        HeadwaterError: A choice names no log, or one that cannot be used.
    """
    RunLogs.open(tuple(choices), folder)


def log_comparison(choices: Sequence[str], comparison: Comparison, folder: Path) -> list[LogOutcome]:
    """Log a comparison as it is now, and return what the logs have: first of the parent, then of each run.

    Runs that have failed, or are not over, are left out.

    Args:
        choices: Names as behind ``--log``.
        comparison: What has been found so far.
        folder: The folder of the comparison, whose tables and page are logged with the parent.

    Raises:
        HeadwaterError: A choice names no log, or one that cannot be used.
    """
    identity = _read_log_identity(folder, comparison.title)
    description = RunDescription(
        identity.id,
        identity.name,
        folder.absolute(),
        {
            "data": ", ".join(comparison.data),
            "partition": comparison.partition,
            "clients": comparison.clients,
            "rounds": comparison.rounds,
            "seeds": ", ".join(map(str, comparison.seeds)),
            "trials": comparison.trials,
            "search": comparison.search,
            "command": comparison.command,
        },
    )
    parent = open_parent(choices, description)
    outcomes = list[LogOutcome]()
    for name, kind, run in _runs_of(comparison):
        logs = RunLogs.open(parent.child, folder)
        tags = {"method": name, "parameters": kind}
        try:
            outcomes += log_finished(folder / run.folder, logs, name=f"{name}, seed {run.seed}", tags=tags)
        except StateError as error:
            outcomes.append(
                LogOutcome("the logs", str(folder / run.folder), 0, 0, is_complete=False, reason=str(error))
            )
    artefacts = {path.name: path for path in sorted(folder.iterdir()) if path.suffix in SHOWN and path.is_file()}
    return [*parent.end(RunEnd("finished", figures=_figures(comparison), artefacts=artefacts)), *outcomes]


def describe_logs(outcomes: Sequence[LogOutcome], parents: int) -> Iterator[str]:
    """Yield lines about what `log_comparison` has logged: the parents, how many runs, and each that lacks something.

    Args:
        outcomes: What it has returned.
        parents: How many of them, the first ones, are of parents: one for each log.
    """
    yield from (outcome.describe() for outcome in outcomes[:parents])
    of_runs = outcomes[parents:]
    complete = [outcome for outcome in of_runs if outcome.is_complete]
    if complete:
        yield f"and {counted(len(complete), 'run')} below"
    yield from (outcome.describe() for outcome in of_runs if not outcome.is_complete)


def _runs_of(comparison: Comparison) -> Iterator[tuple[str, str, SeedRun]]:
    """Yield (name of the row, which parameters, run) of all runs that have a result and a folder."""
    for method in comparison.methods:
        for kind, runs in (("chosen", method.runs), ("defaults", method.untuned)):
            for run in runs:
                if run.folder and not run.failure:
                    yield method.name, kind, run


def _figures(comparison: Comparison) -> dict[str, float]:
    """Return the figures of each row, means over its seeds, such as ``fedper.worst_tenth``."""
    figures: dict[str, float] = {}
    for row in compute_statistics(comparison).rows:
        for name in ("client_mean", "pooled_mean", "worst_tenth"):
            estimate = getattr(row, name)
            if estimate is not None:
                figures[f"{row.name}.{name}"] = estimate.mean
        figures[f"{row.name}.cpu_hours"] = row.costs.trial_hours + row.costs.run_hours
    return figures


def _read_log_identity(folder: Path, title: str) -> LogIdentity:
    """Return by which id and name logs know the comparison in a folder; it gets both when it is first logged."""
    path = folder / LOG_ID
    content = read_json(path)
    identity = LogIdentity(id=secrets.token_hex(16))
    if content is not None:
        identity = parse(LogIdentity, content, where=str(path))
    if not identity.name:
        identity = identity.model_copy(update={"name": title})
        write_json(path, identity.model_dump())
    return identity
