"""The bundle's shared classifier, for the classes that the device has: nothing is learned but which classes these are.

With a handful of samples it is often the best head there is. Its probabilities are those of the classes of the device
alone, so a class that the device has never seen is not answered.
"""

from __future__ import annotations

import numpy as np

from ..core.errors import UsageError
from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from ._features import shared_logits, shared_rows
from .base import FitData, Head, softmax


class SharedHead(Head):
    """The rows of the shared classifier of the classes that occur."""

    source = "the federation's own classifier"
    uses_shared = True

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        if data.global_head is None:
            raise UsageError(
                "head 'shared_classifier': the bundle has no shared classifier for these classes; choose another head"
            )
        return shared_rows(data, classes)

    def _predict(self, features: np.ndarray) -> np.ndarray:
        logits = shared_logits(self.arrays, features.astype(np.float64))
        return softmax(np.asarray(logits))

    def _write(self, graph: Graph, features: Value) -> Value:
        weight = self.arrays["shared.weight"].astype(DOUBLE)
        bias = self.arrays["shared.bias"].astype(DOUBLE)
        return graph.softmax(graph.linear(graph.cast(features, DOUBLE), weight, bias))
