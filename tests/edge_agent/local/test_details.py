from __future__ import annotations

import numpy as np

from edge_agent.data import Samples
from edge_agent.local.details import ClassCount, WorstSample, class_counts, worst_samples
from edge_agent.task import ImageInput

SPEC = ImageInput(channels=1, height=4, width=4)


def samples(labels, names=()):
    return Samples(
        np.zeros((len(labels), 1, 4, 4), np.float32),
        np.array(labels, np.int64),
        ("cat", "dog", "tree"),
        SPEC,
        None,
        names,
    )


def test_counts_by_hand():
    counts = class_counts(samples([0, 0, 1]), samples([0, 1, 1]), np.array([0, 1, 0]))
    assert counts == [ClassCount("cat", 2, 1, 1), ClassCount("dog", 1, 2, 1)]


def test_the_worst_samples_are_those_whose_class_got_least_and_less_than_half():
    test = samples([0, 1, 1], ("a.png", "b.png", "c.png"))
    shares = np.array([[0.4, 0.6, 0.0], [0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    assert worst_samples(test, shares) == [
        WorstSample("b.png", "dog", "cat", 0.1),
        WorstSample("a.png", "cat", "dog", 0.4),
    ]
    assert worst_samples(samples([1]), np.array([[1.0, 0, 0]]))[0].sample == "held-out sample 0"
    assert worst_samples(samples([]), np.zeros((0, 3))) == []
