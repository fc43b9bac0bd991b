"""``headwater gains``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.errors import UsageError

from ..runs.gains import NamedRun, Way, compare_runs, describe_way
from ..runs.run_summary import RunSummary
from ..state.noise import Gain
from ..state.store import StateFolder
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
    runs = [_run_of(step, config, state) for step in steps] if steps else _finished(state_path(config, state))
    way = compare_runs(runs)
    present(way.to_json(), [_steps_table(way), *describe_way(way)], as_json=as_json)


def _run_of(step: str, config: Path | None, state: Path | None) -> NamedRun:
    """Return the run that an argument names.

    Raises:
        UsageError: It names no run that has finished.
    """
    # 1. The folder of a simulation has one run.
    if Path(step).is_dir():
        finished = _finished(Path(step))
        return NamedRun(step, finished[-1].summary, is_simulated=True)
    # 2. Anything else is a run of the state folder.
    path = state_path(config, state)
    finished = _finished(path)
    for run in finished:
        if run.name == step:
            return run
    names = ", ".join(run.name for run in finished[-5:])
    raise UsageError(f"{step}: neither a folder nor a finished run of {path}; finished runs there: {names}")


def _finished(path: Path) -> list[NamedRun]:
    """Return the runs of a state folder that have a summary, in order.

    Raises:
        UsageError: There is none.
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


def _steps_table(way: Way) -> Table:
    """Return one row for each step; a gain within noise is grey."""
    rows = []
    for step in way.steps:
        gain = step.gain
        rows.append(
            (
                step.name,
                step.method,
                step.rounds or "",
                step.accuracy,
                "" if gain is None else f"{100 * gain.mean:+.1f}",
                *(("", "", "") if gain is None else (gain.better, gain.as_good, gain.worse)),
                f"{step.bytes_each / 1e6:.1f}" if step.method else "",
                f"{step.seconds:.0f}" if step.method else "",
            )
        )
    columns = ("step", "method", "rounds", "accuracy,\nmean", "gain,\npoints")
    devices = ("devices\nbetter", "as\ngood", "\nworse")
    title = f"What each step has brought {len(way.devices)} devices"
    result = table(title, (*columns, *devices, "MB for\neach", "s"), rows, left=2)
    _grey_within_noise(result, way)
    return result


def _grey_within_noise(shown: Table, way: Way) -> None:
    """Let the rows of steps whose gain is within noise be grey."""
    for row, step in zip(shown.rows, way.steps, strict=True):
        if step.gain is not None and step.gain.verdict is Gain.WITHIN:
            row.style = "bright_black"
