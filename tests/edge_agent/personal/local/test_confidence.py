from __future__ import annotations

import numpy as np
import pytest

from edge_agent.core.errors import StateError
from edge_agent.heads.base import softmax
from edge_agent.personal.confidence import (
    Calibration,
    Confidence,
    apply_temperature,
    calibrate,
    calibration_error,
)
from edge_agent.personal.detectors import NearestRows
from edge_agent.personal.unknown import UnknownRule


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": np.array([0.0, 0.1, 0.1])},
        {"calibration": np.array([1.0])},
        {"unknown_rows": np.zeros((5, 3), np.float32)},
        {"unknown": np.array([0.5])},
        {"unknown": np.array([np.nan, 0.05])},
        {"unknown": np.array([0.5, 0.0])},
        {"unknown_rows": np.zeros((0, 4), np.float32)},
        {"unknown_rows": None},
    ],
)
def test_damaged_arrays_are_refused(change):
    rows = np.eye(4, dtype=np.float32)
    rule = UnknownRule(rows, 0.5, 0.05, NearestRows(rows))
    arrays = {**Confidence(Calibration(1.5, 0.2, 0.1), rule).arrays(), **change}
    with pytest.raises(StateError, match="confidence"):
        Confidence.from_arrays({name: array for name, array in arrays.items() if array is not None}, 4)


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
