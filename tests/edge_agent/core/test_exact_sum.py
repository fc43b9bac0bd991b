"""Sums that no order and no grouping changes, against rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from edge_agent.core.exact_sum import COARSE, FINE, LARGEST, ExactSum
from edge_agent.methods.base import weighted_mean

COUNT = 300
SIZE = 40


@pytest.fixture(scope="module")
def addends():
    """Arrays of float32 over eleven orders of magnitude, with sample counts as weights."""
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-8, 3, (COUNT, SIZE))
    arrays = (rng.standard_normal((COUNT, SIZE)) * scales).astype(np.float32)
    return list(zip(arrays, rng.integers(1, 5000, COUNT).astype(float), strict=True))


def summed(addends, order, parts=1):
    """The sum in this order, dealt out to so many partial sums that are then merged."""
    partial = [ExactSum((SIZE,)) for _ in range(parts)]
    for number, row in enumerate(order):
        partial[number % parts].add(*addends[row])
    first, *others = partial
    for other in others:
        first.merge(other)
    assert first.is_exact
    return first.total()


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_order_and_number_of_partial_sums_change_no_bit(addends, parts):
    expected = summed(addends, range(COUNT)).tobytes()
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(COUNT)
        assert summed(addends, order, parts).tobytes() == expected


def test_an_ordinary_sum_would_depend_on_the_order(addends):
    """Otherwise the test above would show nothing."""
    forwards = sum(array.astype(np.float64) * weight for array, weight in addends)
    backwards = sum(array.astype(np.float64) * weight for array, weight in reversed(addends))
    assert (forwards != backwards).any()


def test_the_sum_is_the_rational_one_rounded_once(addends):
    result = summed(addends, range(COUNT))
    for column in range(SIZE):
        terms = (Fraction(float(array[column])) * Fraction(weight) for array, weight in addends)
        assert result[column] == float(sum(terms))


def test_the_fine_sum_is_carried_over_before_it_overflows():
    """Each addend has half of a coarse unit at most below it: ten thousand of them need more than 53 bits."""
    total = ExactSum((1,))
    addend = np.array([COARSE / 2 - FINE])
    for _ in range(10_000):
        total.add(addend)
    assert total.total()[0] == float(10_000 * (Fraction(COARSE) / 2 - Fraction(FINE)))
    merged = ExactSum((1,))
    for _ in range(100):
        part = ExactSum((1,))
        for _ in range(127):
            part.add(addend)
        merged.merge(part)
    assert merged.total()[0] == float(12_700 * (Fraction(COARSE) / 2 - Fraction(FINE)))


@pytest.mark.parametrize("value", [2 * LARGEST, -2 * LARGEST, np.inf, np.nan])
def test_a_model_that_has_diverged_is_summed_as_usual_and_says_so(value):
    total = ExactSum((2,))
    total.add(np.array([1.0, value]))
    total.add(np.array([2.0, value]))
    assert not total.is_exact
    np.testing.assert_array_equal(total.total(), [3.0, 2 * value])
    clean = ExactSum((2,))
    clean.merge(total)
    assert not clean.is_exact


def test_large_addends_that_together_exceed_the_limit_say_so():
    total = ExactSum((1,))
    total.add(np.array([LARGEST]))
    assert total.is_exact
    total.add(np.array([LARGEST]))
    assert not total.is_exact


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3, 4), (1 << 15,)])
def test_all_shapes(shape):
    array = np.random.default_rng(0).standard_normal(shape)
    total = ExactSum(shape)
    total.add(array)
    total.add(array.astype(np.float32), 0.5)
    expected = np.rint(array / FINE) * FINE + np.rint(array.astype(np.float32) * 0.5 / FINE) * FINE
    np.testing.assert_allclose(total.total(), expected, rtol=1e-15)
    assert total.total().shape == shape


def test_arrays_that_are_not_contiguous():
    array = np.arange(12.0).reshape(3, 4)
    total = ExactSum((4, 3))
    total.add(array.T)
    np.testing.assert_array_equal(total.total(), array.T)


def test_a_mean_of_models_is_the_same_in_any_order(addends):
    updates = [(weight, {"w": array, "steps": np.array(row)}) for row, (array, weight) in enumerate(addends)]
    forwards = weighted_mean(updates)
    backwards = weighted_mean(reversed(updates))
    assert forwards["w"].tobytes() == backwards["w"].tobytes()
    assert forwards["steps"] == backwards["steps"] == COUNT - 1


def test_fractional_weights_do_not_depend_on_the_order_either():
    weights = [0.1, 0.2, 0.3, 0.7, 1e-3]
    updates = [(weight, {"w": np.float32([weight, 1.0])}) for weight in weights]
    assert weighted_mean(updates)["w"].tobytes() == weighted_mean(reversed(updates))["w"].tobytes()
    assert weighted_mean(updates)["w"][1] == 1.0


def test_a_difference_is_added_as_the_difference_itself(addends):
    (one, weight), (other, _) = addends[:2]
    direct = ExactSum((SIZE,))
    direct.add(one.astype(np.float64) - other, weight)
    total = ExactSum((SIZE,))
    total.add(one, weight, other)
    assert total.total().tobytes() == direct.total().tobytes()


def test_a_sum_goes_on_where_another_process_has_left_it(addends):
    first = ExactSum((SIZE,))
    for array, weight in addends[:150]:
        first.add(array, weight)
    total = ExactSum.resumed(first.coarse, first.fine, first.state())
    for array, weight in addends[150:]:
        total.add(array, weight)
    assert total.is_exact
    assert total.total().tobytes() == summed(addends, range(COUNT)).tobytes()
