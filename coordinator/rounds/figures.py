"""The figures of a round: its time, its bytes, and its line in ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet.collection import Collection
from ..journal.entries import LateUpdate, RoundClosed
from ..journal.store import facts_of
from ..state.run_lines import Excluded, RoundLine
from ..views.runs import OpenRound
from .aggregation import notes
from .context import RunContext


@dataclass(frozen=True)
class RoundCosts:
    """What a round has cost, as `RoundClosed` has it under the same names."""

    seconds: float
    """From sending the tasks to the new state."""

    waiting_s: float
    """Waiting for agents before that."""

    bytes_up: int
    bytes_down: int
    traffic: Mapping[str, tuple[int, int]]
    """Agent -> bytes from it and to it."""

    late: tuple[LateUpdate, ...]
    """Updates of earlier rounds that came during this one."""


@dataclass
class Stats:
    """Time and bytes since the start of a round or a run, and how much of the time was spent waiting for agents."""

    started_at: float
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]
    waiting_s: float = 0.0

    @classmethod
    def begin(cls, context: RunContext, run: str | None = None) -> Stats:
        """Return statistics that count from now on.

        For a ``run`` they include the rounds that earlier processes have closed. What a process did in a round before
        it was killed does not count, nor does the time until the next process.
        """
        stats = cls(context.stopwatch(), dict(context.collector.bytes_from), dict(context.distributor.bytes_to))
        closed = [] if run is None else context.state.journal.entries(run, ("round_closed",))
        for fact in facts_of(closed, RoundClosed):
            stats.started_at -= (fact.seconds or 0.0) + (fact.waiting_s or 0.0)
            for agent, (up, down) in fact.traffic.items():
                stats.bytes_up[agent] = stats.bytes_up.get(agent, 0) - up
                stats.bytes_down[agent] = stats.bytes_down.get(agent, 0) - down
        return stats

    def seconds(self, context: RunContext) -> float:
        """Return the seconds since the start, without waiting for agents."""
        return context.stopwatch() - self.started_at - self.waiting_s

    def traffic(self, context: RunContext, agent: str) -> tuple[int, int]:
        """Return the bytes from an agent and to it since the start."""
        up = context.collector.bytes_from.get(agent, 0) - self.bytes_up.get(agent, 0)
        down = context.distributor.bytes_to.get(agent, 0) - self.bytes_down.get(agent, 0)
        return up, down

    def costs(self, context: RunContext, collection: Collection) -> RoundCosts:
        """Return what only the process that executed the round knows, for its entry in the journal."""
        traffic: dict[str, tuple[int, int]] = {}
        bytes_up = 0
        bytes_down = 0
        for agent in sorted({*context.collector.bytes_from, *context.distributor.bytes_to}):
            up, down = self.traffic(context, agent)
            if up or down:
                traffic[agent] = (up, down)
                bytes_up += up
                bytes_down += down
        return RoundCosts(
            seconds=round(self.seconds(context), 4),
            waiting_s=round(self.waiting_s, 4),
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            traffic=traffic,
            late=tuple(LateUpdate(agent=agent, round=number) for agent, number in collection.late),
        )


def round_line(closed: OpenRound, fact: RoundClosed) -> RoundLine:
    """Return the line of a closed round in ``metrics.jsonl``.

    Args:
        closed: The round with its updates and rejections.
        fact: What is journaled of its end.
    """
    # 1. Whose updates are not in the round, and why: an agent whose own policy refuses the job was not rejected.
    refused: dict[str, str] = {}
    rejected: dict[str, str] = {}
    for agent, rejection in closed.rejected.items():
        group = refused if rejection.is_by_policy else rejected
        group[agent] = rejection.reason
    missing: list[str] = []
    for agent in closed.cohort:
        has_answered = agent in closed.updates or agent in closed.rejected
        # Agents of a buffered round that are at work have their updates in a later one.
        if not has_answered and agent not in fact.busy:
            missing.append(agent)
    # 2. What only some rounds have: updates of earlier rounds, late ones, and accuracies after training.
    stale = sorted(closed.fact.asked.keys() & closed.updates.keys())
    acc = {scope: _metric_by_agent(closed, f"acc.{scope}") for scope in ("global", "personal")}
    acc_after = _metric_by_agent(closed, "acc.after.personal")
    if acc_after:
        acc["after"] = acc_after
    return RoundLine(
        round=closed.round,
        agents=tuple(sorted(closed.updates)),
        missing=tuple(missing),
        rejected=_list_reasons(rejected),
        left_out=_list_reasons({**closed.fact.left_out, **refused}),
        seconds=fact.seconds,
        waiting_s=fact.waiting_s,
        bytes_up=fact.bytes_up,
        bytes_down=fact.bytes_down,
        late=fact.late,
        working=tuple(sorted(fact.busy)),
        work=_metric_by_agent(closed, "work"),
        staleness={agent: closed.round - closed.asked_in(agent) for agent in stale},
        added=tuple(sorted(closed.fact.added)),
        bounded=notes(fact.aggregation),
        restored=fact.restored,
        acc=acc,
        loss=_metric_by_agent(closed, "loss"),
        epsilon=_metric_by_agent(closed, "epsilon"),
        noise_multiplier=fact.noise_multiplier,
    )


def _metric_by_agent(closed: OpenRound, name: str) -> dict[str, float]:
    """Return agent -> a metric of its update, of those that sent it."""
    updates = sorted(closed.updates.items())
    return {agent: update.metrics[name] for agent, update in updates if name in update.metrics}


def _list_reasons(reasons: Mapping[str, str]) -> tuple[Excluded, ...]:
    """Return agents with reasons, sorted by agent."""
    return tuple(Excluded(agent, reason) for agent, reason in sorted(reasons.items()))
