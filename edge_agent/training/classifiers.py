"""Classifiers that are chosen, not learned: matrices whose rows are the directions of the classes."""

from __future__ import annotations

import math

import numpy as np


def orthonormal(rows: int, size: int, seed: int) -> np.ndarray:
    """Matrix (rows, size) float64 with rows of length 1 at right angles, drawn evenly from all such; rows <= size."""
    drawn = np.random.default_rng(seed).standard_normal((size, rows))
    columns, triangle = np.linalg.qr(drawn)
    signs = np.where(np.diag(triangle) < 0, -1.0, 1.0)  # a factorisation may choose them as it likes
    return np.ascontiguousarray((columns * signs).T)


def simplex(classes: int, size: int, seed: int) -> np.ndarray:
    """Equiangular tight frame (classes, size) float64: unit rows, each pair at cosine -1 / (classes - 1).

    Rows of sqrt(K / (K - 1)) (I - 11' / K) U' for K classes and orthonormal U'; they sum to 0. ``classes`` <= ``size``.
    One class alone gets one unit vector.
    """
    directions = orthonormal(classes, size, seed)
    if classes == 1:
        return directions
    return np.asarray(math.sqrt(classes / (classes - 1)) * (directions - directions.mean(axis=0)))
