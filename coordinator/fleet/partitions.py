"""Partitions of a federation's agents, each of which one aggregator serves."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from edge_agent.core.errors import UsageError

MOST_PARTITIONS = 1024
"""The most partitions of one federation."""

_TYPED = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")


@dataclass(frozen=True, order=True)
class Partition:
    """One of several partitions: ``number`` (from 1) of ``of``."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def name(self) -> str:
        """The partition's name in messages and topics, such as ``2-of-4``."""
        return f"{self.number}-of-{self.of}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Return the partition that a person has typed, such as ``2/4``.

        Raises:
            UsageError: The text names no partition.
        """
        match = _TYPED.fullmatch(text)
        if match is not None:
            chosen = cls(int(match[1]), int(match[2]))
            if 1 <= chosen.number <= chosen.of <= MOST_PARTITIONS:
                return chosen
        raise UsageError(
            f"partition '{text[:40]}': expected NUMBER/ALL, such as 2/4 for the second of four; NUMBER from 1, at most "
            f"{MOST_PARTITIONS} partitions"
        )


def partition_of(agent: str, of: int) -> Partition:
    """Return the partition that an agent belongs to, by a hash of its id: the same in every process.

    Args:
        agent: The agent's id.
        of: The number of partitions, 1 or more.
    """
    digest = hashlib.sha256(agent.encode()).digest()
    return Partition(int.from_bytes(digest[:8], "big") % of + 1, of)
