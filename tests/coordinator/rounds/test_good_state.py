"""When the loss of a round is an explosion, and which state is the last good one."""

from __future__ import annotations

import math

import pytest

from coordinator.rounds.good_state import Explosion, GoodState, after, explosion

GOOD = GoodState(3, "d" * 64, 0.5)


@pytest.mark.parametrize(
    "losses, classes, expected",
    [
        ([4.7, 5.0, 6.0], 10, Explosion(5.0, 2 * math.log(10))),
        ([0.1, 4.5, 4.6], 10, None),
        ([4.7, 1e9, 1e9], 10, Explosion(1e9, 2 * math.log(10))),
        ([0.4, 0.5, 1e9], 10, None),
        ([0.4, 1e9], 10, None),
        ([1.5], 2, Explosion(1.5, 2 * math.log(2))),
        ([], 2, None),
        ([*[None] * 9, 1e9], 10, None),
        ([*[None] * 5, *[1e9] * 5], 10, None),
        ([*[None] * 4, *[1e9] * 5], 10, Explosion(1e9, 2 * math.log(10))),
    ],
    ids=[
        "beyond",
        "within",
        "a majority",
        "one liar of three",
        "one liar of two",
        "alone",
        "no losses",
        "one speaks of ten",
        "half speak",
        "a majority speaks",
    ],
)
def test_the_median_counts_against_the_lowest_loss_and_that_of_guessing(losses, classes, expected):
    assert explosion(losses, GOOD, classes, 2.0) == expected


def test_a_method_whose_loss_is_large_anyway_is_measured_by_its_own():
    assert explosion([35.0], GoodState(1, "", 20.0), 10, 2.0) is None
    assert explosion([41.0], GoodState(1, "", 20.0), 10, 2.0) == Explosion(41.0, 40.0)


def test_without_a_good_state_or_a_bound_there_is_none():
    assert explosion([1e9], None, 10, 2.0) is None
    assert explosion([1e9], GOOD, 10, None) is None


def test_the_state_that_agents_trained_from_is_good_and_the_lowest_loss_stays():
    assert after(None, [2.0, 1.0, 3.0], 0, "a") == GoodState(0, "a", 2.0)
    assert after(GOOD, [0.7], 4, "b") == GoodState(4, "b", 0.5)
    assert after(GOOD, [0.2], 4, "b") == GoodState(4, "b", 0.2)
    assert after(GOOD, [], 4, "b") == GOOD


def test_no_state_is_known_to_be_good_from_the_losses_of_a_minority():
    assert after(GOOD, [None, 0.2], 4, "b") == GOOD
    assert after(None, [None, None, 0.2], 4, "b") is None
    assert after(GOOD, [None, 0.2, 0.3], 4, "b") == GoodState(4, "b", 0.2)
