"""A personal classifier that answers together with the shared one that came with the bundle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..task import Tensors
from .base import FitData, softmax


def shared_rows(data: FitData, classes: np.ndarray) -> Tensors:
    """``shared.weight`` (k, d) and ``shared.bias`` (k,) float32: the shared classifier for the classes that occur.

    Empty where the bundle has none.
    """
    if data.global_head is None:
        return {}
    return {f"shared.{name}": data.global_head[name][classes].astype(np.float32) for name in ("weight", "bias")}


def shared_logits(arrays: Mapping[str, np.ndarray], features: np.ndarray) -> np.ndarray | None:
    """Logits (n, k) of the shared classifier, or None where there is none."""
    if "shared.weight" not in arrays:
        return None
    return np.asarray(features @ arrays["shared.weight"].T + arrays["shared.bias"])


def together(personal: np.ndarray, shared: np.ndarray | None, kind: str) -> np.ndarray:
    """Probabilities (n, k) float64 of both classifiers' logits.

    ``kind``: "probs", the mean of both softmaxes; "logits", the softmax of the sum; "none", the shared one alone. Where
    there is no shared classifier the personal one answers.
    """
    own = personal.astype(np.float64)
    if shared is None:
        return softmax(own)
    other = shared.astype(np.float64)
    if kind == "none":
        return softmax(other)
    return softmax(own + other) if kind == "logits" else (softmax(own) + softmax(other)) / 2
