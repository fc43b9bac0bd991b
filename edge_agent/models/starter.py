"""The network of the starter encoder: residual, for pictures of 64 pixels, small enough for a Raspberry Pi in int8."""

from __future__ import annotations

import torch
from torch import nn

from ..core.task import Task
from .base import encoder

_WIDTHS = (32, 48, 96, 192)
"""Channels of the stem and of the three stages."""

_PLACE_CHANNELS = 16
"""Channels of the map that says what is where."""

_MOST_PLACES = 4
"""Rows and columns of that map at most; a larger one is averaged."""


@encoder("image", smallest=32)
def starter_cnn(task: Task, _params: object) -> nn.Module:
    """Return the network of the starter encoder: 1.1 million weights, 544 features of pictures of 64 x 64.

    A stem and three stages halve the sides, each stage with one residual block of two 3 x 3 convolutions (He et al.,
    CVPR 2016). The features are the means of the last two stages' maps, and a map of 16 channels at up to 4 x 4 places.
    """
    return _Starter(task)


class _Residual(nn.Module):
    """Two convolutions with batch norm, whose input is added to their output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.conv1(maps)))
        return torch.relu(maps + self.norm2(self.conv2(inner)))


class _Starter(nn.Module):
    """The network for the inputs of a task."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        channels, height, width = task.input_shape
        stem, first, second, third = _WIDTHS
        self.stem = _halving(channels, stem)
        self.stage1 = nn.Sequential(_halving(stem, first), _Residual(first))
        self.stage2 = nn.Sequential(_halving(first, second), _Residual(second))
        self.stage3 = nn.Sequential(_halving(second, third), _Residual(third))
        # What is where, as few numbers: a narrow map of the last stage, averaged where it has many places.
        sides = [-(-side // 16) for side in (height, width)]
        kernel = [max(1, side // _MOST_PLACES) for side in sides]
        rows, columns = (side // step for side, step in zip(sides, kernel, strict=True))
        self.places = nn.Sequential(
            nn.Conv2d(third, _PLACE_CHANNELS, 1, bias=False), nn.BatchNorm2d(_PLACE_CHANNELS), nn.ReLU()
        )
        self.average = nn.AvgPool2d((kernel[0], kernel[1])) if max(kernel) > 1 else nn.Identity()
        self.feature_dim = second + third + _PLACE_CHANNELS * rows * columns

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        parts = self.stage2(self.stage1(self.stem(images)))
        whole = self.stage3(parts)
        places = self.average(self.places(whole)).flatten(1)
        return torch.cat([parts.mean(dim=(2, 3)), whole.mean(dim=(2, 3)), places], dim=1)


def _halving(channels: int, wider: int) -> nn.Sequential:
    """Return a convolution of stride 2 with batch norm and ReLU."""
    conv = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wider), nn.ReLU())
