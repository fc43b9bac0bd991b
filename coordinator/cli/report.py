"""``headwater report``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..report import write_report
from ..serving import load_config
from ..store import StateFolder
from .options import Config, Json, State, print_json, show

Run = Annotated[str | None, typer.Option("--run", help="Run; default: the latest.")]


def report(config: Config = None, state: State = None, run: Run = None, as_json: Json = False) -> None:  # noqa: FBT001, FBT002 - typer options
    """Write a run's page with tables and plots, and say where it is.

    Example: headwater report --config configs/coordinator.toml --run run-0001
    """
    folder = StateFolder(load_config(config, state).state)
    chosen = folder.run(run) if run else folder.latest_run()
    path = write_report(chosen)
    if as_json:
        print_json({"run_id": chosen.run, "report": str(path), "summary": chosen.summary()})
    else:
        show(str(path))
