"""Means with their spread, and when a mean difference counts: by the same rule for seeds and for clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
"""The share of repeated comparisons whose interval holds the true difference, if differences are normal."""

ENOUGH_ERRORS = 2.0
"""How many standard errors a difference has at least where it is distinguishable from none."""

ENOUGH_SEEDS = 5
"""From so many seeds on chance alone exceeds two standard errors in about one of nine comparisons, or fewer."""

EXACT = 1e-12
"""Differences of accuracies whose deviation is smaller are equal: only their rounding differs."""


@dataclass(frozen=True)
class Estimate:
    """The mean of some values with its spread; a single value has none."""

    mean: float
    count: int
    """The number of values."""

    deviation: float | None = None
    """Standard deviation of the values (n - 1)."""

    standard_error: float | None = None
    """Standard deviation of the mean itself."""

    low: float | None = None
    """Lower end of Student's 95 % interval of the mean."""

    high: float | None = None

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate of at least one value."""
        mean = fmean(values)
        count = len(values)
        if count == 1:
            return cls(mean, count)
        deviation = stdev(values)
        if deviation < EXACT:
            deviation = 0.0
        error = deviation / math.sqrt(count)
        half_width = _critical_value(count) * error
        return cls(mean, count, deviation, error, mean - half_width, mean + half_width)


def _critical_value(count: int) -> float:
    """Return how many standard errors of the mean of ``count`` values Student's 95 % interval reaches to a side."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))


def is_distinguishable(estimate: Estimate) -> bool | None:
    """Return whether a mean difference has two standard errors or more; None where there is no error to judge it by."""
    if estimate.standard_error is None:
        return None
    return abs(estimate.mean) >= max(ENOUGH_ERRORS * estimate.standard_error, EXACT)


def chance_of_distinguishing(count: int) -> float:
    """Return how often a difference of ``count`` pairs has two standard errors where there is none, to either side."""
    from scipy.stats import t

    return float(2 * t.sf(ENOUGH_ERRORS, count - 1))


def describe_chance(count: int) -> str:
    """Say in a sentence how often a difference of ``count`` seeds has two standard errors where there is none."""
    chance = 100 * chance_of_distinguishing(count)
    return f"With {count} seeds chance alone exceeds two standard errors in {chance:.0f} % of comparisons."
