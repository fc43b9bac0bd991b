"""How unlike the normal samples an input is: its Mahalanobis distance to them, in standard deviations.

It learns from samples of class ``normal`` alone, or from all where they have no labels. The covariance of the features
is shrunk towards a multiple of the identity by the formula of Ledoit and Wolf, so that fewer samples than features do.
An input above the threshold is an anomaly; so is about the share ``false_alarms`` of new normal inputs: the threshold
is a rank among the distances of the samples to fits without them (cross-conformal prediction). Below
1 / false_alarms - 1 samples there is none.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from ...core.errors import DataError
from ...core.graph import DOUBLE, Graph, Value
from ...core.task import Tensors
from ..base import HeadParams
from .base import NumericData, NumericHead


class MahalanobisParams(HeadParams):
    """The parameters of the head: what is normal, and how often a normal input may be called an anomaly."""

    normal: str = Field(
        "normal",
        coerce_numbers_to_str=True,  # the command line reads normal=0 as a number
        description="class of the normal samples; all are where they have no labels",
    )
    false_alarms: float = Field(0.05, gt=0, lt=1, description="share of normal inputs above the threshold")


class MahalanobisHead(NumericHead):
    """One Gaussian around the normal samples."""

    Params = MahalanobisParams
    source = "Mahalanobis 1936; Ledoit and Wolf, J. Multivariate Analysis 88, 2004, Lemmas 3.2-3.4"
    predicts_targets = False

    def _fit(self, data: NumericData) -> Tensors:
        # 1. Distances of samples to fits without them: those to a fit that has seen them would be too small.
        left_out = [np.empty(0)]
        for train, test in data.folds:
            if len(train) >= 2:
                left_out.append(distances(data.features[test], gaussian(data.features[train])))
        scores = np.sort(np.concatenate(left_out))
        # 2. The fit on all samples, with the threshold where there are enough scores for its rank.
        arrays = gaussian(data.features)
        rank = math.ceil((len(scores) + 1) * (1 - self.params.false_alarms))
        if 1 <= rank <= len(scores):
            arrays["threshold"] = scores[rank - 1]
        return arrays

    def _predict(self, features: np.ndarray) -> np.ndarray:
        return distances(features, self.arrays)

    def _write(self, graph: Graph, features: Value) -> Value:
        center = self.arrays["center"]
        axes = self.arrays["axes"]
        rows = graph.add("Sub", graph.cast(features, DOUBLE), center)
        along = graph.add("MatMul", rows, np.ascontiguousarray(axes.T))
        along_squares = graph.add("Mul", along, along)
        squares = graph.sum_rows(graph.add("Div", along_squares, self.arrays["variances"]))
        if len(axes) < len(center):
            rest = graph.add("Sub", graph.squared_lengths(rows), graph.sum_rows(along_squares))
            across = graph.add("Max", rest, np.zeros(1))
            squares = graph.add("Add", squares, graph.add("Div", across, self.arrays["floor"]))
        return graph.add("Sqrt", graph.add("Div", squares, np.array(float(len(center)))))


def gaussian(features: np.ndarray) -> Tensors:
    """Return mean and shrunk covariance of ``features`` (n, d): ``center`` (d,), ``axes`` (r, d), variances along them.

    ``variances`` (r,) belong to ``axes``, ``floor`` (0-d) to all directions across them. Features keep their scale:
    divided by their spreads, one that fires in a single normal sample would outweigh all others (on digits, distances
    of new normal samples went up to 71 instead of 1.1, and the order was no better).

    Raises:
        DataError: All rows are equal.
    """
    # 1. Principal axes of the samples, and the variances along them.
    center = features.mean(axis=0, dtype=np.float64)
    rows = features.astype(np.float64) - center
    count, size = rows.shape
    _, values, axes = np.linalg.svd(rows, full_matrices=False)
    variances = values**2 / count
    mean = float(variances.sum()) / size
    if mean <= 0:
        raise DataError("all samples have the same features; give samples that differ")
    # 2. How far the covariance is shrunk: by how noisy it is, beside how far it is from a multiple of the identity.
    square = float((variances**2).sum())
    noise = (float((np.einsum("nd,nd->n", rows, rows) ** 2).sum()) / count - square) / (count * size)
    spread = square / size - mean**2
    shrinkage = 1.0
    if spread > 0:
        shrinkage = min(noise / spread, 1.0)
    return {
        "center": center,
        "axes": axes,
        "variances": np.maximum((1 - shrinkage) * variances + shrinkage * mean, 1e-12 * mean),
        "floor": np.array(max(shrinkage, 1e-12) * mean),
    }


def distances(features: np.ndarray, fitted: Tensors) -> np.ndarray:
    """Return the Mahalanobis distances (n,) float64 of ``features`` (n, d) to a fit of `gaussian`.

    They are divided by the root of the number of features, so that normal inputs are at about 1.
    """
    rows = features.astype(np.float64) - fitted["center"]
    along = rows @ fitted["axes"].T
    across = np.maximum(np.einsum("nd,nd->n", rows, rows) - np.einsum("nr,nr->n", along, along), 0)
    squares = (along**2 / fitted["variances"]).sum(axis=1)
    if len(fitted["axes"]) < rows.shape[1]:
        squares += across / fitted["floor"]
    return np.asarray(np.sqrt(squares / rows.shape[1]))
