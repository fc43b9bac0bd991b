"""Normalisation, selection and shared-classifier helpers of the heads, on cached features (n, d).

What a normalisation learns from the training features is part of the head's arrays and is saved with them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from .base import FitData, Head, HeadParams, softmax

FeatureNorm = Literal["none", "l2", "standard"]


class NormedParams(HeadParams):
    """Parameters of heads that can normalise features first."""

    feature_norm: FeatureNorm = Field(
        "standard", description="none; l2: rows of length 1; standard: zero mean and unit variance on the training data"
    )


def fit_norm(features: np.ndarray, kind: FeatureNorm) -> Tensors:
    """Return the arrays that `normalise` needs: ``feature_mean`` and ``feature_scale`` (d,) float64 for "standard".

    The other kinds of normalisation learn nothing, so the result is empty for them.
    """
    if kind != "standard":
        return {}
    spread = features.std(axis=0, dtype=np.float64)
    # A rectified feature that fired once in the whole training set must not be blown up by its tiny spread.
    floor = 0.01 * float(np.sqrt(np.mean(spread**2))) or 1.0
    return {"feature_mean": features.mean(axis=0, dtype=np.float64), "feature_scale": np.maximum(spread, floor)}


def normalise(features: np.ndarray, kind: FeatureNorm, arrays: Tensors) -> np.ndarray:
    """Return features (n, d) as float64, normalised."""
    wide = features.astype(np.float64)
    if kind == "standard":
        return np.asarray((wide - arrays["feature_mean"]) / arrays["feature_scale"])
    if kind == "l2":
        lengths = np.linalg.norm(wide, axis=1, keepdims=True)
        return np.asarray(wide / np.where(lengths > 0, lengths, 1.0))
    return wide


def write_norm(graph: Graph, features: Value, kind: FeatureNorm, arrays: Tensors) -> Value:
    """Write what `normalise` computes: features (n, d) float64."""
    wide = graph.cast(features, DOUBLE)
    if kind == "standard":
        return graph.add("Div", graph.add("Sub", wide, arrays["feature_mean"]), arrays["feature_scale"])
    if kind == "l2":
        return graph.unit(wide, DOUBLE)
    return wide


class NormedHead(Head):
    """A head that answers with the softmax of logits of normalised features; by default, those of one linear layer."""

    Params = NormedParams

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        norm = fit_norm(data.features, self.params.feature_norm)
        inputs = normalise(data.features, self.params.feature_norm, norm)
        # The layer has a row for each class that occurs, so labels become positions among these classes.
        positions = np.searchsorted(classes, data.labels)
        fitted = self._fit_inputs(inputs, positions, len(classes), rng)
        return {**norm, **fitted}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        return softmax(self._logits(normalise(features, self.params.feature_norm, self.arrays)))

    def _write(self, graph: Graph, features: Value) -> Value:
        inputs = write_norm(graph, features, self.params.feature_norm, self.arrays)
        return graph.softmax(self._write_logits(graph, inputs))

    @abstractmethod
    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        """Fit on normalised ``inputs`` (n, d) float64 and ``labels`` (n,) below ``classes``; return arrays."""

    def _logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return logits (n, k) of normalised ``inputs``."""
        return np.asarray(inputs @ self.arrays["weight"].T + self.arrays["bias"])

    def _write_logits(self, graph: Graph, inputs: Value) -> Value:
        """Write what `_logits` computes; ``inputs`` (n, d) float64."""
        return graph.linear(inputs, self.arrays["weight"].astype(DOUBLE), self.arrays["bias"].astype(DOUBLE))


_USUAL = (0.02, 0.98)
"""The shares of picked features, 0..1, outside of which a selection is reported as degenerate."""


def fisher_score(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return how well each feature separates classes, (d,) float64, larger is better, for ``features`` (n, d).

    FedPick Eqs. 5-7: sum_k n_k (mean_k - mean)^2 / sum_k n_k var_k. A feature that never varies scores 0, one that
    varies between classes only scores infinity.
    """
    wide = features.astype(np.float64)
    between = np.zeros(wide.shape[1])
    within = np.zeros(wide.shape[1])
    mean = wide.mean(axis=0)
    for label in np.unique(labels):
        rows = wide[labels == label]
        between += len(rows) * (rows.mean(axis=0) - mean) ** 2
        within += len(rows) * rows.var(axis=0)
    # Means of equal numbers differ in their last bits: below this, a spread is rounding and no information.
    noise = len(wide) * (np.abs(wide).max(axis=0, initial=0.0) * 1e-12) ** 2
    perfect = np.where(between > noise, np.inf, 0.0)
    return np.divide(between, within, out=perfect, where=within > noise)


def keep_top(scores: np.ndarray, ratio: float) -> np.ndarray:
    """Return the mask (d,) bool of the ``ratio`` (0..1, at least one) of features that score highest.

    Where no score is above 0 (one class only, say), nothing is known about any feature and all are kept.
    """
    if not (scores > 0).any():
        return np.ones(len(scores), bool)
    count = max(1, round(ratio * len(scores)))
    best = np.argsort(-scores, kind="stable")[:count]
    is_kept = np.zeros(len(scores), bool)
    is_kept[best] = True
    return is_kept


def mistake_of_share(share: float) -> str:
    """Return what is wrong with picking this share (0..1) of the features; empty where nothing is."""
    if share < _USUAL[0]:
        return "almost no feature is picked, so the local classifier sees zeros; lower threshold or lr"
    if share > _USUAL[1]:
        return "almost every feature is picked, so nothing is selected; raise threshold, or lower irrelevant_weight"
    return ""


def shared_rows(data: FitData, classes: np.ndarray) -> Tensors:
    """Return the shared classifier of the classes that occur: ``shared.weight`` (k, d), ``shared.bias`` (k,).

    Empty where the bundle has none.
    """
    if data.global_head is None:
        return {}
    return {f"shared.{name}": data.global_head[name][classes].astype(np.float32) for name in ("weight", "bias")}


def shared_logits(arrays: Mapping[str, np.ndarray], features: np.ndarray) -> np.ndarray | None:
    """Return logits (n, k) of the shared classifier, or None where there is none."""
    if "shared.weight" not in arrays:
        return None
    return np.asarray(features @ arrays["shared.weight"].T + arrays["shared.bias"])


def write_shared_logits(graph: Graph, features: Value, arrays: Mapping[str, np.ndarray], dtype: str) -> Value | None:
    """Write what `shared_logits` computes for features (n, d) of ``dtype``."""
    if "shared.weight" not in arrays:
        return None
    return graph.linear(features, arrays["shared.weight"].astype(dtype), arrays["shared.bias"].astype(dtype))


def write_ensemble(graph: Graph, personal: Value, shared: Value | None, kind: str) -> Value:
    """Write what `ensemble` computes; logits (n, k) float32."""
    personal_logits = graph.cast(personal, DOUBLE)
    if shared is None:
        return graph.softmax(personal_logits)
    shared_logits_wide = graph.cast(shared, DOUBLE)
    if kind == "none":
        return graph.softmax(shared_logits_wide)
    if kind == "logits":
        return graph.softmax(graph.add("Add", personal_logits, shared_logits_wide))
    both = graph.add("Add", graph.softmax(personal_logits), graph.softmax(shared_logits_wide))
    return graph.add("Div", both, np.array(2.0))


def ensemble(personal: np.ndarray, shared: np.ndarray | None, kind: str) -> np.ndarray:
    """Return the probabilities (n, k) float64 of the personal and the shared classifier together.

    Args:
        personal: Logits (n, k) of the personal classifier.
        shared: Logits (n, k) of the shared classifier; None where the bundle has none, then the personal one answers.
        kind: "probs": the mean of both softmaxes; "logits": the softmax of the sum; "none": the shared one alone.
    """
    personal_logits = personal.astype(np.float64)
    if shared is None:
        return softmax(personal_logits)
    shared_logits_wide = shared.astype(np.float64)
    if kind == "none":
        return softmax(shared_logits_wide)
    if kind == "logits":
        return softmax(personal_logits + shared_logits_wide)
    return np.asarray((softmax(personal_logits) + softmax(shared_logits_wide)) / 2)
