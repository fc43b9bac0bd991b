from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_agent.core.task import ImageInput
from edge_agent.data import Samples
from edge_agent.personal.confidence import OutOfFold
from edge_agent.personal.local.details import ClassCount, WorstSample, class_counts, label_conflicts, worst_samples

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
    none = samples([])
    assert worst_samples(none, None, test, shares) == [
        WorstSample("b.png", "dog", "cat", 0.1),
        WorstSample("a.png", "cat", "dog", 0.4),
    ]
    assert worst_samples(none, None, samples([1]), np.array([[1.0, 0, 0]]))[0].sample == "held-out sample 0"
    assert worst_samples(none, None, none, np.zeros((0, 3))) == []


def test_the_worst_samples_are_of_all_samples_those_to_learn_from_by_the_answers_of_cross_validation():
    train = samples([2, 0], ("t.png", "u.png"))
    test = samples([1], ("h.png",))
    answers = OutOfFold(np.array([1, 0]), np.array([[0.9, 0.1, 0.0], [0.7, 0.25, 0.05]]), np.array([0, 1]))
    assert worst_samples(train, answers, test, np.array([[0.8, 0.2, 0.0]])) == [
        WorstSample("t.png", "tree", "cat", 0.05, held_out=False),
        WorstSample("h.png", "dog", "cat", 0.2, held_out=True),
    ]
    assert len(worst_samples(train, answers, test, np.array([[0.8, 0.2, 0.0]]), most=1)) == 1


def test_near_duplicates_with_different_labels_are_found_once_each_and_others_are_not():
    rng = np.random.default_rng(0)
    train = samples([0, 1, 2, 0] + [1] * 12, tuple("abcdefghijklmnop"))
    test = samples([1, 0], ("x", "y"))
    learned = rng.normal(size=(16, 16)).astype(np.float32)
    held_out = rng.normal(size=(2, 16)).astype(np.float32)
    held_out[0] = 3 * learned[0]  # the same direction: a cat in training, a dog among the held-out ones
    held_out[1] = learned[3]  # a cat in both: a duplicate, and no conflict
    learned[2] = learned[1] + 1e-3  # dog and tree, nearly the same
    found = label_conflicts(train, learned, test, held_out)
    assert {(one.sample, one.label, one.other, one.other_label) for one in found} == {
        ("a", "cat", "x", "dog"),
        ("b", "dog", "c", "tree"),
    }
    assert len(found) == 2
    assert len(label_conflicts(train, learned, test, held_out, most=1)) == 1
    assert label_conflicts(samples([]), learned[:0], samples([]), held_out[:0]) == []


def test_windows_of_one_recording_are_no_duplicates():
    train = samples([0, 1])
    test = samples([1])
    same = np.ones((2, 4), np.float32)
    assert label_conflicts(train, same, test, same[:1])
    of_one = [replace(part, groups=np.zeros(len(part), np.int64)) for part in (train, test)]
    assert label_conflicts(of_one[0], same, of_one[1], same[:1]) == []
