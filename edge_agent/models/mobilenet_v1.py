"""MobileNet of Howard et al., "MobileNets", 2017, the small network of RepPer's experiments: 1024 features.

3,206,976 weights without its classifier.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..task import Task
from .base import Layers
from .base import StemParams as Params

ACCEPTS = ("image",)
SMALLEST = 32
_STAGES = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Output channels and stride of each stage."""


def build(task: Task, **params: Any) -> nn.Module:
    """A convolution, thirteen pairs of one for each channel and one across channels, then the mean over each map."""
    stride = 1 if Params(**params).stem == "small" else 2
    layers, channels = _convolution(task.input.channels, 32, 3, stride=stride), 32
    for wider, stage_stride in _STAGES:
        layers += _convolution(channels, channels, 3, stride=stage_stride, groups=channels)
        layers += _convolution(channels, wider, 1)
        channels = wider
    return Layers(channels, [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()])


def _convolution(channels: int, wider: int, kernel: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, wider, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(wider), nn.ReLU()]
