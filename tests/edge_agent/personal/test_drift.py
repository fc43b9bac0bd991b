"""Inputs that have changed, on features whose distribution is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_agent.personal import drift
from edge_agent.personal.confidence import Confidence
from edge_agent.personal.drift import EVERY, RUN_TIME, WINDOW, Reference, count_independent, reference_of
from edge_agent.personal.unknown import UnknownRule

CLASSES = 5
SIZE = 24


def features(count, seed=0, *, shift=0.0, labels=None):
    """Rectified clouds, one for each class, as an encoder gives them; ``shift`` moves all of them the same way."""
    world = np.random.default_rng(99)
    centres = world.normal(size=(CLASSES, SIZE))
    direction = world.normal(size=SIZE)
    rng = np.random.default_rng(seed)
    if labels is None:
        labels = rng.integers(0, CLASSES, count)
    rows = centres[labels] + 0.6 * rng.normal(size=(count, SIZE)) + shift * direction
    return np.maximum(rows, 0).astype(np.float32) + 0.01, labels


def reference(count=300, seed=0):
    rows, labels = features(count, seed)
    rule = UnknownRule.fit(rows, 0.05, labels=labels)
    return rule, reference_of(rule)


def alarms_of(found):
    """How often inputs are newly called changed; they are as fitted after eight looks in a row that find nothing."""
    alarms = 0
    calm = 8
    for is_found in found:
        if is_found and calm >= 8:
            alarms += 1
        calm = 0 if is_found else calm + 1
    return alarms


def answered(stream):
    """What a head would answer: the class of the nearest centre."""
    world = np.random.default_rng(99)
    centres = np.maximum(world.normal(size=(CLASSES, SIZE)), 0)
    return ((stream[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)


def looks(rule, ref, stream):
    """What looks at a stream find, one after each `EVERY` answers."""
    labels = answered(stream)
    residuals = ref.residuals(stream, labels)
    unknown = rule.is_unknown(stream)
    for end in range(WINDOW, len(stream) + 1, EVERY):
        part = slice(end - WINDOW, end)
        yield ref.compare(residuals[part], labels[part], unknown[part])


@pytest.mark.parametrize("count", [80, 300])
def test_inputs_that_have_not_changed_are_seldom_called_changed(count):
    """Over ten devices: with few training samples, a device now and then has an alarm after the other."""
    alarms = 0
    for seed in range(10):
        rule, ref = reference(count, seed)
        stream, _ = features(RUN_TIME, seed=100 + seed)
        alarms += alarms_of(look.have_changed for look in looks(rule, ref, stream))
    assert alarms <= 1.5 * 10


def test_one_class_alone_for_long_is_no_change():
    rule, ref = reference(300)
    stream, _ = features(5000, seed=7, labels=np.repeat(np.arange(CLASSES), 1000))
    assert sum(look.have_changed for look in looks(rule, ref, stream)) <= 2


def test_a_picture_that_stays_is_one_input():
    rule, ref = reference(300)
    few, _ = features(40, seed=8)
    stream = np.repeat(few, WINDOW, axis=0)
    noise = 1e-3 * np.random.default_rng(0).normal(size=stream.shape).astype(np.float32)
    found = list(looks(rule, ref, np.maximum(stream + noise, 0)))
    assert max(look.independent for look in found) < 4
    assert sum(look.have_changed for look in found) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_a_shift_is_found_within_200_answers(seed):
    rule, ref = reference(120, seed)
    before, _ = features(WINDOW, seed=200 + seed)
    after, _ = features(200, seed=300 + seed, shift=0.5)
    found = [look.have_changed for look in looks(rule, ref, np.concatenate([before, after]))]
    assert not found[0]
    assert any(found)


def test_unknown_inputs_alone_are_enough():
    rule, ref = reference(300)
    residuals = np.random.default_rng(0).normal(size=(WINDOW, SIZE))
    labels = np.random.default_rng(1).integers(0, CLASSES, WINDOW)
    few = ref.compare(residuals, labels, np.arange(WINDOW) < 8)
    many = ref.compare(residuals, labels, np.arange(WINDOW) < 30)
    assert not few.too_many_unknown
    assert many.too_many_unknown
    assert many.have_changed
    assert rule.rate == 0.05


def test_the_chance_of_unknown_inputs_covers_rates_that_differ_from_device_to_device():
    """On fresh inputs of many devices, counts that are called improbable come up no more often than that."""
    improbable = 0
    for seed in range(300):
        rule, ref = reference(80, seed)
        stream, _ = features(WINDOW, seed=5000 + seed)
        shares = np.bincount(answered(stream), minlength=CLASSES) / WINDOW
        improbable += ref._chance_of_unknown(int(rule.is_unknown(stream).sum()), WINDOW, shares) < 0.05
    assert improbable <= 0.05 * 300


def test_the_quantile_of_a_weighted_sum_is_that_of_a_simulation():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(4000, 5)) * [3.0, 1.0, 0.5, 0.5, 0.1]
    second = rng.normal(size=(4000, 5)) @ rng.normal(size=(5, 5))
    moments = drift._Moments.from_rows(first, second)
    covariance = 0.3 * first.T @ first / 4000 + 0.1 * second.T @ second / 4000
    drawn = (rng.multivariate_normal(np.zeros(5), covariance, 200_000) ** 2).sum(axis=1)
    for share in (0.9, 0.99, 0.999):
        assert moments.quantile(0.3, 0.1, share) == pytest.approx(np.quantile(drawn, share), rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_answers_that_hang_together_count_as_fewer(correlation):
    rng = np.random.default_rng(0)
    rows = np.empty((4000, SIZE))
    rows[0] = rng.normal(size=SIZE)
    for number in range(1, len(rows)):
        rows[number] = correlation * rows[number - 1] + math.sqrt(1 - correlation**2) * rng.normal(size=SIZE)
    expected = len(rows) * (1 - correlation) / (1 + correlation)
    assert count_independent(rows) == pytest.approx(expected, rel=0.1)


def test_windows_of_one_recording_are_not_each_others_neighbours():
    """Overlapping windows are nearly equal: compared with each other, any new recording would look changed."""
    rows, labels = features(100, seed=3)
    twins = np.repeat(rows, 3, axis=0) + 1e-3
    groups = np.repeat(np.arange(100), 3)
    rule = UnknownRule.fit(twins, 0.05, groups, np.repeat(labels, 3))
    ref = reference_of(rule)
    stream, _ = features(3000, seed=9)
    assert sum(look.have_changed for look in looks(rule, ref, stream)) <= 3


def test_what_is_too_little_to_compare_with_is_said():
    rows, labels = features(40)
    few = UnknownRule.fit(rows, 0.05, labels=labels)
    assert reference_of(few) is None
    assert drift.why_not_watched(few) == "the head learned from 40 samples; changes are noticed from 60 on"
    old = UnknownRule.fit(features(80)[0], 0.05)
    assert reference_of(old) is None
    assert "an earlier version fitted the head" in drift.why_not_watched(old)
    assert "keeps no training features" in drift.why_not_watched(None)
    assert isinstance(reference()[1], Reference)


def test_rows_keep_their_recordings_and_classes_when_they_are_saved():
    rows, labels = features(90, seed=4)
    rule = UnknownRule.fit(rows, 0.05, np.repeat(np.arange(30), 3), labels)
    again = Confidence.from_arrays(Confidence(None, rule).arrays(), SIZE).unknown
    np.testing.assert_array_equal(again.groups, rule.groups)
    np.testing.assert_array_equal(again.labels, labels)
    assert again.threshold == rule.threshold
