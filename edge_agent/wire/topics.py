"""Where things are said. At most 7 slashes and only ``[a-z0-9_-/]``, which every broker and cloud service allows.

| topic (below ``{prefix}/1/{federation}``) | from -> to | what |
|---|---|---|
| ``a/{agent}/up`` | agent -> coordinator | control |
| ``a/{agent}/dn`` | coordinator -> agent | control |
| ``a/{agent}/ub`` | agent -> coordinator | chunks of an update |
| ``a/{agent}/db`` | coordinator -> agent | chunks for this agent alone |
| ``b/{first 16 hex digits of the blob}`` | coordinator -> many | chunks for whoever lacks the blob |
| ``s/{agent}`` | agent, or its will | presence |
| ``h/{agent}`` | agent -> coordinator | heartbeat |
| ``ann`` | coordinator -> all | a coordinator is here (again) |
| ``co`` | coordinator -> coordinators | who serves this federation: there must be one |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import NAME_PATTERN
from ..errors import MessageError

GENERATION = 1
"""Topic level that changes only when old and new peers must not even hear each other."""

_AGENT = re.compile(NAME_PATTERN)


@dataclass(frozen=True)
class Topics:
    """All topics of one federation."""

    federation: str
    prefix: str = "fl"

    @property
    def root(self) -> str:
        """What every topic of this federation begins with."""
        return f"{self.prefix}/{GENERATION}/{self.federation}"

    @property
    def announce(self) -> str:
        """Topic of the coordinator's announcements."""
        return f"{self.root}/ann"

    @property
    def coordinators(self) -> str:
        """Topic on which coordinators of the same federation find each other."""
        return f"{self.root}/co"

    def up(self, agent: str) -> str:
        """Control from an agent."""
        return f"{self.root}/a/{agent}/up"

    def down(self, agent: str) -> str:
        """Control to an agent."""
        return f"{self.root}/a/{agent}/dn"

    def up_chunks(self, agent: str) -> str:
        """Chunks from an agent."""
        return f"{self.root}/a/{agent}/ub"

    def down_chunks(self, agent: str) -> str:
        """Chunks to one agent."""
        return f"{self.root}/a/{agent}/db"

    def broadcast(self, digest: str) -> str:
        """Chunks of one blob to many."""
        return f"{self.root}/b/{digest[:16]}"

    def presence(self, agent: str) -> str:
        """Online, offline."""
        return f"{self.root}/s/{agent}"

    def heartbeat(self, agent: str) -> str:
        """Signs of life."""
        return f"{self.root}/h/{agent}"

    def for_coordinator(self) -> tuple[str, ...]:
        """Filters that a coordinator subscribes to."""
        from_agents = (f"{self.root}/a/+/up", f"{self.root}/a/+/ub", f"{self.root}/s/+", f"{self.root}/h/+")
        return (*from_agents, self.coordinators)

    def for_agent(self, agent: str) -> tuple[str, ...]:
        """Filters that an agent always subscribes to."""
        return (self.down(agent), self.down_chunks(agent), self.announce)

    def sender(self, topic: str) -> tuple[str, str]:
        """(agent, kind) of a topic that a coordinator hears; kind is ``up``, ``ub``, ``s`` or ``h``.

        Raises:
            MessageError: not such a topic, or an agent name that cannot be.
        """
        inside = topic.startswith(f"{self.root}/")
        levels = topic[len(self.root) + 1 :].split("/") if inside else []
        if len(levels) == 3 and levels[0] == "a" and levels[2] in {"up", "ub"}:
            _, agent, kind = levels
        elif len(levels) == 2 and levels[0] in {"s", "h"}:
            kind, agent = levels
        else:
            raise MessageError(f"topic {topic[:120]!r} is not one that agents speak on")
        if not _AGENT.fullmatch(agent):
            raise MessageError(f"agent name {agent[:80]!r} does not match {NAME_PATTERN}")
        return agent, kind


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a topic falls under a filter with ``+`` (one level) and ``#`` (all that follow)."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for position, level in enumerate(wanted):
        if level == "#":
            return True
        if position >= len(levels) or level not in {"+", levels[position]}:
            return False
    return len(wanted) == len(levels)
