"""``headwater report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.core.errors import UsageError
from edge_agent.core.storage import write_atomic

from ..fleet.release_commands import releases_of_run
from ..report import write_report
from ..report.page import accuracy_svg
from ..runs.result_notes import describe_progress
from ..state.release_rows import ReleaseRow
from ..state.store import StateFolder
from ..views.runs import RunRecord, replay
from .options import Config, Json, RunOption, State, one_of, state_path
from .output import console, present, ready_for

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Default: the latest that has finished.", show_default=False)
]
Svg = Annotated[Path | None, typer.Option("--svg", help="Also write the devices' accuracies as an SVG to this file.")]


def report(
    run: Run = None,
    config: Config = None,
    state: State = None,
    run_option: RunOption = None,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Write a run's page with tables and plots, and say where it is.

    Without RUN it is the latest run that has finished, or else the latest that has figures. Of a run that has not
    finished, the page and a line on stderr say how far it is. Releases of the run's bundle are part of the page: where
    each stands, and what it scored on which device.

    Example: headwater report --state headwater-demo/coordinator
    """
    run = one_of(run, run_option, "RUN")
    folder = StateFolder(state_path(config, state))
    record = None
    releases = list[ReleaseRow]()
    if folder.journal.exists:
        with folder.look():
            record = replay(folder.journal, run) if run else _latest(folder)
            releases = [] if record is None else releases_of_run(folder, record.run)
    if record is None:
        raise UsageError(f"no run in {folder.path} has figures yet; 'headwater run' starts one")
    chosen = folder.run(record.run)
    path = write_report(chosen, record, releases)
    if record.status != "finished":
        console.print(
            f"{record.run} has not finished ({record.status}): it {describe_progress(record)}", soft_wrap=True
        )
    if svg is not None:
        ready_for(svg)
        write_atomic(svg, accuracy_svg(chosen))
    status = {"status": record.status, "round": record.round}
    result = {"run_id": chosen.run, **status, "report": str(path), "summary": chosen.summary()}
    present(result, [str(path)], as_json=as_json)


def _latest(folder: StateFolder) -> RunRecord | None:
    """Return the latest run that has finished; where there is none, the latest with figures."""
    with_figures = {result.run for result in folder.runs()}
    records = [replay(folder.journal, run) for run in folder.journal.runs() if run in with_figures]
    return next(
        (record for record in reversed(records) if record.status == "finished"), records[-1] if records else None
    )
