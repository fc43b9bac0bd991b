"""When an agent sends its next heartbeat."""

from __future__ import annotations

from ..wire.messages.fields import ConditionName


class HeartbeatTimer:
    """The time of the next heartbeat: regular, rarer while idle in a large fleet, at once when there is news."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._idle_every_s = 0.0
        self._sent_at = float("-inf")
        self._sent_condition: ConditionName = "ok"
        self._was_busy = False

    def welcomed(self, now: float, idle_every_s: float) -> None:
        """Begin a pause, because the coordinator has just heard this agent.

        Args:
            now: The time on the agent's clock, in seconds.
            idle_every_s: The pause that the coordinator asks idle agents for; not above the agent's own: no matter.
        """
        self._idle_every_s = idle_every_s
        self._sent_at = now

    def is_due(self, now: float, condition: ConditionName, *, is_busy: bool) -> bool:
        """Return whether to send a heartbeat now.

        Args:
            now: The time on the agent's clock, in seconds.
            condition: How the agent fares; a change is told at once.
            is_busy: Whether the agent has a job.
        """
        is_stretched = not is_busy and self._idle_every_s > self._every_s
        # After a job the coordinator is told at once, because from now on it expects heartbeats less often.
        has_finished = is_stretched and self._was_busy
        self._was_busy = is_busy
        if has_finished or condition != self._sent_condition:
            return True
        pause_s = self._idle_every_s if is_stretched else self._every_s
        return now - self._sent_at >= pause_s

    def note_sent(self, now: float, condition: ConditionName) -> None:
        """Note that a heartbeat with this condition is sent now."""
        self._sent_at = now
        self._sent_condition = condition
