"""Rounds on engine ``stacked`` against a bare loop over the same clients, one after another, on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yardstick_loop as bare_rounds

from coordinator.research.bench import workloads
from coordinator.research.bench.measuring import Row, SimulationSize
from coordinator.research.bench.simulate import data_source, plan_for, timed_round
from coordinator.simulation.engines.stacked import device_name
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.client import choose_device
from edge_agent.core.errors import MeasuringFailed

MANY = 5
"""The second measurement has so many times the clients of the first."""


@dataclass(frozen=True)
class Against:
    """Seconds of each round, ours and the loop's, and what the engine says of itself."""

    clients: int
    ours: tuple[float, ...]
    bare: tuple[float, ...]
    engine: dict[str, Any]

    def rows(self) -> list[Row]:
        """The figures. The ratio is the median of those of rounds that came one after the other."""
        ratio = median([mine / theirs for mine, theirs in zip(self.ours, self.bare, strict=True)])
        name = f"{self.clients} clients"
        return [
            Row(f"{name}: rounds a second, engine stacked", 1 / median(self.ours), "1/s"),
            Row(f"{name}: rounds a second, one client after another", 1 / median(self.bare), "1/s"),
            Row(f"{name}: round over that loop", ratio, "x"),
        ]


def measure(source: str, size: SimulationSize, device: torch.device, folder: Path) -> Against:
    """FedAvg, rounds of ours and of the loop in turns, after one of each that does not count.

    Raises:
        MeasuringFailed: the run ended.
    """
    workloads.register()
    prepared = Prepared.of(
        plan_for("fedavg", source, size.model_copy(update={"engine": "stacked", "device": str(device)}))
    )
    data = {
        client: tuple(torch.from_numpy(array).to(device) for array in (train.inputs, train.labels))
        for client, share in prepared.division.clients.items()
        for train, _ in [prepared.pools.arrays(share)]
    }
    with open_simulation(prepared, folder) as simulation:
        turns = [(_loop_s(data, device), timed_round(simulation)[0]) for _ in range(size.rounds + 1)]
        engine = simulation.engine.figures["stacked"]
    bare, ours = zip(*turns[1:], strict=True)
    return Against(size.clients, ours, bare, engine)


def _loop_s(data: dict[str, Any], device: torch.device) -> float:
    """Seconds until all clients have trained once."""
    start = {name: tensor.to(device) for name, tensor in bare_rounds.fresh_model().state_dict().items()}
    begin = time.perf_counter()
    mean = bare_rounds.one_round(bare_rounds.fedavg, start, data)
    if not all(bool(tensor.isfinite().all()) for tensor in mean.values()):  # waits for the device, too
        raise MeasuringFailed("the bare loop diverged; its time says nothing")
    return time.perf_counter() - begin


def report(size: SimulationSize, folder: Path, device: str = "auto") -> dict[str, Any]:
    """Everything, for as many clients as ``size`` says and for five times as many.

    Raises:
        DataError: no such device.
        MeasuringFailed: a run ended.
    """
    place = choose_device(device)
    source = data_source(folder, size)
    counts = (size.clients, MANY * size.clients)
    found = [measure(source, size.model_copy(update={"clients": n}), place, folder / f"{n}-clients") for n in counts]
    return {
        "data": source.partition("?")[0],
        "device": device_name(place),
        "engine": {str(one.clients): one.engine for one in found},
        "seconds": {str(one.clients): {"ours": one.ours, "bare": one.bare} for one in found},
        "rows": [row for one in found for row in one.rows()],
    }
