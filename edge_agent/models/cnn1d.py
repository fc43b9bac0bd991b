"""A one-dimensional convolutional network for windows of sensor recordings: 128 features."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import nn

from ..task import Frozen, Task
from .base import Encoder

ACCEPTS = ("window",)
SMALLEST = 8


class Params(Frozen):
    """Parameters of this encoder."""

    feature_dim: int = Field(128, ge=1, le=4096, description="width of the answer, d")
    width: int = Field(32, ge=1, le=512, description="channels of the first stage; the second has twice as many")


class _MeanOverTime(Encoder):
    def __init__(self, channels: int, params: Params) -> None:
        super().__init__(params.feature_dim)
        one, two, three = params.width, 2 * params.width, params.feature_dim
        self.stages = nn.Sequential(*_stage(channels, one, 7), *_stage(one, two, 5), *_stage(two, three, 3))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.stages(windows)
        return maps.mean(dim=2)


def _stage(channels: int, wider: int, kernel: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv1d(channels, wider, kernel, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm1d(wider), nn.ReLU(), nn.MaxPool1d(2)


def build(task: Task, **params: Any) -> nn.Module:
    """Three stages of convolution, batch norm, ReLU and halving; then the mean over time."""
    return _MeanOverTime(task.input.channels, Params(**params))
