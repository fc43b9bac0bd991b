from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edge_agent.core.errors import TensorsError, UnknownName
from edge_agent.core.task import ImageInput, Task
from edge_agent.methods.base import pooled_norm
from edge_agent.training.parts import (
    Parts,
    encoder_alone,
    encoder_and_head,
    load_arrays,
    names_that_travel,
    personal_names,
    to_arrays,
)

TASK = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b", "c"), encoder="small_cnn")


def disguised() -> Parts:
    """Batch norm under a name that says nothing, and a plain layer under a name that lies."""
    encoder = nn.Sequential()
    encoder.add_module("downsample", nn.Conv2d(1, 2, 3))
    encoder.add_module("shift", nn.BatchNorm2d(2))
    encoder.add_module("bn_like", nn.Linear(2, 2))
    return Parts(encoder=encoder, head=nn.Linear(2, 3))


PLAIN = {"encoder.downsample.weight", "encoder.downsample.bias", "encoder.bn_like.weight", "encoder.bn_like.bias"}
AFFINE = {"encoder.shift.weight", "encoder.shift.bias"}
STATISTICS = {"encoder.shift.running_mean", "encoder.shift.running_var"}


@pytest.mark.parametrize(
    "norm, expected",
    [("global", PLAIN | AFFINE | STATISTICS), ("local_stats", PLAIN | AFFINE), ("local_all", PLAIN)],
)
def test_norm_policies_know_batch_norm_by_type_and_never_send_counters(norm, expected):
    names = names_that_travel(disguised(), ("encoder",), norm)
    assert set(names) == expected
    assert list(names) == sorted(names)


def test_one_dimensional_and_nested_batch_norm_are_found_too():
    model = Parts(projector=nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))))
    assert names_that_travel(model, ("projector",), "local_all") == ("projector.0.bias", "projector.0.weight")


def test_sharing_a_part_that_is_not_there_is_refused():
    with pytest.raises(UnknownName, match="did you mean 'encoder'"):
        names_that_travel(disguised(), ("encoders",), "global")


def test_nothing_shared_means_nothing_travels():
    assert names_that_travel(disguised(), (), "global") == ()


def test_personal_names_are_all_the_others():
    model = disguised()
    shared = names_that_travel(model, ("encoder",), "local_stats")
    personal = personal_names(model, shared)
    assert set(personal) == STATISTICS | {"encoder.shift.num_batches_tracked", "head.weight", "head.bias"}
    assert set(shared) | set(personal) == set(model.state_dict())


def test_a_part_is_found_by_name():
    model = encoder_and_head(TASK)
    assert model.part("head") is model.head
    with pytest.raises(UnknownName, match="known: encoder, head"):
        model.part("projector")


def test_logits_are_the_head_of_the_features():
    model = encoder_and_head(TASK).eval()
    inputs = torch.randn(2, 1, 8, 8)
    assert torch.equal(model(inputs), model.head(model.features(inputs)))
    assert model(inputs).shape == (2, 3)


def test_an_encoder_alone_has_no_head():
    assert {name.split(".")[0] for name in encoder_alone(TASK).state_dict()} == {"encoder"}


def test_arrays_are_copies_in_plain_layout():
    model = encoder_and_head(TASK)  # convolutions are channels_last inside
    arrays = to_arrays(model, model.state_dict())
    before = {name: array.copy() for name, array in arrays.items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    for name, array in arrays.items():
        assert array.flags.c_contiguous, name
        np.testing.assert_array_equal(array, before[name])


def test_loading_what_was_saved_restores_every_bit():
    torch.manual_seed(0)
    source = encoder_and_head(TASK)
    target = encoder_and_head(TASK)
    load_arrays(target, to_arrays(source, source.state_dict()))
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


def test_loading_takes_read_only_arrays_and_touches_nothing_else():
    model = encoder_and_head(TASK)
    before = to_arrays(model, model.state_dict())
    bias = np.arange(3, dtype=np.float32)
    bias.flags.writeable = False
    load_arrays(model, {"head.bias": bias})
    after = to_arrays(model, model.state_dict())
    np.testing.assert_array_equal(after.pop("head.bias"), [0, 1, 2])
    assert all(np.array_equal(after[name], before[name]) for name in after)


def test_all_misfits_are_named_and_nothing_is_loaded():
    model = encoder_and_head(TASK)
    before = to_arrays(model, model.state_dict())
    wrong = {
        "head.bias": np.ones(3, np.float32),
        "head.weight": np.ones((2, 128), np.float32),
        "heat.bias": np.ones(3, np.float32),
        "encoder.layers.1.num_batches_tracked": np.ones((), np.float32),
    }
    with pytest.raises(TensorsError) as caught:
        load_arrays(model, wrong)
    message = str(caught.value)
    assert "'head.weight' is float32[2, 128], the model has float32[3, 128]" in message
    assert "no tensor 'heat.bias'" in message
    assert "num_batches_tracked' is float32[], the model has int64[]" in message
    np.testing.assert_array_equal(to_arrays(model, ["head.bias"])["head.bias"], before["head.bias"])


def test_asking_for_an_unknown_tensor_is_refused():
    with pytest.raises(TensorsError, match=r"no tensor 'head\.bias'"):
        to_arrays(encoder_alone(TASK), ["head.bias"])


def test_pooled_statistics_of_two_clients():
    # By hand: means 0 and 2 -> 1; second moments 0 + 1 and 4 + 1 -> 3; variance 3 - 1 = 2.
    clients = [
        (1.0, {"bn.running_mean": np.array([0.0]), "bn.running_var": np.array([1.0]), "bn.weight": np.array([1.0])}),
        (1.0, {"bn.running_mean": np.array([2.0]), "bn.running_var": np.array([1.0]), "bn.weight": np.array([4.0])}),
    ]
    pooled = pooled_norm(clients)
    assert pooled["bn.running_mean"] == 1.0
    assert pooled["bn.running_var"] == 2.0
    assert pooled["bn.weight"] == 2.5


@given(st.lists(st.integers(2, 30), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_pooled_statistics_are_those_of_all_samples_together(sizes, seed):
    rng = np.random.default_rng(seed)
    samples = [rng.normal(rng.normal(0, 3, 2), rng.uniform(0.1, 2, 2), (size, 2)) for size in sizes]
    pooled = pooled_norm((len(s), {"n.running_mean": s.mean(axis=0), "n.running_var": s.var(axis=0)}) for s in samples)
    together = np.concatenate(samples)
    np.testing.assert_allclose(pooled["n.running_mean"], together.mean(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pooled["n.running_var"], together.var(axis=0), rtol=1e-4, atol=1e-5)


def test_a_variance_without_its_mean_cannot_be_pooled():
    with pytest.raises(TensorsError, match=r"'bn\.running_var' came without 'bn\.running_mean'"):
        pooled_norm([(1.0, {"bn.running_var": np.ones(2)})])


@pytest.mark.parametrize("clients", [[], [(0.0, {"bn.weight": np.ones(1)})]])
def test_pooling_nobody_is_refused(clients):
    with pytest.raises(TensorsError, match="more than 0"):
        pooled_norm(clients)
