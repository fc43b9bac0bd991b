"""Topics that messages are published on, and filters that match them."""

from __future__ import annotations

import re

from ..core.config import NAME_PATTERN
from ..core.errors import MessageError

GENERATION = 1
"""Topic level that changes only when old and new peers must not even receive each other's messages."""


_AGENT = re.compile(NAME_PATTERN)


class Topics:
    """All topics of one federation."""

    def __init__(self, federation: str) -> None:
        self.federation = federation
        self.root = f"fl/{GENERATION}/{federation}"
        """What every topic of this federation begins with."""

        self.announce = f"{self.root}/ann"
        """Announcements of the coordinator."""

        self.coordinators = f"{self.root}/co"
        """On which coordinators of the same federation detect each other."""

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
        """Heartbeats."""
        return f"{self.root}/h/{agent}"

    def for_coordinator(self) -> tuple[str, ...]:
        """Filters that a coordinator subscribes to."""
        from_agents = (f"{self.root}/a/+/up", f"{self.root}/a/+/ub", f"{self.root}/s/+", f"{self.root}/h/+")
        return (*from_agents, self.coordinators)

    def for_agent(self, agent: str) -> tuple[str, ...]:
        """Filters that an agent always subscribes to."""
        return (self.down(agent), self.down_chunks(agent), self.announce)

    def sender(self, topic: str) -> tuple[str, str]:
        """(agent, kind) of a topic that agents publish on; kind is ``up``, ``ub``, ``s`` or ``h``.

        Raises:
            MessageError: The topic is not one of an agent, or the agent's name is invalid.
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
    """Return whether a topic falls under a filter with ``+`` (one level) and ``#`` (all that follow)."""
    wanted = topic_filter.split("/")
    levels = topic.split("/")
    for position, level in enumerate(wanted):
        if level == "#":
            return True
        if position >= len(levels) or level not in {"+", levels[position]}:
            return False
    return len(wanted) == len(levels)
