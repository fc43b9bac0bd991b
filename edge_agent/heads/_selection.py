"""Which features tell classes apart, without any training; and whether a choice of features is still a choice."""

from __future__ import annotations

import numpy as np

_USUAL = (0.02, 0.98)


def fisher_score(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How well each feature tells classes apart, (d,) float64, larger is better, for ``features`` (n, d).

    FedPick Eqs. 5-7: sum_k n_k (mean_k - mean)^2 / sum_k n_k var_k. A feature that never varies scores 0, one that
    varies between classes only scores infinity.
    """
    wide = features.astype(np.float64)
    between, within = np.zeros(wide.shape[1]), np.zeros(wide.shape[1])
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
    """Which ``ratio`` (0..1, at least one) of the features score highest, (d,) bool; equal scores: the first ones.

    Where no score is above 0 (one class only, say), nothing is known about any feature and all are kept.
    """
    if not (scores > 0).any():
        return np.ones(len(scores), bool)
    kept = np.zeros(len(scores), bool)
    kept[np.argsort(-scores, kind="stable")[: max(1, round(ratio * len(scores)))]] = True
    return kept


def mistake_of_share(share: float) -> str:
    """What is wrong with picking this share (0..1) of the features; empty where nothing is."""
    if share < _USUAL[0]:
        return "almost no feature is picked, so the local classifier sees zeros; lower threshold or lr"
    if share > _USUAL[1]:
        return "almost every feature is picked, so nothing is selected; raise threshold, or lower irrelevant_weight"
    return ""
