"""Encoders that are networks of torchvision, without their classifiers and without pretrained weights.

The only place that imports torchvision: also where its compiled part does not match the installed torch. A CPU build of
torch beside torchvision's PyPI wheel makes ``import torchvision`` fail with "operator torchvision::nms does not exist",
although the networks need none of the compiled operators. Declaring the operators' schemas lets the import pass. A
matching pair never comes this way.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from ..errors import MissingCapability
from ..task import Frozen, Task
from .base import encoder

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library object that is collected takes its operators with it


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
    net = getattr(networks(), name)(weights=None)
    if params.stem == "small":
        net.conv1, net.maxpool = _first_convolution(net.conv1, task, stride=1, kernel=3), nn.Identity()
    elif task.input.channels != 3:
        net.conv1 = _first_convolution(net.conv1, task)
    net.feature_dim, net.fc = net.fc.in_features, nn.Identity()
    network: nn.Module = net
    return network


def _mobilenet(task: Task, name: str, params: StemParams, feature_dim: int) -> nn.Module:
    net = getattr(networks(), name)(weights=None)
    first = net.features[0]
    if params.stem == "small" or task.input.channels != 3:
        first[0] = _first_convolution(first[0], task, stride=1 if params.stem == "small" else None)
    net.feature_dim, net.classifier = feature_dim, nn.Identity()
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
    """A fresh convolution like ``conv`` that takes the task's channels; smaller or denser where asked."""
    size = kernel or int(conv.kernel_size[0])
    stride = stride or int(conv.stride[0])
    has_bias = conv.bias is not None
    return nn.Conv2d(task.input.channels, conv.out_channels, size, stride, padding=size // 2, bias=has_bias)


def networks() -> ModuleType:
    """The module ``torchvision.models``.

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise MissingCapability.package("torchvision", "train", "this encoder") from error
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            advice = f"install the torchvision release made for torch {torch.__version__}"
            raise MissingCapability(f"torchvision cannot be imported: {error}; {advice}") from error
    if not _declared:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            library.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(library)
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]  # half imported
    return importlib.import_module("torchvision.models")
