"""The time in which no coordinator answers: what an agent waits for, and how often it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..config import AgentConfig
from .mismatch import FINAL_S, Mismatch

log = logging.getLogger(__name__)

HELLO_AGAIN_S = 2.0
ALONE_S, ALONE_AGAIN_S = 10.0, 60.0
"""Time without an answer to hello after which the agent says so, and after which it says so again."""


class Silence:
    """How long an agent has had no answer, from the moment that it could have had one."""

    def __init__(self, mismatch: Mismatch, clock: Callable[[], float]) -> None:
        self._mismatch, self._clock = mismatch, clock
        self._since: float | None = None
        self._said_at = 0.0
        self._away = ""

    def begin(self) -> None:
        """From now on somebody could answer."""
        self._since = self._said_at = self._clock()

    def broker_away(self, reason: str) -> None:
        """Nobody can be heard until the broker is back."""
        self._since, self._away = None, reason

    def tell(self, config: AgentConfig) -> None:
        """Log that nobody answers: after a while, and then from time to time."""
        now, since = self._clock(), self._since
        pause = ALONE_S if since == self._said_at else ALONE_AGAIN_S
        if since is not None and now - self._said_at >= pause:
            self._said_at = now
            log.warning("unanswered seconds=%.0f %s", now - since, self.waits_for(config))

    def waits_for(self, config: AgentConfig) -> str:
        """For whom and until when, in words."""
        if self._since is None:
            why = f" ({self._away})" if self._away else ""
            return (
                f"waits for the broker {config.broker.url}{why}; tries until it is stopped. "
                "'edge-agent doctor --config FILE' tries the way to it"
            )
        if self._mismatch.reason:
            return (
                f"the coordinator at {config.broker.url} speaks another protocol ({self._mismatch.reason}); says hello "
                f"again in {self._mismatch.next_s():.0f} s, and ends when that goes on for {FINAL_S / 60:.0f} minutes"
            )
        if config.broker.user not in {None, config.id}:
            return (
                f"no coordinator answers: this agent's id is '{config.id}', its MQTT user '{config.broker.user}', and "
                "a broker with users lets an agent speak and listen under its own id alone; change id or broker.user. "
                "'edge-agent doctor --config FILE' tries the broker's rules"
            )
        return (
            f"no coordinator of federation '{config.federation}' answers at {config.broker.url}; says hello every "
            f"{HELLO_AGAIN_S:.0f} s until one does or the agent is stopped. Does 'headwater serve' run, with the same "
            "federation and broker? 'edge-agent doctor --config FILE' tries login and topics"
        )
