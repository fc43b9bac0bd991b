"""Ridge regression onto the classes: one linear solve, and the penalty from exact leave-one-out errors.

The fastest head, and hard to overfit: 600 x 512 x 10 takes a few hundredths of a second. Scores are regressions onto +1
for the class and -1 for the others, as scikit-learn's ``RidgeClassifierCV`` fits them; probabilities are the softmax of
``sharpness`` times the scores, with the sharpness of 0.5 ... 16 that suits the leave-one-out scores best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.task import Tensors
from ._features import NormedHead, NormedParams
from .base import softmax

PENALTIES = tuple(np.logspace(-3, 4, 15).tolist())
"""Weights of the penalty |w|^2 that are tried."""

SHARPNESS = tuple(2.0**power for power in range(-1, 5))
"""Factors of the scores that are tried."""


class RidgeHead(NormedHead):
    """Regularised least squares; the penalty is found, not given, and the result does not depend on the generator."""

    Params = NormedParams
    source = "Hoerl and Kennard 1970; leave-one-out errors by the hat matrix (Allen's PRESS)"

    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        one_hot = np.eye(classes)[labels]
        weight, bias, left_out = fit_ridge(inputs, 2 * one_hot - 1)
        rows = np.arange(len(labels))
        sharpness = max(
            SHARPNESS,
            key=lambda sharp: float(np.log(np.maximum(softmax(sharp * left_out)[rows, labels], 1e-12)).mean()),
        )
        return {"weight": sharpness * weight, "bias": sharpness * bias}


def fit_ridge(inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights (k, d), biases (k,) and leave-one-out predictions (n, k), float64, for the best of `PENALTIES`.

    ``inputs`` (n, d) and ``targets`` (n, k) float64, n >= 2. The intercept is not penalised. The best penalty is that
    with the least mean square of leave-one-out errors, over all targets.
    """
    # 1. Without their means the targets need no intercept.
    center = inputs.mean(axis=0)
    middle = targets.mean(axis=0)
    rows = inputs - center
    centred_targets = targets - middle
    # 2. Squared singular values and left singular vectors, by the smaller of the two products.
    if len(rows) <= rows.shape[1]:
        values, left_vectors = np.linalg.eigh(rows @ rows.T)
        has_spread = values > max(float(values[-1]), 1e-30) * 1e-12
        values = values[has_spread]
        left_vectors = left_vectors[:, has_spread]
    else:
        values, right_vectors = np.linalg.eigh(rows.T @ rows)
        has_spread = values > max(float(values[-1]), 1e-30) * 1e-12
        values = values[has_spread]
        left_vectors = rows @ right_vectors[:, has_spread] / np.sqrt(values)
    # 3. With them each penalty costs a product: its leave-one-out errors follow from residuals and leverages.
    projected = left_vectors.T @ centred_targets
    squares = left_vectors**2
    fits: list[_PenaltyFit] = []
    for penalty in PENALTIES:
        kept = values / (values + penalty)
        leverage = 1 / len(rows) + squares @ kept
        residuals = centred_targets - left_vectors @ (kept[:, None] * projected)
        errors = residuals / np.maximum(1 - leverage, 1e-9)[:, None]
        fits.append(_PenaltyFit(penalty, errors, float((errors**2).mean())))
    # 4. The weights of the best penalty; the first of equal ones.
    best = min(fits, key=lambda fit: fit.mean_square)
    weight = (rows.T @ (left_vectors @ (projected / (values + best.penalty)[:, None]))).T
    return weight, middle - weight @ center, targets - best.errors


@dataclass(frozen=True)
class _PenaltyFit:
    """One penalty, its leave-one-out errors (n, k) and their mean square."""

    penalty: float
    errors: np.ndarray
    mean_square: float
