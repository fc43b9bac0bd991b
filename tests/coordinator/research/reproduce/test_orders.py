"""Orders of rows that a table claims, checked by means and by differences within seeds."""

from __future__ import annotations

from statistics import fmean

import pytest
from scipy import stats

from coordinator.research.reproduce.cells import Promise, Row, Table
from coordinator.research.reproduce.orders import Standing, Values, check_order, markdown_of_pairs


def checked(above=("all",), short_rows=(), **accuracies):
    """The order of row Best above others; row -> seed -> accuracy."""
    values = {name: Values(fmean(by_seed.values()), by_seed) for name, by_seed in accuracies.items() if by_seed}
    rows = tuple(Row(name=name, method="local") for name in accuracies)
    promise = Promise(row="Best", above=above)
    table = Table(title="t", source="s", measure="m", columns=({"name": "all"},), rows=rows, promises=(promise,))
    return check_order(table, promise, "all", values, short_rows=short_rows)


def test_differences_are_paired_over_the_seeds_that_both_rows_have():
    """Within a seed the rows differ by 1.0, 1.2 and 1.4, although the seeds themselves differ by ten points."""
    order = checked(Best={0: 80.0, 1: 90.0, 2: 85.0, 3: 20.0}, Other={2: 83.6, 0: 79.0, 1: 88.8})
    (other,) = order.lower_rows
    assert other.paired.mean == pytest.approx(1.2)
    assert (other.paired.count, other.standing) == (3, Standing.LOWER)
    low, high = stats.t.interval(0.95, 2, loc=1.2, scale=stats.sem([1.0, 1.2, 1.4]))
    assert (other.paired.low, other.paired.high) == (pytest.approx(low), pytest.approx(high))


def test_rows_with_other_seeds_are_compared_over_those_that_both_have():
    """By the means of all seeds Best would be below Other, because it alone has seed 3."""
    order = checked(Best={0: 80.0, 1: 90.0, 3: 20.0}, Other={0: 79.0, 1: 88.8}, Same={0: 78.0, 1: 88.0, 3: 19.0})
    assert order.holds is True
    assert order.to_json()["margin"] == pytest.approx(1.1)
    means, seeds, *_ = order.sentences()
    assert means == "The paper's order holds: Best above Other, Same, by 1.10 points or more."
    assert seeds == "With other seeds than Best: Other; the seeds that both rows have are compared."


def test_an_order_in_words_with_what_chance_may_have_done():
    order = checked(Best={0: 80.0, 1: 90.0}, Lower={0: 78.0, 1: 87.9}, Similar={0: 79.9, 1: 80.0}, Missing={})
    first, standings, chance = order.sentences()
    assert first == (
        "The paper's order holds so far: Best above Lower, Similar, by 2.05 points or more; these are 2 of 3; not "
        "there yet: Missing."
    )
    assert standings == (
        "Paired over 2 seeds Best is above Lower by two standard errors or more; not distinguishable from Similar."
    )
    assert chance == "With 2 seeds chance alone exceeds two standard errors in 30 % of comparisons."


def test_rows_with_other_numbers_of_seeds_are_judged_by_those_that_they_share():
    order = checked(Best={0: 80.0, 1: 90.0, 2: 85.0}, All={0: 78.0, 1: 87.9, 2: 83.1}, Two={0: 78.0, 1: 87.9})
    _, _, standings, chance = order.sentences()
    assert standings == "Paired over 2 seeds or more Best is above All, Two by two standard errors or more."
    assert chance.startswith("With 2 seeds")


def test_a_row_that_is_higher_is_named():
    order = checked(Best={0: 80.0, 1: 90.0}, Higher={0: 81.0, 1: 91.1})
    first, standings, _ = order.sentences()
    assert first == (
        "By the means the paper's order does **not** hold (Best above Higher): Higher came out at least as high, by "
        "1.05 points at most."
    )
    assert standings == "Paired over 2 seeds Best is below Higher by two standard errors or more."


def test_a_row_that_is_higher_by_less_than_the_noise_is_said_to_be_so():
    order = checked(Best={0: 80.0}, Higher={0: 80.3}, Missing={})
    (only,) = order.sentences()
    assert only == (
        "By the means the paper's order does **not** hold (Best above Higher, Missing): Higher came out at least as "
        "high, by 0.30 points at most, which is within the noise; these are 1 of 2; not there yet: Missing."
    )


@pytest.mark.parametrize("short_row", ["Best", "Other"])
def test_an_order_after_fewer_rounds_is_said_to_be_one(short_row):
    order = checked(short_rows=[short_row], Best={0: 80.0}, Other={0: 78.0})
    (only,) = order.sentences()
    assert only == (
        "The paper's order holds: Best above Other, by 2.00 points or more; with fewer rounds than the table has, this "
        "may change."
    )


def test_fewer_rounds_of_a_row_that_the_order_is_not_about_say_nothing_of_it():
    order = checked(above=("Other",), short_rows=["Third"], Best={0: 80.0}, Other={0: 78.0}, Third={0: 90.0})
    (only,) = order.sentences()
    assert only == "The paper's order holds: Best above Other, by 2.00 points or more."


def test_enough_seeds_need_no_word_on_chance_and_a_small_margin_of_many_seeds_is_no_noise():
    order = checked(Best=dict.fromkeys(range(5), 80.0), Other={seed: 79.5 + 0.01 * seed for seed in range(5)})
    first, standings = order.sentences()
    assert first == "The paper's order holds: Best above Other, by 0.48 points or more."
    assert standings == "Paired over 5 seeds Best is above Other by two standard errors or more."


def test_one_seed_says_nothing_of_chance():
    order = checked(Best={0: 80.0}, Other={0: 79.5})
    assert list(order.sentences()) == [
        "The paper's order holds: Best above Other, by 0.50 points, which is within the noise."
    ]
    assert list(markdown_of_pairs([order])) == []
    assert order.to_json()["paired"] == [
        {
            "row": "Other", "seeds": 1, "difference": 0.5,
            "standard_error": None, "low": None, "high": None, "standing": None,
        },
    ]  # fmt: skip


def test_rows_without_a_common_seed_have_no_paired_difference():
    order = checked(Best={0: 80.0, 1: 81.0}, Other={2: 79.0, 3: 70.0})
    assert order.lower_rows[0].paired is None
    assert list(order.sentences()) == [
        "The paper's order holds: Best above Other, by 6.00 points or more.",
        "Without a seed of Best: Other; part of the difference may be that of the seeds.",
    ]
    assert order.to_json()["paired"] == [{"row": "Other", "seeds": 0}]


def test_an_order_without_another_row_does_not_hold():
    order = checked(Best={0: 80.0})
    assert list(order.sentences()) == [
        "The paper's order (Best above none) cannot be checked yet: there is nothing to compare."
    ]
    assert order.to_json()["holds"] is None


def test_the_table_of_pairs():
    order = checked(Best={0: 80.0, 1: 90.0}, Lower={0: 78.0, 1: 87.9}, Once={0: 90.0})
    assert list(markdown_of_pairs([order])) == [
        "| Best minus | points, paired over seeds | standard error | Student's 95 % interval | seeds |",
        "|---|---|---|---|---|",
        "| Lower | +2.05 | 0.05 | +1.41 to +2.69 | 2 |",
        "",
    ]
