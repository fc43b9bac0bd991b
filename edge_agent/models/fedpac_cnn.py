"""The convolutional networks of FedPAC's experiments (Xu, Tong, Huang, ICLR 2023): 128 features, no batch norm.

Grey images: two stages, as for Fashion-MNIST (115,776 weights at 28 x 28). Colour images: three, as for CIFAR-10.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..task import Task
from . import NoParams
from .base import Layers

ACCEPTS = ("image",)
SMALLEST = 16
Params = NoParams
_STAGES = {1: ((16, 5, 0), (32, 5, 1)), 3: ((16, 5, 0), (32, 5, 1), (64, 3, 1))}
"""Input channels -> (output channels, kernel, padding) of each stage."""


def build(task: Task, **params: Any) -> nn.Module:
    """Stages of convolution, LeakyReLU and halving; then one linear layer with LeakyReLU."""
    Params(**params)
    layers: list[nn.Module] = []
    channels, height, width = task.input_shape
    for wider, kernel, padding in _STAGES[channels]:
        layers += [nn.Conv2d(channels, wider, kernel, padding=padding), nn.LeakyReLU(), nn.MaxPool2d(2)]
        channels, height, width = wider, *((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
    layers += [nn.Flatten(), nn.Linear(channels * height * width, 128), nn.LeakyReLU()]
    return Layers(128, layers)
