"""A small convolutional network with batch norm for 28 and 32 pixels: about 100,000 weights, 128 features."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import nn

from ..task import Frozen, Task
from .base import Layers

ACCEPTS = ("image",)
SMALLEST = 4


class Params(Frozen):
    """Parameters of this encoder."""

    feature_dim: int = Field(128, ge=1, le=4096, description="width of the answer, d")
    width: int = Field(16, ge=1, le=512, description="channels of the first stage; they double twice, then stay")


def build(task: Task, **params: Any) -> nn.Module:
    """Stages of 3 x 3 convolution, batch norm, ReLU and halving down to 4 pixels or less; then one linear layer."""
    chosen = Params(**params)
    layers: list[nn.Module] = []
    (channels, height, width), stage = task.input_shape, 0
    while not layers or (max(height, width) > 4 and min(height, width) >= 2):
        wider = chosen.width * 2 ** min(stage, 2)
        conv = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width, stage = wider, height // 2, width // 2, stage + 1
    layers += [nn.Flatten(), nn.Linear(channels * height * width, chosen.feature_dim), nn.ReLU()]
    return Layers(chosen.feature_dim, layers)
