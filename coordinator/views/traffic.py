"""Bytes that were moved for each agent, as far as the journal says: in closed rounds, and at the ends of runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..journal.entries import ReleaseReported, RoundClosed
from ..journal.store import Entry


@dataclass
class RunTraffic:
    """The bytes of one agent in one run, in one direction."""

    in_rounds: int = 0
    """In the rounds that were closed."""

    reported: int = 0
    """In the whole run up to the agent's report, which also counts the transfers after the last round."""

    @property
    def total(self) -> int:
        """The larger one, because both count the closed rounds."""
        return max(self.in_rounds, self.reported)


@dataclass
class AgentTraffic:
    """The bytes from and to every agent, over all runs."""

    KINDS = ("round_closed", "release_reported")

    _from_agent: dict[tuple[str, str], RunTraffic] = field(default_factory=dict)
    _to_agent: dict[tuple[str, str], RunTraffic] = field(default_factory=dict)
    """Run and agent -> bytes."""

    def add(self, entry: Entry) -> None:
        """Count the next entry; one of another kind changes nothing."""
        fact = entry.fact
        run = entry.run or ""
        if isinstance(fact, RoundClosed):
            for agent, (up_bytes, down_bytes) in fact.traffic.items():
                self._from_agent.setdefault((run, agent), RunTraffic()).in_rounds += up_bytes
                self._to_agent.setdefault((run, agent), RunTraffic()).in_rounds += down_bytes
        elif isinstance(fact, ReleaseReported) and entry.agent is not None:
            key = (run, entry.agent)
            self._from_agent.setdefault(key, RunTraffic()).reported = fact.bytes_up
            self._to_agent.setdefault(key, RunTraffic()).reported = fact.bytes_down

    def bytes_from(self) -> dict[str, int]:
        """Return the bytes that each agent has sent."""
        return _sum_by_agent(self._from_agent)

    def bytes_to(self) -> dict[str, int]:
        """Return the bytes that were sent to each agent."""
        return _sum_by_agent(self._to_agent)


def _sum_by_agent(traffic: dict[tuple[str, str], RunTraffic]) -> dict[str, int]:
    totals = Counter[str]()
    for (_, agent), in_run in traffic.items():
        totals[agent] += in_run.total
    return dict(totals)
