"""``headwater report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.errors import UsageError
from edge_agent.store import write_atomic

from ..report import write_report
from ..report.picture import picture
from ..store import StateFolder
from .options import Config, Json, State, print_json, show, state_path

Run = Annotated[str | None, typer.Option("--run", help="Run; default: the latest.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Also write the devices' accuracies as an SVG to this file.")]


def report(config: Config = None, state: State = None, run: Run = None, svg: Svg = None, as_json: Json = False) -> None:
    """Write a run's page with tables and plots, and say where it is.

    Example: headwater report --state headwater-demo/coordinator
    """
    folder = StateFolder(state_path(config, state))
    if not folder.runs():
        raise UsageError(f"no run in {folder.path} has figures yet; 'headwater run' starts one")
    chosen = folder.run(run) if run else folder.latest_run()
    path = write_report(chosen)
    if svg is not None:
        write_atomic(svg, picture(chosen).encode())
    if as_json:
        print_json({"run_id": chosen.run, "report": str(path), "summary": chosen.summary()})
    else:
        show(str(path))
