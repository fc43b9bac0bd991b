"""The bundle's shared classifier, moved towards the device's samples: logistic regression with another centre.

The penalty is |W - W_shared|^2 / (2 C) in place of |W|^2 / (2 C), so that few samples leave the shared classifier as it
is and many find the device's own. The optimum is unique: how long and in which steps it is sought does not matter.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.errors import UsageError
from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from ._features import shared_rows
from .base import FitData, Head, HeadParams, softmax
from .lr import LogisticRegressionParams, fit_logistic


class TunedParams(HeadParams):
    """The parameter of head ``tuned``: C, as for head ``lr``, but for a penalty around the shared classifier."""

    c: float = Field(0.3, gt=0, le=1e6, description="C, inverse strength of the pull to the shared classifier")


class TunedHead(Head):
    """Logistic regression pulled to the shared classifier; it does not depend on the generator."""

    Params = TunedParams
    uses_shared = True
    source = "ours: fine-tuning of the classifier alone, to convergence; the penalty is that of L2-SP (Li et al. 2018)"

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        if data.global_head is None:
            raise UsageError("head 'tuned': the bundle has no shared classifier for these classes; choose another head")
        shared = {name: data.global_head[name][classes] for name in ("weight", "bias")}
        return fit_towards(data, shared, self.params.c)

    def _predict(self, features: np.ndarray) -> np.ndarray:
        return softmax(features.astype(np.float64) @ self.arrays["weight"].T + self.arrays["bias"])

    def _write(self, graph: Graph, features: Value) -> Value:
        weight = self.arrays["weight"].astype(DOUBLE)
        bias = self.arrays["bias"].astype(DOUBLE)
        return graph.softmax(graph.linear(graph.cast(features, DOUBLE), weight, bias))


SHARED_C = Field(
    0.3,
    gt=0,
    le=1e6,
    description="C, inverse strength of the pull of the shared classifier's local training to what came with the "
    "bundle; none: it stays as it came",
)
"""Parameter of heads that answer together with the shared classifier, which their methods train on each client, too."""


def shared_rows_tuned(data: FitData, classes: np.ndarray, c: float | None) -> Tensors:
    """Return the shared classifier's rows as `shared_rows` does, fitted to the samples by `fit_towards`.

    With ``c`` None the rows stay as they came with the bundle. The result is empty where the bundle has no classifier.
    """
    rows = shared_rows(data, classes)
    if c is None or not rows:
        return rows
    shared = {name: rows[f"shared.{name}"] for name in ("weight", "bias")}
    fitted = fit_towards(data, shared, c)
    return {f"shared.{name}": array for name, array in fitted.items()}


def fit_towards(data: FitData, center: Tensors, c: float) -> Tensors:
    """Fit a logistic regression whose penalty pulls it to another classifier, for the classes that occur.

    Features are divided by their root mean square, over all of them, so that ``c`` means the same for every encoder.

    Args:
        data: The samples.
        center: ``weight`` (k, d) and ``bias`` (k,) of the classifier that the penalty pulls to.
        c: Inverse strength of the penalty.

    Returns:
        ``weight`` (k, d) and ``bias`` (k,) float32.
    """
    inputs = data.features.astype(np.float64)
    scale = float(np.sqrt(np.mean(inputs**2))) or 1.0
    targets = np.eye(len(data.classes))[np.searchsorted(data.classes, data.labels)]
    scaled_center = {"weight": center["weight"] * scale, "bias": center["bias"]}
    weight, bias = fit_logistic(inputs / scale, targets, LogisticRegressionParams(c=c), scaled_center)
    return {"weight": (weight / scale).astype(np.float32), "bias": bias.astype(np.float32)}
