"""What is asked of whom now: one job for each agent, made when it is first needed, and its blobs on offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Job

from .context import Fleet

Make = Callable[[str], tuple[Job, tuple[Outgoing, ...]]]
"""An agent's job, and the blobs that it names."""


@dataclass
class Assignment:
    """Work that is open until ``until`` (of `Fleet.heard_s`). ``make`` is called once for each agent."""

    fleet: Fleet
    until: float
    make: Make
    purpose: str = "train"
    round: int = 0
    _jobs: dict[str, Job] = field(default_factory=dict)
    _on_offer: set[str] = field(default_factory=set)

    def ask(self, agents: Iterable[str]) -> None:
        """Tell these agents, after all that they need is on offer: what is the same for many then goes out once."""
        asked = tuple(agents)
        for agent in asked:
            self._prepare(agent)
        for agent in asked:
            self.invite(agent)

    def invite(self, agent: str) -> None:
        """Tell one agent (again), with the time that is left now."""
        left = max(1.0, self.until - self.fleet.heard_s())
        self.fleet.send(agent, self._prepare(agent).model_copy(update={"deadline_s": left}))

    def withdraw(self) -> None:
        """Nothing is asked any more: its blobs are off the table."""
        self.fleet.distributor.withdraw(self._on_offer)
        self._jobs.clear()
        self._on_offer.clear()

    def _prepare(self, agent: str) -> Job:
        if agent not in self._jobs:
            self._jobs[agent], blobs = self.make(agent)
            for blob in blobs:
                self.fleet.distributor.offer(blob, (agent,))
                self._on_offer.add(blob.ref.digest)
        return self._jobs[agent]
