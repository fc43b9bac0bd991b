"""Small encoders of this project, for images and for windows of sensor recordings."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import nn

from ..core.task import Frozen, Task
from .base import Layers, encoder


class LinearParams(Frozen):
    """Parameters of `linear`."""

    feature_dim: int = Field(16, ge=1, le=4096, description="width of the answer, d")
    bias: bool = Field(True, description="whether the layer has a bias")


@encoder("image", "window", params=LinearParams)
def linear(task: Task, params: LinearParams) -> nn.Module:
    """One linear layer on the flattened input: the smallest encoder, whose results can be worked out by hand."""
    layer = nn.Linear(math.prod(task.input_shape), params.feature_dim, bias=params.bias)
    return Layers(params.feature_dim, [nn.Flatten(), layer])


class SmallCNNParams(Frozen):
    """Parameters of `small_cnn`."""

    feature_dim: int = Field(128, ge=1, le=4096, description="width of the answer, d")
    width: int = Field(16, ge=1, le=512, description="channels of the first stage; they double twice, then stay")


@encoder("image", smallest=4, params=SmallCNNParams)
def small_cnn(task: Task, params: SmallCNNParams) -> nn.Module:
    """Return a small convolutional network with batch norm for 28 and 32 pixels: about 100,000 weights, 128 features.

    Stages of 3 x 3 convolution, batch norm, ReLU and halving down to 4 pixels or less; then one linear layer.
    """
    layers: list[nn.Module] = []
    (channels, height, width) = task.input_shape
    stage = 0
    while not layers or (max(height, width) > 4 and min(height, width) >= 2):
        wider = params.width * 2 ** min(stage, 2)
        conv = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        channels = wider
        height = height // 2
        width = width // 2
        stage = stage + 1
    layers += [nn.Flatten(), nn.Linear(channels * height * width, params.feature_dim), nn.ReLU()]
    return Layers(params.feature_dim, layers)


class CNN1dParams(Frozen):
    """Parameters of `cnn1d`."""

    feature_dim: int = Field(128, ge=1, le=4096, description="width of the answer, d")
    width: int = Field(32, ge=1, le=512, description="channels of the first stage; the second has twice as many")


class _MeanOverTime(nn.Module):
    def __init__(self, channels: int, params: CNN1dParams) -> None:
        super().__init__()
        self.feature_dim = params.feature_dim
        layers: list[nn.Module] = []
        for wider, kernel in ((params.width, 7), (2 * params.width, 5), (params.feature_dim, 3)):
            conv = nn.Conv1d(channels, wider, kernel, padding=kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm1d(wider), nn.ReLU(), nn.MaxPool1d(2)]
            channels = wider
        self.stages = nn.Sequential(*layers)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.stages(windows)
        return maps.mean(dim=2)


@encoder("window", smallest=8, params=CNN1dParams)
def cnn1d(task: Task, params: CNN1dParams) -> nn.Module:
    """Return a one-dimensional convolutional network for windows of sensor recordings: 128 features.

    Three stages of convolution, batch norm, ReLU and halving; then the mean over time.
    """
    return _MeanOverTime(task.input.channels, params)
