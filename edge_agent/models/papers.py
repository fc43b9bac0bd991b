"""Convolutional networks of the papers whose methods ship."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import nn

from ..core.task import Frozen, Task
from . import NoParams
from .base import Layers, encoder
from .torchvision_networks import StemParams


@encoder("image", smallest=16)
def fedpac_cnn(task: Task, _: NoParams) -> nn.Module:
    """Return the networks of FedPAC's experiments (Xu, Tong, Huang, ICLR 2023): 128 features, no batch norm.

    Grey images: two stages of convolution, LeakyReLU and halving, as for Fashion-MNIST (115,776 weights at 28 x 28).
    Colour images: three, as for CIFAR-10. Then one linear layer with LeakyReLU.
    """
    layers: list[nn.Module] = []
    channels, height, width = task.input_shape
    stages = [(16, 5, 0), (32, 5, 1), (64, 3, 1)]  # output channels, kernel, padding
    for wider, kernel, padding in stages[: 2 if channels == 1 else 3]:
        layers += [nn.Conv2d(channels, wider, kernel, padding=padding), nn.LeakyReLU(), nn.MaxPool2d(2)]
        channels = wider
        height = (height + 2 * padding - kernel + 1) // 2
        width = (width + 2 * padding - kernel + 1) // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, 128), nn.LeakyReLU()]
    return Layers(128, layers)


@encoder("image", smallest=4)
def digits_cnn(task: Task, _: NoParams) -> nn.Module:
    """Return the network that FedBN (Li et al., ICLR 2021) uses for its five digit sets: 512 features.

    Three convolutions of 5 x 5, two of them halved, and two linear layers, batch norm behind each; 14,214,080 weights
    at 28 x 28 colour.
    """
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


# --- FedRIR ----------------------------------------------------------------------------------------------------------

FEDRIR_CHANNELS = (32, 64)
FEDRIR_KERNEL = 5


class FedRIRParams(Frozen):
    """Parameters of `fedrir_cnn`."""

    feature_dim: int = Field(512, ge=1, le=4096, description="width of the answer, d; paper: 512")


def fedrir_padding(task: Task) -> tuple[int, int]:
    """Pixels added on either side of height and width: none from 16 pixels on, as in the paper; else 2."""
    height, width = task.input_shape[1:]
    return (0 if height >= 16 else 2), (0 if width >= 16 else 2)


def fedrir_stages(task: Task) -> tuple[list[nn.Module], tuple[int, int, int]]:
    """Convolution, batch norm, ReLU and halving, twice; and the shape (channels, height, width) that comes out."""
    layers: list[nn.Module] = []
    channels, *sides = task.input_shape
    padding = fedrir_padding(task)
    for wider in FEDRIR_CHANNELS:
        conv = nn.Conv2d(channels, wider, FEDRIR_KERNEL, padding=padding)
        layers += [conv, nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        channels = wider
        sides = [(side + 2 * more - FEDRIR_KERNEL + 1) // 2 for side, more in zip(sides, padding, strict=True)]
    return layers, (channels, sides[0], sides[1])


@encoder("image", smallest=4, params=FedRIRParams)
def fedrir_cnn(task: Task, params: FedRIRParams) -> nn.Module:
    """FedRIR's global feature extractor: two convolutions with batch norm and one linear layer without activation.

    577,088 weights at 28 x 28 grey, 5,592,192 at 64 x 64 colour, as in the paper's table. Sides below 16 are padded,
    which the paper has no case of: its two convolutions of 5 x 5 would leave nothing of them.
    """
    layers, shape = fedrir_stages(task)
    layers += [nn.Flatten(), nn.Linear(math.prod(shape), params.feature_dim)]
    return Layers(params.feature_dim, layers)


# --- AlexNet ---------------------------------------------------------------------------------------------------------

_GRID = 6


class GridMean(nn.Module):
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
        begin = cell * side // _GRID
        end = -(-(cell + 1) * side // _GRID)
        weights[cell, begin:end] = 1.0 / (end - begin)
    return weights


@encoder("image", smallest=63)
def alexnet_bn(task: Task, _: NoParams) -> nn.Module:
    """AlexNet with batch norm, as FedBN (Li et al., ICLR 2021) uses it for Office-Caltech and DomainNet: 4096 features.

    Five convolutions with batch norm, means over a 6 x 6 grid, two linear layers with batch norm; 57 million weights:
    for machines with a GPU. 227 x 227 is the size that AlexNet was made for.
    """
    layers: list[nn.Module] = []
    channels, height, width = task.input_shape
    stages = [(64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False)]
    for wider, kernel, stride, padding, pooled in [*stages, (256, 3, 1, 1, True)]:
        layers += [nn.Conv2d(channels, wider, kernel, stride, padding), nn.BatchNorm2d(wider), nn.ReLU()]
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        if pooled:
            layers.append(nn.MaxPool2d(3, stride=2))
            height = (height - 3) // 2 + 1
            width = (width - 3) // 2 + 1
        channels = wider
    layers += [nn.Identity() if (height, width) == (_GRID, _GRID) else GridMean(height, width), nn.Flatten()]
    for inputs in (256 * _GRID * _GRID, 4096):
        layers += [nn.Linear(inputs, 4096), nn.BatchNorm1d(4096), nn.ReLU()]
    return Layers(4096, layers)


# --- MobileNet -------------------------------------------------------------------------------------------------------

_STAGES = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Output channels and stride of each stage."""


@encoder("image", smallest=32, params=StemParams)
def mobilenet_v1(task: Task, params: StemParams) -> nn.Module:
    """MobileNet of Howard et al., "MobileNets", 2017, the small network of RepPer's experiments: 1024 features.

    A convolution, thirteen pairs of one for each channel and one across channels, then the mean over each map;
    3,206,976 weights without its classifier.
    """
    first_stride = 1 if params.stem == "small" else 2
    layers = _convolution(task.input.channels, 32, 3, stride=first_stride)
    channels = 32
    for wider, stride in _STAGES:
        layers += _convolution(channels, channels, 3, stride=stride, groups=channels)
        layers += _convolution(channels, wider, 1)
        channels = wider
    return Layers(channels, [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()])


def _convolution(channels: int, wider: int, kernel: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, wider, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(wider), nn.ReLU()]
