"""How often an agent's connection to the broker has broken, and whether that is worth telling."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime

from edge_agent.core.time_and_text import show_time

MOST_BREAKS = 5
"""The number of breaks within `RECENT_S` that make a flapping link; a device that moves has fewer."""

RECENT_S = 600.0
"""Time in seconds without a break after which a link is good again."""


@dataclass
class LinkBreaks:
    """The breaks of one agent's link since it was a good one."""

    times: int = 0
    since: datetime | None = None
    """Wall clock of the first of them; None: there was none."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_BREAKS))
    """Monotonic times of the last ones, the newest at the end."""

    def add(self, now: float, at: datetime) -> None:
        """Count one more break, at ``now`` of the monotonic clock and ``at`` of the wall clock."""
        if self.recent and now - self.recent[-1] > RECENT_S:
            self.times = 0
            self.recent.clear()
        if not self.recent:
            self.since = at
        self.times += 1
        self.recent.append(now)

    def note(self, now: float) -> str:
        """Return what to tell about the link; empty where it is a good one, or has broken a few times only."""
        is_flapping = len(self.recent) == MOST_BREAKS and now - self.recent[0] <= RECENT_S
        if not is_flapping or self.since is None:
            return ""
        since = show_time(self.since.isoformat())
        return (
            f"its connection to the broker has broken {self.times} times since {since}, last "
            f"{now - self.recent[-1]:.0f} s ago; transfers resume after each break, slowly; check its network"
        )
