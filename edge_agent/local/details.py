"""What lies behind an accuracy: the samples of each class, and those that were answered worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..data import Samples


@dataclass(frozen=True)
class ClassCount:
    """Samples of one class: to learn from, held out, and how many of these are answered right."""

    name: str
    train: int
    held_out: int
    right: int


@dataclass(frozen=True)
class WorstSample:
    """A held-out sample with a large loss: its origin, its class, the answer, and the probability of its class, 0..1.

    A wrong label is as likely a cause as a weak head.
    """

    sample: str
    label: str
    answer: str
    probability: float


def class_counts(train: Samples, test: Samples, answers: np.ndarray) -> list[ClassCount]:
    """Counts of each class that occurs, in the order of the classes; ``answers`` (n,) are those to the test samples."""
    names = train.class_names
    learned, held_out = (np.bincount(part.labels, minlength=len(names)) for part in (train, test))
    right = np.bincount(test.labels[answers == test.labels], minlength=len(names))
    rows = zip(names, learned.tolist(), held_out.tolist(), right.tolist(), strict=True)
    return [ClassCount(*row) for row in rows if row[1] or row[2]]


def not_held_out(train: Samples, test: Samples) -> list[str]:
    """Classes of which there are samples to learn from and none held out; none where nothing is held out at all."""
    tested = {*test.labels.tolist()}
    return [train.class_names[label] for label in sorted({*train.labels.tolist()} - tested)] if tested else []


def worst_samples(test: Samples, probabilities: np.ndarray, most: int = 5) -> list[WorstSample]:
    """The ``most`` samples whose class got the least probability, worst first, of those where it got less than half.

    ``probabilities`` (n, K) of the samples ``test``, whose labels are below K.
    """
    names: Sequence[str] = test.names or [f"held-out sample {number}" for number in range(len(test))]
    shares = probabilities[np.arange(len(test)), test.labels]
    rows = [int(row) for row in np.argsort(shares, kind="stable")[:most] if shares[row] < 0.5]
    answers = probabilities.argmax(axis=1)
    classes = test.class_names
    return [
        WorstSample(names[row], classes[test.labels[row]], classes[answers[row]], round(float(shares[row]), 6))
        for row in rows
    ]
