"""What counts as a gain: the paired test of the device where it loses, two standard errors where it gains."""

from __future__ import annotations

import math

import pytest

from coordinator.state.fleet_rows import AgentRow
from coordinator.state.noise import Compared, Gain, classify_gain, classify_mean_gain


@pytest.mark.parametrize(
    "local, personal, support, alone, kind",
    [
        (0.5, 0.75, 40, False, Gain.ABOVE),  # 21 and 31 of 42: 0.238 against 2 * 0.101
        (0.5, 0.70, 40, False, Gain.WITHIN),  # 21 and 29 of 42: 0.190 against 2 * 0.106
        (0.74, 0.733, 150, False, Gain.WITHIN),
        (0.845, 0.883, 239, False, Gain.WITHIN),  # two standard errors are 6.3 points
        (0.738, 0.907, 321, False, Gain.ABOVE),
        (0.8, 0.7, 40, False, Gain.WITHIN),  # lower, and the device's own test does not say that it is better alone
        (0.8, 0.7, 40, True, Gain.BELOW),
        (0.8, 0.7, None, True, Gain.BELOW),
        (0.5, 0.9, None, False, Gain.UNKNOWN),
        (0.5, 0.9, 0, False, Gain.UNKNOWN),
        (None, 0.9, 40, False, Gain.UNKNOWN),
        (0.5, None, 40, False, Gain.UNKNOWN),
    ],
)
def test_gain_of_one_device(local, personal, support, alone, kind):
    assert classify_gain(local, personal, support, better_alone=alone) is kind
    row = AgentRow("a", local=local, personal=personal, support=support, better_alone=alone)
    assert row.gain_kind is kind


def test_standard_error_of_a_gain_by_hand():
    rates = 21 / 42, 31 / 42
    expected = math.sqrt(sum(rate * (1 - rate) / 42 for rate in rates))
    assert Compared(0.5, 0.75, 40).error == pytest.approx(expected)
    assert Compared(0.5, 0.75, 40).adjusted_gain == pytest.approx(10 / 42)


def test_mean_gain_of_many_devices_is_known_better_than_that_of_one():
    one = Compared(0.5, 0.65, 40)
    assert classify_gain(one.local, one.personal, one.support, better_alone=False) is Gain.WITHIN
    assert classify_mean_gain([one]) is Gain.WITHIN
    assert classify_mean_gain([one] * 4) is Gain.ABOVE, "the noise of the mean of four is half of that of one"
    assert classify_mean_gain([Compared(0.65, 0.5, 40)] * 4) is Gain.BELOW
    assert classify_mean_gain([]) is Gain.UNKNOWN
