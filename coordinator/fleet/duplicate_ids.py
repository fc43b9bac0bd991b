"""Which start of an agent may have an id, where several claim the same one.

An agent that restarts has a new boot, and its predecessor is offline: the broker has said so, or it does not answer.
Only where the start that has the id and the one that claims it both answer are there two; the later one is rejected.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.core.errors import DuplicateId
from edge_agent.core.time_and_text import show_time
from edge_agent.wire.messages import down, fields, up

from ..journal.store import utc_now
from .members import Member
from .roster import Roster

log = logging.getLogger(__name__)

ANSWER_S = 1.5
"""How long the start that has an id may take to answer; less than an agent's pause between two hellos."""

MAX_CLAIMS = 1000
CLONE_RETURNS = 2
"""How often a start that was replaced is back when it counts as a clone: a late message of it may look like one."""

MOST_STARTS = 8
"""Starts of one agent that are remembered."""


@dataclass(frozen=True)
class _Claim:
    """Another start that claims the id."""

    boot: str
    question: str
    since: float


class DuplicateIds:
    """Who may have an id. Call `accept` for every hello."""

    def __init__(self, roster: Roster, send: Callable[[str, fields.Command], None], clock: Callable[[], float]) -> None:
        self._roster = roster
        self._send = send
        self._clock = clock
        self._claims: dict[str, _Claim] = {}
        self._rejected: dict[str, str] = {}
        self._starts: dict[str, dict[str, int]] = {}
        """Agent -> the starts that had its id and their newest connections, the first start first."""

        self._returns: dict[str, int] = {}

    def accept(self, agent: str, message: up.Hello) -> bool:
        """Return whether this start has the id now; if not, an answer of the start that has it is pending."""
        member = self._roster.get(agent)
        if member is None or member.boot == message.boot:
            return self._accept(agent, member, message)
        if self._is_clone(agent, member, message):
            return False
        accepted = self._accept(agent, member, message)
        if accepted:
            starts = self._starts.setdefault(agent, {})
            starts[member.boot] = member.connection
            starts[message.boot] = message.connection
            if len(starts) > MOST_STARTS:
                del starts[next(iter(starts))]
        return accepted

    def _is_clone(self, agent: str, member: Member, message: up.Hello) -> bool:
        """Return whether two starts take the id from each other; the one that had it first keeps it.

        A broker that takes an agent's id from its certificate ends the session of the other one at each connect, so
        that never both can answer. But a start that was replaced does not come back with a new connection, twice.
        """
        starts = self._starts.get(agent, {})
        if message.connection <= starts.get(message.boot, message.connection):
            return False
        starts[message.boot] = message.connection
        self._returns[agent] = self._returns.get(agent, 0) + 1
        if self._returns[agent] < CLONE_RETURNS or message.boot == next(iter(starts)):
            return False
        self._reject(agent, member, message.boot, "take the id from each other")
        return True

    def _reject(self, agent: str, member: Member, boot: str, conflict: str) -> None:
        """Reject a start for good; ``conflict``: what both starts did, as the rest of a sentence."""
        log.warning("duplicate_id agent=%s has=%s rejected=%s: both %s", agent, member.boot, boot, conflict)
        at = show_time(utc_now())
        member.notes["duplicate"] = (
            f"another agent with the id '{agent}' (start {boot}) was rejected at {at}: both were alive; "
            "give one of them another id"
        )
        self._rejected[agent] = boot
        self._send(agent, _rejection(member, boot, conflict))

    def _accept(self, agent: str, member: Member | None, message: up.Hello) -> bool:
        """Return whether the start that says hello has the id, by asking the one that had it whether it is alive."""
        # Nobody has the id now.
        if member is None or not member.is_present:
            self._claims.pop(agent, None)
            self._rejected.pop(agent, None)
            return True
        claim = self._claims.get(agent)
        # The start that has the id keeps it. If this answers the question, both it and the claimant are alive.
        if member.boot == message.boot:
            if claim is not None and message.answers == claim.question:
                del self._claims[agent]
                self._reject(agent, member, claim.boot, "answered at once")
            return True
        return self._accept_claim(agent, member, message, claim)

    def _accept_claim(self, agent: str, member: Member, message: up.Hello, claim: _Claim | None) -> bool:
        """Return whether another start than the one that has the id gets it: that one has not answered in time."""
        if self._rejected.get(agent) == message.boot:
            if not message.answers:  # it has not heard
                self._send(agent, _rejection(member, message.boot))
            return False
        # The first hello of this start makes it a claimant, and the other one is asked.
        if claim is None or claim.boot != message.boot:
            self._ask(agent, message.boot)
            return False
        if self._clock() - claim.since < ANSWER_S:
            return False
        del self._claims[agent]
        log.info("agent_restarted agent=%s boot=%s before=%s", agent, message.boot, member.boot)
        return True

    def is_claiming(self, agent: str, boot: str) -> bool:
        """Return whether this start does not have the id (yet), so that its messages do not count."""
        claim = self._claims.get(agent)
        return (claim is not None and claim.boot == boot) or self._rejected.get(agent) == boot

    def _ask(self, agent: str, boot: str) -> None:
        if max(len(self._claims), len(self._rejected)) >= MAX_CLAIMS:
            self._claims.clear()
            self._rejected.clear()
        question = secrets.token_hex(8)
        self._claims[agent] = _Claim(boot, question, self._clock())
        self._send(agent, down.Who(question=question))


def _rejection(member: Member, boot: str, conflict: str = "answered the same question") -> down.Refused:
    """Return the message that rejects a start; ``conflict``: what both starts did, as the rest of a sentence."""
    message = (
        f"the id '{member.id}' is in use: this agent (start {boot}) and one that was here before (start {member.boot}, "
        f"tier {member.tier}) both {conflict}, so both are alive; give one of them another id in its "
        "configuration, or stop it"
    )
    return down.Refused(error=DuplicateId.__name__, message=message, whom=boot)
