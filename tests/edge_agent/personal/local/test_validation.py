from __future__ import annotations

from operator import itemgetter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import Samples
from edge_agent.personal.local.validation import (
    CurvePoint,
    LearningCurve,
    extrapolate,
    folds,
    interval,
    is_better,
    learning_curve,
    new_rows,
    p_value,
)

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
    groups = np.repeat([0, 1], 20)
    labels = np.repeat([0, 1], 20)
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


@given(
    runs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=8),
    stride=st.sampled_from([2, 4]),
    count=st.integers(2, 5),
)
@example(runs=[(0, 1, 1), (0, 0, 2)], stride=2, count=5)  # one fold has all neighbours of what it tests left out
@settings(max_examples=300)
def test_folds_of_any_recordings_are_two_or_more_or_none_and_leak_nothing(runs, stride, count):
    """``runs``: recording, class and number of windows that follow one another."""
    groups = np.concatenate([np.full(windows, recording) for recording, _, windows in sorted(runs, key=itemgetter(0))])
    labels = np.concatenate([np.full(windows, label) for _, label, windows in sorted(runs, key=itemgetter(0))])
    spec = WindowInput(channels=1, length=4, stride=stride)
    divisions = folds(samples_of(labels, groups, spec), count, np.random.default_rng(0))
    assert len(divisions) == 0 or 2 <= len(divisions) <= count
    tested = [row for fold in divisions for row in fold.test]
    assert len(tested) == len(set(tested)), "no sample is tested twice"
    for fold in divisions:
        assert fold.train.size
        assert fold.test.size
        near = np.abs(fold.train[:, None] - fold.test) * stride < 4
        assert not (near & (groups[fold.train][:, None] == groups[fold.test])).any()


def measured(error_with, count, rng, folds=3):
    """A curve of ``count`` samples in three folds, as a head with these errors (size -> share) would give it.

    Of the tested samples 60 % are easy or hard for the heads of all sizes alike.
    """
    sizes = [round(share * count * 2 / 3) for share in (0.1, 0.2, 0.4, 0.7, 1.0)]
    per_fold = count // folds
    ease = rng.random((folds, per_fold))
    points = []
    for size in sizes:
        luck = np.where(rng.random(ease.shape) < 0.4, rng.random(ease.shape), ease)
        right = (luck >= error_with(size)).mean(axis=1)
        points.append(CurvePoint(size, float(right.mean()), float(right.std())))
    return points


@pytest.mark.parametrize(
    "error_with",
    [
        pytest.param(lambda size: 2.7 * size**-0.5, id="steep"),
        pytest.param(lambda size: 0.02 + 0.6 * size**-0.25, id="slow"),
        pytest.param(lambda _size: 0.06, id="flat"),
        pytest.param(lambda size: 0.05 + 3 / size, id="plateau"),
    ],
)
def test_the_range_of_a_forecast_covers_what_twice_as_many_samples_give(error_with):
    rng = np.random.default_rng(0)
    inside = []
    widths = []
    for _ in range(100):
        found = extrapolate(measured(error_with, 300, rng), 600, 300, 3)
        inside.append(found.low <= 1 - error_with(600) <= found.high)
        widths.append(found.high - found.low)
    assert np.mean(inside) >= 0.85  # 90 % asked for; one standard deviation of the share is 3 %
    assert np.mean(widths) < 0.15


@pytest.mark.parametrize(
    "accuracies, spread, tested, words",
    [
        ((0.611, 0.539, 0.536, 0.514, 0.480), 0.08, 24, "it is not clear"),  # falls
        ((0.80, 0.93, 0.941, 0.940, 0.941), 0.01, 750, "hardly help"),
        ((0.30, 0.45, 0.60, 0.72, 0.80), 0.01, 750, "is worth it"),
        ((0.98, 1.0, 1.0, 1.0, 1.0), 0.0, 3, "it is not clear"),  # three recordings
        ((0.50, 0.80, 0.97, 0.995, 0.999), 0.001, 5000, "hardly help"),  # falls faster than 1 / n
        ((0.10, 0.11, 0.15, 0.97, 0.99), 0.01, 5000, "hardly help"),  # jumps, as no curve does
    ],
)
def test_advice_promises_no_more_than_the_curve(accuracies, spread, tested, words):
    pairs = zip((50, 100, 200, 350, 500), accuracies, strict=True)
    points = tuple(CurvePoint(size, mean, spread) for size, mean in pairs)
    curve = LearningCurve(points, extrapolate(points, 1500, tested, 3))
    assert words in curve.advice
    assert "with 1500 samples to fit, twice as many as here, about " in curve.advice
    known = curve.forecast
    assert 0 <= known.low < known.expected <= known.high <= 1
    assert 0 <= known.gain[0] <= known.gain[1] <= max(1 - points[-1].mean, 0.3 * (tested < 10))
    assert ("worth it" in words) is (known.expected > points[-1].mean + 0.02)
    assert (known.low < 0.85) is (tested < 100)


def test_a_forecast_is_that_of_a_slow_twin():
    """All curves one by one, each with its weight; the mean gain and its quantiles by hand."""
    points = [CurvePoint(n, a, 0.02) for n, a in ((20, 0.7), (40, 0.8), (80, 0.84))]
    noise = [max((e * 90 + 1) / 92 * (1 - (e * 90 + 1) / 92) / 90, 0.02**2 / 2) for e in (0.3, 0.2, 0.16)]
    pairs = []
    for remains in np.linspace(0, 1, 11):
        for power in np.linspace(0, 1.5, 31):
            for last in 0.16 + np.linspace(-3, 3, 31) * np.sqrt(noise[-1]):
                falls = [remains + (1 - remains) * (n / 80) ** -power for n in (20, 40, 80)]
                misfit = sum((last * f - e) ** 2 / s for f, e, s in zip(falls, (0.3, 0.2, 0.16), noise, strict=True))
                gain = min(last * (1 - remains) * (1 - (240 / 80) ** -power), 0.16)
                pairs.append((gain, np.exp(-misfit / 2) * (last >= 0)))
    pairs.sort()
    gains, weights = np.array(pairs).T
    shares = np.cumsum(weights) / weights.sum()
    found = extrapolate(points, 240, 90, 3)
    assert found.expected == pytest.approx(0.84 + (gains * weights).sum() / weights.sum())
    assert found.gain == pytest.approx([gains[shares >= 0.05][0], gains[shares >= 0.95][0]], abs=1e-3)
    assert extrapolate(points[:2], 240, 90, 3) is None


def test_a_curve_says_whether_more_samples_would_help():
    rng = np.random.default_rng(0)
    samples = samples_of(np.tile([0, 1, 2], 200))

    def still_learning(train, test):
        return round(len(test) * (1 - 0.9 * len(train) ** -0.2))

    curve = learning_curve(still_learning, samples, rng)
    assert [point.samples for point in curve.points] == sorted(point.samples for point in curve.points)
    assert (curve.forecast.samples, curve.same_sitting) == (1200, None)
    assert curve.forecast.expected == pytest.approx(1 - 0.9 * 1200**-0.2, abs=0.03)
    assert "is worth it" in curve.advice
    flat = learning_curve(lambda train, test: round(len(test) * 0.9), samples, rng)
    assert "hardly help" in flat.advice
    assert "too few" in learning_curve(still_learning, samples_of([0, 0, 1, 1]), rng).advice


def test_a_curve_says_whether_its_windows_are_of_other_recordings():
    spec = WindowInput(channels=1, length=4, stride=4)
    for recordings, expected in ((np.repeat([0, 1, 2, 3], 10), 0.0), (np.repeat([0, 1], 20), 1.0)):
        samples = samples_of(np.repeat([0, 1], 20), recordings, spec)
        curve = learning_curve(lambda train, test: len(test), samples, np.random.default_rng(0))
        assert curve.same_sitting == expected
