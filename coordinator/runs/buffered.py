"""Buffered rounds: a round closes with its first K updates, and agents that are still training go on.

Their updates count in a later round, as changes to the model that they started from, and the less the older that is.
An agent that has delivered is asked again when the round closes.

Source: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous
Aggregation", AISTATS 2022 (FedBuff), with the weight 1 / sqrt(1 + staleness).
Differs from the paper: each agent counts at most once in a round; changes are weighted by sample counts where the
method does so; the server's step is the method's own; running statistics of batch norm move towards the update's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_agent.core.task import State, Tensors
from edge_agent.methods import Update
from edge_agent.methods.base import is_learned
from edge_agent.wire.messages.up import UpdateManifest

from ..fleet.transfers import Collection


@dataclass
class BufferedCollection(Collection):
    """What a buffered round has collected; its quorum is the buffer, or all that can still deliver."""

    buffer: int = 1
    asked_in: Mapping[str, int] = field(default_factory=dict)
    """Agent -> the earlier round that its update is of."""

    def needed(self, share: float, least: int) -> int:  # noqa: ARG002 - there is no quorum
        """How many updates close the round."""
        uncounted = {*self.given_up, *self.on_trial, *self.rejected}
        able = sum(agent in self.accepted or agent not in uncounted for agent in self.cohort)
        return max(1, min(self.buffer, able))

    def takes(self, agent: str, message: UpdateManifest) -> bool:
        """Whether the update was made for the round in which the agent was asked."""
        asked = (self.run, self.asked_in.get(agent, self.round), self.purpose)
        return (message.run, message.round, message.purpose) == asked


def staleness_weight(staleness: int) -> float:
    """What a change counts that was made from the model so many rounds ago."""
    return 1 / math.sqrt(1 + staleness)


def rebased(
    updates: Iterable[Update], state: State, asked_in: Mapping[str, int], number: int, base: Callable[[int], State]
) -> Iterator[Update]:
    """The updates of round ``number`` as if made from ``state``, those of earlier rounds with less weight.

    ``base``: the state that agents of a round started from. Updates of this round are returned as they are.
    """
    for update in updates:
        asked = asked_in.get(update.client, number)
        if asked == number:
            yield update
            continue
        weight = staleness_weight(number - asked)
        before = base(asked)
        tensors = {name: _moved(name, array, state, before, weight) for name, array in update.tensors.items()}
        yield Update(update.client, update.weight, tensors)


def _moved(name: str, array: np.ndarray, state: State, before: Tensors, weight: float) -> np.ndarray:
    if array.dtype.kind != "f" or name not in state:
        return array
    # A running statistic is no sum of steps: a change beyond it could make a variance negative.
    origin = before[name] if is_learned(name, array) else state[name]
    moved: np.ndarray = state[name] + weight * (array.astype(np.float64) - origin)
    return moved.astype(array.dtype)
