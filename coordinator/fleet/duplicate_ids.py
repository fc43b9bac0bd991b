"""Two agents with one id: found because both answer the same question, refused before they spoil each other's work.

An agent that starts anew has a new boot, and its predecessor is gone: told by the broker, or silent when asked. Only
where the start that has the id and the one that claims it both answer are there two, and the later one is refused.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.errors import DuplicateId
from edge_agent.wire.messages import Command, Hello, Refused, Who

from ..state.journal import utc_now
from .registry import Member, Roster

log = logging.getLogger(__name__)

ANSWER_S = 1.5
"""How long the start that has an id may take to answer; less than an agent's pause between two hellos."""

MAX_CLAIMS = 1000


@dataclass(frozen=True)
class _Claim:
    """Another start says that it has the id."""

    boot: str
    question: str
    since: float


class Doubles:
    """Who may have an id. Ask `admits` for every hello."""

    def __init__(self, roster: Roster, send: Callable[[str, Command], None], clock: Callable[[], float]) -> None:
        self._roster, self._send, self._clock = roster, send, clock
        self._claims: dict[str, _Claim] = {}
        self._refused: dict[str, str] = {}

    def admits(self, agent: str, message: Hello) -> bool:
        """Whether this start has the id now; if not, it is waited for an answer of the one that has."""
        member = self._roster.get(agent)
        if member is None or not member.is_present:
            self._claims.pop(agent, None)
            self._refused.pop(agent, None)
            return True
        claim = self._claims.get(agent)
        if member.boot == message.boot:
            if claim is not None and message.answers == claim.question:
                self._refuse(member, claim)
            return True
        if self._refused.get(agent) == message.boot:
            if not message.answers:  # it has not heard
                self._send(agent, _refusal(member, message.boot))
            return False
        if claim is None or claim.boot != message.boot:
            self._ask(agent, message.boot)
            return False
        if self._clock() - claim.since < ANSWER_S:
            return False
        del self._claims[agent]
        log.info("agent_restarted agent=%s boot=%s before=%s", agent, message.boot, member.boot)
        return True

    def is_claiming(self, agent: str, boot: str) -> bool:
        """Whether this start has not been given the id (yet), so that its words do not count."""
        claim = self._claims.get(agent)
        return (claim is not None and claim.boot == boot) or self._refused.get(agent) == boot

    def _ask(self, agent: str, boot: str) -> None:
        if max(len(self._claims), len(self._refused)) >= MAX_CLAIMS:
            self._claims.clear()
            self._refused.clear()
        question = secrets.token_hex(8)
        self._claims[agent] = _Claim(boot, question, self._clock())
        self._send(agent, Who(question=question))

    def _refuse(self, member: Member, claim: _Claim) -> None:
        del self._claims[member.id]
        log.warning(
            "duplicate_id agent=%s has=%s refused=%s: both answered at once", member.id, member.boot, claim.boot
        )
        at = utc_now().isoformat(timespec="seconds")
        member.notes["duplicate"] = (
            f"another agent with the id '{member.id}' (start {claim.boot}) was refused at {at}: both were alive; "
            "give one of them another id"
        )
        self._refused[member.id] = claim.boot
        self._send(member.id, _refusal(member, claim.boot))


def _refusal(member: Member, boot: str) -> Refused:
    why = (
        f"the id '{member.id}' is in use: this agent (start {boot}) and one that was here before (start {member.boot}, "
        f"tier {member.tier}) both answered the same question, so both are alive; give one of them another id in its "
        "configuration, or stop it"
    )
    return Refused(error=DuplicateId.__name__, message=why, whom=boot)
