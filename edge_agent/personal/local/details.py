"""What lies behind an accuracy: the samples of each class, those that were answered worst, and doubtful labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data import Samples
from ..confidence import OutOfFold

MOST_COMPARED = 4096
"""Samples among which near-duplicates are looked for; of more, a random part: the time grows with their square."""

NEAR = 0.25
"""Two samples are near-duplicates whose features are closer than so much of the usual distance to the next sample."""

_BLOCK_CELLS = 2_000_000
"""Distances that are in memory at once."""


@dataclass(frozen=True)
class ClassCount:
    """Samples of one class: to learn from, held out, and how many of these are answered right."""

    name: str
    train: int
    held_out: int
    right: int


@dataclass(frozen=True)
class WorstSample:
    """A sample with a large loss: its origin, its class, the answer, and the probability of its class, 0..1.

    A wrong label is as likely a cause as a weak head. The answer is of a head that was not fitted on the sample: the
    head itself where the sample is ``held_out``, else one of cross-validation.
    """

    sample: str
    label: str
    answer: str
    probability: float
    held_out: bool = True


@dataclass(frozen=True)
class LabelConflict:
    """Two samples that are nearly the same to the encoder and have different labels: one of the labels may be wrong.

    An encoder that was trained on other data takes different samples for the same.
    """

    sample: str
    label: str
    other: str
    other_label: str


def class_counts(train: Samples, test: Samples, answers: np.ndarray) -> list[ClassCount]:
    """Return counts of each class that occurs, in the order of the classes.

    ``answers`` (n,) are those to the test samples.
    """
    names = train.class_names
    learned, held_out = (np.bincount(part.labels, minlength=len(names)) for part in (train, test))
    right = np.bincount(test.labels[answers == test.labels], minlength=len(names))
    rows = zip(names, learned.tolist(), held_out.tolist(), right.tolist(), strict=True)
    return [ClassCount(*row) for row in rows if row[1] or row[2]]


def not_held_out(train: Samples, test: Samples) -> list[str]:
    """Return classes of which there are samples to learn from and none held out.

    There are none where nothing is held out at all.
    """
    tested = {*test.labels.tolist()}
    return [train.class_names[label] for label in sorted({*train.labels.tolist()} - tested)] if tested else []


def worst_samples(
    train: Samples, answers: OutOfFold | None, test: Samples, probabilities: np.ndarray, most: int = 10
) -> list[WorstSample]:
    """Return the samples whose class got the least probability, worst first, of those where it got less than half.

    Args:
        train: The training samples.
        answers: Those of cross-validation to the training samples; None: these are not looked at.
        test: The held-out samples, whose labels are below K.
        probabilities: The head's answers to the held-out samples, (n, K).
        most: The number of samples at most.
    """
    candidates = _doubtful(test, np.arange(len(test)), probabilities, is_held_out=True)
    if answers is not None:
        candidates += _doubtful(train, answers.rows, answers.probabilities, is_held_out=False)
    candidates.sort(key=lambda sample: sample.probability)
    return candidates[:most]


def _doubtful(samples: Samples, rows: np.ndarray, probabilities: np.ndarray, *, is_held_out: bool) -> list[WorstSample]:
    """Return the samples at ``rows`` (m,) whose class got less than half of their ``probabilities`` (m, K)."""
    labels = samples.labels[rows]
    shares = probabilities[np.arange(len(rows)), labels]
    answers = probabilities.argmax(axis=1)
    names = samples.class_names
    return [
        WorstSample(
            _name(samples, int(rows[at]), is_held_out=is_held_out),
            names[labels[at]],
            names[answers[at]],
            round(float(shares[at]), 6),
            is_held_out,
        )
        for at in np.flatnonzero(shares < 0.5)
    ]


def _name(samples: Samples, row: int, *, is_held_out: bool) -> str:
    """Return the origin of a sample, or its number where the data have no names."""
    if samples.names:
        return samples.names[row]
    return f"{'held-out' if is_held_out else 'training'} sample {row}"


def label_conflicts(
    train: Samples, train_features: np.ndarray, test: Samples, test_features: np.ndarray, most: int = 10
) -> list[LabelConflict]:
    """Return pairs of near-duplicates with different labels, the closest first.

    Two samples are near-duplicates when their features, scaled to length 1, are equal, or closer than `NEAR` of the
    median distance of a sample to the one that is closest to it. Samples of one recording are no duplicates: their
    windows overlap.

    Args:
        train: The training samples.
        train_features: Their features, (n, d).
        test: The held-out samples.
        test_features: Their features, (m, d).
        most: The number of pairs at most.
    """
    count = len(train) + len(test)
    if count < 2:
        return []
    rows = np.arange(count)
    if count > MOST_COMPARED:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST_COMPARED, replace=False))
    nearest = _nearest(
        np.concatenate([train_features, test_features])[rows],
        np.concatenate([train.labels, test.labels])[rows],
        _recordings(train, test)[rows],
    )
    finite_distances = nearest.of_any[np.isfinite(nearest.of_any)]
    usual = float(np.median(finite_distances)) if len(finite_distances) else 0.0
    # Rounding leaves equal rows of float32 a distance of up to 1e-3, the root of what it loses of their product.
    largest = max(NEAR * usual, 1e-3)

    def described(row: int) -> tuple[str, str]:
        """Return the origin and the class of a sample, training samples first."""
        is_held_out = row >= len(train)
        samples = test if is_held_out else train
        index = row - len(train) if is_held_out else row
        return _name(samples, index, is_held_out=is_held_out), samples.class_names[samples.labels[index]]

    result = list[LabelConflict]()
    listed = set[tuple[int, int]]()
    for at in np.argsort(nearest.of_others, kind="stable").tolist():
        if nearest.of_others[at] > largest or len(result) == most:
            break
        nearest_row = int(nearest.other[at])
        pair = (min(at, nearest_row), max(at, nearest_row))
        if pair not in listed:
            listed.add(pair)
            result.append(LabelConflict(*described(int(rows[pair[0]])), *described(int(rows[pair[1]]))))
    return result


@dataclass(frozen=True)
class _Nearest:
    """Distances (n,) to the closest sample, and to the closest one with another label, whose position is ``other``."""

    of_any: np.ndarray
    of_others: np.ndarray
    other: np.ndarray


def _nearest(features: np.ndarray, labels: np.ndarray, recordings: np.ndarray) -> _Nearest:
    """Return the distances between ``features`` (n, d), scaled to length 1, of samples from different recordings."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    units = (features / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    count = len(units)
    result = _Nearest(np.empty(count), np.empty(count), np.empty(count, int))
    block = max(1, _BLOCK_CELLS // count)
    for start in range(0, count, block):
        block_rows = np.arange(start, min(start + block, count))
        distances = np.sqrt(np.maximum(2.0 - 2.0 * (units[block_rows] @ units.T), 0.0))
        distances[recordings[block_rows, None] == recordings[None, :]] = np.inf
        result.of_any[block_rows] = distances.min(axis=1)
        distances[labels[block_rows, None] == labels[None, :]] = np.inf
        result.of_others[block_rows] = distances.min(axis=1)
        result.other[block_rows] = distances.argmin(axis=1)
    return result


def _recordings(train: Samples, test: Samples) -> np.ndarray:
    """Return the recording of each sample, (n,); without recordings each sample is one of its own."""
    if train.groups is None or test.groups is None:
        return np.arange(len(train) + len(test))
    return np.unique(np.concatenate([train.groups, test.groups]), return_inverse=True)[1]
