"""Features in two dimensions, to be looked at: t-SNE (van der Maaten and Hinton, 2008)."""

from __future__ import annotations

import numpy as np

from edge_agent.errors import MissingCapability

LEAST_SAMPLES = 5
LEAST_PERPLEXITY = 1.0


def bounded_perplexity(wish: float, samples: int) -> float:
    """A perplexity that so many samples allow: at most a third of the neighbours that each has."""
    return max(LEAST_PERPLEXITY, min(wish, (samples - 1) / 3))


def tsne(features: np.ndarray, perplexity: float, seed: int) -> np.ndarray | None:
    """Points (n, 2) float64 for features (n, d), the same for the same seed; None for fewer than 5 samples.

    Raises:
        MissingCapability: scikit-learn is not installed.
    """
    if len(features) < LEAST_SAMPLES:
        return None
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingCapability.package("sklearn", "heads", "t-SNE") from error
    wide = features.astype(np.float64)
    wide /= np.abs(wide).max(initial=0.0) or 1.0  # the scale does not matter, and huge squares would overflow
    # All features alike (a mask that picks nothing): the start by principal components divides by their spread.
    start = "pca" if wide.std(axis=0).max(initial=0.0) > 1e-9 and wide.shape[1] > 1 else "random"
    machine = TSNE(perplexity=bounded_perplexity(perplexity, len(wide)), init=start, random_state=seed, n_jobs=1)
    points: np.ndarray = np.asarray(machine.fit_transform(wide), np.float64)
    return np.asarray(points - points.mean(axis=0))
