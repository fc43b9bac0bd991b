"""Floating-point numbers as integers modulo 2^64, so that their sums are exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.errors import TrainingFailed


@dataclass(frozen=True)
class FixedPoint:
    """The form of numbers as integers modulo 2^64, rounded to multiples of 2^-``bits``.

    A sum over n clients differs from the exact one by at most n 2^-(bits + 1) in each number. Each number of a client
    may reach 2^(62 - bits) / n, so that no sum wraps around.
    """

    bits: int = 24

    def bound(self, clients: int) -> float:
        """Return the largest absolute value that a number of one of so many clients may have."""
        return float(2.0 ** (62 - self.bits) / clients)

    def encode(self, numbers: np.ndarray, clients: int) -> np.ndarray:
        """Return ``numbers`` (n,) as integers (n,) uint64.

        Raises:
            TrainingFailed: A number is not finite, or too large for the sum.
        """
        largest = float(np.abs(numbers).max(initial=0.0))
        if not largest <= self.bound(clients):
            raise TrainingFailed(
                f"a number of {largest:g} in the weighted update, a secure sum of {clients} clients holds up to "
                f"{self.bound(clients):g}; lower the step size, or clip the update"
            )
        return np.rint(numbers.astype(np.float64) * 2.0**self.bits).astype(np.int64).view(np.uint64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Return a sum (n,) uint64 as numbers (n,) float64."""
        return total.view(np.int64).astype(np.float64) / 2.0**self.bits
