"""The last good state of a run, which is restored when the agents' loss explodes.

Agents report the loss of their training, which tells whether the state was good that they started from. So the state of
a round is known to be good one round later, and a bad one has been trained on once before its state is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from ..journal import entries as facts
from ..journal.entries import RoundClosed


@dataclass(frozen=True)
class GoodState:
    """The state after ``round``, by the digest of its blob; ``loss``: the lowest median loss of the run so far."""

    round: int
    digest: str
    loss: float

    @classmethod
    def from_fact(cls, closed: RoundClosed) -> GoodState | None:
        """What a closed round has journaled; None where it has nothing."""
        good = closed.good
        return None if good is None else cls(good.round, good.digest, float(good.loss))

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
    """Whether these losses of a round exceed ``most`` times both the lowest of the run and that of guessing, log K.

    ``losses`` has one for each accepted update, None where the agent withholds it. The median (of two the lower)
    counts, and who is silent has not seen an explosion, so that no minority of the round can have a state restored.
    """
    known = [-math.inf if loss is None else loss for loss in losses]
    if most is None or good is None or not known:
        return None
    loss = median_low(known)
    bound = most * max(good.loss, math.log(max(2, num_classes)))
    return Explosion(loss, bound) if loss > bound else None


def after(good: GoodState | None, losses: Iterable[float | None], number: int, digest: str) -> GoodState | None:
    """The last good state, when agents have trained without an explosion from that of round ``number``.

    Where no more than half of the ``losses`` are known, nobody can tell; it is the one before.
    """
    known = list(losses)
    reported = [loss for loss in known if loss is not None]
    if 2 * len(reported) <= len(known):
        return good
    loss = median_low(reported)
    return GoodState(number, digest, loss if good is None else min(loss, good.loss))


def reason_of_restoration(restored: Mapping[str, Any]) -> str:
    """Why a round has restored an earlier state, from what it has journaled."""
    what = "the initial state" if restored["round"] == 0 else f"the state of round {restored['round']}"
    return (
        f"{what} was restored: the median training loss rose to {restored['loss']:.4g}, the bound is "
        f"{restored['bound']:.4g} (aggregation.max_loss); the updates of the round are not in the model"
    )
