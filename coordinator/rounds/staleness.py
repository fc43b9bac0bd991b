"""Updates of earlier rounds, as they count in a buffered round: as changes to the model that they started from.

Source and differences: `coordinator.rounds.buffered`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from edge_agent.core.task import State, Tensors
from edge_agent.methods import Update
from edge_agent.methods.base import is_learned


def staleness_weight(staleness: int) -> float:
    """Return the weight (0..1) of a change that was made from the model of so many rounds ago."""
    return 1 / math.sqrt(1 + staleness)


def rebased(
    updates: Iterable[Update], state: State, asked_in: Mapping[str, int], number: int, base: Callable[[int], State]
) -> Iterator[Update]:
    """Yield the updates of a round as if all were made from its state, those of earlier rounds with less weight.

    Args:
        updates: The updates of the round; those that were asked for in it are yielded as they are.
        state: The state that the round began with.
        asked_in: Agent -> the earlier round that its update is of.
        number: The round.
        base: Returns the state that the agents of a round started from.
    """
    for update in updates:
        round_asked = asked_in.get(update.client, number)
        if round_asked == number:
            yield update
            continue
        weight = staleness_weight(number - round_asked)
        before = base(round_asked)
        tensors = {name: _rebase(name, array, state, before, weight) for name, array in update.tensors.items()}
        yield Update(update.client, update.weight, tensors)


def _rebase(name: str, array: np.ndarray, state: State, before: Tensors, weight: float) -> np.ndarray:
    """Return an array of an earlier round's update as if it had been made from the state of this round.

    Args:
        name: The name of the array.
        array: The array after training; integers, and arrays that the state does not have, are returned as they are.
        state: The state that this round began with.
        before: The state that the agent started from.
        weight: The weight (0..1) of the change.
    """
    if array.dtype.kind != "f" or name not in state:
        return array
    # Weights change by a step from where the agent started. A running statistic moves towards the agent's: a step
    # beyond that could make a variance negative.
    origin = before[name] if is_learned(name, array) else state[name]
    rebased_array: np.ndarray = state[name] + weight * (array.astype(np.float64) - origin)
    return rebased_array.astype(array.dtype)
