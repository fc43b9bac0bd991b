"""Simulated rounds against a bare loop over the same clients, in turns in one run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from yardstick_loop import BareWorkers

from coordinator.research.bench.measuring import Row, SimulationSize
from coordinator.research.bench.simulate import SETUP, plan_for, timed_round, worker_count
from coordinator.research.bench.workloads import register
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared


@dataclass(frozen=True)
class Turns:
    """(wall, CPU) seconds of each round: ours, bare, and bare in processes that keep freed memory, as ours do."""

    method: str
    ours: tuple[tuple[float, float], ...]
    bare: tuple[tuple[float, float], ...]
    keeping: tuple[tuple[float, float], ...]

    def rows(self) -> list[Row]:
        """The figures. Ratios are medians of those of rounds that came one after the other."""
        name = self.method
        return [
            Row(f"{name}: bare loop", median(wall for wall, _ in self.bare), "s"),
            Row(f"{name}: round", median(wall for wall, _ in self.ours), "s"),
            Row(f"{name}: round over bare loop", over(self.ours, self.bare, 0), "x"),
            Row(f"{name}: round over bare loop, CPU of all processes", over(self.ours, self.bare, 1), "x"),
            Row(f"{name}: round over bare loop that keeps freed memory, too", over(self.ours, self.keeping, 0), "x"),
        ]


def over(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], index: int) -> float:
    """Median of the ratios of two series, pair by pair; ``index`` 0 is wall clock, 1 CPU."""
    return median(one[index] / other[index] for one, other in zip(some, others, strict=True))


def measure(method: str, source: str, size: SimulationSize, folder: Path) -> Turns:
    """Rounds of ours and of the bare loop in turns, after one of each that does not count."""
    register()
    prepared = Prepared.of(plan_for(method, source, size)).shared()
    folder.mkdir(parents=True)
    data = {}
    for client, share in prepared.division.clients.items():
        train, _ = prepared.pools.arrays(share)
        data[client] = (train.inputs, train.labels)
    with contextlib.ExitStack() as stack:
        bare = [
            BareWorkers.start(stack, method, data, worker_count(size), folder, keeps_memory=keeps)
            for keeps in (False, True)
        ]
        ours = stack.enter_context(open_simulation(prepared, folder / "plain", SETUP))
        turns = [(timed_round(ours), *(one.timed_round() for one in bare)) for _ in range(size.rounds + 1)]
    return Turns(method, *zip(*turns[1:], strict=True))
