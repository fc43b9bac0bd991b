"""The networks of FedRIR and FedBN, and encoders without their own parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edge_agent import models
from edge_agent.core.errors import ConfigError
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.models.base import Layers
from edge_agent.models.papers import GridMean
from export.encoder import to_onnx
from export.parity import parity_gate


def image_task(encoder: str, channels: int, height: int, width: int, **params) -> Task:
    size = ImageInput(channels=channels, height=height, width=width)
    return Task(input=size, class_names=("a", "b"), encoder=encoder, encoder_params=params)


def weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "channels, side, expected",
    [
        # conv(1,32,5) 832 + bn 64 + conv(32,64,5) 51,264 + bn 128 + fc(64*4*4, 512) 524,800
        (1, 28, 832 + 64 + 51_264 + 128 + 524_800),
        # conv(3,32,5) 2,432; fc(64*5*5, 512) 819,712
        (3, 32, 2_432 + 64 + 51_264 + 128 + 819_712),
        # fc(64*13*13, 512) 5,538,304: 5,592,192, the paper's 5.592 M
        (3, 64, 2_432 + 64 + 51_264 + 128 + 5_538_304),
    ],
)
def test_fedrir_cnn_has_the_published_number_of_weights(channels, side, expected):
    assert weights(models.create(image_task("fedrir_cnn", channels, side, side))) == expected


def test_fedrir_cnn_at_28_pixels_has_577_088_weights_and_512_features_of_either_sign():
    torch.manual_seed(0)
    built = models.create(image_task("fedrir_cnn", 1, 28, 28))
    assert weights(built) == 577_088
    features = built.eval()(torch.randn(3, 1, 28, 28))
    assert features.shape == (3, 512)
    assert (features < 0).any()
    assert (features > 0).any()


@pytest.mark.parametrize("height, width", [(4, 4), (8, 8), (12, 28), (17, 15), (16, 4)])
def test_fedrir_cnn_takes_any_side_from_4_on(height, width):
    built = models.create(image_task("fedrir_cnn", 3, height, width, feature_dim=7)).eval()
    assert built(torch.randn(2, 3, height, width)).shape == (2, 7)


def test_digits_cnn_is_that_of_fedbn():
    built = models.create(image_task("digits_cnn", 3, 28, 28))
    # Three convolutions 4,864 + 102,464 + 204,928 with norms 128 + 128 + 256;
    # fc(128*7*7 = 6272, 2048) 12,847,104 + 4,096; fc(2048, 512) 1,049,088 + 1,024
    assert weights(built) == 4_864 + 102_464 + 204_928 + 512 + 12_847_104 + 4_096 + 1_049_088 + 1_024
    assert [layer.in_features for layer in built.modules() if isinstance(layer, nn.Linear)] == [6272, 2048]
    assert built.feature_dim == 512


@pytest.fixture(scope="module")
def alexnet():
    return models.create(image_task("alexnet_bn", 3, 224, 224))


def test_alexnet_without_its_classifier_has_the_known_number_of_weights(alexnet):
    # torchvision states 61,100,840 for AlexNet; fc(4096, 1000) has 4,097,000 of them; norms are 2 for each channel.
    norms = 2 * (64 + 192 + 384 + 256 + 256 + 4096 + 4096)
    assert weights(alexnet) == 61_100_840 - 4_097_000 + norms
    assert alexnet.feature_dim == 4096


def test_alexnet_at_its_own_size_needs_no_grid(alexnet):
    assert not any(isinstance(layer, GridMean) for layer in alexnet.modules())
    assert any(isinstance(layer, nn.Identity) for layer in alexnet.modules())


@pytest.mark.parametrize("height, width", [(7, 7), (6, 9), (1, 1), (13, 4), (12, 18)])
def test_means_over_the_grid_are_those_of_torch(height, width):
    maps = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(GridMean(height, width)(maps), nn.AdaptiveAvgPool2d(6)(maps))


def test_the_grid_does_not_travel():
    assert not GridMean(7, 7).state_dict()


@pytest.mark.parametrize(
    "encoder, size",
    [
        ("fedrir_cnn", (1, 28, 28)),
        ("fedrir_cnn", (3, 8, 20)),
        ("digits_cnn", (3, 28, 28)),
        pytest.param("alexnet_bn", (3, 80, 72), marks=pytest.mark.slow),
    ],
)
def test_the_exported_graph_gives_the_same_features(encoder, size):
    task = image_task(encoder, *size)
    torch.manual_seed(0)
    built = models.create(task).eval()
    inputs = torch.randn(3, *size, generator=torch.Generator().manual_seed(1)).numpy()
    gate, _ = parity_gate(to_onnx(built, task, "legacy").model, built, inputs)
    assert gate.passed, gate.detail


def test_the_grid_can_be_exported():
    task = image_task("alexnet_bn", 3, 7, 10)
    grid = Layers(3 * 36, [GridMean(7, 10), nn.Flatten()]).eval()
    inputs = torch.randn(2, 3, 7, 10, generator=torch.Generator().manual_seed(1)).numpy()
    gate, _ = parity_gate(to_onnx(grid, task, "legacy").model, grid, inputs)
    assert gate.passed, gate.detail


# --- encoders without Params -----------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch):
    """An encoder of somebody else's that states nothing but how it is built."""
    monkeypatch.setattr(models.registry, "_extra", {})

    def build(task: Task, _: models.NoParams) -> nn.Module:
        return Layers(task.input_shape[-1], [nn.Flatten()])

    models.registry.add("bare", models.Encoder(build))
    return Task(input=WindowInput(channels=1, length=6), class_names=("a", "b"), encoder="bare")


def test_an_encoder_without_params_can_be_created(bare):
    assert models.create(bare)(torch.zeros(2, 1, 6)).shape == (2, 6)


def test_an_encoder_without_params_takes_none(bare):
    with pytest.raises(ConfigError, match="width: unknown key"):
        models.create(bare.model_copy(update={"encoder_params": {"width": 3}}))
