"""Which messages of agents a coordinator handles first, and which ones replace each other while they wait.

A coordinator that is behind must not take agents for dead that have said that they live, and gains nothing from the
fifth hello of an agent while the first one waits.
"""

from __future__ import annotations

import re

from edge_agent.core.errors import MessageError
from edge_agent.wire.inbox import ORDINARY, Rank, RankOf
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

from .rate_limits import type_of

NEWEST_COUNTS = frozenset({"hello", "update"})
"""Control messages that an agent repeats until it has an answer; each says everything that the one before it said."""

_BOOT = re.compile(rb'"boot" ?: ?"([0-9a-zA-Z]{1,64})"')
_HEAD_BYTES = 256


def rank_by(topics: Topics) -> RankOf:
    """Return the ranks of the messages that agents send under these topics.

    Heartbeats and last wills are urgent. Messages of two starts of one id do not replace each other: one of them may be
    a program, such as 'edge-agent doctor', that runs beside the agent.
    """

    def rank_of(message: Message) -> Rank:
        """Return the rank of a message, by its topic and, for control messages, its type."""
        # One message of an aggregator is about many updates, and says that it lives.
        if message.topic in {topics.aggregators_up, topics.aggregators_down}:
            return Rank(is_urgent=True)
        return _rank_of_agents_message(topics, message)

    return rank_of


def _rank_of_agents_message(topics: Topics, message: Message) -> Rank:
    """Return the rank of a message that an agent has sent."""
    if message.retained:  # it is refused, and must not take the place of a live one
        return ORDINARY
    try:
        agent, kind = topics.sender(message.topic)
    except MessageError:
        return ORDINARY
    if kind == "h":
        return Rank(is_urgent=True, replaces=f"h {agent} {_boot_of(message.payload)}")
    if kind == "s":
        return Rank(is_urgent=message.payload.startswith(b"offline"), replaces=f"s {agent} {message.payload!r}")
    if kind == "up":
        message_type = type_of(message.payload)
        if message_type in NEWEST_COUNTS:
            return Rank(replaces=f"{message_type} {agent} {_boot_of(message.payload)}")
    return ORDINARY


def _boot_of(payload: bytes) -> str:
    """Return the start of its agent that a control message names; empty where it names none."""
    match = _BOOT.search(payload, 0, _HEAD_BYTES)
    return "" if match is None else match[1].decode()
