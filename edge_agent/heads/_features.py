"""Features made comparable before a head sees them; what was learned in doing so travels with the head."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from ..task import Tensors
from .base import HeadParams

FeatureNorm = Literal["none", "l2", "standard"]


class NormedParams(HeadParams):
    """Parameters of heads that can normalise features first."""

    feature_norm: FeatureNorm = Field(
        "standard", description="none; l2: rows of length 1; standard: zero mean and unit variance on the training data"
    )


def fit_norm(features: np.ndarray, kind: FeatureNorm) -> Tensors:
    """Arrays that `normalise` needs: ``feature_mean`` and ``feature_scale`` (d,) float64, or none at all."""
    if kind != "standard":
        return {}
    spread = features.std(axis=0, dtype=np.float64)
    # A rectified feature that fired once in the whole training set must not be blown up by its tiny spread.
    floor = 0.01 * float(np.sqrt(np.mean(spread**2))) or 1.0
    return {"feature_mean": features.mean(axis=0, dtype=np.float64), "feature_scale": np.maximum(spread, floor)}


def normalise(features: np.ndarray, kind: FeatureNorm, arrays: Tensors) -> np.ndarray:
    """Features (n, d) as float64, normalised."""
    wide = features.astype(np.float64)
    if kind == "standard":
        return np.asarray((wide - arrays["feature_mean"]) / arrays["feature_scale"])
    if kind == "l2":
        lengths = np.linalg.norm(wide, axis=1, keepdims=True)
        return np.asarray(wide / np.where(lengths > 0, lengths, 1.0))
    return wide


def one_hot(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Targets (n, k) float64 for ``labels`` that all occur in the ascending ``classes`` (k,)."""
    return np.asarray(np.eye(len(classes))[np.searchsorted(classes, labels)])
