"""Simulated rounds of workload W1 on this machine: seconds, CPU and memory of all processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edge_agent.client import choose_device
from edge_agent.core.capabilities import cores
from edge_agent.core.errors import MeasuringFailed

from ...simulation.engines.stacked import device_name
from ...simulation.plan import Plan
from ...simulation.run import Simulation, open_simulation
from ...simulation.setup import Prepared
from .measuring import Row, SimulationSize, usage
from .workloads import FASHION, W1_ENCODER, W1_PARAMS, has_fashion, register

SETUP = (f"{__package__}.workloads:register",)


@dataclass(frozen=True)
class Timed:
    """What was measured of the rounds of one method."""

    method: str
    clients: int
    plain: tuple[tuple[float, float], ...]
    """(Wall, CPU) seconds of each round without evaluation."""

    evaluated: tuple[tuple[float, float], ...]
    """(Wall, CPU) seconds of each round with evaluation; each follows the round without at the same place."""

    memory_mb: float | None
    """Memory of all processes in MB; None where the system does not say."""

    engine: dict[str, Any]
    """What the engine says of itself, as JSON."""

    def rows(self) -> Iterator[Row]:
        """Yield the figures. The ratio is the median of those of rounds that came one after the other."""
        wall_s = median(wall for wall, _ in self.plain)
        cpu_s = median(cpu for _, cpu in self.plain)
        ratios = list[float]()
        for (_, cpu_evaluated), (_, cpu_plain) in zip(self.evaluated, self.plain, strict=True):
            ratios.append(cpu_evaluated / cpu_plain)
        yield Row(f"{self.method}: round", wall_s, "s")
        yield Row(f"{self.method}: clients trained a second", self.clients / wall_s, "1/s")
        yield Row(f"{self.method}: CPU of a round, all processes", cpu_s, "s")
        yield Row(f"{self.method}: CPU of a round with evaluation over one without", median(ratios), "x")
        if self.memory_mb is not None:
            yield Row(f"{self.method}: memory of all processes", self.memory_mb, "MB")


def report(size: SimulationSize, folder: Path) -> dict[str, Any]:
    """Return the seconds of each round, and the figures as ``rows``.

    Raises:
        DataError: There is no such device.
        MeasuringFailed: A run ended while it was measured.
    """
    device = "cpu"
    workers = worker_count(size)
    if size.is_stacked:
        device = device_name(choose_device(size.device))
        workers = 1
    source = data_source(folder, size)
    seconds = {}
    engines = {}
    rows = list[Row]()
    for method in size.methods:
        timed = measure(method, source, size, folder / method)
        seconds[method] = {"plain": _wall_seconds(timed.plain), "evaluated": _wall_seconds(timed.evaluated)}
        engines[method] = timed.engine
        rows.extend(timed.rows())
    return {
        "data": source.partition("?")[0],
        "device": device,
        "workers": workers,
        "seconds": seconds,
        "engine": engines,
        "rows": rows,
    }


def _wall_seconds(rounds: Sequence[tuple[float, float]]) -> list[float]:
    """Return the wall seconds of rounds as JSON has them: four decimals."""
    return [round(wall, 4) for wall, _ in rounds]


def worker_count(size: SimulationSize) -> int:
    """Return the number of workers of engine ``pool``: as many as cores where no number is given."""
    return min(size.workers or cores(), size.clients)


def data_source(folder: Path, size: SimulationSize) -> str:
    """Return the data source Fashion-MNIST, or one of random images in ``folder`` where that is not installed."""
    if has_fashion():
        return f"idx:{FASHION}"
    rng = np.random.default_rng(0)
    count = max(4 * size.samples, 1000) // 10 * 10
    images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    path = folder / "random.npz"
    np.savez(path, inputs=images, labels=np.arange(count) % 10, class_names=np.array(list("0123456789")))
    return f"npz:{path}"


def plan_for(method: str, source: str, size: SimulationSize) -> Plan:
    """Return the plan of the simulation: it has more rounds than are measured, and is closed when enough are timed."""
    params = dict(W1_PARAMS) if method == "fedavg" else {**W1_PARAMS, "weight_decay": 5e-4}
    engine = {"engine": "pool", "workers": worker_count(size), "device": "cpu"}
    if size.is_stacked:
        engine = {"engine": "stacked", "device": size.device, "threads": 1}
    return Plan.model_validate(
        {
            "method": method,
            "params": params,
            "data": (source,),
            "partition": "fedpac",
            "clients": size.clients,
            "size": size.samples,
            "rounds": 1_000_000,
            "encoder": W1_ENCODER,
            "evaluate_every": 0,
            **engine,
        }
    )


def measure(method: str, source: str, size: SimulationSize, folder: Path) -> Timed:
    """Time rounds without and with evaluation in turns, after one of each that does not count.

    Raises:
        MeasuringFailed: A run ended while it was measured.
    """
    register()
    prepared = Prepared.of(plan_for(method, source, size))
    if not size.is_stacked:
        prepared = prepared.shared()
    evaluating = replace(prepared, plan=prepared.plan.model_copy(update={"evaluate_every": 1}))
    folder.mkdir(parents=True)
    memory_mb = None
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(open_simulation(prepared, folder / "plain", SETUP))
        timed_round(plain)
        with contextlib.suppress(OSError):
            memory_mb = sum(map(proportional_mb, (os.getpid(), *plain.engine.pids)))
        evaluated = stack.enter_context(open_simulation(evaluating, folder / "evaluating", SETUP))
        timed_round(evaluated)
        # In turns, so that whatever else this machine does slows both kinds of rounds.
        plain_rounds = []
        evaluated_rounds = []
        for _ in range(size.rounds):
            plain_rounds.append(timed_round(plain))
            evaluated_rounds.append(timed_round(evaluated))
        engine = dict(plain.engine.figures.get("stacked", {}))
    return Timed(method, size.clients, tuple(plain_rounds), tuple(evaluated_rounds), memory_mb, engine)


def timed_round(simulation: Simulation) -> tuple[float, float]:
    """Return the (wall, CPU) seconds from handing out the work of a round to handing out that of the next one.

    Raises:
        MeasuringFailed: The run ended.
    """
    simulation.talk()
    pids = (os.getpid(), *simulation.engine.pids)
    begin = time.perf_counter()
    cpu_s = sum(usage(pid).cpu_s for pid in pids)
    number = simulation.open_round
    while simulation.open_round == number:
        if simulation.is_over:
            raise MeasuringFailed("the simulated run ended while it was measured")
        simulation.work()
        simulation.talk()
    return time.perf_counter() - begin, sum(usage(pid).cpu_s for pid in pids) - cpu_s


def proportional_mb(pid: int) -> float:
    """Return the memory of a process in MB (10^6 bytes); of pages shared with others, its share.

    Raises:
        OSError: There is no such process, or this system does not provide the figure.
    """
    for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"process {pid}: no proportional set size in /proc")
