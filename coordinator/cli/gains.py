"""``headwater gains``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.errors import UsageError

from ..runs.gains import Comparison, NamedRun, Step, compare_runs, describe_comparison
from ..runs.run_summary import RunSummary
from ..state.noise import Gain
from ..state.store import StateFolder
from ..text import counted
from .options import Config, Json, State, state_path
from .output import present, table

if TYPE_CHECKING:
    from rich.table import Table

Steps = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN|FOLDER]...",
        help="Runs of the state folder, or folders of simulations, in the order in which they were made; default: all "
        "finished runs of the state folder.",
        show_default=False,
    ),
]


def gains(
    steps: Steps = None,
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show what each step has brought the devices: alone, the first run, the next run.

    The accuracies are those that the devices report on their own held-out samples. Only devices with figures in every
    step count, so that all steps are measured on the same samples; a difference within noise is said to be one.

    Example: headwater gains run-0001 run-0002

    Example: headwater gains analytic-simulation full-simulation
    """
    runs = [_find_run(step, config, state) for step in steps or ()]
    if not steps:
        runs = _finished_runs(state_path(config, state))
    comparison = compare_runs(runs)
    lines = describe_comparison(comparison)
    present(comparison.to_json(), [_steps_table(comparison), *lines], as_json=as_json)


def _find_run(step: str, config: Path | None, state: Path | None) -> NamedRun:
    """Return the finished run that an argument names: that of a simulation's folder, or one of the state folder.

    Raises:
        UsageError: The argument names no run that has finished.
    """
    # 1. The folder of a simulation has one run.
    if Path(step).is_dir():
        finished = _finished_runs(Path(step))
        return NamedRun(step, finished[-1].summary, is_simulated=True)
    # 2. Anything else is a run of the state folder.
    path = state_path(config, state)
    finished = _finished_runs(path)
    for run in finished:
        if run.name == step:
            return run
    names = ", ".join(run.name for run in finished[-5:])
    raise UsageError(f"{step}: neither a folder nor a finished run of {path}; finished runs there: {names}")


def _finished_runs(path: Path) -> list[NamedRun]:
    """Return the runs of a state folder that have a summary, in the order in which they were requested.

    Raises:
        UsageError: No run of the folder has finished.
    """
    folder = StateFolder(path)
    runs = []
    if folder.journal.exists:
        for result in folder.runs():
            summary = result.summary()
            if summary is not None:
                runs.append(NamedRun(result.run, RunSummary.from_json(summary)))
    if not runs:
        raise UsageError(f"{path} has no finished run; 'headwater run' and 'headwater simulate' make one")
    return runs


def _steps_table(comparison: Comparison) -> Table:
    """Return a table with one row for each step; the row of a gain within noise is grey."""
    columns = ("step", "method", "rounds", "accuracy,\nmean", "gain,\npoints")
    counts = ("devices\nbetter", "as\ngood", "\nworse", "MB for\neach", "s")
    title = f"What each step has brought {counted(len(comparison.devices), 'device')}"
    result = table(title, (*columns, *counts), [_row(step) for step in comparison.steps], left=2)
    for row, step in zip(result.rows, comparison.steps, strict=True):
        if step.gain is not None and step.gain.verdict is Gain.WITHIN:
            row.style = "bright_black"
    return result


def _row(step: Step) -> tuple[object, ...]:
    """Return the cells of a step; the devices alone have neither a gain nor traffic."""
    gain = step.gain
    if gain is None:
        return (step.name, "", "", step.accuracy, "", "", "", "", "", "")
    return (
        step.name,
        step.method,
        step.rounds,
        step.accuracy,
        f"{100 * gain.mean:+.1f}",
        gain.better,
        gain.as_good,
        gain.worse,
        f"{step.bytes_each / 1e6:.1f}",
        f"{step.seconds:.0f}",
    )
