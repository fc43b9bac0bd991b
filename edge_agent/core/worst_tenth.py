"""The worst tenth of the clients: the figure that says whether a mean hides clients that the model fails."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

Ranked = TypeVar("Ranked")


def worst_tenth(ranked: Sequence[Ranked]) -> Sequence[Ranked]:
    """Return the worst tenth of a sequence that begins with the worst: a tenth of its length, rounded up."""
    return ranked[: math.ceil(len(ranked) / 10)]


def mean_of_worst_tenth(values: Iterable[float]) -> float:
    """Return the mean of the lowest tenth of at least one value; of fewer than eleven that is the lowest."""
    lowest = worst_tenth(sorted(values))
    return math.fsum(lowest) / len(lowest)
