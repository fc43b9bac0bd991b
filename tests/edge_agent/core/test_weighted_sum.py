"""Weighted sums in parts, and on their way between processes, against the sum of all at once."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent.core.errors import TensorsError, TrainingFailed
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.wire.tensors import decode, encode


def addend(seed):
    """Weight and arrays of one client, with a counter among them."""
    rng = np.random.default_rng(seed)
    arrays = {
        "encoder.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "extra.means": rng.standard_normal(4) * 1e6,
        "encoder.steps": np.array(seed, np.int64),
    }
    return float(rng.integers(1, 1000)), arrays


def summed(seeds):
    """The sum of the addends of these seeds."""
    total = WeightedSum()
    for seed in seeds:
        total.add(*addend(seed))
    return total


def travelled(total):
    """The sum after it has been bytes."""
    return WeightedSum.from_tensors(decode(encode(total.to_tensors())))


def test_mean_is_the_weighted_one_and_a_counter_its_largest_value():
    weights, arrays = zip(*map(addend, range(5)), strict=True)
    mean = summed(range(5)).mean()
    expected = np.average([one["extra.means"] for one in arrays], axis=0, weights=weights)
    assert mean["extra.means"] == pytest.approx(expected)
    assert mean["encoder.weight"].dtype == np.float32
    assert mean["encoder.steps"] == 4


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_parts_that_have_travelled_give_the_bits_of_the_whole(parts):
    whole = summed(range(40)).mean()
    total = WeightedSum()
    for part in range(parts):
        total.merge(travelled(summed(range(part, 40, parts))))
    assert total.count == 40
    assert total.is_exact
    merged = total.mean()
    assert merged.keys() == whole.keys()
    for name, array in whole.items():
        assert merged[name].tobytes() == array.tobytes(), name
        assert merged[name].dtype == array.dtype


def test_a_part_without_updates_changes_nothing():
    total = summed(range(3))
    total.merge(travelled(WeightedSum()))
    assert total.mean()["extra.means"].tobytes() == summed(range(3)).mean()["extra.means"].tobytes()


def test_only_is_the_single_addend_itself():
    total = summed([7])
    assert total.only is not None
    total.add(*addend(8))
    assert total.only is None


def test_no_weight_is_an_error():
    total = WeightedSum()
    total.add(0.0, {"a": np.ones(2)})
    with pytest.raises(TrainingFailed, match="positive weight"):
        total.mean()


@pytest.mark.parametrize("lost", ["about", "fine.weight.a", "about.weight.a", "coarse.weight"])
def test_an_array_that_is_missing_is_an_error(lost):
    total = WeightedSum()
    total.add(2.0, {"a": np.ones(2)})
    tensors = {name: array for name, array in total.to_tensors().items() if name != lost}
    with pytest.raises(TensorsError):
        WeightedSum.from_tensors(tensors)


def test_an_array_of_another_form_is_an_error():
    total = WeightedSum()
    total.add(2.0, {"a": np.ones(2)})
    tensors = total.to_tensors() | {"fine.weight.a": np.ones(2, np.float32)}
    with pytest.raises(TensorsError, match="float64"):
        WeightedSum.from_tensors(tensors)


@pytest.mark.parametrize(
    "name, array",
    [
        ("about", np.zeros(0, np.int64)),
        ("about", np.ones(1, np.float32)),
        ("about.weight.a", np.array([1.0, np.nan, 1.0])),
        ("about.weight.a", np.array([1.0, -1.0, 1.0])),
        ("like.b", np.zeros(0, np.float32)),
        ("counter.b", np.zeros((), np.int64)),
    ],
)
def test_arrays_that_do_not_belong_together_are_an_error(name, array):
    """They were taken, and what was missing showed as a KeyError when the mean was taken."""
    total = WeightedSum()
    total.add(2.0, {"a": np.ones(2)})
    with pytest.raises(TensorsError):
        WeightedSum.from_tensors(total.to_tensors() | {name: array})


def test_a_value_beyond_exact_sums_is_told():
    total = summed([1])
    total.add(1.0, {"extra.means": np.full(4, 1e30)})
    assert not total.is_exact
    assert not travelled(total).is_exact
