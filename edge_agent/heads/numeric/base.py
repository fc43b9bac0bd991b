"""The contract of numeric heads: features in, one number for each row out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...core.errors import DataError, StateError, UsageError
from ...core.graph import Graph, Value
from ...core.task import Tensors
from ..base import HeadParams


@dataclass(frozen=True)
class NumericData:
    """The data of a numeric head: ``features`` (n, d) float32, and ``targets`` (n,) float64 if it predicts them.

    ``folds``: pairs of rows to learn from and rows to test on; samples of one recording are on one side.
    """

    features: np.ndarray
    targets: np.ndarray | None = None
    folds: Sequence[tuple[np.ndarray, np.ndarray]] = ()

    def __post_init__(self) -> None:
        if len(self.features) < 2:
            raise DataError(f"{len(self.features)} samples to fit a head on; expected at least two")
        if not np.isfinite(self.features).all():
            raise DataError("features hold NaN or infinity; check the encoder and the inputs")
        if self.targets is not None and self.targets.shape != self.features.shape[:1]:
            raise DataError(
                f"features of shape {self.features.shape} with targets of shape {self.targets.shape}; "
                "expected (n, d) and (n,); give one number for each row of features"
            )
        if self.targets is not None and not np.isfinite(self.targets).all():
            raise DataError("targets hold NaN or infinity; give a number for each sample")


class NumericHead(ABC):
    """One numeric head: the one subclass in its file states ``Params`` and how to fit and predict.

    A fitted head is named arrays plus plain JSON values, so that saving and loading never runs code.
    """

    Params: ClassVar[type[HeadParams]] = HeadParams
    source: ClassVar[str] = ""
    predicts_targets: ClassVar[bool] = True
    """Whether the head learns targets; else it learns normal samples, and scores how unlike these an input is."""

    def __init__(self, params: HeadParams | None = None) -> None:
        self.params: Any = params if params is not None else self.Params()
        self.arrays: Tensors = {}
        self.feature_dim = 0

    @property
    def name(self) -> str:
        """The file name, which is the head's name everywhere."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def fit(self, data: NumericData) -> None:
        """Learn from ``data``; the same data give the same head.

        Raises:
            DataError: No head can be learned from these samples.
        """
        self.feature_dim = data.features.shape[1]
        self.arrays = self._fit(data)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return one number (n,) float64 for each row of ``features`` (n, d) float32.

        Raises:
            StateError: The head has not been fitted, or was fitted on another feature size.
        """
        self._check_fitted("predict")
        if features.ndim != 2 or features.shape[1] != self.feature_dim:
            raise StateError(
                f"features {features.shape}, head '{self.name}' was fitted on (n, {self.feature_dim}); "
                "use the encoder that it was fitted with, or fit again"
            )
        return self._predict(features)

    def load(self, arrays: Tensors, feature_dim: int) -> None:
        """Take over the arrays of a saved head of the same name and parameters."""
        self.arrays = dict(arrays)
        self.feature_dim = feature_dim

    @property
    def threshold(self) -> float | None:
        """The score above which an input is an anomaly; None for heads of targets, and after too few samples."""
        value = self.arrays.get("threshold")
        return None if value is None else float(value)

    def write(self, graph: Graph, features: Value) -> Value:
        """Write what `predict` computes as operators: one number (n, 1) float64 for each row of ``features`` (n, d).

        Raises:
            StateError: The head has not been fitted.
            UsageError: This kind of head has no form as operators.
        """
        self._check_fitted("write")
        return self._write(graph, features)

    def _check_fitted(self, caller: str) -> None:
        if not self.arrays:
            raise StateError(f"head '{self.name}' has not been fitted; call fit or load before {caller}")

    def _write(self, graph: Graph, features: Value) -> Value:
        """Write what `_predict` computes: a tensor (n, 1) float64; a head need not be able to."""
        raise UsageError(f"head '{self.name}' cannot be written as ONNX operators; add `_write` to it")

    @abstractmethod
    def _fit(self, data: NumericData) -> Tensors:
        """Return arrays of a fitted head."""

    @abstractmethod
    def _predict(self, features: np.ndarray) -> np.ndarray:
        """Return numbers (n,) float64 from ``self.arrays``."""
