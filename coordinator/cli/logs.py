"""``headwater logs``: what happened in a run, from the files of its state folder."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_agent.core.children import stop_on_signals
from edge_agent.core.errors import UnknownName

from ..state.store import StateFolder
from ..state.timeline import Timeline
from ..views.timeline import Event, Level
from .options import Config, Json, State, state_path
from .output import present, print_line, show

LOOK_EVERY_S = 0.5

Run = Annotated[str | None, typer.Argument(metavar="RUN", help="Default: the run that was requested last.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over, or Ctrl-C.")]
Agent = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Only what is about this agent.")]
Least = Annotated[Level, typer.Option("--level", help="Least level; debug: every update, too.")]
Last = Annotated[int, typer.Option("--last", min=0, help="Only so many lines, the newest; 0: all.")]


def logs(
    run: Run = None,
    config: Config = None,
    state: State = None,
    follow: Follow = False,
    agent: Agent = None,
    level: Least = "info",
    last: Last = 0,
    as_json: Json = False,
) -> None:
    """Show what happened in a run: rounds, for whom it waited and why, rejected updates, faults, who came and left.

    It is read from the journal and the coordinator's log in the state folder, also after the run, and without a
    coordinator. With --follow and --json each event is one line.

    Example: headwater logs run-0001 --agent porch --level warning
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder, stop_on_signals() as stop:
        runs = folder.journal.runs()
        if run is None and not runs:
            show("no runs yet; 'headwater run' starts one")
            return
        if run is not None and run not in runs:
            raise UnknownName("run", run, runs[-20:])
        timeline = Timeline(folder, run or runs[-1], least=level, agent=agent)
        events = timeline.read_new()
        events = events[-last:] if last else events
        if not follow:
            present(
                {"run": run or runs[-1], "events": [one.body() for one in events]}, map(_line, events), as_json=as_json
            )
            return
        while True:
            for event in events:
                print_line(event.body() if as_json else _line(event))
            if timeline.is_over or stop.wait(LOOK_EVERY_S):
                return
            events = timeline.read_new()


def _line(event: Event) -> str:
    mark = {"warning": " WARNING", "error": " ERROR"}.get(event.level, "")
    return f"{event.at[:19]}Z{mark} {event.text}"
