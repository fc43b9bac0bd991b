"""The last good state of a run, which is restored when the agents' loss explodes.

Agents report the loss of their training, which tells whether the state was good that they started from. So the state of
a round is known to be good one round later, and a bad one has been trained on once before its state is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from ..journal import entries as facts
from ..journal.entries import Restored, RoundClosed


@dataclass(frozen=True)
class GoodState:
    """The state after ``round``, by the digest of its blob; ``loss``: the lowest median loss of the run so far."""

    round: int
    digest: str
    loss: float

    @classmethod
    def from_fact(cls, closed: RoundClosed) -> GoodState | None:
        """Return the good state that a closed round has journaled; None where it has none."""
        if closed.good is None:
            return None
        return cls(closed.good.round, closed.good.digest, float(closed.good.loss))

    def to_fact(self) -> facts.GoodState:
        """Return the state for an entry of the journal."""
        return facts.GoodState(round=self.round, digest=self.digest, loss=self.loss)


@dataclass(frozen=True)
class Explosion:
    """Why a state is restored: the median ``loss`` of the round, and the ``bound`` that it exceeds."""

    loss: float
    bound: float


def explosion(
    losses: Iterable[float | None], good: GoodState | None, num_classes: int, most: float | None
) -> Explosion | None:
    """Return the explosion of a round's loss; None where there is none, or nothing to compare it with.

    The median of the losses counts, or the lower one of two in the middle. An agent that withholds its loss counts as
    one that has not seen an explosion. So no minority of a round can have a state restored.

    Args:
        losses: The loss of each accepted update; None where its agent withholds it.
        good: The last good state, with the lowest median loss of the run.
        num_classes: K; a model that guesses has a loss of log K.
        most: The median may be this many times the larger of those two losses; None: it may be anything.
    """
    if most is None or good is None:
        return None
    known_or_lowest = [-math.inf if loss is None else loss for loss in losses]
    if not known_or_lowest:
        return None
    loss = median_low(known_or_lowest)
    loss_of_guessing = math.log(max(2, num_classes))
    bound = most * max(good.loss, loss_of_guessing)
    if loss > bound:
        return Explosion(loss, bound)
    return None


def after(good: GoodState | None, losses: Iterable[float | None], number: int, digest: str) -> GoodState | None:
    """Return the last good state, after agents have trained from a state without an explosion.

    Args:
        good: The last good state before.
        losses: The loss of each accepted update; None where its agent withholds it. Where no more than half are known,
            nobody can tell whether the state is good, and the one before stays.
        number: The round whose state the agents have trained from.
        digest: The digest of that state.
    """
    all_losses = list(losses)
    reported = [loss for loss in all_losses if loss is not None]
    if 2 * len(reported) <= len(all_losses):
        return good
    lowest = median_low(reported)
    if good is not None:
        lowest = min(lowest, good.loss)
    return GoodState(number, digest, lowest)


def reason_of_restoration(restored: Restored) -> str:
    """Return why a round has restored an earlier state, as text, from what it has journaled."""
    state = f"the state of round {restored.round}"
    if restored.round == 0:
        state = "the initial state"
    return (
        f"{state} was restored: the median training loss rose to {restored.loss:.4g}, the bound is "
        f"{restored.bound:.4g} (aggregation.max_loss); the updates of the round are not in the model"
    )
