"""Features as an encoder may give them: each class a cloud around its own place."""

from __future__ import annotations

import numpy as np

from edge_agent.heads import FitData


def clouds(seed: int = 0, *, classes: int = 3, size: int = 6, count: int = 60, shared: bool = False) -> FitData:
    """Samples whose classes take turns; ``shared``: with the classifier that tells places apart best."""
    labels = np.arange(count) % classes
    centres = np.random.default_rng(99).normal(size=(classes, size)) * 2
    features = (centres[labels] + np.random.default_rng(seed).normal(size=(count, size))).astype(np.float32)
    head = {"weight": centres.astype(np.float32), "bias": (-(centres**2).sum(axis=1) / 2).astype(np.float32)}
    return FitData(features, labels, classes, head if shared else None)
