"""Weights from files, written by the safetensors library: what fits is loaded, and nothing of what does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from edge_agent.errors import DataError
from edge_agent.training.parts import Parts
from edge_agent.training.weights import load_weights


def _encoder():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Parts(encoder=_encoder(), head=nn.Linear(2, 3), twin=_encoder())


def _weights(prefix=""):
    rng = np.random.default_rng(1)
    shapes = {"0.weight": (2, 1, 3, 3), "0.bias": (2,)}
    shapes |= {f"1.{name}": (2,) for name in ("weight", "bias", "running_mean", "running_var")}
    return {prefix + name: rng.random(shape).astype(np.float32) for name, shape in shapes.items()}


def _holds(module, weights):
    state = module.state_dict()
    return all(np.array_equal(state[name].numpy(), array) for name, array in weights.items())


@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_the_encoder_and_what_is_built_like_it_hold_the_files_numbers(model, tmp_path, prefix):
    head = model.head.weight.clone()
    save_file({**_weights(prefix), "fc.weight": np.ones((1000, 2), np.float32)}, tmp_path / "w.safetensors")
    assert load_weights(model, tmp_path / "w.safetensors") == ("fc.weight",)
    assert _holds(model.encoder, _weights())
    assert _holds(model.twin, _weights())
    assert torch.equal(model.head.weight, head)
    assert model.encoder[1].num_batches_tracked == 0


def test_numbers_of_half_precision_become_single(model, tmp_path):
    halves = {name: array.astype(np.float16) for name, array in _weights().items()}
    save_file(halves, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert model.encoder[0].weight.dtype == torch.float32
    assert _holds(model.encoder, {name: array.astype(np.float32) for name, array in halves.items()})


def test_all_that_does_not_fit_is_told_and_nothing_is_loaded(model, tmp_path):
    weights = _weights()
    del weights["0.bias"]
    weights["0.weight"] = np.ones((2, 3, 3, 3), np.float32)
    weights["1.weight"] = np.array([1, np.nan], np.float32)
    weights["1.bias"] = np.array([1, 2])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(DataError) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    for words in (
        "'0.bias' is missing",
        "'0.weight' is [2, 3, 3, 3], expected [2, 1, 3, 3]",
        "'1.weight' holds NaN",
        "'1.bias' is int64, expected float32",
    ):
        assert words in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_torch_save_wrote_is_never_opened_and_how_to_convert_it_is_told(model, tmp_path):
    torch.save(model.encoder.state_dict(), tmp_path / "new.pth")
    torch.save(model.encoder.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("new.pth", "old.pth"):
        with pytest.raises(DataError, match=r"pickle, which can run code; convert it once(.|\n)*save_file"):
            load_weights(model, tmp_path / name)


def test_other_files_and_places_are_told(model, tmp_path):
    (tmp_path / "text").write_text("not weights at all")
    save_file({}, tmp_path / "empty")
    for name, words in (("text", "no safetensors file"), ("empty", "'0.weight' is missing"), ("absent", "cannot be")):
        with pytest.raises(DataError, match=words):
            load_weights(model, tmp_path / name)
