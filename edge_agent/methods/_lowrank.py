"""Matrices that keep their largest singular values, and what sending their factors would take."""

from __future__ import annotations

import numpy as np

from ..task import Tensors


def smallest_rank(singular: np.ndarray, energy: float) -> int:
    """How many of the singular values (r,), largest first, hold a share ``energy`` (0..1] of their sum of squares."""
    squares = np.cumsum(np.square(singular.astype(np.float64)))
    if energy >= 1.0 or not squares[-1]:
        return len(singular) if energy >= 1.0 else 0
    # The smallest rank that is enough; a search that stops before full rank would keep nothing where all are needed.
    return int(np.searchsorted(squares, energy * squares[-1] * (1 - 1e-12))) + 1


def truncated(array: np.ndarray, energy: float) -> tuple[np.ndarray, int]:
    """The array of the smallest sufficient rank, and the bytes that it takes: its factors', or its own if fewer.

    An array of more than two axes is the matrix of its first axis against all others. One with fewer is left alone, and
    so is what needs full rank, bit for bit.
    """
    if array.ndim < 2 or not array.size or array.dtype.kind != "f":
        return array, array.nbytes
    matrix = array.reshape(len(array), -1)
    left, singular, right = np.linalg.svd(matrix, full_matrices=False)
    rank = smallest_rank(singular, energy)
    factors = rank * (sum(matrix.shape) + 1) * array.itemsize
    if rank == len(singular):
        return array, min(factors, array.nbytes)
    low = (left[:, :rank] * singular[:rank]) @ right[:rank]
    return low.reshape(array.shape).astype(array.dtype), min(factors, array.nbytes)


def compressed(tensors: Tensors, base: Tensors, energy: float) -> tuple[Tensors, int]:
    """``base`` plus what is left of each difference from it, and the bytes of all factors; nothing in base is zero."""
    found, total = dict[str, np.ndarray](), 0
    for name, array in tensors.items():
        start = base.get(name)
        low, taken = truncated(array if start is None else array - start, energy)
        found[name] = low if start is None else (start + low).astype(array.dtype)
        total += taken
    return found, total
