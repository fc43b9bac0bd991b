"""Servers that take the mean of a round as a direction, not as the next model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np

from ..task import State, Tensors
from .base import Update, weighted_mean
from .fedavg import Method as FedAvg

AT_HOME = "server."
"""Arrays of the state with names like this are the coordinator's own."""

_STATISTICS = (".running_mean", ".running_var")


def is_learned(name: str, array: np.ndarray) -> bool:
    """Whether an array of a state is a weight that gradients move.

    Not so extras, counters, and batch norm's running statistics: a step beyond their mean can make a variance negative.
    """
    return array.dtype.kind == "f" and not name.startswith(("extra.", AT_HOME)) and not name.endswith(_STATISTICS)


def changes(state: State, mean: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Of each learned array its name and ``mean`` minus ``state``, float64."""
    for name, array in mean.items():
        if is_learned(name, array):
            yield name, array.astype(np.float64) - state[name]


def towards(state: State, mean: Tensors, rate: float) -> Tensors:
    """Arrays ``state + rate * (mean - state)``; those that are not learned are the mean. ``rate`` 1 gives the mean."""
    if rate == 1.0:
        return mean
    moved = {name: (state[name] + rate * change).astype(mean[name].dtype) for name, change in changes(state, mean)}
    return {**mean, **moved}


class ServerSteps(FedAvg):
    """FedAvg whose server makes a step of its own from the mean change of a round."""

    def broadcast(self, state: State) -> Tensors:
        """Encoder and head."""
        return {name: array for name, array in state.items() if not name.startswith(AT_HOME)}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """The state after one step; running statistics of batch norm are the mean."""
        mean = weighted_mean(self._weighted(updates))
        found = {**state, **mean}
        for name, change in changes(state, mean):
            step, moments = self.step(state, name, change)
            found[name] = (state[name] + step).astype(mean[name].dtype)
            found |= {f"{AT_HOME}{key}.{name}": array.astype(np.float32) for key, array in moments.items()}
        return found

    @abstractmethod
    def step(self, state: State, name: str, change: np.ndarray) -> tuple[np.ndarray, Tensors]:
        """What is added to the array ``name``, and the moments to keep, by kind; ``change`` is mean minus state."""

    @staticmethod
    def moment(state: State, kind: str, name: str, start: float = 0.0) -> np.ndarray | float:
        """The kept moment of an array, or ``start`` in the first round."""
        return state.get(f"{AT_HOME}{kind}.{name}", start)
