from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import CohortConfig
from coordinator.rounds.selection import choose

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), unique=True, max_size=30)


@given(NAMES, st.floats(0.01, 1), st.integers(1, 8), st.integers(0, 100), st.integers(1, 50))
def test_a_cohort_is_a_sorted_subset_of_the_size_that_was_asked_for(names, fraction, least, seed, number):
    config = CohortConfig(fraction=fraction, min_agents=least)
    chosen = choose(names, config, seed=seed, round_number=number)
    if len(names) < least:
        assert chosen == ()
    else:
        assert list(chosen) == sorted(set(chosen))
        assert set(chosen) <= set(names)
        assert len(chosen) == min(len(names), max(least, round(fraction * len(names))))


@given(NAMES, st.integers(0, 100), st.randoms())
def test_the_order_in_which_agents_came_does_not_matter(names, seed, dice):
    config = CohortConfig(fraction=0.5)
    shuffled = list(names)
    dice.shuffle(shuffled)
    assert choose(names, config, seed=seed, round_number=3) == choose(shuffled, config, seed=seed, round_number=3)


@pytest.mark.parametrize(
    "available, fraction, least, most, over, expected",
    [
        (10, 1.0, 1, None, 1.0, 10),
        (10, 0.5, 1, None, 1.0, 5),
        (10, 0.5, 7, None, 1.0, 7),
        (10, 1.0, 1, 4, 1.0, 4),
        (10, 1.0, 1, 4, 1.3, math.ceil(4 * 1.3)),
        (10, 1.0, 1, 10, 1.3, 10),
        (2, 1.0, 3, None, 1.0, 0),
        (3, 0.1, 3, None, 1.0, 3),
    ],
)
def test_sizes_follow_fraction_bounds_and_over_selection(available, fraction, least, most, over, expected):
    config = CohortConfig(fraction=fraction, min_agents=least, max_agents=most, over_selection=over)
    names = [f"a{i}" for i in range(available)]
    assert len(choose(names, config, seed=0, round_number=1)) == expected


def test_over_many_rounds_everybody_is_asked_about_equally_often():
    """200 rounds of 5 of 10: each is asked 100 times on average with a standard deviation of 7.1."""
    names = [f"a{i}" for i in range(10)]
    config = CohortConfig(fraction=0.5)
    asked = dict.fromkeys(names, 0)
    for number in range(200):
        for name in choose(names, config, seed=1, round_number=number):
            asked[name] += 1
    assert sum(asked.values()) == 1000
    assert all(70 < count < 130 for count in asked.values())


def test_seed_and_round_change_the_cohort():
    names = [f"a{i}" for i in range(20)]
    config = CohortConfig(fraction=0.5)
    cohorts = {choose(names, config, seed=seed, round_number=number) for seed in range(5) for number in range(5)}
    assert len(cohorts) > 20
