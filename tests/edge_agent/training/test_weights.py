"""Weights from files, written by the safetensors library: what fits is loaded, and nothing of what does not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from edge_agent import methods
from edge_agent.core.errors import WeightsError
from edge_agent.core.task import ImageInput, Task
from edge_agent.training.parts import Parts
from edge_agent.training.weights import put_weights, read_weights


def _encoder():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def load_weights(model, path):
    weights, left_out = read_weights(model.encoder, path)
    put_weights(model, weights)
    return left_out


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Parts(encoder=_encoder(), head=nn.Linear(2, 3), personal=Parts(encoder=_encoder(), head=nn.Linear(2, 3)))


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
    assert _holds(model.part("personal").encoder, _weights())
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
    weights["1.running_mean"] = np.array([1, 1e300])
    weights["1.running_var"] = np.array([1, -0.5], np.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    for words in (
        "'0.bias' is missing",
        "'0.weight' is [2, 3, 3, 3], expected [2, 1, 3, 3]",
        "'1.weight' holds NaN",
        "'1.bias' is int64, expected float32",
        "'1.running_mean' holds NaN or infinity",
        "1 more",
    ):
        assert words in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_torch_save_wrote_is_never_opened_and_how_to_convert_it_is_told(model, tmp_path):
    torch.save(model.encoder.state_dict(), tmp_path / "new.pth")
    torch.save(model.encoder.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("new.pth", "old.pth"):
        with pytest.raises(WeightsError, match=r"pickle, which can run code; convert it once(.|\n)*save_file"):
            load_weights(model, tmp_path / name)


def test_other_files_and_places_are_told(model, tmp_path):
    (tmp_path / "text").write_text("not weights at all")
    save_file({}, tmp_path / "empty")
    for name, words in (("text", "no safetensors file"), ("empty", "'0.weight' is missing"), ("absent", "cannot be")):
        with pytest.raises(WeightsError, match=words):
            load_weights(model, tmp_path / name)


def test_a_variance_is_never_negative(model, tmp_path):
    save_file({**_weights(), "1.running_var": np.array([1, -0.5], np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"'1\.running_var' is below 0"):
        load_weights(model, tmp_path / "w.safetensors")


def test_a_name_of_the_encoders_own_comes_before_one_with_a_prefix(model, tmp_path):
    plain = _weights()
    prefixed = {name: array + 1 for name, array in _weights("encoder.").items()}
    save_file({**plain, **prefixed}, tmp_path / "w.safetensors")
    assert load_weights(model, tmp_path / "w.safetensors") == tuple(sorted(prefixed))
    assert _holds(model.encoder, plain)


def test_what_is_no_file_is_not_waited_for(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(WeightsError, match="is not a file"):
            load_weights(model, place)


@pytest.mark.parametrize("name", methods.registry.names())
def test_every_network_of_a_method_that_is_built_like_the_encoder_begins_with_them(name):
    """Ditto's and APFL's personal model and FedKD's teacher lie one level deeper than the encoder."""
    method = methods.create(name, {})
    task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="small_cnn")
    model = method.build(task)
    weights = {n: np.full(t.shape, 0.5, t.numpy().dtype) for n, t in model.encoder.state_dict().items()}
    put_weights(model, weights)
    own = tuple(weights)
    alike = [n for n in model.state_dict() if f".{n}".endswith(f".encoder.{own[0]}")]
    assert len(alike) == (2 if name in {"apfl", "ditto", "fedfomo", "fedkd", "pfedme"} else 1)
    for place in (n.removesuffix(own[0]) for n in alike):
        assert all(bool((model.state_dict()[place + n] == weights[n].reshape(-1)[0]).all()) for n in own)
