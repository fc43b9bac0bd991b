"""What a round took and brought: one line of a run's figures, which the journal can give again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..fleet.transfers import Collection
from ..state.journal import Accepted, Journal, OpenRound, RunRecord, step
from ..state.store import StateFolder
from .context import RunContext

FIGURES = ("seconds", "waiting_s", "bytes_up", "bytes_down", "late")
"""What only the process that did the round knows; it goes into the journal with the round's end."""


@dataclass
class RoundStats:
    """Time and bytes at the start of a round, and how much of the time went by in waiting for agents to come."""

    started_at: float
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]
    waiting_s: float = 0.0

    @classmethod
    def begin(cls, context: RunContext) -> RoundStats:
        """As they stand now."""
        return cls(context.stopwatch(), dict(context.collector.bytes_from), dict(context.distributor.bytes_to))

    def traffic(self, context: RunContext) -> dict[str, list[int]]:
        """Bytes up and down since then, by agent."""
        up, down = context.collector.bytes_from, context.distributor.bytes_to
        return {
            agent: [up.get(agent, 0) - self.bytes_up.get(agent, 0), down.get(agent, 0) - self.bytes_down.get(agent, 0)]
            for agent in sorted({*up, *down})
        }

    def figures(self, context: RunContext, collection: Collection) -> dict[str, Any]:
        """The round's `FIGURES`: ``seconds`` from sending out the work to the end, ``waiting_s`` before that.

        Beside them ``traffic``: the bytes of each agent.
        """
        traffic = {agent: moved for agent, moved in self.traffic(context).items() if any(moved)}
        return {
            "seconds": round(context.stopwatch() - self.started_at - self.waiting_s, 4),
            "waiting_s": round(self.waiting_s, 4),
            "bytes_up": sum(up for up, _ in traffic.values()),
            "bytes_down": sum(down for _, down in traffic.values()),
            "traffic": traffic,
            "late": [{"agent": agent, "round": number} for agent, number in collection.late],
        }


@dataclass(frozen=True)
class RunStats:
    """What a run takes, from its start on: rounds that earlier processes have closed are in it.

    What a process did in a round before it was killed is nowhere, and the time until the next one came does not count.
    """

    earlier_s: float
    earlier: Mapping[str, tuple[int, int]]
    now: RoundStats

    @classmethod
    def begin(cls, context: RunContext, run: str) -> RunStats:
        """State when this process starts or resumes the run."""
        seconds, earlier = 0.0, dict[str, tuple[int, int]]()
        for entry in context.state.journal.entries(run, ("round_closed",)):
            seconds += entry.body.get("seconds", 0.0) + entry.body.get("waiting_s", 0.0)
            for agent, (up, down) in entry.body.get("traffic", {}).items():
                before = earlier.get(agent, (0, 0))
                earlier[agent] = (before[0] + up, before[1] + down)
        return cls(seconds, earlier, RoundStats.begin(context))

    def seconds(self, context: RunContext) -> float:
        """Time at work on the run."""
        return self.earlier_s + context.stopwatch() - self.now.started_at

    def traffic(self, context: RunContext, agent: str) -> tuple[int, int]:
        """Bytes that came from an agent and that went to it."""
        (up, down), (more_up, more_down) = self.earlier.get(agent, (0, 0)), self.now.traffic(context).get(agent, (0, 0))
        return up + more_up, down + more_down


def round_record(
    number: int,
    figures: Mapping[str, Any],
    accepted: Mapping[str, Accepted],
    rejected: Mapping[str, str],
    missing: tuple[str, ...],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """The round's line in ``metrics.jsonl``."""
    return {
        "kind": "round",
        "round": number,
        **{name: figures.get(name) for name in FIGURES},
        "agents": sorted(accepted),
        "missing": list(missing),
        "rejected": [{"agent": agent, "reason": why} for agent, why in sorted(rejected.items())],
        "left_out": [{"agent": agent, "reason": why} for agent, why in sorted(left_out.items())],
        "acc": {scope: _metric(accepted, f"acc.{scope}") for scope in ("global", "personal")},
        "loss": _metric(accepted, "loss"),
    }


def restore(state: StateFolder, run: str) -> None:
    """Put the lines of closed rounds that ``metrics.jsonl`` lacks into it: a kill came between journal and figures.

    Raises:
        StateError: the figures that are there are damaged.
    """
    closed = {entry.round for entry in state.journal.entries(run, ("round_closed",)) if entry.round is not None}
    if not closed:
        return
    folder = state.run(run)
    there = {record.get("round") for record in folder.metrics() if record.get("kind") == "round"}
    for number in sorted(closed - there):
        folder.append_metrics(_from_journal(state.journal, run, number))


def _from_journal(journal: Journal, run: str, number: int) -> dict[str, Any]:
    record, figures = RunRecord(run, {}, round=number - 1), dict[str, Any]()
    for entry in journal.entries(run, round=number):
        if entry.kind == "round_closed":
            figures = entry.body
            break  # what comes after it was late
        record = step(record, entry)
    opened = record.open_round or OpenRound(number, 1, (), {})
    missing = tuple(a for a in opened.cohort if a not in opened.updates and a not in opened.rejected)
    return round_record(number, figures, opened.updates, opened.rejected, missing, opened.body.get("left_out", {}))


def _metric(accepted: Mapping[str, Accepted], name: str) -> dict[str, float]:
    return {agent: update.metrics[name] for agent, update in sorted(accepted.items()) if name in update.metrics}
