"""Simulations of a few seconds that are logged, also one that is killed in the middle of a round."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coordinator.api import Watching, finish
from coordinator.loggers.records import RoundResult, Spread
from coordinator.loggers.run_logs import RunLogs
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared

SETTINGS = {
    "clients": 3, "rounds": 4, "encoder": "linear", "encoder_params": {"feature_dim": 4}, "device": "cpu",
    "engine": "serial", "local": False,
}  # fmt: skip
"""What `coordinator.simulate` gets beside a method, data and logs."""


def only(folder: Path) -> Path:
    """Return what is in a folder, which is one thing."""
    (path,) = folder.iterdir()
    return path


def log_simulation(plan: Plan, folder: Path, on_round: Callable[[RoundResult], object] | None = None) -> dict[str, Any]:
    """Return the result of a simulation that is begun, or gone on with, and logged as its plan says."""
    with open_simulation(Prepared.of(plan), folder) as simulation:
        logs = RunLogs.open(plan.log, folder)
        return finish(simulation, folder, Watching(on_round=on_round, logs=logs))


def losses(result: dict[str, Any]) -> list[float]:
    """Return the training loss of each round of a result."""
    return [figures["loss"] for figures in result["rounds"]]


def row_of(number: int) -> RoundResult:
    """Return the figures of a round without a simulation: its loss is its number, as a float."""
    spread = Spread(number / 400, 0.0, 0.0, 0.0, 1)
    return RoundResult(
        number, 400, 1, {"global": spread}, loss=float(number), per_client={"a": {"loss": float(number)}}
    )


_KILLED = """
import os, signal, sys
from pathlib import Path
from coordinator.api import Watching, finish
from coordinator.loggers.run_logs import RunLogs
from coordinator.simulation.client_pool import SimulatedClients
from coordinator.simulation.plan import Plan
from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared

plan = Plan.model_validate_json(sys.argv[1])
folder = Path(sys.argv[2])
work = SimulatedClients.work
done = []

def work_or_die(clients):
    job = work(clients)
    done.extend([job] if job is not None and job.round == 3 else [])
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return job

SimulatedClients.work = work_or_die
with open_simulation(Prepared.of(plan), folder) as simulation:
    logs = RunLogs.open(plan.log, folder)
    finish(simulation, folder, Watching(on_round=lambda _: logs.flush(), logs=logs))
"""


def kill_in_round_3(plan: Plan, folder: Path) -> None:
    """Simulate in another process, which is killed when two clients have trained in round 3; two rounds are logged."""
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, plan.model_dump_json(), str(folder)],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@contextlib.contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """Inside, no file of this process becomes larger: writes take a part and then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
