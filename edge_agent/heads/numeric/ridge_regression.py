"""Ridge regression onto a number that the data name: one linear solve, the penalty from exact leave-one-out errors.

As head ``ridge``, which does the same for classes. The weight of the penalty is found, and nothing is random.
"""

from __future__ import annotations

import numpy as np

from ...core.errors import DataError
from ...core.graph import Graph, Value
from ...core.task import Tensors
from .._features import NormedParams, fit_norm, normalise, write_norm
from ..ridge import fit_ridge
from .base import NumericData, NumericHead


class RidgeRegressionHead(NumericHead):
    """Regularised least squares onto one target."""

    Params = NormedParams
    source = "Hoerl and Kennard 1970; leave-one-out errors by the hat matrix (Allen's PRESS)"

    def _fit(self, data: NumericData) -> Tensors:
        if data.targets is None:
            raise DataError("head 'ridge_regression' predicts numbers, and the data name none")
        norm = fit_norm(data.features, self.params.feature_norm)
        inputs = normalise(data.features, self.params.feature_norm, norm)
        spread = float(data.targets.std()) or 1.0  # penalties are tried for targets of about this size
        center = float(data.targets.mean())
        weight, bias, _ = fit_ridge(inputs, (data.targets[:, None] - center) / spread)
        return {**norm, "weight": weight * spread, "bias": bias * spread + center}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        inputs = normalise(features, self.params.feature_norm, self.arrays)
        return np.asarray(inputs @ self.arrays["weight"][0] + self.arrays["bias"][0])

    def _write(self, graph: Graph, features: Value) -> Value:
        inputs = write_norm(graph, features, self.params.feature_norm, self.arrays)
        return graph.linear(inputs, self.arrays["weight"], self.arrays["bias"])
