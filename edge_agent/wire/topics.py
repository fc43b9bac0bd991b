"""The topics on which messages are published, and the filters that match them."""

from __future__ import annotations

import functools
import re

from ..core.config import NAME_PATTERN
from ..core.errors import MessageError

GENERATION = 1
"""The level of all topics that changes only when old and new peers must not even receive each other's messages."""

_AGENT = re.compile(NAME_PATTERN)


class Topics:
    """All topics of one federation."""

    def __init__(self, federation: str) -> None:
        self.federation = federation
        self.root = f"fl/{GENERATION}/{federation}"
        """The first levels of every topic of this federation."""

        self.announce = f"{self.root}/ann"
        """The topic of the coordinator's announcements to all agents."""

        self.coordinators = f"{self.root}/co"
        """The topic on which coordinators of the same federation detect each other."""

        self.aggregators_up = f"{self.root}/g/up"
        """The topic of the messages of aggregators to their coordinator."""

        self.aggregators_down = f"{self.root}/g/dn"
        """The topic of the coordinator's messages to its aggregators."""

    def up(self, agent: str, partition: str = "") -> str:
        """Return the topic of control messages from an agent; with a ``partition`` those about its update alone."""
        return f"{self._uploads_of(agent, partition)}/up"

    def down(self, agent: str) -> str:
        """Return the topic of control messages to an agent."""
        return f"{self.root}/a/{agent}/dn"

    def up_chunks(self, agent: str, partition: str = "") -> str:
        """Return the topic of chunks from an agent, to the coordinator or to whoever serves a ``partition``."""
        return f"{self._uploads_of(agent, partition)}/ub"

    def _uploads_of(self, agent: str, partition: str) -> str:
        return f"{self.root}/p/{partition}/{agent}" if partition else f"{self.root}/a/{agent}"

    def down_chunks(self, agent: str) -> str:
        """Return the topic of chunks to one agent."""
        return f"{self.root}/a/{agent}/db"

    @property
    def broadcasts(self) -> str:
        """The beginning of the topics of blobs to many agents, to all of which each agent may subscribe."""
        return f"{self.root}/b"

    def broadcast(self, digest: str) -> str:
        """Return the topic of the chunks of one blob to many agents."""
        return f"{self.broadcasts}/{digest[:16]}"

    def presence(self, agent: str) -> str:
        """Return the topic that says whether an agent is online or offline."""
        return f"{self.root}/s/{agent}"

    def heartbeat(self, agent: str) -> str:
        """Return the topic of an agent's heartbeats."""
        return f"{self.root}/h/{agent}"

    def for_coordinator(self) -> tuple[str, ...]:
        """Return the filters to which a coordinator subscribes."""
        from_agents = (f"{self.root}/a/+/up", f"{self.root}/a/+/ub", f"{self.root}/s/+", f"{self.root}/h/+")
        return (*from_agents, self.coordinators)

    def for_partition(self, partition: str) -> tuple[str, ...]:
        """Return the filters of whoever takes the updates of a partition of the agents."""
        return (self.up("+", partition), self.up_chunks("+", partition))

    def for_agent(self, agent: str) -> tuple[str, ...]:
        """Return the filters to which an agent always subscribes."""
        return (self.down(agent), self.down_chunks(agent), self.announce)

    def site_up(self, relay: str) -> str:
        """Return the topic of the messages of a relay to its coordinator, about sums of updates."""
        return f"{self.root}/r/{relay}/up"

    def site_down(self, relay: str) -> str:
        """Return the topic of the coordinator's messages to a relay."""
        return f"{self.root}/r/{relay}/dn"

    def site_chunks(self, relay: str) -> str:
        """Return the topic of the chunks of a relay's sums."""
        return f"{self.root}/r/{relay}/ub"

    def site_sender(self, topic: str) -> tuple[str, str] | None:
        """Return the relay that publishes on a topic, and its kind, ``up`` or ``ub``; None: it is none of a relay."""
        match topic.removeprefix(f"{self.root}/").split("/"):
            case ["r", relay, "up" | "ub" as kind] if topic.startswith(self.root) and _AGENT.fullmatch(relay):
                return relay, kind
        return None

    def for_relay(self) -> tuple[str, ...]:
        """Return the filters to which a relay subscribes at the broker of its site: all that agents publish."""
        messages = (self.up("+"), self.up("+", "+"), self.presence("+"), self.heartbeat("+"))
        return (*messages, self.up_chunks("+"), self.up_chunks("+", "+"))

    def receiver(self, topic: str) -> tuple[str, str]:
        """Return the agent to which a coordinator publishes on a topic, and the kind of the topic: ``dn`` or ``db``.

        Raises:
            MessageError: The topic is not one of an agent, or the agent's name is invalid.
        """
        match topic.removeprefix(f"{self.root}/a/").split("/"):
            case [agent, "dn" | "db" as kind] if topic.startswith(self.root) and _AGENT.fullmatch(agent):
                return agent, kind
        raise MessageError(f"topic {topic[:120]!r} is not one on which a coordinator publishes to an agent")

    def sender(self, topic: str) -> tuple[str, str]:
        """Return the agent that publishes on a topic, and the kind of the topic: ``up``, ``ub``, ``s`` or ``h``.

        Raises:
            MessageError: The topic is not one of an agent, or the agent's name is invalid.
        """
        prefix = f"{self.root}/"
        levels = topic.removeprefix(prefix).split("/") if topic.startswith(prefix) else []
        match levels:
            case ["a", agent, "up" | "ub" as kind] | ["p", _, agent, "up" | "ub" as kind]:
                pass
            case ["s" | "h" as kind, agent]:
                pass
            case _:
                raise MessageError(f"topic {topic[:120]!r} is not one on which agents publish")
        if not _AGENT.fullmatch(agent):
            raise MessageError(f"agent name {agent[:80]!r} does not match {NAME_PATTERN}")
        return agent, kind


@functools.lru_cache(maxsize=4096)
def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a filter covers a topic; ``+`` stands for one level, ``#`` for all that follow.

    The answers of the last few thousand pairs are kept: the same topics come again with each message.
    """
    pattern = topic_filter.split("/")
    levels = topic.split("/")
    for position, level in enumerate(pattern):
        if level == "#":
            return True
        if position >= len(levels) or level not in {"+", levels[position]}:
            return False
    return len(pattern) == len(levels)
