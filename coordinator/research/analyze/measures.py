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
    """Return 1 - (mean cosine distance within classes) / (mean cosine distance overall), which is at most 1.

    Distances are 1 - cosine, pairs of a sample with itself included. Every class, and every pair of classes, counts
    alike.

    Source: Kornblith et al., "Why Do Better Loss Functions Lead to Less Transferable Features?", NeurIPS 2021, whose
    measure DualFed's Fig. 5 shows.

    Args:
        features: Features (n, d).
        labels: Class of each row (n,).

    Returns:
        The separation; None where it is not defined: there is one class only, or all features have one direction.
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
    if overall < LEAST:
        return None
    return 1.0 - within / overall


def gram(features: np.ndarray) -> np.ndarray | None:
    """Return the centred inner products of all pairs of rows, scaled so that the vector of them has length 1.

    The inner product of two of these vectors is the linear CKA of the features, see `linear_cka`.

    Args:
        features: Features (n, d).

    Returns:
        The products (n * n,) float32; None for features that are the same for all samples.
    """
    centred = features.astype(np.float64)
    largest = np.abs(centred).max(initial=0.0)
    centred -= centred.mean(axis=0)
    is_constant = np.abs(centred).max(initial=0.0) <= LEAST * largest  # what is left is rounding
    if is_constant:
        return None
    centred /= np.abs(centred).max()
    products = centred @ centred.T
    return np.asarray(products / np.linalg.norm(products), np.float32).ravel()


def linear_cka(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return the linear centred kernel alignment, 0..1, of two kinds of features of the same samples.

    It is HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) with linear kernels. Neither rotating nor scaling the features
    changes it.

    Source: Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019, whose measure
    DualFed's Fig. 6 shows.

    Args:
        first: Features (n, d).
        second: Features (n, e) of the same n samples.

    Returns:
        The alignment; None where the features of one kind are the same for all samples.
    """
    first_gram = gram(first)
    second_gram = gram(second)
    if first_gram is None or second_gram is None:
        return None
    alignment = float(first_gram.astype(np.float64) @ second_gram)
    return min(1.0, max(0.0, alignment))


def cka_matrix(kinds: Sequence[np.ndarray]) -> np.ndarray:
    """Return `linear_cka` (m, m) of every pair among m kinds of features of the same samples.

    It is NaN where it is not defined.
    """
    matrix = np.full((len(kinds), len(kinds)), np.nan)
    grams = list[np.ndarray]()
    defined = list[int]()
    for index, features in enumerate(kinds):
        products = gram(features)
        if products is not None:
            grams.append(products)
            defined.append(index)
    if grams:
        stacked = np.stack(grams)
        matrix[np.ix_(defined, defined)] = np.clip((stacked @ stacked.T).astype(np.float64), 0.0, 1.0)
    # Features agree with themselves exactly, whatever float32 has made of it.
    matrix[defined, defined] = 1.0
    return matrix


def sparsity_ratio(features: np.ndarray, threshold: float) -> float:
    """Return the share, 0..1, of components of L2-normalised features whose size is below a threshold.

    A sample whose features are all 0 counts as sparse.

    Source: FedPick, Eqs. 3-4 and Fig. 2, which does not state its threshold.

    Args:
        features: Features (n, d).
        threshold: The size below which a component counts as 0.
    """
    wide = features.astype(np.float64)
    unit = np.abs(wide) / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), LEAST)
    return float((unit < threshold).mean())


def mean_fisher(features: np.ndarray, labels: np.ndarray) -> tuple[float, int] | None:
    """Return the mean Fisher score over features (FedPick, Eqs. 5-7), and how many features are left out of it.

    Features are left out that vary between classes only, because their score is infinite.

    Args:
        features: Features (n, d).
        labels: Class of each row (n,).

    Returns:
        Mean and count; None with fewer than two classes, or where all features are left out.
    """
    if len(np.unique(labels)) < 2:
        return None
    scores = fisher_score(features, labels)
    is_finite = np.isfinite(scores)
    if not is_finite.any():
        return None
    return float(scores[is_finite].mean()), int((~is_finite).sum())


def important(scores: np.ndarray, share: float) -> np.ndarray:
    """Return which features (d,) bool are the ``share`` of highest score.

    Of features with equal scores the first ones count. A feature of score 0 is never important.
    """
    return keep_top(scores, share) & (scores > 0)


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Return intersection over union of two choices (d,) bool (FedPick, Fig. 10); 1 for two empty ones."""
    union = int((first | second).sum())
    if not union:
        return 1.0
    return float((first & second).sum()) / union


def overlap_matrix(choices: Sequence[np.ndarray]) -> np.ndarray:
    """Return `overlap` (m, m) of every pair among m choices."""
    matrix = np.eye(len(choices))
    for row, column in combinations(range(len(choices)), 2):
        shared = overlap(choices[row], choices[column])
        matrix[row, column] = shared
        matrix[column, row] = shared
    return matrix


def mean_of_pairs(matrix: np.ndarray) -> float | None:
    """Return the mean of a symmetric matrix (m, m) over its pairs, without the diagonal.

    Pairs whose value is NaN do not count. None where no pair has a value.
    """
    values = matrix[np.triu_indices(len(matrix), 1)]
    defined = values[~np.isnan(values)]
    if not len(defined):
        return None
    return float(defined.mean())


def class_accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """Return label -> share (0..1) of its samples that were classified correctly, of the labels that occur.

    Args:
        answers: Predicted class of each sample (n,).
        labels: Its class (n,).
    """
    return {int(label): float((answers[labels == label] == label).mean()) for label in np.unique(labels)}


def head_and_tail(counts: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the head and the tail classes of a client, each from most to fewest samples.

    The head are the classes with at least as many samples as the mean over the classes that the client has; the tail
    are the others that it has. The papers that speak of head and tail give no rule.

    Args:
        counts: Number of training samples of each class (K,).
    """
    order = [int(label) for label in np.argsort(-counts, kind="stable") if counts[label]]
    if not order:
        return (), ()
    mean = counts.sum() / len(order)
    head = tuple(label for label in order if counts[label] >= mean)
    tail = tuple(label for label in order if counts[label] < mean)
    return head, tail


def group_mass(weights: np.ndarray, groups: Sequence[str]) -> dict[str, float]:
    """Return which share of a row of weights falls on the row's own group, and which on itself, as means over rows.

    Args:
        weights: Weights (m, m); row i is of client i.
        groups: Name of the group of each of the m clients.

    Returns:
        ``same_group`` and ``own``, and what ``same_group`` would be if all weights were equal, as ``if_even``.
    """
    is_same_group = np.array(groups)[:, None] == np.array(groups)[None, :]
    sums = np.maximum(weights.sum(axis=1), LEAST)
    return {
        "same_group": float(((weights * is_same_group).sum(axis=1) / sums).mean()),
        "own": float((np.diag(weights) / sums).mean()),
        "if_even": float(is_same_group.mean()),
    }


def spread_evenly(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Return client -> how many of its samples to take, as evenly as possible, so that all take at most ``limit``.

    Args:
        counts: Client -> how many samples it has.
        limit: The most samples of all clients together.
    """
    taken = dict.fromkeys(counts, 0)
    remaining = dict(counts)
    room = limit
    # Clients with few samples cannot use their share, which the others then divide in the next turn.
    while room and any(remaining.values()):
        able = [name for name, count in remaining.items() if count]
        share = max(1, room // len(able))
        for name in able:
            more = min(share, remaining[name], room)
            taken[name] += more
            remaining[name] -= more
            room -= more
    return taken


LEAST_SAMPLES = 5
"""The least number of samples that are drawn by t-SNE."""

LEAST_PERPLEXITY = 1.0


def bounded_perplexity(requested: float, samples: int) -> float:
    """Return the requested perplexity, or a third of the neighbours that each of so many samples has, if it is less."""
    return max(LEAST_PERPLEXITY, min(requested, (samples - 1) / 3))


def tsne(features: np.ndarray, perplexity: float, seed: int) -> np.ndarray | None:
    """Return points (n, 2) float64 for features (n, d) by t-SNE; the same seed gives the same points.

    None for fewer than `LEAST_SAMPLES` samples.

    Raises:
        MissingCapability: Scikit-learn is not installed.
    """
    if len(features) < LEAST_SAMPLES:
        return None
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingCapability.package("sklearn", "research", "t-SNE") from error
    wide = features.astype(np.float64)
    # The scale does not matter, and the squares of huge features would overflow.
    largest = np.abs(wide).max(initial=0.0)
    if largest:
        wide /= largest
    # A start by principal components divides by the spread of the features, which is 0 where a mask picks nothing.
    has_components = wide.std(axis=0).max(initial=0.0) > 1e-9 and wide.shape[1] > 1
    start = "pca" if has_components else "random"
    machine = TSNE(perplexity=bounded_perplexity(perplexity, len(wide)), init=start, random_state=seed, n_jobs=1)
    points: np.ndarray = np.asarray(machine.fit_transform(wide), np.float64)
    return np.asarray(points - points.mean(axis=0))
