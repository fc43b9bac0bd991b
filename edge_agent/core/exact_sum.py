"""Sums of floating-point arrays that have the same bits in any order, and from any grouping into partial sums.

Floating-point addition rounds, so (a + b) + c is not a + (b + c), and a sum would depend on who arrived first and on
how many processes have shared the work. Here each addend is split into a multiple of `COARSE` and a multiple of `FINE`,
which are summed apart. Both sums are exact as long as their values keep to 53 bits, so no order can change them. What
an addend has below `FINE` is rounded, by itself and always alike.
"""

from __future__ import annotations

import numpy as np

from .errors import TensorsError

COARSE = 2.0**-10
FINE = 2.0**-56
"""Products of a float32 above 2^-32 and a count below 2^29 are multiples of it, so nothing of them is rounded."""

LARGEST = 2.0**40
"""The largest addend, and the largest sum. Multiples of `COARSE` are exact in float64 up to eight times that."""

_CARRY_EVERY = 128
"""Additions after which the fine sum, of at most `COARSE` / 2 each, is carried over to the coarse one."""

_BLOCK = 1 << 14
"""Values that are worked on at a time, so that intermediate arrays stay in the processor's cache."""

_TO_COARSE = 1.5 * 2.0**52 * COARSE
_TO_FINE = 1.5 * 2.0**52 * FINE
"""(x + c) - c rounds x to a multiple: at 1.5 * 2^52 units the neighbours of a float64 are one unit apart."""


_MOST_COARSE = 2 * LARGEST
_MOST_FINE = _CARRY_EVERY * COARSE
"""The largest numbers of both sums: that of all addends, and 128 halves of `COARSE` with those of one merged sum."""


class ExactSum:
    """The sum of arrays of one shape, each times a weight.

    Attributes:
        coarse: Sum of the multiples of `COARSE`, float64.
        fine: Sum of the multiples of `FINE`, float64.
        is_exact: Whether all addends were at most `LARGEST`. If not, the sum is an ordinary one, which depends on the
            order: such values are those of models that have diverged.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.coarse = np.zeros(shape)
        self.fine = np.zeros(shape)
        self.is_exact = True
        self._additions = 0
        self._bound = 0.0

    def add(self, array: np.ndarray, weight: float = 1.0, minus: np.ndarray | None = None) -> None:
        """Add an array of floats times a weight.

        Args:
            array: The array, of the size of this sum.
            weight: Its factor.
            minus: An array of that size, which is subtracted before; None: nothing is.
        """
        coarse = self.coarse.reshape(-1)
        fine = self.fine.reshape(-1)
        addend = np.ascontiguousarray(array).reshape(-1)
        origin = None if minus is None else np.ascontiguousarray(minus).reshape(-1)
        largest = 0.0
        for begin in range(0, addend.size, _BLOCK):
            piece = slice(begin, begin + _BLOCK)
            part = addend[piece].astype(np.float64)
            if origin is not None:
                part -= origin[piece]
            part *= weight
            lowest = float(part.min())
            highest = float(part.max())
            # A model that has diverged: added as usual. NaN, which is in no range, goes this way as well.
            if not -LARGEST <= lowest <= highest <= LARGEST:
                self.is_exact = False
                coarse[piece] += part
                continue
            largest = max(largest, highest, -lowest)
            rounded = part + _TO_COARSE
            rounded -= _TO_COARSE
            coarse[piece] += rounded
            part -= rounded
            part += _TO_FINE
            part -= _TO_FINE
            fine[piece] += part
        self._note(largest, 1)

    def merge(self, other: ExactSum) -> None:
        """Add what another sum has, as if its addends had been added here.

        Raises:
            TensorsError: It is a sum of arrays of another shape.
        """
        if other.coarse.shape != self.coarse.shape:
            raise TensorsError(f"a sum of shape {other.coarse.shape}, expected one of shape {self.coarse.shape}")
        self.coarse += other.coarse
        self.fine += other.fine
        self.is_exact = self.is_exact and other.is_exact
        self._note(other._bound, max(other._additions, 1))

    def _note(self, largest: float, additions: int) -> None:
        """Count additions, and carry before the fine sum needs more than 53 bits."""
        self._bound += largest
        self._additions += additions
        self.is_exact = self.is_exact and self._bound <= LARGEST
        if self._additions >= _CARRY_EVERY:
            self._carry()

    def _carry(self) -> None:
        """Move multiples of `COARSE` from the fine sum to the coarse one; the sum of both stays what it is."""
        carried = self.fine + _TO_COARSE
        carried -= _TO_COARSE
        self.coarse += carried
        self.fine -= carried
        self._additions = 1

    def state(self) -> np.ndarray:
        """Return what `resumed` needs beside both sums, (3,) float64: whether it is exact, its additions, its bound."""
        return np.array([float(self.is_exact), float(self._additions), self._bound])

    @classmethod
    def resumed(cls, coarse: np.ndarray, fine: np.ndarray, state: np.ndarray) -> ExactSum:
        """Return the sum with these attributes and this `state`; the arrays are copied.

        Raises:
            TensorsError: The arrays are not those of a sum.
        """
        are_floats = coarse.dtype == fine.dtype == state.dtype == np.float64
        if not are_floats or state.shape != (3,) or fine.shape != coarse.shape:
            raise TensorsError("arrays of another form than those of an exact sum, expected float64 of one shape")
        if not np.isfinite(state).all() or state.min() < 0:
            raise TensorsError(f"state {state.tolist()} of an exact sum, expected three numbers of 0 or more")
        # A sum that says to be exact is within what sums hold exactly; NaN is within nothing.
        if state[0] and not (_is_within(coarse, _MOST_COARSE) and _is_within(fine, _MOST_FINE)):
            raise TensorsError("a sum that calls itself exact holds NaN, infinity or numbers that no exact sum has")
        if state[1] > _CARRY_EVERY:
            raise TensorsError(f"a sum after {state[1]:g} additions, expected {_CARRY_EVERY} at most")
        total = cls(coarse.shape)
        total.coarse[...] = coarse
        total.fine[...] = fine
        total.is_exact = bool(state[0])
        total._additions = int(state[1])
        total._bound = float(state[2])
        return total

    def total(self) -> np.ndarray:
        """Return the sum, float64, rounded once."""
        return np.asarray(self.coarse + self.fine)


def _is_within(array: np.ndarray, limit: float) -> bool:
    """Return whether all numbers are from -limit to limit."""
    return bool(-limit <= array.min(initial=0.0) and array.max(initial=0.0) <= limit)
