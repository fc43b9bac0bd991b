"""Weighted sums of named arrays, of which the mean is taken: partial sums add up to the bits of one sum of all.

That is so because every array is summed exactly, see `edge_agent.core.exact_sum`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .errors import TensorsError, TrainingFailed
from .exact_sum import ExactSum
from .task import Tensors

_COARSE = "coarse."
_FINE = "fine."
_STATE = "about."
"""Beginnings of the names of the three arrays by which an exact sum travels."""

_COUNT = "about"
"""Name of the number of addends, (1,) int64."""

_COUNTER = "counter."
"""Beginning of the name of a counter."""

_LIKE = "like."
"""Beginning of the name of an empty array, whose dtype is that of a mean."""

_WEIGHT = "weight"
"""Name of the sum of the weights; those of the arrays have it in front, as ``weight.encoder.conv1.weight``."""


Form = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and the shape of an array."""


class WeightedSum:
    """The sum of weights, and of named arrays each times its weight; memory is one accumulator.

    Integer arrays (counters) are not summed. Of them the largest value is kept, because a mean of counters means
    nothing.

    Attributes:
        count: The number of addends.
        only: The arrays of the only addend; None where there are none or several, or where it was merged.
    """

    def __init__(self) -> None:
        self.count = 0
        self.only: Tensors | None = None
        self._weight = ExactSum(())
        self._sums = dict[str, ExactSum]()
        self._counters: Tensors = {}
        self._dtypes = dict[str, np.dtype[Any]]()

    @property
    def weight(self) -> float:
        """The sum of the weights."""
        return float(self._weight.total())

    @property
    def is_exact(self) -> bool:
        """Whether no order could have changed a bit, see `ExactSum.is_exact`."""
        return self._weight.is_exact and all(total.is_exact for total in self._sums.values())

    def add(self, weight: float, tensors: Tensors) -> None:
        """Add arrays times a weight; those of one name have one shape, and keep the dtype of the first."""
        self._count(weight, tensors)
        for name, array in tensors.items():
            self._dtypes.setdefault(name, array.dtype)
            if array.dtype.kind != "f":
                self._note_counter(name, array)
            else:
                self._sum_of(name, array.shape).add(array, weight)

    def add_products(self, weight: float, tensors: Tensors, products: Tensors) -> None:
        """Add arrays that were multiplied with their weight before, and rounded where the caller wants it.

        Args:
            weight: The weight.
            tensors: The arrays before they were multiplied, which become `only`.
            products: The arrays that are added, float64.
        """
        self._count(weight, tensors)
        for name, array in products.items():
            self._dtypes.setdefault(name, array.dtype)
            self._sum_of(name, array.shape).add(array)

    def merge(self, other: WeightedSum) -> None:
        """Add what another sum has, as if its addends had been added here.

        Raises:
            TensorsError: Arrays of one name have different shapes.
        """
        self.count += other.count
        self.only = None
        self._weight.merge(other._weight)
        for name, dtype in other._dtypes.items():
            self._dtypes.setdefault(name, dtype)
        for name, array in other._counters.items():
            self._note_counter(name, array)
        for name, total in other._sums.items():
            self._sum_of(name, total.coarse.shape).merge(total)

    def require_weight(self, *, may_be_empty: bool = False) -> float:
        """Return the sum of the weights.

        Args:
            may_be_empty: Whether there may be no array at all.

        Raises:
            TrainingFailed: The weights sum to zero, or there are no addends.
        """
        total = self.weight
        is_empty = not self._dtypes and may_be_empty
        if not total > 0 and not is_empty:
            raise TrainingFailed("no update with a positive weight to average; the round keeps its state")
        return total

    def mean(self, *, may_be_empty: bool = False) -> Tensors:
        """Return the weighted mean of the arrays, and end this sum: it can be read once.

        Args:
            may_be_empty: Whether there may be no array at all; the mean is empty then.

        Raises:
            TrainingFailed: The weights sum to zero, or there are no addends.
        """
        total = self.require_weight(may_be_empty=may_be_empty)
        # Each sum goes as its mean comes: a 45 MB model would else lie here several times over.
        means: Tensors = {}
        for name, dtype in self._dtypes.items():
            if name in self._counters:
                means[name] = self._counters[name]
            else:
                means[name] = (self._sums.pop(name).total() / total).astype(dtype)
        return means

    def sums(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name of each array that is summed, and its sum, float64."""
        for name, total in self._sums.items():
            yield name, total.total()

    # --- between processes -----------------------------------------------------------------------------------------

    def to_tensors(self) -> Tensors:
        """Return the sum as named arrays, from which `from_tensors` makes it again; `only` stays behind."""
        tensors: Tensors = {_COUNT: np.array([self.count], np.int64)}
        tensors |= exact_to_tensors({_WEIGHT: self._weight})
        tensors |= {f"{_COUNTER}{name}": array for name, array in self._counters.items()}
        tensors |= {f"{_LIKE}{name}": np.zeros(0, dtype) for name, dtype in self._dtypes.items()}
        for name, total in self._sums.items():
            tensors |= exact_to_tensors({f"{_WEIGHT}.{name}": total})
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray]) -> WeightedSum:
        """Return the sum that `to_tensors` has written.

        Raises:
            TensorsError: The arrays are not those of a weighted sum.
        """
        total = cls()
        # 1. The number of addends, and the sum of their weights.
        sums = exact_from_tensors(tensors)
        count = tensors.get(_COUNT)
        if _WEIGHT not in sums or count is None or count.shape != (1,) or count.dtype != np.int64:
            raise TensorsError(f"no weighted sum: '{_COUNT}' or '{_WEIGHT}' is missing, or of another form")
        total.count = int(count[0])
        if total.count < 0:
            raise TensorsError(f"a weighted sum of {total.count} addends, expected 0 or more")
        total._weight = sums.pop(_WEIGHT)
        # 2. The sums of the arrays, the counters, and the dtypes of both.
        total._sums = {name.removeprefix(f"{_WEIGHT}."): array_sum for name, array_sum in sums.items()}
        for name, array in tensors.items():
            if name.startswith(_COUNTER):
                total._counters[name.removeprefix(_COUNTER)] = np.array(array)
            elif name.startswith(_LIKE):
                total._dtypes[name.removeprefix(_LIKE)] = array.dtype
        # 3. A mean without a sum, or a sum without a dtype, would show only when the mean is taken.
        summed = total._sums.keys() | total._counters.keys()
        if summed != total._dtypes.keys():
            lonely = ", ".join(sorted(summed ^ total._dtypes.keys())[:5])
            raise TensorsError(f"no weighted sum: '{lonely}' has either a sum or a dtype, expected both or neither")
        return total

    # --- inside ----------------------------------------------------------------------------------------------------

    def _count(self, weight: float, tensors: Tensors) -> None:
        """Count an addend, and its weight."""
        self.count += 1
        self.only = tensors if self.count == 1 else None
        self._weight.add(np.float64(weight))

    def _note_counter(self, name: str, array: np.ndarray) -> None:
        """Keep the larger value of each counter.

        Raises:
            TensorsError: It has another shape than before.
        """
        before = self._counters.get(name)
        if before is not None and before.shape != array.shape:
            raise TensorsError(f"counter '{name}' of shape {array.shape}, expected one of shape {before.shape}")
        self._counters[name] = array.copy() if before is None else np.maximum(before, array)

    def _sum_of(self, name: str, shape: tuple[int, ...]) -> ExactSum:
        """Return the sum of the arrays of this name."""
        if name not in self._sums:
            self._sums[name] = ExactSum(shape)
        return self._sums[name]


def forms_of_sum(addends: Mapping[str, Form]) -> dict[str, Form]:
    """Return the form of each array of `WeightedSum.to_tensors` for a sum of arrays of these forms."""
    forms: dict[str, Form] = {_COUNT: (np.dtype(np.int64), (1,)), **_forms_of_exact(_WEIGHT, ())}
    for name, (dtype, shape) in addends.items():
        forms[f"{_LIKE}{name}"] = (dtype, (0,))
        if dtype.kind != "f":
            forms[f"{_COUNTER}{name}"] = (dtype, shape)
        else:
            forms |= _forms_of_exact(f"{_WEIGHT}.{name}", shape)
    return forms


def _forms_of_exact(name: str, shape: tuple[int, ...]) -> dict[str, Form]:
    """Return the form of each array of an exact sum."""
    float64 = np.dtype(np.float64)
    return {
        f"{_COARSE}{name}": (float64, shape),
        f"{_FINE}{name}": (float64, shape),
        f"{_STATE}{name}": (float64, (3,)),
    }


def exact_to_tensors(sums: Mapping[str, ExactSum]) -> Tensors:
    """Return exact sums as named arrays, three for each, from which `exact_from_tensors` makes them again."""
    tensors: Tensors = {}
    for name, total in sums.items():
        tensors[f"{_COARSE}{name}"] = total.coarse
        tensors[f"{_FINE}{name}"] = total.fine
        tensors[f"{_STATE}{name}"] = total.state()
    return tensors


def exact_from_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, ExactSum]:
    """Return the exact sums among named arrays.

    Raises:
        TensorsError: An array of one of them is missing, or has another shape.
    """
    sums = dict[str, ExactSum]()
    for key, coarse in tensors.items():
        if not key.startswith(_COARSE):
            continue
        name = key.removeprefix(_COARSE)
        fine = tensors.get(f"{_FINE}{name}")
        state = tensors.get(f"{_STATE}{name}")
        if fine is None or state is None or fine.shape != coarse.shape:
            raise TensorsError(f"sum '{name}' lacks its fine part or its state, or they are of different shapes")
        sums[name] = ExactSum.resumed(coarse, fine, state)
    return sums
