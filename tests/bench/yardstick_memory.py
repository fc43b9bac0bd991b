"""Memory of a simulation against its number of clients: as much work for few clients as for many.

Each measurement has its own process, as what an earlier one has left behind would count with the next one. The
most memory of all comes when several workers and the coordinator are at their peaks together, so the more is done, the
more of that is seen. Few clients therefore train so many rounds that they send as many updates as the many.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coordinator.research.bench.measuring import Row, module, send_line
from coordinator.research.bench.simulate import proportional_mb
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import Simulation, open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.core.capabilities import cores
from edge_agent.core.errors import MeasuringFailed, RunFailed, TrainingFailed

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}
FEW = 4
SAMPLE_EVERY_S = 0.05
ROUNDS = 2
"""Of the many; the few do more."""


def main() -> None:
    """Print the most memory in MB of one simulation: ``FOLDER CLIENTS ROUNDS WORKERS``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("clients", "rounds", "workers"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    send_line(repr(most_mb(arguments.folder, arguments.clients, arguments.rounds, arguments.workers)))


def memory_rows(many: int, workers: int, folder: Path) -> list[Row]:
    """Most memory that a simulation of few and of ``many`` clients with ResNet18 takes, all its processes together.

    Raises:
        MeasuringFailed: a process ended, or the run failed.
    """
    few = min(FEW, many)
    crew = workers or cores()
    folder.mkdir(parents=True)
    one = _in_a_process(folder / "few", few, ROUNDS * max(many // few, 1), crew)
    other = _in_a_process(folder / "many", many, ROUNDS, crew)
    return [
        Row(f"ResNet18, {few} clients: all processes", one, "MB"),
        Row(f"ResNet18, {many} clients: all processes", other, "MB"),
        Row(f"ResNet18, {many} clients over {few}, as many updates", other / one, "x"),
    ]


def _in_a_process(folder: Path, clients: int, rounds: int, workers: int) -> float:
    arguments = (folder, clients, rounds, workers)
    with module(folder.name, arguments, folder.parent, module="yardstick_memory", environment=ENVIRONMENT) as measured:
        return float(measured.answer())


def most_mb(folder: Path, clients: int, rounds: int, workers: int) -> float:
    """Most memory in MB (10^6 bytes) of ``rounds`` with four pictures for each client; shared pages count once.

    Raises:
        MeasuringFailed: the run failed.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    count = 5 * clients
    pictures = rng.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
    labels = np.arange(count) % 2
    np.savez(folder / "pictures.npz", inputs=pictures, labels=labels, class_names=np.array(["a", "b"]))
    plan = Plan(
        data=(f"npz:{folder}/pictures.npz",),
        clients=clients,
        rounds=rounds,
        encoder="resnet18",
        device="cpu",
        engine="pool",
        workers=min(workers, clients),
        evaluate_every=0,
    )
    with open_simulation(Prepared.of(plan).shared(), folder / "run") as simulation, _watched(simulation) as most:
        try:
            simulation.finish()
        except (RunFailed, TrainingFailed) as error:
            raise MeasuringFailed(str(error)) from error
    return most[0]


@contextlib.contextmanager
def _watched(simulation: Simulation) -> Iterator[list[float]]:
    """The most that all processes of a simulation took together, so far: one number, in MB."""
    most = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_EVERY_S):
            with contextlib.suppress(OSError):  # a worker that has just ended
                most[0] = max(most[0], sum(map(proportional_mb, (os.getpid(), *simulation.engine.pids))))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
