"""What is collected of the agents of a round: who was asked, and what has come of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from edge_agent.core.storage import mapped
from edge_agent.core.task import Tensors
from edge_agent.methods import Update
from edge_agent.wire.messages.fields import EXCHANGES, Purpose
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import Spec, decode

from ..state.store import BlobStore
from ..views.runs import Accepted, Rejection

Judge = Callable[[Path, Callable[[str | None], bool]], None]
"""Calls back with the objection to the update in a file, empty when there is none, None when that is not known.

The answer is whether it was still waited for.
"""


def share_of(share: float, agents: int) -> int:
    """Return how many are ``share`` (0..1) of so many agents, rounded up; an error in the last bits rounds nothing."""
    return math.ceil(share * agents - 1e-9)


@dataclass
class Collection:
    """What one round has collected so far.

    The quorum is a share of the agents that can still deliver: an agent that is offline for too long, was rejected, or
    is on trial after failures in earlier rounds is not counted unless its update has arrived.
    """

    run: str
    round: int
    cohort: tuple[str, ...]
    expected: Mapping[str, Spec]
    accepted: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, Rejection] = field(default_factory=dict)
    objection: Callable[[Tensors], str] = lambda _: ""
    """Why tensors of the right form are still not plausible; empty when they are."""

    judge: Judge | None = None
    """Asked beside ``objection``, where the method has its own function for that, in another process."""

    joining: tuple[str, ...] = ()
    """Agents of the cohort that do not train the encoder; they send ``extras`` alone."""

    extras: Mapping[str, Spec] = field(default_factory=dict)
    on_trial: frozenset[str] = frozenset()
    """Agents that failed in earlier rounds: asked, and not counted in the quorum."""

    given_up: dict[str, str] = field(default_factory=dict)
    """Agents that went offline or did not start the job, and which start of each; their updates still count."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """Agent -> reason, of those that were online and are not in this round."""

    purpose: Purpose = "train"
    """What its agents are asked to do, except that those in ``joining`` contribute."""

    late: list[tuple[str, int]] = field(default_factory=list)
    """Updates of rounds that are over: (agent, round that it was for)."""

    session: str = ""
    """Attempt at a secure sum that the updates are masked for; empty: none."""

    has_grace_period: ClassVar[bool] = True
    """Whether members that have not delivered get more time once the quorum has."""

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Cohort members that have neither been accepted nor rejected."""
        return tuple(a for a in self.cohort if a not in self.accepted and a not in self.rejected)

    @property
    def training(self) -> tuple[str, ...]:
        """Cohort members whose update has all that the round collects: those that train.

        All of them where none trains, or where the update of a device without torch is the same as that of the others.
        """
        # Asked after each event of rounds with thousands of agents.
        if not self.joining or self.extras == self.expected:
            return self.cohort
        return tuple(agent for agent in self.cohort if agent not in self.joining) or self.cohort

    @property
    def delivered(self) -> int:
        """How many of those that train have delivered: devices that only contribute deliver at once."""
        return len([agent for agent in self.training if agent in self.accepted])

    def needed(self, share: float, least: int) -> int:
        """Return how many updates of those that train are a quorum.

        Args:
            share: The share (0..1) of those that train which has to deliver. Where some of them cannot any more, it is
                the share of the others.
            least: The least number that is enough then. One update is the least in any case.
        """
        uncounted = {*self.given_up, *self.on_trial, *self.rejected}
        able = [agent for agent in self.training if agent in self.accepted or agent not in uncounted]
        of_all = share_of(share, len(self.training))
        of_able = share_of(share, len(able))
        return max(1, min(of_all, max(least, of_able)))

    def has_quorum(self, share: float, least: int) -> bool:
        """Return whether as many as are `needed` have delivered."""
        return self.delivered >= self.needed(share, least)

    @property
    def is_hopeless(self) -> bool:
        """Whether every member has failed: with the same seed it would fail the next time, too."""
        return not self.accepted and not self.outstanding

    def expects(self, agent: str) -> Mapping[str, Spec]:
        """Return the tensors that an update of this agent holds, no more and no less."""
        return self.extras if agent in self.joining else self.expected

    def purpose_of(self, agent: str) -> Purpose:
        """Return what this agent is asked to do."""
        return "contribute" if agent in self.joining else self.purpose

    def asked_in_round(self, agent: str) -> int:  # noqa: ARG002 - in rounds of another kind agents differ
        """Return the round whose job this agent works on."""
        return self.round

    def takes(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether the update was made for this round and purpose."""
        made_for = (message.run, message.round, message.purpose, message.session)
        return made_for == (self.run, self.round, self.purpose_of(agent), self.session)

    def awaits(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether the update was made for this round and purpose by an agent that was asked."""
        return agent in self.cohort and self.takes(agent, message)

    def __str__(self) -> str:
        name = f"round {self.round}"
        if self.purpose == "train":
            return name
        purpose = self.purpose.replace("_", " ")
        is_of_round = self.purpose in EXCHANGES
        return f"{purpose} of {name}" if is_of_round else f"{purpose} after {name}"


def updates_of(blobs: BlobStore, collection: Collection) -> Iterator[Update]:
    """Yield the accepted updates in the order of agent ids, each mapped from disk only when its turn comes."""
    for agent in sorted(collection.accepted):
        accepted = collection.accepted[agent]
        yield Update(agent, accepted.samples, decode(mapped(blobs.path(accepted.digest))))
