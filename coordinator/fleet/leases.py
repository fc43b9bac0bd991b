"""When the leases of agents end: the first ones first, without a look at all other agents."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Leases:
    """The earliest time at which each agent's lease may end; whether it has ended is decided by the caller.

    A message from an agent extends its lease and changes nothing here, as messages are many. The agent is looked at
    when the time comes that was noted, and then gets a new one.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        """(time, agent): the lease of the agent ends then or later."""

        self._end_of: dict[str, float] = {}
        """Agent -> the time of its entry that counts; its other entries are of earlier leases."""

    def note_end(self, agent: str, until: float) -> None:
        """Note that an agent's lease ends at ``until`` if it is not heard; an earlier time that is noted stays."""
        # An earlier entry leads to this one when it is due.
        if until < self._end_of.get(agent, float("inf")):
            self._end_of[agent] = until
            heapq.heappush(self._heap, (until, agent))

    def take_due(self, now: float) -> Iterator[str]:
        """Yield each agent whose lease may have ended before ``now``; the caller may note later ends meanwhile."""
        while self._heap and self._heap[0][0] < now:
            until, agent = heapq.heappop(self._heap)
            if self._end_of.get(agent) != until:
                continue
            del self._end_of[agent]
            yield agent
