"""Features of a frozen encoder come from the cache bit for bit, and never for other weights, samples or models."""

from __future__ import annotations

import gc

import pytest
import torch
from simulation_harness import learned, run, small_plan, write_images
from torch import nn

from edge_agent.core.errors import DataError
from edge_agent.training import feature_cache
from edge_agent.training.feature_cache import FeatureCache
from edge_agent.training.loops import features_of
from edge_agent.training.parts import Parts


def small_model(seed=0):
    torch.manual_seed(seed)
    return Parts(encoder=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU()))


@pytest.fixture
def inputs():
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def test_the_same_samples_are_computed_once_with_the_same_bits(inputs):
    model = small_model()
    cache = FeatureCache()
    first = cache.features_of(model, inputs)
    again = cache.features_of(model, inputs.clone())
    assert torch.equal(first, again)
    assert torch.equal(first, features_of(model, inputs))
    assert (cache.misses, cache.hits) == (1, 1)


def test_what_is_returned_may_be_changed(inputs):
    model = small_model()
    cache = FeatureCache()
    cache.features_of(model, inputs).zero_()
    assert torch.equal(cache.features_of(model, inputs), features_of(model, inputs))


def change_weight(model):
    model.encoder[0].weight.data[0, 0] += 1


def change_statistics(model):
    model.encoder[1].running_mean += 1


@pytest.mark.parametrize("change", [change_weight, change_statistics])
def test_other_weights_or_statistics_are_computed_again(change, inputs):
    model = small_model()
    cache = FeatureCache()
    before = cache.features_of(model, inputs)
    change(model)
    after = cache.features_of(model, inputs)
    assert not torch.equal(before, after)
    assert torch.equal(after, features_of(model, inputs))


def test_other_samples_shapes_and_models_are_computed_again(inputs):
    model = small_model()
    cache = FeatureCache()
    cache.features_of(model, inputs)
    cache.features_of(model, inputs[:5])
    cache.features_of(model, inputs + 1)
    twin = small_model()  # the same weights: another forward method could be behind them
    cache.features_of(twin, inputs)
    assert (cache.misses, cache.hits) == (4, 0)


def test_a_model_that_is_gone_takes_its_features_along(inputs):
    model = small_model()
    cache = FeatureCache()
    cache.features_of(model, inputs)
    assert cache._bytes == 6 * 4 * 4
    del model
    gc.collect()
    assert cache._bytes == 0
    assert not cache._entries


def test_the_least_recently_used_leave_where_the_bound_is_reached(inputs):
    """Six rows of four features are 96 bytes: two of three entries fit into 200."""
    model = small_model()
    cache = FeatureCache(200)
    for shift in (0, 1, 0, 2):
        cache.features_of(model, inputs + shift)
    assert cache.hits == 1
    cache.features_of(model, inputs)
    assert cache.hits == 2, "it was used after the one that left"
    cache.features_of(model, inputs + 1)
    assert cache.misses == 4
    assert FeatureCache(0).features_of(model, inputs).shape == (6, 4)


def test_no_inputs_are_an_error_as_without_a_cache():
    with pytest.raises(DataError, match="no inputs"):
        FeatureCache().features_of(small_model(), torch.zeros(0, 3))


@pytest.mark.parametrize("method, hits", [("linear_probe", 12), ("repper", 0)])
def test_a_simulation_with_a_cache_has_the_bits_of_one_without(method, hits, tmp_path, monkeypatch):
    """Three clients: test samples in rounds 2 and 3, and all at the end. RepPer's encoder changes in a round."""
    images = write_images(tmp_path / "images.npz", 90)
    plan = small_plan(images, method, rounds=3)
    results = []
    counts = []
    for bound in (0, feature_cache.MOST_BYTES):
        cache = FeatureCache(bound)
        monkeypatch.setattr(feature_cache, "of_process", cache)
        results.append(learned(run(plan, tmp_path / str(bound))))
        counts.append(cache.hits)
    assert results[0] == results[1]
    assert counts == [0, hits]
