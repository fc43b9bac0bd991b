from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from edge_agent.data import Samples
from edge_agent.local.validation import (
    CurvePoint,
    extrapolated,
    folds,
    interval,
    is_better,
    learning_curve,
    new_rows,
    p_value,
)
from edge_agent.task import ImageInput, WindowInput

IMAGE = ImageInput(channels=1, height=4, width=4)


def samples_of(labels, groups=None, spec=IMAGE):
    labels = np.asarray(labels, np.int64)
    inputs = np.zeros((len(labels), *spec.shape), np.float32)
    return Samples(inputs, labels, ("a", "b", "c"), spec, None if groups is None else np.asarray(groups))


@pytest.mark.parametrize("correct, total", [(0, 1), (7, 10), (10, 10), (480, 500)])
def test_an_interval_is_that_of_wilson(correct, total):
    expected = binomtest(correct, total).proportion_ci(method="wilson")
    assert interval(correct, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_two_models_are_compared_on_the_answers_in_which_they_differ():
    first = np.array([1] * 40 + [1] * 9 + [0] * 2, bool)
    second = np.array([1] * 40 + [0] * 9 + [1] * 2, bool)
    assert p_value(first, second) == pytest.approx(binomtest(2, 11).pvalue)
    assert not is_better(first, second)  # 9 of 11 is p = 0.065
    second[[40 + 9, 40 + 10]] = False
    assert is_better(first, second)
    assert not is_better(second, first)
    assert p_value(first, first) == 1.0


def test_every_sample_is_tested_once_and_classes_are_dealt_evenly():
    labels = np.repeat([0, 1, 2], [25, 10, 5])
    divisions = folds(samples_of(labels), 5, np.random.default_rng(0))
    assert sorted(np.concatenate([fold.test for fold in divisions]).tolist()) == list(range(40))
    for fold in divisions:
        assert np.bincount(labels[fold.test]).tolist() == [5, 2, 1]
        assert not set(fold.train) & set(fold.test)
        assert len(fold.train) + len(fold.test) == 40


def test_a_recording_never_stands_on_both_sides():
    groups = np.repeat(np.arange(8), 6)
    labels = np.repeat([0, 0, 0, 0, 1, 1, 1, 1], 6)
    divisions = folds(
        samples_of(labels, groups, WindowInput(channels=1, length=4, stride=2)), 4, np.random.default_rng(1)
    )
    assert len(divisions) == 4
    for fold in divisions:
        assert not set(groups[fold.train]) & set(groups[fold.test])
        assert set(labels[fold.test]) == {0, 1}


def test_one_recording_for_each_class_is_cut_into_blocks_without_overlap():
    groups, labels = np.repeat([0, 1], 20), np.repeat([0, 1], 20)
    spec = WindowInput(channels=1, length=6, stride=2)  # windows 2 apart overlap, those 3 apart do not
    divisions = folds(samples_of(labels, groups, spec), 4, np.random.default_rng(0))
    assert sorted(np.concatenate([fold.test for fold in divisions]).tolist()) == list(range(40))
    for fold in divisions:
        for row in fold.train:
            same = fold.test[groups[fold.test] == groups[row]]
            assert np.abs(same - row).min() * spec.stride >= spec.length


def test_the_only_recording_of_a_class_is_cut_and_those_of_others_stay_whole():
    """Recordings 0 to 3 are of class 0; recording 4 holds class 1 and then class 2, which have no other."""
    groups = np.concatenate([np.repeat([0, 1, 2, 3], 5), np.full(24, 4)])
    labels = np.concatenate([np.zeros(20, int), np.repeat([1, 2], 12)])
    spec = WindowInput(channels=1, length=4, stride=2)  # neighbours overlap
    divisions = folds(samples_of(labels, groups, spec), 4, np.random.default_rng(0))
    assert sorted(np.concatenate([fold.test for fold in divisions]).tolist()) == list(range(44))
    for number, fold in enumerate(divisions):
        assert set(labels[fold.test]) == set(labels[fold.train]) == {0, 1, 2}
        assert len(set(groups[fold.test]) - {4}) == 1, "one whole recording"
        assert not set(groups[fold.test]) & set(groups[fold.train]) - {4}
        # Of the twelve windows of a class the fold has three: 0 to 2, 3 to 5 ... Beside them one more is left out.
        first = [20 + 3 * number, 32 + 3 * number]
        assert fold.test[fold.test >= 20].tolist() == [begin + step for begin in first for step in range(3)]
        left_out = {begin + step for begin in first for step in (-1, 3)} & set(range(20, 44))
        assert not left_out & set(fold.train.tolist())
        assert len(fold.train) == 44 - len(fold.test) - len(left_out - set(fold.test.tolist()))


def test_windows_that_overlap_learned_ones_are_not_new():
    spec = WindowInput(channels=1, length=6, stride=2)  # windows 2 apart overlap, those 3 apart do not
    inputs = np.random.default_rng(0).normal(size=(20, 1, 6)).astype(np.float32)
    samples = Samples(inputs, np.zeros(20, np.int64), ("a",), spec, np.repeat([0, 1], 10))
    learned = samples.take(np.array([0, 1, 9])).row_digests()
    assert new_rows(samples, learned).tolist() == [4, 5, 6, *range(10, 20)]
    assert new_rows(samples, None).tolist() == list(range(20))
    assert len({*samples.row_digests().tolist()}) == 20


def test_one_sample_of_each_class_cannot_be_divided():
    assert folds(samples_of([0, 1, 2]), 5, np.random.default_rng(0)) == []


def test_a_curve_is_continued_by_its_power_law():
    points = [CurvePoint(n, 1 - 0.8 * n**-0.5, 0.0) for n in (20, 40, 80, 160)]
    expected, low, high = extrapolated(points, 200)
    assert expected == pytest.approx(1 - 0.8 * 400**-0.5, abs=1e-6)
    assert low == pytest.approx(expected, abs=1e-6) == high
    assert extrapolated(points[:2], 200) == (None, None, None)


def test_a_curve_says_whether_more_samples_would_help():
    rng = np.random.default_rng(0)
    samples = samples_of(np.tile([0, 1, 2], 60))

    def still_learning(train, test):
        return round(len(test) * (1 - 0.9 * len(train) ** -0.4))

    curve = learning_curve(still_learning, samples, rng)
    assert [point.samples for point in curve.points] == sorted(point.samples for point in curve.points)
    assert curve.expected > curve.points[-1].mean + 0.01
    assert "is worth it" in curve.advice
    flat = learning_curve(lambda train, test: round(len(test) * 0.9), samples, rng)
    assert "hardly help" in flat.advice
    assert "too few" in learning_curve(still_learning, samples_of([0, 0, 1, 1]), rng).advice
