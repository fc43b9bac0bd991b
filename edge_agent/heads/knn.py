"""kNN-Per: the votes of the nearest of the device's own samples, mixed with the shared classifier's probabilities.

p = lambda p_knn + (1 - lambda) p_shared. A neighbour at squared distance D weighs exp(-D / (d scale)) for d features.
Probabilities are over the classes that the device has; without a shared classifier in the bundle lambda is 1.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from ._features import (
    FeatureNorm,
    NormedParams,
    fit_norm,
    normalise,
    shared_logits,
    shared_rows,
    write_norm,
    write_shared_logits,
)
from .base import FitData, Head, softmax

_CELLS = 2_000_000
"""Distances that are held at once, 16 MB."""

MIXES: tuple[float, ...] = tuple(np.linspace(0.0, 1.0, 11).tolist())
"""Values of lambda that are tried."""


class KNNParams(NormedParams):
    """Defaults of the authors' code; the paper picks lambda (and sometimes scale) on held-out data."""

    feature_norm: FeatureNorm = Field("none", description="none (the paper), l2 or standard, for the distances only")
    neighbours: int = Field(10, ge=1, le=10_000, description="k; all samples where there are fewer")
    scale: float = Field(1.0, gt=0, description="width of the weights: squared distances are divided by d times this")
    mix: float | None = Field(
        None,
        ge=0,
        le=1,
        description="lambda, share of the neighbours; none: the best of 0, 0.1 ... 1 on held-out data",
    )
    held_back: float = Field(0.2, gt=0, lt=1, description="share of the samples on which lambda is picked")


class KNNHead(Head):
    """All training features, and a choice of lambda; nothing is iterated."""

    Params = KNNParams
    source = "Marfoq, Neglia, Kameni, Vidal, kNN-Per, ICML 2022"
    uses_shared = True

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        norm = fit_norm(data.features, self.params.feature_norm)
        arrays: Tensors = {**norm, **shared_rows(data, classes), "members": np.searchsorted(classes, data.labels)}
        arrays["stored"] = normalise(data.features, self.params.feature_norm, norm).astype(np.float32)
        share = self._mix(arrays, data.features, len(classes), rng)
        return {**arrays, "mix": np.array([share])}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        near, shared = self._predict_both(self.arrays, features, len(self.arrays["classes"]))
        if shared is None:
            return near
        share = float(self.arrays["mix"][0])
        return share * near + (1 - share) * shared

    def _write(self, graph: Graph, features: Value) -> Value:
        arrays = self.arrays
        count = len(arrays["classes"])
        stored = arrays["stored"].astype(DOUBLE)
        # 1. Squared distances of the nearest stored rows, less the smallest one.
        queries = write_norm(graph, features, self.params.feature_norm, arrays)
        products = graph.add("MatMul", queries, np.ascontiguousarray(-2 * stored.T))
        squares = graph.add("Add", graph.add("Add", products, (stored**2).sum(axis=1)), graph.squared_lengths(queries))
        nearest, positions = graph.nearest(squares, min(self.params.neighbours, len(stored)))
        above_zero = graph.add("Max", nearest, np.zeros(1))
        farther = graph.add("Sub", above_zero, graph.columns(above_zero, 0, 1))
        # 2. Their weighted votes.
        weights = graph.add("Exp", graph.add("Div", farther, np.array(-stored.shape[1] * self.params.scale)))
        members = graph.add("Gather", np.eye(count)[arrays["members"]], positions)
        weighted = graph.add("Mul", graph.add("Unsqueeze", weights, np.array([2])), members)
        votes = graph.add("ReduceSum", weighted, np.array([1]), keepdims=0)
        near = graph.add("Div", votes, graph.sum_rows(votes))
        # 3. The shared classifier's share.
        logits = write_shared_logits(graph, graph.cast(features, DOUBLE), arrays, DOUBLE)
        if logits is None:
            return near
        share = float(arrays["mix"][0])
        near_part = graph.add("Mul", near, np.array(share))
        return graph.add("Add", near_part, graph.add("Mul", graph.softmax(logits), np.array(1 - share)))

    def _mix(self, arrays: Tensors, features: np.ndarray, count: int, rng: np.random.Generator) -> float:
        """Return lambda, 0..1: the configured one, else the best one on samples that are held out of the neighbours.

        `best_mix` says which is the best. The result is 0.5 where there are too few samples to hold any out, and 1
        without a shared classifier.
        """
        if "shared.weight" not in arrays:
            return 1.0
        if self.params.mix is not None:
            return float(self.params.mix)
        total = len(features)
        order = rng.permutation(total)
        held_count = round(self.params.held_back * total)
        if not 0 < held_count < total:
            return 0.5
        held_out = order[:held_count]
        stored = order[held_count:]
        neighbours = {**arrays, "stored": arrays["stored"][stored], "members": arrays["members"][stored]}
        near, shared = self._predict_both(neighbours, features[held_out], count)
        if shared is None:
            shared = near
        return best_mix(near, shared, arrays["members"][held_out])

    def _predict_both(self, arrays: Tensors, features: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return probabilities (n, count) of the neighbours and of the shared classifier, None where there is none."""
        params = self.params
        queries = normalise(features, params.feature_norm, arrays)
        near = count_votes(queries, arrays["stored"], arrays["members"], count, params.neighbours, params.scale)
        logits = shared_logits(arrays, features.astype(np.float64))
        if logits is None:
            return near, None
        return near, softmax(logits)


def best_mix(near: np.ndarray, shared: np.ndarray, labels: np.ndarray) -> float:
    """Return the lambda of 0, 0.1 ... 1 with most correct answers; of equals that of least log loss, then the smallest.

    ``near`` and ``shared``: probabilities (n, K) of neighbours and of the shared classifier; ``labels`` (n,).
    """
    return max(MIXES, key=lambda share: quality(near, shared, labels, share))


def quality(near: np.ndarray, shared: np.ndarray, labels: np.ndarray, share: float) -> tuple[int, float]:
    """Return the number of correct answers, and minus the mean log loss, of a mixture; of both more is better.

    Args:
        near: Probabilities (n, K) of the neighbours.
        shared: Probabilities (n, K) of the shared classifier.
        labels: Positions (n,) of the classes.
        share: lambda, 0..1, the weight of ``near``.
    """
    mixed = share * near + (1 - share) * shared
    right = int((mixed.argmax(axis=1) == labels).sum())
    of_label = np.maximum(mixed[np.arange(len(labels)), labels], 1e-12)
    # Rounded: shares of one and the same probability differ in their last digits.
    return right, round(float(np.log(of_label).mean()), 9)


def count_votes(
    queries: np.ndarray, stored: np.ndarray, members: np.ndarray, count: int, neighbours: int, scale: float
) -> np.ndarray:
    """Return the weighted shares of the classes (n, count) float64 among the nearest stored rows, block by block.

    ``queries`` (n, d) float64, ``stored`` (s, d) float32 with s >= 1, ``members`` (s,) class positions.
    """
    shares = np.zeros((len(queries), count))
    step = max(1, _CELLS // len(stored))
    for begin in range(0, len(queries), step):
        block = queries[begin : begin + step]
        nearest, squares = _nearest(block, stored, min(neighbours, len(stored)))
        # The smallest distance is taken off first: the shares stay, and at least one weight does not underflow.
        weights = np.exp(-(squares - squares.min(axis=1, keepdims=True)) / (stored.shape[1] * scale))
        np.add.at(shares, (np.arange(begin, begin + len(block))[:, None], members[nearest]), weights)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def _nearest(queries: np.ndarray, stored: np.ndarray, neighbours: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices (n, k) of the nearest stored rows, and their squared distances (n, k)."""
    # 1. Squared distances without |query|^2, which does not change the order; stored rows are widened piece by piece.
    squares = np.empty((len(queries), len(stored)))
    step = max(1, _CELLS // stored.shape[1])
    for begin in range(0, len(stored), step):
        piece = stored[begin : begin + step].astype(np.float64)
        products = queries @ piece.T
        squares[:, begin : begin + step] = np.einsum("ij,ij->i", piece, piece) - 2 * products
    # 2. The nearest rows, for which |query|^2 is added; rounding must not make a distance negative.
    nearest = np.argpartition(squares, neighbours - 1, axis=1)[:, :neighbours]
    lengths = np.einsum("ij,ij->i", queries, queries)[:, None]
    return nearest, np.maximum(np.take_along_axis(squares, nearest, axis=1) + lengths, 0.0)
