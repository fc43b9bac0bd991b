"""What learns and travels of an encoder: each choice, by numbers worked out from the weights themselves."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.client import Arrays, Session
from edge_agent.core.errors import ConfigError, UnknownName
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.methods.base import weighted_mean
from edge_agent.training import peft
from edge_agent.training.parts import Parts, load_arrays, to_arrays
from edge_agent.training.peft.last_block import last_block
from edge_agent.training.peft.lora import LoraParams, frozen_factor
from edge_agent.training.ranges import activation_ranges
from export import model_from_state

IMAGES = Task(
    input=ImageInput(channels=3, height=16, width=16),
    class_names=("a", "b"),
    encoder="small_cnn",
    encoder_params={"width": 4, "feature_dim": 8},
)
WINDOWS = Task(
    input=WindowInput(channels=2, length=16),
    class_names=("a", "b"),
    encoder="cnn1d",
    encoder_params={"width": 4, "feature_dim": 8},
)
LINEAR = Task(
    input=WindowInput(channels=1, length=6),
    class_names=("a", "b"),
    encoder="linear",
    encoder_params={"feature_dim": 4},
)


def model_of(task: Task, seed: int = 0, method: str = "fedavg") -> Parts:
    torch.default_generator.manual_seed(seed)
    made = methods.create(method)
    return made.adapt(made.build(task), task)


def inputs_of(task: Task, count: int = 6) -> torch.Tensor:
    return torch.randn(count, *task.input_shape, generator=torch.Generator().manual_seed(1))


def with_random_adapters(model: Parts, seed: int) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("lora_b"):
            weight.data = torch.randn(weight.shape, generator=generator)
    return model


# --- lora ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [IMAGES, WINDOWS, LINEAR], ids=["conv2d", "conv1d", "linear"])
def test_an_encoder_with_fresh_adapters_computes_what_it_did(task):
    plain = model_of(task).eval()
    adapted = model_of(task.with_peft("lora")).eval()
    torch.testing.assert_close(adapted(inputs_of(task)), plain(inputs_of(task)), rtol=0, atol=0)


@pytest.mark.parametrize("task", [IMAGES, WINDOWS, LINEAR], ids=["conv2d", "conv1d", "linear"])
def test_the_merged_encoder_is_the_adapted_one(task):
    adapted_task = task.with_peft("lora", {"rank": 3, "scale": 0.5})
    adapted = with_random_adapters(model_of(adapted_task), seed=5).eval()
    merged = peft.merge(to_arrays(adapted, adapted.state_dict()), adapted_task)
    plain = model_of(task, seed=9).eval()
    assert merged.keys() == plain.state_dict().keys()
    load_arrays(plain, merged)
    with torch.no_grad():
        torch.testing.assert_close(plain(inputs_of(task)), adapted(inputs_of(task)), rtol=1e-5, atol=1e-5)
        # The adapters did change the answers, else the comparison says nothing.
        assert (model_of(task).eval()(inputs_of(task)) - plain(inputs_of(task))).abs().max() > 0.01


@pytest.mark.parametrize("choice", peft.names())
def test_ranges_of_activations_are_those_of_the_encoder_that_is_exported(choice):
    """A coordinator counts the steps of the merged encoder, and expects as many ranges of each client."""
    task = IMAGES.with_peft(choice)
    made = methods.create("fedavg")
    adapted = with_random_adapters(model_of(task), seed=3)
    state = to_arrays(adapted, made.shared_names(adapted))
    inputs = inputs_of(task).numpy()
    samples = Arrays(inputs, np.zeros(len(inputs), np.int64))
    session = Session(made, task, "a", samples, samples, seed=0, device="cpu")
    exported = model_from_state(made, task, state)
    expected = activation_ranges(exported.encoder, inputs_of(task))
    received = {name: array for name, array in state.items() if name.startswith("encoder.")}
    ranges = session.activation_ranges(received)["ranges"]
    assert ranges.shape == expected.shape
    np.testing.assert_allclose(ranges, expected, rtol=1e-5, atol=1e-5)
    # The client goes on with its adapters.
    assert set(session.returned) == set(made.returned_names(adapted))


def test_a_merged_weight_is_the_sum_that_numpy_computes():
    task = LINEAR.with_peft("lora", {"rank": 2, "scale": 3.0})
    model = with_random_adapters(model_of(task), seed=2)
    tensors = to_arrays(model, model.state_dict())
    path = "encoder.layers.1."
    by_hand = tensors[path + "weight"] + 3.0 * tensors[path + "lora_b"] @ tensors[path + "lora_a"]
    np.testing.assert_allclose(peft.merge(tensors, task)[path + "weight"], by_hand, rtol=1e-6, atol=1e-6)


def test_the_mean_of_adapters_merges_to_the_mean_of_merged_weights():
    task = IMAGES.with_peft("lora", {"rank": 2})
    clients = [with_random_adapters(model_of(task), seed) for seed in (1, 2, 3)]
    states = [to_arrays(client, client.state_dict()) for client in clients]
    weights = (5.0, 1.0, 2.0)
    returned = methods.create("fedavg").returned_names(clients[0])
    mean = weighted_mean(
        (weight, {name: state[name] for name in returned}) for weight, state in zip(weights, states, strict=True)
    )
    merged_mean = peft.merge({**states[0], **mean}, task)
    mean_of_merged = weighted_mean(
        (weight, peft.merge(state, task)) for weight, state in zip(weights, states, strict=True)
    )
    for name in ("encoder.layers.0.weight", "encoder.layers.9.weight"):
        np.testing.assert_allclose(merged_mean[name], mean_of_merged[name], rtol=0, atol=1e-6)


def test_a_step_on_b_is_the_projection_of_the_step_on_the_whole_weight():
    """Plain SGD with the same learning rate on W and on B: the changes of W + B A are equal on the rows of A."""
    task = LINEAR.with_peft("lora", {"rank": 2})
    adapted = model_of(task)
    plain = model_of(LINEAR)
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    for model in (adapted, plain):
        F.cross_entropy(model(inputs_of(LINEAR)), labels).backward()
    whole = plain.encoder.layers[1].weight.grad.numpy()
    layer = adapted.encoder.layers[1]
    rows = layer.lora_a.numpy()
    np.testing.assert_allclose(layer.lora_b.grad.numpy() @ rows, whole @ rows.T @ rows, atol=1e-6)
    assert layer.weight.grad is None


def test_the_frozen_factor_is_orthonormal_and_follows_from_seed_and_layer_alone():
    rows = frozen_factor("layers.0", 10, LoraParams(rank=4))
    np.testing.assert_allclose(rows @ rows.T, np.eye(4), atol=1e-12)
    np.testing.assert_array_equal(rows, frozen_factor("layers.0", 10, LoraParams(rank=4)))
    assert np.abs(rows - frozen_factor("layers.1", 10, LoraParams(rank=4))).max() > 0.1
    assert np.abs(rows - frozen_factor("layers.0", 10, LoraParams(rank=4, seed=1))).max() > 0.1
    assert frozen_factor("layers.0", 3, LoraParams(rank=4)).shape == (3, 3)


def test_two_models_of_other_seeds_have_the_same_frozen_factor():
    task = IMAGES.with_peft("lora")
    one = model_of(task, seed=1).encoder.layers[0].lora_a
    other = model_of(task, seed=2).encoder.layers[0].lora_a
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_convolutions_of_several_groups_get_no_adapter():
    task = IMAGES.model_copy(
        update={"encoder": "mobilenet_v2", "encoder_params": {}, "input": ImageInput(channels=3, height=32, width=32)}
    )
    model = model_of(task.with_peft("lora"))
    with_adapter = {path for path, layer in model.encoder.named_modules() if hasattr(layer, "lora_b")}
    for path, layer in model.encoder.named_modules():
        if isinstance(layer, nn.Conv2d):
            assert (path in with_adapter) == (layer.groups == 1), path


# --- bn and last_block -----------------------------------------------------------------------------------------------


def test_bn_trains_the_normalisation_layers_alone():
    model = model_of(IMAGES.with_peft("bn"))
    returned = methods.create("fedper").returned_names(model)
    words = ("bias", "running_mean", "running_var", "weight")
    assert returned == tuple(f"encoder.layers.{layer}.{word}" for layer in (1, 5) for word in words)
    learning = [name for name, weight in model.encoder.named_parameters() if weight.requires_grad]
    assert learning == ["layers.1.weight", "layers.1.bias", "layers.5.weight", "layers.5.bias"]


def test_last_block_of_a_sequence_is_its_last_layer_with_weights():
    model = model_of(IMAGES.with_peft("last_block"))
    assert methods.create("fedper").returned_names(model) == ("encoder.layers.9.bias", "encoder.layers.9.weight")


def test_last_block_has_the_batch_norm_behind_it():
    assert last_block(model_of(WINDOWS).encoder) == ("stages.8", "stages.9", "stages.10", "stages.11")


@pytest.mark.parametrize(
    "encoder, block",
    [
        ("resnet18", "layer4.1"),
        ("mobilenet_v2", "features.18"),
        ("efficientnet_b0", "features.8"),
        ("vit", "encoder.layers.encoder_layer_11"),
    ],
)
def test_last_block_of_networks_of_blocks(encoder, block):
    task = Task(input=ImageInput(channels=3, height=32, width=32), class_names=("a", "b"), encoder=encoder)
    assert last_block(model_of(task).encoder)[0] == block


def test_the_last_block_of_a_transformer_is_one_of_its_twelve_and_the_norm_behind_them():
    task = Task(input=ImageInput(channels=3, height=32, width=32), class_names=("a", "b"), encoder="vit")
    model = model_of(task.with_peft("last_block"))
    learning = {name for name, weight in model.encoder.named_parameters() if weight.requires_grad}
    parts = {".".join(name.split(".")[:3]) for name in learning}
    assert parts == {"encoder.layers.encoder_layer_11", "encoder.ln.weight", "encoder.ln.bias"}


def test_a_block_with_a_sequence_inside_is_not_divided():
    """An inverted residual as the last child: its expansion, its kernels for each channel and its projection."""
    residual = nn.Module()
    residual.conv = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), residual)
    assert last_block(encoder) == ("1",)


@pytest.mark.parametrize("choice", ["last_block", "lora"])
def test_frozen_batch_norm_stays_in_eval_mode(choice):
    model = model_of(IMAGES.with_peft(choice)).train()
    layer = model.encoder.layers[1]
    before = layer.running_mean.clone()
    model(inputs_of(IMAGES))
    assert model.training
    assert not layer.training
    torch.testing.assert_close(layer.running_mean, before, rtol=0, atol=0)
    assert int(layer.num_batches_tracked) == 0
    # A copy, as some methods make one, is held by itself.
    twin = copy.deepcopy(model).train()
    assert not twin.encoder.layers[1].training


def test_batch_norm_that_learns_is_in_train_mode():
    model = model_of(IMAGES.with_peft("bn")).train()
    model(inputs_of(IMAGES))
    assert int(model.encoder.layers[1].num_batches_tracked) == 1


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_an_unknown_choice_suggests_the_nearest():
    with pytest.raises(UnknownName, match="lora"):
        model_of(IMAGES.with_peft("lorra"))


def test_unknown_parameters_are_all_named():
    with pytest.raises(ConfigError) as caught:
        model_of(IMAGES.with_peft("lora", {"rnak": 2, "scale": -1}))
    assert "did you mean 'rank'" in str(caught.value)
    assert "scale" in str(caught.value)


def test_parameters_without_a_choice_are_a_mistake():
    with pytest.raises(ConfigError, match="without peft"):
        model_of(IMAGES.with_peft(None, {"rank": 2}))


def test_an_encoder_without_batch_norm_cannot_train_it_alone():
    with pytest.raises(
        ConfigError, match="'linear' has no normalisation layers with weights; choose last_block or lora"
    ):
        model_of(LINEAR.with_peft("bn"))


def test_an_encoder_of_one_layer_has_nothing_to_freeze():
    with pytest.raises(ConfigError, match="anything is left to freeze"):
        model_of(LINEAR.with_peft("last_block"))


def test_batch_norm_that_never_travels_cannot_be_all_that_travels():
    with pytest.raises(ConfigError, match="nothing of the encoder would travel with norm = 'local_all'"):
        model_of(IMAGES.with_peft("bn"), method="fedbn")


def test_a_task_without_a_choice_is_written_as_ever():
    fields = IMAGES.model_dump(mode="json")
    assert "peft" not in fields
    assert "peft_params" not in fields
    chosen = IMAGES.with_peft("lora", {"rank": 2})
    assert Task.model_validate_json(chosen.model_dump_json()) == chosen
