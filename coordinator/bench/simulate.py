"""Simulated rounds against a bare loop over the same clients, in turns in one run; and memory against clients."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.errors import MeasuringFailed

from ..simulation.engines.choice import cores
from ..simulation.plan import Plan
from ..simulation.prepared import Prepared
from ..simulation.run import Simulation, open_simulation
from . import w1
from .figures import Row, median
from .memory import memory_rows
from .processes import Measured, answer, module, tell, usage

BUDGETS = {"fedavg": 1.05, "fedpac": 1.25}
EVALUATION_BUDGET = 1.2
SETUP = ("coordinator.bench.w1:register",)


@dataclass(frozen=True)
class Size:
    """How much is measured; the defaults are those of workload W1."""

    clients: int = 20
    samples: int = 600
    rounds: int = 5
    workers: int = 0
    many: int = 100
    """Clients of the measurement of memory; 0 leaves it out."""

    methods: tuple[str, ...] = ("fedavg", "fedpac")
    has_evaluation: bool = True
    """Whether rounds with evaluation are measured, too."""

    @property
    def crew(self) -> int:
        """Workers, as many as cores where nobody says."""
        return min(self.workers or cores(), self.clients)


@dataclass(frozen=True)
class Turns:
    """Seconds of wall clock, and of CPU in all processes, of each round: ours, bare, and ours with evaluation.

    ``keeping`` is the bare loop again, in processes that keep what they free, as ours do.
    """

    method: str
    ours: tuple[tuple[float, float], ...]
    bare: tuple[tuple[float, float], ...]
    keeping: tuple[tuple[float, float], ...]
    evaluated: tuple[tuple[float, float], ...] = ()

    def rows(self) -> list[Row]:
        """The figures. Ratios are medians of those of rounds that came one after the other."""
        name = self.method
        found = [
            Row(f"{name}: bare loop", median([wall for wall, _ in self.bare]), "s"),
            Row(f"{name}: round", median([wall for wall, _ in self.ours]), "s"),
            Row(f"{name}: round over bare loop", over(self.ours, self.bare, 0), "x", BUDGETS.get(name)),
            Row(f"{name}: round over bare loop, CPU of all processes", over(self.ours, self.bare, 1), "x"),
            Row(f"{name}: round over bare loop that keeps freed memory, too", over(self.ours, self.keeping, 0), "x"),
        ]
        if self.evaluated:
            ratio = over(self.evaluated, self.ours, 1)
            found.append(Row(f"{name}: CPU of a round with evaluation over one without", ratio, "x", EVALUATION_BUDGET))
        return found

    def seconds(self) -> dict[str, list[float]]:
        """Wall seconds of each round."""
        kinds = {"ours": self.ours, "bare": self.bare, "keeping": self.keeping, "evaluated": self.evaluated}
        return {kind: [round(wall, 4) for wall, _ in turns] for kind, turns in kinds.items()}


def over(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], place: int) -> float:
    """Median of the ratios of two series, pair by pair; ``place`` 0 is wall clock, 1 CPU."""
    return median([mine[place] / theirs[place] for mine, theirs in zip(some, others, strict=True)])


def data_source(folder: Path, size: Size) -> str:
    """Fashion-MNIST, or random pictures where it is not installed."""
    if w1.has_fashion():
        return f"idx:{w1.FASHION}"
    rng, count = np.random.default_rng(0), max(4 * size.samples, 1000) // 10 * 10
    pictures = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    path = folder / "random.npz"
    np.savez(path, inputs=pictures, labels=np.arange(count) % 10, class_names=np.array(list("0123456789")))
    return f"npz:{path}"


def plan_for(method: str, source: str, size: Size, *, evaluate_every: int = 0) -> Plan:
    """What is simulated: many more rounds than anybody waits for, as the bench decides when it has seen enough."""
    params = dict(w1.PARAMS) if method == "fedavg" else {**w1.PARAMS, "weight_decay": 5e-4}
    return Plan(
        method=method,
        params=params,
        data=(source,),
        partition="fedpac",
        clients=size.clients,
        size=size.samples,
        rounds=1_000_000,
        encoder=w1.ENCODER,
        evaluate_every=evaluate_every,
        device="cpu",
        engine="pool",
        workers=size.crew,
    )


def measure(method: str, source: str, size: Size, folder: Path) -> Turns:
    """Rounds of ours and of the bare loop in turns, after one of each that does not count.

    Raises:
        MeasuringFailed: a process ended.
    """
    w1.register()
    prepared = Prepared.of(plan_for(method, source, size)).shared()
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        bare = [Bare.started(stack, method, prepared, size, folder, keeps=keeps) for keeps in (False, True)]
        ours = [stack.enter_context(open_simulation(prepared, folder / "plain", SETUP))]
        if size.has_evaluation:
            looking = replace(prepared, plan=prepared.plan.model_copy(update={"evaluate_every": 1}))
            ours.append(stack.enter_context(open_simulation(looking, folder / "evaluating", SETUP)))
        turns = [(*(one.timed_round() for one in bare), *map(timed_round, ours)) for _ in range(size.rounds + 1)]
    alone, keeping, mine, *evaluated = zip(*turns[1:], strict=True)
    return Turns(method, mine, alone, keeping, *evaluated)


def timed_round(simulation: Simulation) -> tuple[float, float]:
    """(wall, CPU) seconds from handing out the work of a round to handing out that of the next one.

    Raises:
        MeasuringFailed: the run ended.
    """
    simulation.talk()
    pids = (os.getpid(), *simulation.engine.pids)
    begin, cpu, number = time.perf_counter(), _cpu_s(pids), simulation.open_round
    while simulation.open_round == number:
        if simulation.is_over:
            raise MeasuringFailed("the simulated run ended while it was measured")
        simulation.work()
        simulation.talk()
    return time.perf_counter() - begin, _cpu_s(pids) - cpu


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(usage(pid).cpu_s for pid in pids)


@dataclass(frozen=True)
class Bare:
    """The workers of the bare loop."""

    workers: tuple[Measured, ...]

    @classmethod
    def started(
        cls, stack: contextlib.ExitStack, method: str, prepared: Prepared, size: Size, folder: Path, *, keeps: bool
    ) -> Bare:
        """Workers that have loaded their clients, dealt out in turn (all clients of the workload are alike)."""
        clients = sorted(prepared.division.clients)
        path = folder / "clients.npz"
        np.savez(path, **_arrays(prepared))  # type: ignore[arg-type]
        started = [
            stack.enter_context(
                module(
                    f"bare-{n}{'-keeping' * keeps}",
                    [path, method, *["--keep"] * keeps, *clients[n :: size.crew]],
                    folder,
                    module="coordinator.bench.bare_rounds",
                )
            )
            for n in range(size.crew)
        ]
        for worker in started:
            answer(worker)
        return cls(tuple(started))

    def timed_round(self) -> tuple[float, float]:
        """(wall, CPU) seconds until all clients have trained once."""
        pids = [worker.process.pid for worker in self.workers]
        begin, cpu = time.perf_counter(), _cpu_s(pids)
        for worker in self.workers:
            tell(worker)
        for worker in self.workers:
            answer(worker)
        return time.perf_counter() - begin, _cpu_s(pids) - cpu


def _arrays(prepared: Prepared) -> dict[str, np.ndarray]:
    """Training samples of each client."""
    found: dict[str, np.ndarray] = {}
    for client, share in prepared.division.clients.items():
        train, _ = prepared.pools.arrays(share)
        found |= {f"{client}.x": train.inputs, f"{client}.y": train.labels}
    return found


def report(size: Size, folder: Path) -> dict[str, Any]:
    """Everything: seconds of each round, and the figures."""
    source = data_source(folder, size)
    turns = [measure(method, source, size, folder / method) for method in size.methods]
    rows = [row for one in turns for row in one.rows()]
    if size.many:
        rows += memory_rows(size.many, size.workers, folder / "memory")
    seconds = {one.method: one.seconds() for one in turns}
    return {"data": source.partition("?")[0], "workers": size.crew, "seconds": seconds, "rows": rows}
