"""Encoders that are networks of torchvision, without their classifiers and without pretrained weights."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from pydantic import Field
from torch import nn

from ..core.task import Frozen, Task
from ._torchvision import import_torchvision
from .base import encoder


class StemParams(Frozen):
    """Parameters of encoders that were made for large images."""

    stem: Literal["imagenet", "small"] = Field(
        "imagenet", description="'small' keeps the size of small images: better features, 4 to 15x the work"
    )


@encoder("image", smallest=32, params=StemParams)
def resnet18(task: Task, params: StemParams) -> nn.Module:
    """ResNet18 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 512 features."""
    return _resnet(task, "resnet18", params)


@encoder("image", smallest=32, params=StemParams)
def resnet34(task: Task, params: StemParams) -> nn.Module:
    """ResNet34 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 512 features."""
    return _resnet(task, "resnet34", params)


@encoder("image", smallest=32, params=StemParams)
def mobilenet_v2(task: Task, params: StemParams) -> nn.Module:
    """MobileNetV2 of Sandler et al., "Inverted Residuals and Linear Bottlenecks", CVPR 2018: 1280 features."""
    return _mobilenet(task, "mobilenet_v2", params, 1280)


@encoder("image", smallest=32, params=StemParams)
def mobilenet_v3_small(task: Task, params: StemParams) -> nn.Module:
    """MobileNetV3-small of Howard et al., "Searching for MobileNetV3", ICCV 2019: 576 features."""
    return _mobilenet(task, "mobilenet_v3_small", params, 576)


def _resnet(task: Task, name: str, params: StemParams) -> nn.Module:
    """Return a ResNet of torchvision without its classifier, whose first layers fit the task and the stem.

    The ``small`` stem, for small images, has a 3 x 3 convolution with stride 1, and no pooling.
    """
    net = getattr(networks(), name)(weights=None)
    if params.stem == "small":
        net.conv1 = _first_convolution(net.conv1, task, stride=1, kernel=3)
        net.maxpool = nn.Identity()
    elif task.input.channels != 3:
        net.conv1 = _first_convolution(net.conv1, task)
    net.feature_dim = net.fc.in_features
    net.fc = nn.Identity()
    network: nn.Module = net
    return network


def _mobilenet(task: Task, name: str, params: StemParams, feature_dim: int) -> nn.Module:
    """Return a MobileNet of torchvision without its classifier, whose first layer fits the task and the stem.

    The ``small`` stem, for small images, has stride 1.
    """
    net = getattr(networks(), name)(weights=None)
    first = net.features[0]
    if params.stem == "small":
        first[0] = _first_convolution(first[0], task, stride=1)
    elif task.input.channels != 3:
        first[0] = _first_convolution(first[0], task)
    net.feature_dim = feature_dim
    net.classifier = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            # torchvision gives MobileNetV3 a momentum of 0.01: after the few steps of a federated round the running
            # statistics are still those of the start, and features in eval mode are at chance level (measured).
            module.momentum = 0.1
    network: nn.Module = net
    return network


def _first_convolution(
    conv: nn.Conv2d, task: Task, *, stride: int | None = None, kernel: int | None = None
) -> nn.Conv2d:
    """Return a fresh convolution like ``conv`` that takes the task's channels; smaller or denser where asked."""
    size = kernel or int(conv.kernel_size[0])
    stride = stride or int(conv.stride[0])
    has_bias = conv.bias is not None
    return nn.Conv2d(task.input.channels, conv.out_channels, size, stride, padding=size // 2, bias=has_bias)


def networks() -> ModuleType:
    """Return the module ``torchvision.models``.

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    import_torchvision()
    return importlib.import_module("torchvision.models")
