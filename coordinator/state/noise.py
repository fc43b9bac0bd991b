"""The rule that tells a difference between two accuracies of one device from noise, for everything that is shown.

A device compares the two models on its held-out samples by McNemar's exact test and reports ``better_alone``; that
decides whether it loses. It sends no outcomes of single samples, so a gain is judged by the accuracies alone, as if
they were of different samples. That is stricter than the paired test: what counts as a gain here is one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

STANDARD_ERRORS = 2.0
"""The number of standard errors above which a difference is more than noise."""


class Gain(enum.Enum):
    """How a personal model compares with the best model alone; the values are the words of the pages."""

    ABOVE = "above"
    WITHIN = "within noise"
    BELOW = "below"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Compared:
    """Two accuracies, 0..1, of one device on the same ``support`` held-out samples."""

    local: float
    personal: float
    support: int
    better_alone: bool = False

    @property
    def error(self) -> float:
        """The standard error of their difference, as if they were of different samples."""
        return math.hypot(standard_error(self.local, self.support), standard_error(self.personal, self.support))

    @property
    def adjusted_gain(self) -> float:
        """The difference of both accuracies as `adjusted` has them."""
        return adjusted(self.personal, self.support) - adjusted(self.local, self.support)


def adjusted(accuracy: float, samples: int) -> float:
    """Return the accuracy with a right and a wrong answer added (Agresti and Caffo): never 0 or 1, sound for few."""
    return (accuracy * samples + 1) / (samples + 2)


def standard_error(accuracy: float, samples: int) -> float:
    """Return the binomial standard error of an accuracy on so many held-out samples."""
    rate = adjusted(accuracy, samples)
    return math.sqrt(rate * (1 - rate) / (samples + 2))


def classify_gain(local: float | None, personal: float | None, support: int | None, *, better_alone: bool) -> Gain:
    """Return whether a personal model is above or below the best model alone by more than noise.

    Args:
        local: Accuracy, 0..1, of the best model that the device fits alone; None: not known.
        personal: Accuracy, 0..1, of its personal model on the same held-out samples; None: not known.
        support: The number of these samples; None or 0: not known.
        better_alone: What the device reports of its own test.
    """
    if local is None or personal is None:
        return Gain.UNKNOWN
    if better_alone:
        return Gain.BELOW
    if not support:
        return Gain.UNKNOWN
    compared = Compared(local, personal, support)
    return Gain.ABOVE if compared.adjusted_gain > STANDARD_ERRORS * compared.error else Gain.WITHIN


def classify_mean_gain(devices: Iterable[Compared]) -> Gain:
    """Return whether the mean gain of several devices, whose samples are independent, is more than noise."""
    compared = list(devices)
    if not compared:
        return Gain.UNKNOWN
    gain = math.fsum(device.adjusted_gain for device in compared)
    noise = STANDARD_ERRORS * math.sqrt(math.fsum(device.error**2 for device in compared))
    if abs(gain) <= noise:
        return Gain.WITHIN
    return Gain.ABOVE if gain > 0 else Gain.BELOW
