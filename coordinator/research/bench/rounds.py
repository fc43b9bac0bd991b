"""Whole rounds: a broker, a coordinator and agents as processes, timed by the coordinator's journal."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from edge_agent.core.errors import MeasuringFailed
from edge_agent.core.task import ImageInput, Task

from ...broker import EmbeddedBroker, MosquittoBroker, SupervisedBroker, find_mosquitto
from ...journal.entries import RunFailed
from ...journal.store import Journal, facts_of
from ...rounds.request import Request
from ...state.status_file import read_status
from ...state.store import StateFolder
from .measuring import RoundPlan, Row, Usage, forget_peak, module, quantile, usage, wait_for
from .workloads import NOOP, TEST_FRACTION, W1_PARAMS, w1_source, w1_task

FEDERATION = "bench"
PROGRAMS = f"{__package__}.workloads"
START_LIMIT_S = 120.0
RUN_LIMIT_S = 1800.0


def request_for(plan: RoundPlan) -> Request:
    """Return the request of the run that is measured."""
    if plan.workload == "w1":
        return Request("fedavg", dict(W1_PARAMS), plan.rounds, 0, w1_task())
    task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="linear")
    return Request(NOOP, {"payload_bytes": plan.payload_bytes}, plan.rounds, 0, task)


@dataclass
class Rounds:
    """The figures of a run over one broker."""

    broker: str
    seconds: list[float]
    """Seconds of each round from the second one on: the first one also opens connections."""

    first_s: float
    coordinator_idle: Usage
    """What the coordinator has used before the run."""

    coordinator_end: Usage
    """What it has used after the run."""

    broker_cpu_s: float
    agent_cpu_s: list[float]
    """CPU seconds of each agent."""

    agent_peak_mb: float
    """The most memory of any agent."""

    def rows(self) -> list[Row]:
        """Return the figures in the order of the table."""
        count = len(self.seconds) + 1
        above = self.coordinator_end.peak_mb - self.coordinator_idle.rss_mb
        cpu = self.coordinator_end.cpu_s - self.coordinator_idle.cpu_s
        return [
            Row("round, median", median(self.seconds), "s"),
            Row("round, 90 %", quantile(self.seconds, 0.9), "s"),
            Row("first round", self.first_s, "s"),
            Row("coordinator idle", self.coordinator_idle.rss_mb, "MB"),
            Row("coordinator peak above idle", above, "MB"),
            Row("coordinator CPU a round", cpu / count, "s"),
            Row("broker CPU a round", self.broker_cpu_s / count, "s"),
            Row("agent CPU a round", sum(self.agent_cpu_s) / len(self.agent_cpu_s) / count, "s"),
            Row("agent peak", self.agent_peak_mb, "MB"),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {"broker": self.broker, "seconds": self.seconds, "figures": [row.as_json() for row in self.rows()]}


def brokers(requested: str) -> list[str]:
    """Return the names of the brokers to measure: the requested one, or for ``all`` those that are installed."""
    if requested != "all":
        return [requested]
    return ["mosquitto", "amqtt"] if find_mosquitto() else ["amqtt"]


def broker(name: str) -> SupervisedBroker:
    """Return a broker on any free port, as a context manager."""
    kind = MosquittoBroker if name == "mosquitto" else EmbeddedBroker
    return kind(federation=FEDERATION)


def measure(plan: RoundPlan, broker_name: str, folder: Path) -> Rounds:
    """Measure a run of ``plan``.

    Raises:
        MeasuringFailed: A process ended, or nothing happened for a long time.
        MissingCapability: The broker is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with broker(broker_name) as running, contextlib.ExitStack() as stack:
        # 1. A coordinator and its agents, each a process.
        url = running.config().names
        path = _coordinator_file(folder, url, plan.agents)
        processes = [
            stack.enter_context(module("coordinator", ["coordinator", "--config", path], folder, module=PROGRAMS))
        ]
        for number in range(plan.agents):
            name = f"agent-{number}"
            path = agent_file(folder, name, url, w1_source(number, plan.agents))
            arguments = ["agent", "--config", path]
            if plan.workload == "w1":
                arguments.append("--train")
            processes.append(stack.enter_context(module(name, arguments, folder, module=PROGRAMS)))
        processes[0].answer()

        def all_present() -> bool:
            fleet = read_status(folder / "coordinator").fleet
            return fleet is not None and fleet.online == plan.agents

        wait_for(all_present, processes, what=f"{plan.agents} agents to connect", limit_s=START_LIMIT_S)
        # 2. What each process uses from the request of the run to its end.
        pids = [running.pid or 0, *(process.pid for process in processes)]
        before = [usage(pid) for pid in pids]
        for pid in pids[1:]:
            forget_peak(pid)
        with StateFolder(folder / "coordinator").look() as state:
            run = state.journal.request_run(request_for(plan).to_fact())
            ends = ("run_finished", "run_failed", "run_cancelled")
            wait_for(
                lambda: bool(state.journal.entries(run=run, kinds=ends)),
                processes,
                what="the run to end",
                limit_s=RUN_LIMIT_S,
            )
            seconds = round_seconds(state.journal, run)
        after = [usage(pid) for pid in pids]
    return Rounds(
        broker=broker_name,
        seconds=seconds[1:],
        first_s=seconds[0],
        coordinator_idle=before[1],
        coordinator_end=after[1],
        broker_cpu_s=after[0].cpu_s - before[0].cpu_s,
        agent_cpu_s=[end.cpu_s - begin.cpu_s for begin, end in zip(before[2:], after[2:], strict=True)],
        agent_peak_mb=max(agent.peak_mb for agent in after[2:]),
    )


def _coordinator_file(folder: Path, url: str, agents: int) -> Path:
    """Write the configuration file of the coordinator, whose rounds wait for all agents, and return its path."""
    path = folder / "coordinator.toml"
    path.write_text(
        f'federation = "{FEDERATION}"\nstate = "coordinator"\nevaluate_every = 0\n\n[broker]\nurl = "{url}"\n\n'
        f'[task]\nclass_names = ["a"]\n\n[cohort]\nmin_agents = {agents}\n\n[round]\nquorum = 1.0\n\n'
        "[export]\nafter_run = false\n",
        encoding="utf-8",
    )
    return path


def agent_file(folder: Path, name: str, url: str, source: str, tier: str = "train") -> Path:
    """Write an agent's configuration file and return its path."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'id = "{name}"\nfederation = "{FEDERATION}"\ntier = "{tier}"\nstate = "{name}"\n\n[broker]\nurl = "{url}"\n\n'
        f'[data]\nsource = "{source}"\ntest_fraction = {TEST_FRACTION:.6f}\n',
        encoding="utf-8",
    )
    return path


def round_seconds(journal: Journal, run: str) -> list[float]:
    """Return the seconds of each round of a finished run, by the times of its entries in the journal.

    Raises:
        MeasuringFailed: The run failed.
    """
    entries = journal.entries(run=run, kinds=("round_opened", "round_closed", "run_failed"))
    failed = facts_of(entries, RunFailed)
    if failed:
        raise MeasuringFailed(f"{run} failed: {failed[0].reason}")
    # A round begins when the one before is closed; the first one when it is opened.
    closed = [datetime.fromisoformat(entry.at) for entry in entries if entry.kind == "round_closed"]
    marks = [datetime.fromisoformat(entries[0].at), *closed]
    return [round((end - begin).total_seconds(), 3) for begin, end in itertools.pairwise(marks)]
