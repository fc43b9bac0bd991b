"""How far a simulation has come: a bar with the time that is left on a terminal, else a line for each round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edge_agent.wire.messages import Job

from ..simulation.results import round_of
from ..simulation.run import Simulation
from .options import console

__all__ = ["shown"]


AT_THE_END = 0.25
"""What evaluating a client after the last round costs, measured in its training of a round."""


class _Told:
    """How far a run has come, in trainings of a client; what each client does at the end counts `AT_THE_END`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, plan = simulation, simulation.prepared.plan
        clients = len(simulation.prepared.division.clients)
        share = (plan.fraction + (plan.fraction_max or plan.fraction)) / 2
        self.rounds, self.cohort = plan.rounds, max(1, round(share * (clients - plan.new_clients)))
        self.total = plan.rounds * self.cohort + AT_THE_END * clients
        record = simulation.state.journal.replay(simulation.run)
        self.closed = record.round
        updates = len(record.open_round.updates) if record.open_round is not None else 0
        self.begun = self.done = float(record.round * self.cohort + updates)
        self._began_at = time.monotonic()

    def count(self, job: Job) -> dict[str, Any] | None:
        """Note one more job; the figures of the round before when this is the first of the next one."""
        self.done += 1.0 if job.purpose == "train" else AT_THE_END
        closed = job.round - 1 if job.purpose == "train" else self.rounds
        if closed <= self.closed:
            return None
        self.closed = closed
        simulation = self._simulation
        return round_of(simulation.state, simulation.run, closed, simulation.prepared.division)

    def left_s(self) -> float:
        """Seconds that the rest will take if it goes on like this."""
        done = max(AT_THE_END, self.done - self.begun)
        return (time.monotonic() - self._began_at) / done * (self.total - self.done)


def _words(figures: dict[str, Any]) -> str:
    found = [f"acc.{scope} {acc['clients_mean']:.3f}" for scope, acc in figures["acc"].items()]
    loss = [] if figures["loss"] is None else [f"loss {figures['loss']:.3f}"]
    return ", ".join([*found, *loss])


@contextlib.contextmanager
def shown(simulation: Simulation) -> Iterator[Callable[[Job], None]]:
    """What to call after each job, for as long as the context lasts."""
    told = _Told(simulation)
    if not console.is_terminal:
        yield lambda job: _line(told, told.count(job))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=told.total, completed=int(told.done), words="")

        def watch(job: Job) -> None:
            figures = told.count(job)
            where = f"round {job.round} of {told.rounds}" if job.purpose == "train" else "clients evaluate the end"
            progress.update(bar, completed=told.done, description=where)
            if figures is not None:
                progress.update(bar, words=_words(figures))

        yield watch


def _line(told: _Told, figures: dict[str, Any] | None) -> None:
    if figures is None:
        return
    seconds = "" if figures["seconds"] is None else f"{figures['seconds']:.1f} s; "
    left = f"about {told.left_s():.0f} s left"
    words = f"{_words(figures)}, " if _words(figures) else ""
    console.print(f"round {figures['round']} of {told.rounds}: {words}{seconds}{left}", soft_wrap=True)
