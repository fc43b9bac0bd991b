"""What the coordinator knows of a secure sum: public keys, shares that it cannot read, and updates under masks.

The protocol is `edge_agent.privacy.secure_sum`. An attempt at a round has its own session, and keys that no other
attempt uses: where too few agents deliver, or the coordinator was restarted, the round begins again with another
session. So nobody's masks are ever taken off two different sums. The updates of another attempt are the same again, so
two sums over different agents would tell more than one does. Therefore the journal has whose sum it is once shares are
asked for, and only these agents take part in the next attempt, also in another run that trains from the same model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_agent.core.errors import CodecError, TensorsError
from edge_agent.core.task import Tensors
from edge_agent.methods import Update
from edge_agent.privacy.secure_sum import tensors as layout
from edge_agent.privacy.secure_sum.keys import SECRET_BYTES, PublicKeys, agreed, private_key, threshold
from edge_agent.privacy.secure_sum.server import unmasked
from edge_agent.wire.messages.fields import MAX_SAMPLES, Purpose
from edge_agent.wire.tensors import Spec

log = logging.getLogger(__name__)


@dataclass
class SecureSum:
    """One attempt at a secure sum, as the coordinator knows it."""

    run: str
    round: int
    session: str
    """The id of the attempt."""

    forms: Mapping[str, Spec]
    """The tensors of an update of the method, by name."""

    least: int
    """The least number of updates in a sum, however few members there are."""

    keys: dict[str, PublicKeys] = field(default_factory=dict)
    """Member -> its public keys."""

    sealed: dict[str, np.ndarray] = field(default_factory=dict)
    """Agent -> its shares (n, 148) for the others, encrypted."""

    @property
    def members(self) -> tuple[str, ...]:
        """The agents whose keys the others get, sorted."""
        return tuple(sorted(self.keys))

    @property
    def needed(self) -> int:
        """How many of the members have to deliver."""
        return max(self.least, threshold(len(self.keys)))

    def expects(self, purpose: Purpose) -> dict[str, Spec]:
        """Return the form of the one tensor that a member sends in the phase of this purpose."""
        names: dict[Purpose, str] = {
            "secure_keys": layout.KEYS,
            "secure_shares": layout.SHARES,
            "train": layout.MASKED,
            "secure_unmask": layout.REVEALED,
        }
        name = names[purpose]
        forms = layout.specs(len(self.keys), layout.size_of(self.forms))
        return {name: forms[name]}

    def take_keys(self, updates: Iterable[Update]) -> None:
        """Take the members' public keys, without those that two agents have sent: clients refuse a list with these."""
        keys = {update.client: layout.keys_of(update.tensors[layout.KEYS]) for update in updates}
        senders: Counter[bytes] = Counter()
        for public in keys.values():
            senders.update((public.share, public.mask))
        self.keys = {}
        for agent, public in keys.items():
            if senders[public.share] == 1 and senders[public.mask] == 1:
                self.keys[agent] = public

    def take_shares(self, updates: Iterable[Update]) -> None:
        """Take the encrypted shares that members have made for each other."""
        self.sealed = {update.client: np.array(update.tensors[layout.SHARES]) for update in updates}

    def for_shares(self) -> Tensors:
        """Return what all members get to make their shares: the members, and the public keys of each."""
        rows = {agent: layout.keys_as_bytes(public).tobytes() for agent, public in self.keys.items()}
        keys = layout.table(rows, self.members, layout.KEY_BYTES)
        return {layout.MEMBERS: layout.members_as_bytes(self.members), layout.KEYS: keys}

    def for_training(self, agent: str) -> Tensors:
        """Return what this member gets to put masks on: the shares that the others have made for it."""
        members = self.members
        row = members.index(agent)
        rows = {sender: sealed[row].tobytes() for sender, sealed in self.sealed.items()}
        shares = layout.table(rows, members, layout.SEALED_BYTES)
        return {layout.SHARERS: np.array([member in self.sealed for member in members]), layout.SHARES: shares}

    def for_unmasking(self, delivered: Iterable[str]) -> Tensors:
        """Return what those who have delivered get to reveal shares: for each member, whether it has delivered."""
        delivering = frozenset(delivered)
        return {layout.DELIVERED: np.array([member in delivering for member in self.members])}

    def mean(self, masked: Iterable[Update], revealed: Iterable[Update]) -> Tensors:
        """Return the weighted mean of the updates.

        Args:
            masked: The updates under masks.
            revealed: What those who have delivered have revealed of the masks.

        Raises:
            CodecError: A share was wrong, or the sum is none of weighted updates.
            TrainingFailed: Too few have revealed their shares.
        """
        vectors = {update.client: update.tensors[layout.MASKED].view(np.uint64) for update in masked}
        answers = {update.client: self._answer(update.tensors[layout.REVEALED]) for update in revealed}
        context = layout.context_of(self.run, self.round, self.session)
        total = unmasked(vectors, self.keys, answers, context, self._blame)
        # The last number of the sum is that of the weights.
        weight = float(layout.FIXED_POINT.decode(total[-1:])[0])
        most = len(vectors) * MAX_SAMPLES
        if not 0 < weight <= most:
            raise CodecError(f"the weights add up to {weight:g}, expected 1 to {most:g}; an agent has sent no update")
        return layout.mean_of(total, self.forms)

    def _blame(self, agent: str) -> None:
        """Log that the shares of an agent were wrong."""
        log.warning("shares_wrong run=%s round=%d agent=%s", self.run, self.round, agent)

    def _answer(self, rows: np.ndarray) -> dict[str, bytes]:
        """Return member -> the share of its secret that an agent has revealed, of those who have sent shares."""
        of_members = zip(self.members, rows, strict=True)
        return {member: row.tobytes() for member, row in of_members if member in self.sealed}


def disputed(accusations: Mapping[str, Collection[str]], members: Iterable[str]) -> set[str]:
    """Return the agents in dispute over shares with most others; empty where nobody accuses anybody.

    Of two members one of whom accuses the other, one lies. Whoever sends wrong shares to many, or accuses many, is in
    dispute with many; of two that are in dispute with each other alone, nobody knows who lies.

    Args:
        accusations: Agent -> the agents whose shares it could not decrypt.
        members: The members of the attempt; accusations of others do not count.
    """
    present = frozenset(members)
    # 1. Each dispute counts once, whoever of the two has accused the other.
    pairs: set[frozenset[str]] = set()
    for accuser, accused in accusations.items():
        others = present.intersection(accused) - {accuser}
        pairs.update(frozenset((accuser, other)) for other in others)
    # 2. With how many others each agent is in dispute.
    disputes: Counter[str] = Counter()
    for pair in pairs:
        disputes.update(pair)
    most = max(disputes.values(), default=0)
    return {agent for agent, count in disputes.items() if count == most}


def keys_objection(tensors: Tensors) -> str:
    """Return why these are no public keys, so that all others would refuse them; empty when they are."""
    public = layout.keys_of(tensors[layout.KEYS])
    trial = private_key(bytes(SECRET_BYTES - 1) + b"\1")
    try:
        agreed(trial, public.share, b"")
        agreed(trial, public.mask, b"")
    except CodecError as error:
        return str(error)
    return ""


def check_forms(forms: Mapping[str, Spec]) -> str:
    """Return why updates of this form cannot be added up; empty when they can."""
    try:
        layout.summed(forms)
    except TensorsError as error:
        return str(error)
    return ""
