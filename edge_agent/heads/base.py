"""The contract of a head, and what all heads share: constant predictions, and classes that a device does not have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..core.errors import DataError, StateError, UsageError
from ..core.graph import Graph, Value
from ..core.task import Frozen, Tensors


class HeadParams(Frozen):
    """Parameters of a head; each head adds its own."""


@dataclass(frozen=True)
class FitData:
    """The data from which a head may learn: cached features, and what came with the bundle.

    ``features`` (n, d) float32 with n >= 1, ``labels`` (n,) int64 in 0..num_classes-1. ``global_head`` holds the shared
    linear classifier (``weight`` (K, d), ``bias`` (K,)) where the bundle has one. ``statistics`` are means over the
    samples of all clients, where the bundle has them: ``gram`` (d (d + 1) / 2,), the upper triangle of z z'; ``mean``
    (d,) of the features; ``sums`` (K, d) of those of each class, and ``shares`` (K,) of the classes, zeros for classes
    that the federation does not know.
    """

    features: np.ndarray
    labels: np.ndarray
    num_classes: int
    global_head: Tensors | None = None
    method_params: Mapping[str, Any] = field(default_factory=dict)
    statistics: Tensors | None = None

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1]:
            raise DataError(
                f"features of shape {self.features.shape} with labels of shape {self.labels.shape}; "
                "expected (n, d) and (n,); give one label for each row of features"
            )
        if not len(self.labels):
            raise DataError("no samples to fit a head on; expected at least one; check the data source")
        if self.labels.min() < 0 or self.labels.max() >= self.num_classes:
            raise DataError(
                f"labels {self.labels.min()}..{self.labels.max()}, expected 0..{self.num_classes - 1}; "
                "give positions of classes"
            )
        if not np.isfinite(self.features).all():
            raise DataError("features hold NaN or infinity; check the encoder and the inputs")

    @property
    def classes(self) -> np.ndarray:
        """Labels that occur, ascending, int64."""
        return np.flatnonzero(np.bincount(self.labels)).astype(np.int64)  # np.unique would bring 2 MB of numpy.ma


Contribute = Callable[[FitData, Tensors, np.random.Generator], Tensors]
"""A function from features, the received model and a generator to the tensors of the update that a device without torch
sends in a round of training."""


class Head(ABC):
    """One personal head: the one subclass in its file states ``Params`` and how to fit and predict.

    A fitted head is named arrays plus plain JSON values, so that saving and loading never runs code. Classes that the
    device has never seen get probability 0; a device that knows one class only answers with that class.
    """

    Params: ClassVar[type[HeadParams]] = HeadParams
    source: ClassVar[str] = ""
    uses_shared: ClassVar[bool] = False
    """Whether the bundle's shared classifier takes part in its answers, where there is one."""
    contribute: ClassVar[Contribute | None] = None
    """The function by which a device without torch takes part in rounds of the method of the same name, or None."""

    def __init__(self, params: HeadParams | None = None) -> None:
        self.params: Any = params if params is not None else self.Params()
        self.arrays: Tensors = {}
        self.num_classes = 0
        self.feature_dim = 0

    @property
    def name(self) -> str:
        """The file name, which is the head's name everywhere."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def fit(self, data: FitData, rng: np.random.Generator) -> None:
        """Learn from ``data``; the same data and generator state give the same head.

        Raises:
            MissingCapability: A package that this head needs for fitting is not installed.
        """
        self.num_classes = data.num_classes
        self.feature_dim = data.features.shape[1]
        classes = data.classes
        if len(classes) == 1:
            self.arrays = {"only_class": classes}
        else:
            self.arrays = {"classes": classes, **self._fit(data, classes, rng)}

    def predict_proba(self, features: np.ndarray) -> np.ndarray:
        """Return class probabilities (n, num_classes) float64, rows sum to 1, for ``features`` (n, d) float32.

        Raises:
            StateError: The head has not been fitted, or was fitted on another feature size.
        """
        self._check_fitted("predict_proba")
        if features.ndim != 2 or (self.feature_dim and features.shape[1] != self.feature_dim):
            raise StateError(
                f"features {features.shape}, head '{self.name}' was fitted on (n, {self.feature_dim}); "
                "use the encoder that it was fitted with, or fit again"
            )
        answer = np.zeros((len(features), self.num_classes))
        if "only_class" in self.arrays:
            answer[:, self.arrays["only_class"][0]] = 1.0
        elif len(features):
            answer[:, self.arrays["classes"]] = self._predict(features)
        return answer

    def load(self, arrays: Tensors, num_classes: int, feature_dim: int = 0) -> None:
        """Take over the arrays of a saved head of the same name and parameters; ``feature_dim`` 0 = not known."""
        self.arrays = dict(arrays)
        self.num_classes = num_classes
        self.feature_dim = feature_dim

    def write(self, graph: Graph, features: Value) -> Value:
        """Write what `predict_proba` computes as operators.

        Args:
            graph: Gets the operators.
            features: A tensor (n, d) float32 of it.

        Returns:
            The class probabilities, a tensor (n, num_classes) float64.

        Raises:
            StateError: The head has not been fitted.
            UsageError: This kind of head has no form as operators.
        """
        self._check_fitted("write")
        if "only_class" in self.arrays:
            certain = np.zeros(self.num_classes)
            certain[self.arrays["only_class"][0]] = 1.0
            return graph.repeat(certain, features)
        return graph.spread(self._write(graph, features), self.arrays["classes"], self.num_classes)

    def _check_fitted(self, caller: str) -> None:
        if not self.arrays:
            raise StateError(f"head '{self.name}' has not been fitted; call fit or load before {caller}")

    def _write(self, graph: Graph, features: Value) -> Value:
        """Write what `_predict` computes: a tensor (n, len(classes)) float64; a head need not be able to."""
        raise UsageError(
            f"head '{self.name}' cannot be written as ONNX operators; fit another one, such as lr, or give it `_write`"
        )

    @abstractmethod
    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        """Return arrays of a fitted head; at least two ``classes`` occur. Rows and columns follow ``classes``."""

    @abstractmethod
    def _predict(self, features: np.ndarray) -> np.ndarray:
        """Return probabilities (n, len(classes)) from ``self.arrays``."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the row-wise softmax (n, k) float64, safe for large logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponents = np.exp(shifted)
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))
