from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import binom

from edge_agent.core.errors import StateError
from edge_agent.heads.base import softmax
from edge_agent.personal.confidence import (
    Calibration,
    Confidence,
    UnknownRule,
    apply_temperature,
    calibrate,
    calibration_error,
)


def test_false_alarms_stay_below_the_rate_that_was_asked_for():
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(100):
        rule = UnknownRule.fit(rng.normal(size=(60, 8)).astype(np.float32), 0.1)
        rates.append(rule.is_unknown(rng.normal(size=(200, 8)).astype(np.float32)).mean())
    assert 0.03 < np.mean(rates) <= 0.1


def test_inputs_from_elsewhere_are_unknown():
    rng = np.random.default_rng(0)
    known = rng.normal(size=(100, 16)).astype(np.float32) + np.eye(16, dtype=np.float32)[0] * 5
    rule = UnknownRule.fit(known, 0.05)
    restored = Confidence.of(Confidence(unknown=rule).arrays(), 16).unknown
    assert rule.is_unknown(-known).mean() > 0.95
    np.testing.assert_array_equal(restored.distances(known[:9]), rule.distances(known[:9]))
    assert Confidence.of({}, 16) == Confidence()


def test_a_rate_needs_as_many_samples_as_can_show_it():
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    assert UnknownRule.fit(rows[:18], 0.05) is None
    assert UnknownRule.fit(rows[:19], 0.05) is not None
    assert UnknownRule.fit(rows[:8], 0.1) is None
    many = np.random.default_rng(0).normal(size=(4400, 2)).astype(np.float32)
    assert len(UnknownRule.fit(many, 0.05).rows) == 4096
    assert len(UnknownRule.fit(many, 1 / 4200).rows) == 4199


def test_neighbours_of_the_same_recording_do_not_count():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 5)
    rows = (rng.normal(size=(20, 6))[groups] + 0.01 * rng.normal(size=(100, 6))).astype(np.float32)
    # A new recording is far from the others; without groups every one of its windows would be a false alarm.
    other = rng.normal(size=(200, 6)).astype(np.float32)
    assert UnknownRule.fit(rows, 0.1).is_unknown(other).mean() > 0.8
    assert UnknownRule.fit(rows, 0.1, groups).is_unknown(other).mean() < 0.25


def test_drift_is_a_surplus_of_unknown_inputs_beyond_chance():
    rule = UnknownRule(np.eye(2, dtype=np.float32), 0.5, 0.05)
    for total in (1, 50, 20_000):
        for unknown in range(0, total + 1, max(1, total // 50)):
            assert rule.has_drifted(unknown, total) == (binom.sf(unknown - 1, total, 0.05) < 0.001), (unknown, total)


def test_distances_are_those_to_the_third_nearest_direction():
    """By brute force with scipy, leave-one-out for the threshold."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 5)).astype(np.float32)
    queries = rng.normal(size=(7, 5)).astype(np.float32)
    rule = UnknownRule.fit(rows, 0.1)
    unit, others = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (rows, queries))
    np.testing.assert_allclose(rule.distances(queries), np.sort(cdist(others, unit), axis=1)[:, 2], atol=1e-3)
    left_out = np.sort(cdist(unit, unit), axis=1)[:, 3]  # the first one is the sample itself
    assert rule.threshold == pytest.approx(np.sort(left_out)[int(np.ceil(31 * 0.9)) - 1], abs=1e-3)
    assert (left_out > rule.threshold + 1e-6).mean() <= 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": np.array([0.0, 0.1, 0.1])},
        {"calibration": np.array([1.0])},
        {"unknown_rows": np.zeros((5, 3), np.float32)},
        {"unknown": np.array([0.5])},
        {"unknown_rows": None},
    ],
)
def test_damaged_arrays_are_refused(change):
    rule = UnknownRule(np.eye(4, dtype=np.float32), 0.5, 0.05)
    arrays = {**Confidence(Calibration(1.5, 0.2, 0.1), rule).arrays(), **change}
    with pytest.raises(StateError, match="confidence"):
        Confidence.of({name: array for name, array in arrays.items() if array is not None}, 4)


def test_a_temperature_finds_the_factor_by_which_probabilities_are_too_sharp():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 5)) * 2
    labels = np.array([rng.choice(5, p=row) for row in softmax(logits)])
    found = calibrate(softmax(logits * 3), labels, np.arange(4000) % 5)
    assert found.temperature == pytest.approx(3, rel=0.05)
    assert found.error_before > 0.2
    assert found.error_after < 0.03
    assert calibration_error(found(softmax(logits * 3)), labels) == pytest.approx(found.error_after, abs=0.01)
    assert calibrate(softmax(logits)[:49], labels[:49], np.arange(49) % 5) is None


def test_a_temperature_that_does_not_lower_the_error_is_not_used():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        shares = softmax(rng.normal(size=(80, 5)) * 2)
        labels = np.array([rng.choice(5, p=row) for row in shares])
        found.append(calibrate(shares, labels, np.arange(80) % 5))
    used = [one for one in found if one is not None]
    assert 0 < len(used) < 40, "well-calibrated answers: by chance a temperature seems to help now and then"
    assert all(one.error_after < one.error_before for one in used)
    sure = np.tile([[1.0, 0.0]], (60, 1))
    assert calibrate(sure, np.zeros(60, np.int64), np.arange(60) % 5) is None


def test_calibration_error_is_that_of_a_hand_worked_case():
    probabilities = np.tile([[0.8, 0.2]], (100, 1))
    labels = np.array([0] * 60 + [1] * 40)
    rng = np.random.default_rng(0)
    # One confidence everywhere: whatever the bins, the error is |0.8 - 0.6| at least, and that in large bins.
    assert calibration_error(probabilities, rng.permutation(labels)) == pytest.approx(0.2, abs=0.06)


def test_absent_classes_stay_at_zero():
    assert apply_temperature(np.array([[0.9, 0.1, 0.0]]), 2.0)[0] == pytest.approx([0.75, 0.25, 0.0])
