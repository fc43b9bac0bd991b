"""Ridge regression on the device's samples and on what the federation knows of all others: their sums of products.

W = (G_own + c G_shared + ridge I)^-1 (Q_own + c Q_shared) with G = sum z z' and Q = sum of z by class; those of the
federation are means over its samples, so c is the number of samples that its knowledge counts for. c = 0 is a head of
the device alone, and a large c the shared classifier of method `afl`. Both c and the ridge are those with the least
square error of own samples that are left out one at a time, which has a closed form: no model is fitted twice.

A class that the federation does not know has no part in Q_shared, and samples of others count against it. Samples that
this device gave to the federation itself count once more with weight c / n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from ..core.errors import UsageError
from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from .base import FitData, Head, HeadParams, softmax

COUNTS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 10_000.0)
"""The numbers of samples that the shared statistics count for, of which the best is taken."""

RIDGES = (1e-4, 1e-2, 1.0)
"""The penalties that are tried, in units of the mean square of a feature, times the samples that count."""

SHARPNESS = tuple(2.0**power for power in range(8))
"""Factors of the scores that are tried, so that probabilities are neither too sure nor too timid."""


class RidgePriorParams(HeadParams):
    """The parameter of head ``ridge_prior``."""

    samples: float | None = Field(
        None,
        ge=0,
        le=1e9,
        description="c, the samples that the shared statistics count for; none: the best by errors of samples left out",
    )


class RidgePriorHead(Head):
    """Least squares with the federation's statistics as prior; it does not depend on the generator."""

    Params = RidgePriorParams
    uses_shared = True
    source = "ours; FedCGS (arXiv 2503.06962) fits personal heads to global statistics, leave-one-out by the hat matrix"

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        if data.statistics is None:
            raise UsageError(
                "head 'ridge_prior': the bundle has no shared statistics; take one of a run of method afl, or choose "
                "another head"
            )
        own = _Rows.of(data, classes)
        shared = _Prior.of(data.statistics, classes)
        counts = COUNTS if self.params.samples is None else (self.params.samples,)
        fits = [fit_with(own, shared, count, ridge) for count in counts for ridge in RIDGES]
        best = min(fits, key=lambda fit: fit.mean_square)
        positions = np.searchsorted(classes, data.labels)
        sharpness = max(SHARPNESS, key=lambda factor: _log_likelihood(factor * best.left_out, positions))
        return {
            "weight": (sharpness * best.weight[:, :-1]).astype(np.float32),
            "bias": (sharpness * best.weight[:, -1]).astype(np.float32),
            "prior_samples": np.array([best.count], np.float32),
        }

    def _predict(self, features: np.ndarray) -> np.ndarray:
        return softmax(features.astype(np.float64) @ self.arrays["weight"].T + self.arrays["bias"])

    def _write(self, graph: Graph, features: Value) -> Value:
        weight = self.arrays["weight"].astype(DOUBLE)
        bias = self.arrays["bias"].astype(DOUBLE)
        return graph.softmax(graph.linear(graph.cast(features, DOUBLE), weight, bias))


@dataclass(frozen=True)
class _Rows:
    """The device's samples: features with a constant 1 behind them (n, d + 1), and one-hot classes (n, k)."""

    inputs: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(cls, data: FitData, classes: np.ndarray) -> _Rows:
        features = data.features.astype(np.float64)
        inputs = np.concatenate([features, np.ones((len(features), 1))], axis=1)
        return cls(inputs, np.eye(len(classes))[np.searchsorted(classes, data.labels)])


@dataclass(frozen=True)
class _Prior:
    """The federation's mean statistics of the same form: G (d + 1, d + 1) and Q (d + 1, k)."""

    gram: np.ndarray
    cross: np.ndarray

    @classmethod
    def of(cls, statistics: Tensors, classes: np.ndarray) -> _Prior:
        mean = statistics["mean"].astype(np.float64)
        size = len(mean)
        gram = np.zeros((size + 1, size + 1))
        upper = np.zeros((size, size))
        upper[np.triu_indices(size)] = statistics["gram"]
        gram[:size, :size] = upper + np.triu(upper, 1).T
        gram[:size, size] = mean
        gram[size, :size] = mean
        gram[size, size] = 1.0
        cross = np.concatenate([statistics["sums"][classes], statistics["shares"][classes, None]], axis=1)
        return cls(gram, cross.astype(np.float64).T)


@dataclass(frozen=True)
class PriorFit:
    """One fit: weights (k, d + 1), answers (n, k) to each sample by a fit without it, and their mean square error."""

    count: float
    weight: np.ndarray
    left_out: np.ndarray
    mean_square: float


def fit_with(own: _Rows, shared: _Prior, count: float, ridge: float) -> PriorFit:
    """Return the fit in which the shared statistics count for ``count`` samples.

    Args:
        own: The device's samples.
        shared: The federation's statistics.
        count: c.
        ridge: The penalty, in units of the mean square of a feature, times the samples that count.
    """
    gram = own.inputs.T @ own.inputs + count * shared.gram
    cross = own.inputs.T @ own.targets + count * shared.cross
    size = len(gram) - 1
    penalty = np.full(size + 1, ridge * max(float(np.trace(gram[:size, :size])) / size, 1e-30))
    penalty[size] = 1e-9 * gram[size, size]  # the intercept is not penalised
    # One solve gives the weights and, for the leverages of the samples, G^-1 x.
    solved = np.linalg.solve(gram + np.diag(penalty), np.concatenate([cross, own.inputs.T], axis=1))
    weight = solved[:, : cross.shape[1]]
    leverage = np.einsum("ij,ji->i", own.inputs, solved[:, cross.shape[1] :])
    residuals = own.targets - own.inputs @ weight
    # A sample's error without itself follows from its error and its leverage (Allen's PRESS).
    errors = residuals / np.maximum(1 - leverage, 1e-9)[:, None]
    return PriorFit(count, weight.T, own.targets - errors, float((errors**2).mean()))


def _log_likelihood(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean log-probability of the labels (n,) under the softmax of scores (n, k)."""
    return float(np.log(np.maximum(softmax(scores)[np.arange(len(labels)), labels], 1e-12)).mean())
