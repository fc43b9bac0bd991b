"""AlexNet with batch norm, as FedBN (Li et al., ICLR 2021) uses it for Office-Caltech and DomainNet: 4096 features.

57 million weights: for machines with a GPU. 227 x 227 is the size that AlexNet was made for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..task import Task
from . import NoParams
from .base import Layers

ACCEPTS = ("image",)
SMALLEST = 63
Params = NoParams
_GRID = 6


class _GridMean(nn.Module):
    """Means over a 6 x 6 grid of the maps: AdaptiveAvgPool2d as two matrix products, which ONNX can express."""

    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.register_buffer("rows", _cells(height), persistent=False)
        self.register_buffer("columns", _cells(width).T.contiguous(), persistent=False)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps (n, c, 6, 6) of maps (n, c, height, width)."""
        return self.rows @ maps @ self.columns


def _cells(side: int) -> torch.Tensor:
    """Weights (6, side) of each cell's mean; cells overlap, or repeat pixels, where 6 does not divide the side."""
    weights = torch.zeros(_GRID, side)
    for cell in range(_GRID):
        begin, end = cell * side // _GRID, -(-(cell + 1) * side // _GRID)
        weights[cell, begin:end] = 1.0 / (end - begin)
    return weights


def build(task: Task, **params: Any) -> nn.Module:
    """Five convolutions with batch norm, means over a 6 x 6 grid, two linear layers with batch norm."""
    Params(**params)
    pool = nn.MaxPool2d(3, stride=2)
    height, width = (_side_after(side) for side in task.input_shape[1:])
    grid = nn.Identity() if (height, width) == (_GRID, _GRID) else _GridMean(height, width)
    layers = [
        *_convolution(task.input.channels, 64, 11, stride=4, padding=2), pool,
        *_convolution(64, 192, 5, padding=2), pool,
        *_convolution(192, 384, 3, padding=1),
        *_convolution(384, 256, 3, padding=1),
        *_convolution(256, 256, 3, padding=1), pool,
        grid, nn.Flatten(),
        *_linear(256 * _GRID * _GRID), *_linear(4096),
    ]  # fmt: skip
    return Layers(4096, layers)


def _side_after(side: int) -> int:
    """Pixels on a side of the last maps."""
    side = (side + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def _convolution(channels: int, wider: int, kernel: int, *, padding: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, wider, kernel, stride=stride, padding=padding)
    return [conv, nn.BatchNorm2d(wider), nn.ReLU()]


def _linear(inputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, 4096), nn.BatchNorm1d(4096), nn.ReLU()]
