"""How fast blobs go down to agents and up from them, what it costs whom, and a plain TCP loop of the same run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yardstick_tcp as tcp

from coordinator.research.bench.measuring import Measured, forget_peak, module, rounded, usage
from coordinator.research.bench.rounds import FEDERATION, PROGRAMS, agent_file, broker

DIRECTIONS = ("broadcast", "upload")


@dataclass(frozen=True)
class Leg:
    """One direction over one broker. MB/s count what all agents together got or sent, CPU seconds one transfer."""

    broker: str
    direction: str
    mb_per_s: float
    of_tcp: float
    cpu_s: dict[str, float]
    peak_mb: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        numbers = {"mb_per_s": rounded(self.mb_per_s), "of_tcp": rounded(self.of_tcp)}
        cpu, peak = ({who: rounded(value) for who, value in of.items()} for of in (self.cpu_s, self.peak_mb))
        return {"broker": self.broker, "direction": self.direction, **numbers, "cpu_s": cpu, "peak_mb": peak}


@dataclass(frozen=True)
class _Measure:
    hub: Measured
    agents: list[Measured]
    broker_pid: int
    delivered_mb: float
    repeats: int

    def leg(self, name: str, direction: str, tcp_s: float) -> Leg:
        """One direction: one transfer to warm up, then so many that count."""
        self._transfer(direction)
        pids = (self.broker_pid, self.hub.pid, *(agent.pid for agent in self.agents))
        for pid in pids:
            forget_peak(pid)
        before = [usage(pid) for pid in pids]
        seconds = median([self._transfer(direction) for _ in range(self.repeats)])
        after = [usage(pid) for pid in pids]
        return Leg(
            name,
            direction,
            self.delivered_mb / seconds,
            tcp_s / seconds,
            _by_role([(b.cpu_s - a.cpu_s) / self.repeats for a, b in zip(before, after, strict=True)], total=True),
            _by_role([one.peak_mb for one in after], total=False),
        )

    def _transfer(self, direction: str) -> float:
        self.hub.send(direction)
        return float(json.loads(self.hub.answer()))


def measure(agents: int, size_bytes: int, brokers: list[str], folder: Path, repeats: int = 3) -> dict[str, Any]:
    """TCP's figures and those of both directions over each broker.

    Raises:
        MeasuringFailed: a process ended.
        MissingCapability: a broker is not installed.
    """
    delivered = agents * size_bytes / 1e6
    runs = [tcp.seconds(agents, size_bytes, folder / "tcp") for _ in range(repeats)]
    best = {direction: median([run[place] for run in runs]) for place, direction in enumerate(DIRECTIONS)}
    legs = [leg for name in brokers for leg in _over(name, agents, size_bytes, best, folder / name, repeats)]
    return {
        "agents": agents,
        "payload_bytes": size_bytes,
        "tcp_mb_per_s": {direction: rounded(delivered / seconds) for direction, seconds in best.items()},
        "legs": [leg.as_json() for leg in legs],
    }


def _over(name: str, agents: int, size: int, tcp_s: dict[str, float], folder: Path, repeats: int) -> list[Leg]:
    folder.mkdir(parents=True, exist_ok=True)
    with broker(name) as running, contextlib.ExitStack() as stack:
        files = [agent_file(folder, f"agent-{n}", running.url, "npz:none") for n in range(agents)]
        started = [
            stack.enter_context(module(file.stem, ["agent", "--config", file], folder, module=PROGRAMS))
            for file in files
        ]
        arguments = [running.url, FEDERATION, folder / "hub", agents, size]
        hub = stack.enter_context(module("hub", arguments, folder, module="yardstick_hub", environment=tcp.ENVIRONMENT))
        hub.answer()
        measure = _Measure(hub, started, running.pid or 0, agents * size / 1e6, repeats)
        return [measure.leg(name, direction, tcp_s[direction]) for direction in DIRECTIONS]


def _by_role(values: list[float], *, total: bool) -> dict[str, float]:
    """Broker, coordinator, and the agents: their sum, or the largest of them."""
    of_agents = sum(values[2:]) if total else max(values[2:])
    return {"broker": values[0], "coordinator": values[1], "agents": of_agents}
