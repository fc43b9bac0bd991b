"""A whole federation in one process: the coordinator's own round loop, its journal, and clients that work in turn.

Nothing sleeps: the clock of leases and deadlines stands still while anybody works, and moves when nobody has anything
to do. A run that was stopped, however, goes on where it stood, and ends in the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent import methods
from edge_agent.config import parse
from edge_agent.data.partition import Division
from edge_agent.errors import RunFailed, UsageError
from edge_agent.methods import Method
from edge_agent.store import read_json, write_json
from edge_agent.task import Task
from edge_agent.training.session import Built
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.messages import Job

from ..config import CoordinatorConfig
from ..request import Request
from ..service import Coordinator
from ..store import StateFolder
from .clients import Crowd, Shared
from .plan import Plan
from .pools import Pools, prepare

__all__ = ["Plan", "Prepared", "Simulation", "open_simulation", "planned"]

FEDERATION = "simulation"
PLAN, PARTITION, CLIENTS = "simulation.json", "partition.json", "clients"
SHORTEST_PAUSE_S = 0.01
LONGEST_ROUND_S = 7 * 86_400.0


class StandingClock:
    """Seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Prepared:
    """Everything that can be wrong has been looked at; nothing has been written."""

    plan: Plan
    method: Method
    pools: Pools
    division: Division
    task: Task
    model: Built

    @classmethod
    def of(cls, plan: Plan, saved: Path | None = None) -> Prepared:
        """Data, partition, method and model of a plan. ``saved``: the partition of a run that is gone on with.

        Raises:
            UsageError: of any kind: names, parameters, data, or things that do not go together.
        """
        import torch

        if plan.threads:
            torch.set_num_threads(plan.threads)
        method = methods.create(plan.method, plan.params)
        pools, division, task = prepare(plan, saved)
        model = Built.of(method, task, seed=plan.seed, device=plan.device)
        return cls(plan, method, pools, division, task, model)

    def request(self) -> Request:
        """The run to ask for."""
        params = self.method.params.model_dump(mode="json")
        plan = self.plan
        return Request(plan.method, params, plan.rounds, plan.seed, self.task, plan.keep_every)

    def config(self, folder: Path) -> CoordinatorConfig:
        """A coordinator that waits for everybody: who cannot deliver in a simulation never will."""
        raw = {
            "federation": FEDERATION,
            "state": folder,
            "task": self.task,
            "cohort": {"fraction": self.plan.fraction},
            "round": {"quorum": 1.0, "max_attempts": 1, "deadline_s": LONGEST_ROUND_S},
            "export": {"after_run": False},
            "evaluate_every": self.plan.evaluate_every,
        }
        return parse(CoordinatorConfig, raw, where="the simulation's coordinator")


class Simulation:
    """One run in one folder, which this process has locked. `step` until `is_over`."""

    def __init__(self, prepared: Prepared, state: StateFolder, run: str) -> None:
        self.prepared, self.state, self.run = prepared, state, run
        self.clock, broker = StandingClock(), MemoryBroker()
        self.coordinator = Coordinator(
            prepared.config(state.path), state, broker.transport(), clock=self.clock, stopwatch=time.perf_counter
        )
        folder, plan = state.path / CLIENTS, prepared.plan
        shared = Shared(
            prepared.pools,
            prepared.division,
            prepared.model,
            folder,
            plan.device,
            evaluate_after=plan.evaluate_after,
            keep_every=plan.keep_every,
        )
        duties = {client: shared.duties(client) for client in prepared.division.clients}
        self.crowd = Crowd(broker, self.coordinator.topics, self.coordinator.distributor, duties)
        self._is_over = False

    def start(self) -> None:
        """Everybody connects."""
        self.coordinator.start()
        self.crowd.start(self.coordinator.roster)

    def close(self) -> None:
        """Leave everything on disk so that it can be gone on with."""
        self.coordinator.close()

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end, good or bad."""
        return self._is_over

    def step(self) -> Job | None:
        """Let everybody say what they have to say, then let one client work; returns the job that it did."""
        while self.coordinator.step(0) or self.crowd.hear():
            pass
        job = self.crowd.work()
        if job is None:
            self._is_over = self.coordinator.loop is None and self.state.journal.replay(self.run).is_over
            self.clock.now += max(SHORTEST_PAUSE_S, self.coordinator.idle_s())
        return job

    def finish(self, watch: Callable[[Job], None] = lambda _: None) -> dict[str, Any]:
        """`step` to the end; ``watch`` hears of each job that was done. Returns the result as JSON.

        Raises:
            RunFailed: it failed; the message says why.
        """
        from .results import result_of

        while not self.is_over:
            job = self.step()
            if job is not None:
                watch(job)
        record = self.state.journal.replay(self.run)
        if record.status != "finished":
            raise RunFailed(f"{self.run} {record.status}: {record.outcome.get('reason', 'no reason was noted')}")
        return result_of(self.state, self.run, self.prepared.plan, self.prepared.division)


@contextlib.contextmanager
def open_simulation(prepared: Prepared, folder: Path) -> Iterator[Simulation]:
    """A started simulation in ``folder``: a new one, or the one that was left there.

    Raises:
        UsageError: the folder holds something else, or a run that has failed.
        StateError: another process works there, or what lies there is damaged.
    """
    is_new = read_json(folder / PLAN) is None
    if is_new and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty and holds no simulation; choose another with --out")
    with StateFolder(folder).open("headwater simulate") as state:
        if is_new:
            prepared.division.write(folder / PARTITION)
            write_json(folder / PLAN, prepared.plan.model_dump(mode="json", exclude_defaults=True))
        runs = state.journal.runs()
        run = runs[0] if runs else state.journal.request_run(prepared.request().body())
        simulation = Simulation(prepared, state, run)
        simulation.start()
        try:
            yield simulation
        finally:
            simulation.close()


def planned(folder: Path) -> Plan | None:
    """The plan of the simulation in ``folder``; None where there is none.

    Raises:
        ConfigError: the file is not a plan.
        StateError: the file is damaged.
    """
    content = read_json(folder / PLAN)
    return None if content is None else parse(Plan, content, where=str(folder / PLAN))
