"""FedRIR's global feature extractor: two convolutions with batch norm and one linear layer, 512 features by default.

577,088 weights at 28 x 28 grey, 5,592,192 at 64 x 64 colour, as in the paper's table. Sides below 16 are padded, which
the paper has no case of: its two convolutions of 5 x 5 would leave nothing of them.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field
from torch import nn

from ..task import Frozen, Task
from .base import Layers

ACCEPTS = ("image",)
SMALLEST = 4
CHANNELS = (32, 64)
KERNEL = 5


class Params(Frozen):
    """Parameters of this encoder."""

    feature_dim: int = Field(512, ge=1, le=4096, description="width of the answer, d; paper: 512")


def padding_for(task: Task) -> tuple[int, int]:
    """Pixels added on either side of height and width: none from 16 pixels on, as in the paper; else 2."""
    height, width = task.input_shape[1:]
    return (0 if height >= 16 else 2), (0 if width >= 16 else 2)


def stages(task: Task) -> tuple[list[nn.Module], tuple[int, int, int]]:
    """Convolution, batch norm, ReLU and halving, twice; and the shape (channels, height, width) that comes out."""
    layers: list[nn.Module] = []
    channels, *sides = task.input_shape
    padding = padding_for(task)
    for wider in CHANNELS:
        conv = nn.Conv2d(channels, wider, KERNEL, padding=padding)
        layers += [conv, nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        channels = wider
        sides = [(side + 2 * more - KERNEL + 1) // 2 for side, more in zip(sides, padding, strict=True)]
    return layers, (channels, sides[0], sides[1])


def build(task: Task, **params: Any) -> nn.Module:
    """The two stages, then one linear layer without activation."""
    chosen = Params(**params)
    layers, shape = stages(task)
    layers += [nn.Flatten(), nn.Linear(math.prod(shape), chosen.feature_dim)]
    return Layers(chosen.feature_dim, layers)
