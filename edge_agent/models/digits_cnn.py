"""The convolutional network that FedBN (Li et al., ICLR 2021) uses for its five digit sets: 512 features.

Three convolutions and two linear layers, batch norm behind each; 14,214,080 weights at 28 x 28 colour.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..task import Task
from . import NoParams
from .base import Layers

ACCEPTS = ("image",)
SMALLEST = 4
Params = NoParams


def build(task: Task, **params: Any) -> nn.Module:
    """Two halvings between three convolutions of 5 x 5; then two linear layers."""
    Params(**params)
    channels, height, width = task.input_shape
    layers: list[nn.Module] = []
    for wider, halved in ((64, True), (64, True), (128, False)):
        layers += [nn.Conv2d(channels, wider, 5, padding=2), nn.BatchNorm2d(wider), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if halved else []
        channels = wider
    layers.append(nn.Flatten())
    size = channels * (height // 4) * (width // 4)
    for wider in (2048, 512):
        layers += [nn.Linear(size, wider), nn.BatchNorm1d(wider), nn.ReLU()]
        size = wider
    return Layers(size, layers)
