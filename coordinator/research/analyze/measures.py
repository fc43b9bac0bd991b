"""Measures of features and of models, each a plain function of arrays; definitions are those of the papers named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from edge_agent.core.errors import MissingCapability
from edge_agent.heads._features import fisher_score, keep_top

LEAST = 1e-12
"""Lengths and spreads below this are zero."""


def class_separation(features: np.ndarray, labels: np.ndarray) -> float | None:
    """1 - (mean cosine distance within classes) / (mean cosine distance overall), at most 1, for features (n, d).

    Kornblith et al., Why Do Better Loss Functions Lead to Less Transferable Features?, NeurIPS 2021, whose measure
    DualFed's Fig. 5 shows. Distances are 1 - cosine, pairs of a sample with itself included, and every class (and
    every pair of classes) counts alike. None where it is not defined: one class, or all features of one direction.
    """
    classes = np.unique(labels)
    if len(classes) < 2:
        return None
    unit = features.astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), LEAST)
    # The mean cosine of all pairs out of two classes is the inner product of the classes' mean unit vectors.
    means = np.stack([unit[labels == label].mean(axis=0) for label in classes])
    within = 1.0 - float(np.einsum("ij,ij->i", means, means).mean())
    overall = 1.0 - float(np.square(means.mean(axis=0)).sum())
    return None if overall < LEAST else 1.0 - within / overall


def gram(features: np.ndarray) -> np.ndarray | None:
    """Centred inner products of all pairs of rows, (n * n,) float32 of length 1; None for features that are all alike.

    The inner product of two of these is the linear CKA of the features, see `linear_cka`.
    """
    centred = features.astype(np.float64)
    size = np.abs(centred).max(initial=0.0)
    centred -= centred.mean(axis=0)
    if np.abs(centred).max(initial=0.0) <= LEAST * size:  # what is left is rounding
        return None
    centred /= np.abs(centred).max()
    products = centred @ centred.T
    return np.asarray(products / np.linalg.norm(products), np.float32).ravel()


def linear_cka(first: np.ndarray, second: np.ndarray) -> float | None:
    """Linear centred kernel alignment, 0..1, of two kinds of features (n, d) and (n, e) of the same n samples.

    Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019, whose measure DualFed's Fig. 6
    shows: HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) with linear kernels. Neither turning nor scaling the features
    changes it. None where one of them is the same for all samples.
    """
    one = gram(first)
    other = gram(second)
    return None if one is None or other is None else min(1.0, max(0.0, float(one.astype(np.float64) @ other)))


def cka_matrix(kinds: Sequence[np.ndarray]) -> np.ndarray:
    """`linear_cka` (m, m) of every pair among m kinds of features of the same samples; NaN where it is not defined."""
    grams = [gram(features) for features in kinds]
    result = np.full((len(kinds), len(kinds)), np.nan)
    known = [index for index, one in enumerate(grams) if one is not None]
    if known:
        stacked = np.stack([one for one in grams if one is not None])
        result[np.ix_(known, known)] = np.clip((stacked @ stacked.T).astype(np.float64), 0.0, 1.0)
    result[known, known] = 1.0
    return result


def sparsity_ratio(features: np.ndarray, threshold: float) -> float:
    """Share, 0..1, of components of L2-normalised features (n, d) whose size is below ``threshold``.

    FedPick, Eqs. 3-4 and Fig. 2; the paper's threshold is lost. A sample whose features are all 0 counts as sparse.
    """
    wide = features.astype(np.float64)
    unit = np.abs(wide) / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), LEAST)
    return float((unit < threshold).mean())


def mean_fisher(features: np.ndarray, labels: np.ndarray) -> tuple[float, int] | None:
    """Mean over features of the Fisher score (FedPick, Eqs. 5-7), and how many features were left out of it.

    Left out are those that vary between classes only: their score is infinite. None with fewer than two classes, or
    where all are left out.
    """
    if len(np.unique(labels)) < 2:
        return None
    scores = fisher_score(features, labels)
    finite = np.isfinite(scores)
    return (float(scores[finite].mean()), int((~finite).sum())) if finite.any() else None


def important(scores: np.ndarray, share: float) -> np.ndarray:
    """Which features (d,) bool are the ``share`` of highest score; of equal ones the first, and none that scores 0."""
    return keep_top(scores, share) & (scores > 0)


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """What two choices (d,) bool have in common: intersection over union (FedPick, Fig. 10); 1 for two empty ones."""
    union = int((first | second).sum())
    return float((first & second).sum()) / union if union else 1.0


def overlap_matrix(choices: Sequence[np.ndarray]) -> np.ndarray:
    """`overlap` (m, m) of every pair among m choices."""
    result = np.eye(len(choices))
    for one, other in combinations(range(len(choices)), 2):
        result[one, other] = result[other, one] = overlap(choices[one], choices[other])
    return result


def mean_of_pairs(matrix: np.ndarray) -> float | None:
    """Mean of a symmetric matrix (m, m) over its pairs, the diagonal left out; None where no pair is known."""
    values = matrix[np.triu_indices(len(matrix), 1)]
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def class_accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """Label -> share of its samples, 0..1, that were classified correctly; only labels that occur. Both are (n,)."""
    return {int(label): float((answers[labels == label] == label).mean()) for label in np.unique(labels)}


def head_and_tail(counts: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Head and tail classes of a client with ``counts`` (K,) training samples, each from most to fewest samples.

    Head: classes with at least as many samples as the mean class that the client has; tail: the others that it has.
    The papers that speak of head and tail give no rule.
    """
    order = [int(label) for label in np.argsort(-counts, kind="stable") if counts[label]]
    if not order:
        return (), ()
    mean = counts.sum() / len(order)
    return tuple(k for k in order if counts[k] >= mean), tuple(k for k in order if counts[k] < mean)


def group_mass(weights: np.ndarray, groups: Sequence[str]) -> dict[str, float]:
    """What share of each row of ``weights`` (m, m) falls on the row's own group, on itself, and if all were alike.

    Means over rows. ``groups`` names the group of each of the m clients, in the same order.
    """
    same = np.array(groups)[:, None] == np.array(groups)[None, :]
    rows = np.maximum(weights.sum(axis=1), LEAST)
    return {
        "same_group": float(((weights * same).sum(axis=1) / rows).mean()),
        "own": float((np.diag(weights) / rows).mean()),
        "if_even": float(same.mean()),
    }


def spread_evenly(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Client -> how many of its ``counts`` to take so that all together are at most ``limit``, as even as can be."""
    taken = dict.fromkeys(counts, 0)
    left = dict(counts)
    room = limit
    while room and any(left.values()):
        able = [name for name, count in left.items() if count]
        each = max(1, room // len(able))
        for name in able:
            more = min(each, left[name], room)
            taken[name] += more
            left[name] -= more
            room -= more
    return taken


LEAST_SAMPLES = 5
LEAST_PERPLEXITY = 1.0


def bounded_perplexity(requested: float, samples: int) -> float:
    """Return a perplexity that so many samples allow: at most a third of the neighbours that each has."""
    return max(LEAST_PERPLEXITY, min(requested, (samples - 1) / 3))


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
        raise MissingCapability.package("sklearn", "research", "t-SNE") from error
    wide = features.astype(np.float64)
    wide /= np.abs(wide).max(initial=0.0) or 1.0  # the scale does not matter, and huge squares would overflow
    # All features alike (a mask that picks nothing): the start by principal components divides by their spread.
    start = "pca" if wide.std(axis=0).max(initial=0.0) > 1e-9 and wide.shape[1] > 1 else "random"
    machine = TSNE(perplexity=bounded_perplexity(perplexity, len(wide)), init=start, random_state=seed, n_jobs=1)
    points: np.ndarray = np.asarray(machine.fit_transform(wide), np.float64)
    return np.asarray(points - points.mean(axis=0))
