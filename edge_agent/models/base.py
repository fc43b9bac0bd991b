"""Models of named parts, and what encoders share: a feature width, and the adaptation of torchvision's networks."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from ..errors import UnknownName
from ..task import Frozen, Task
from ._torchvision import networks

Stem = Literal["imagenet", "small"]
"""``imagenet``: torchvision's own first layers, which shrink early. ``small``: stride 1, for up to some 64 pixels."""


class Parts(nn.Module):
    """A model of named parts; the first word of each tensor's name is its part (``encoder.conv1.weight``).

    ``Parts(encoder=..., head=...)`` answers with logits. Methods with other parts reach them by ``part(name)``.
    """

    encoder: nn.Module
    head: nn.Module

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)

    def part(self, name: str) -> nn.Module:
        """The part called ``name``.

        Raises:
            UnknownName: no such part.
        """
        module = self._modules.get(name)
        if module is None:
            raise UnknownName("part", name, self._modules)
        return module

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (n, d) of the encoder."""
        features: torch.Tensor = self.encoder(inputs)
        return features

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits (n, K)."""
        logits: torch.Tensor = self.head(self.encoder(inputs))
        return logits


class StemParams(Frozen):
    """Parameters of encoders that were made for large images."""

    stem: Stem = Field(
        "imagenet", description="'small' keeps the size of small images: better features, 4 to 15x the work"
    )


class Encoder(nn.Module):
    """A module whose ``forward`` gives features (n, feature_dim) float32."""

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim


class Layers(Encoder):
    """An encoder that runs its layers one after another."""

    def __init__(self, feature_dim: int, layers: list[nn.Module]) -> None:
        super().__init__(feature_dim)
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (n, feature_dim) of ``inputs`` (n, ...)."""
        features: torch.Tensor = self.layers(inputs)
        return features


def with_channels(conv: nn.Conv2d, task: Task, *, stride: int | None = None, kernel: int | None = None) -> nn.Conv2d:
    """A fresh first convolution like ``conv`` that takes the task's channels; smaller or denser where asked."""
    size = kernel or int(conv.kernel_size[0])
    return nn.Conv2d(
        task.input.channels,
        conv.out_channels,
        kernel_size=size,
        stride=stride or int(conv.stride[0]),
        padding=size // 2,
        bias=conv.bias is not None,
    )


def resnet(task: Task, name: str, stem: Stem) -> nn.Module:
    """The ResNet of torchvision with this name, without its classifier and without pretrained weights."""
    net = getattr(networks(), name)(weights=None)
    if stem == "small":
        net.conv1, net.maxpool = with_channels(net.conv1, task, stride=1, kernel=3), nn.Identity()
    elif task.input.channels != 3:
        net.conv1 = with_channels(net.conv1, task)
    net.feature_dim, net.fc = net.fc.in_features, nn.Identity()
    encoder: nn.Module = net
    return encoder


def mobilenet(task: Task, name: str, stem: Stem, feature_dim: int) -> nn.Module:
    """The MobileNet of torchvision with this name, without its classifier and without pretrained weights.

    Batch norm statistics are set to follow short local training.
    """
    net = getattr(networks(), name)(weights=None)
    first = net.features[0]
    if stem == "small" or task.input.channels != 3:
        first[0] = with_channels(first[0], task, stride=1 if stem == "small" else None)
    net.feature_dim, net.classifier = feature_dim, nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            # torchvision gives MobileNetV3 a momentum of 0.01: after the few steps of a federated round the running
            # statistics are still those of the start, and features in eval mode are at chance level (measured).
            module.momentum = 0.1
    encoder: nn.Module = net
    return encoder
