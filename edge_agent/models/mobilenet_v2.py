"""MobileNetV2 of Sandler et al., "Inverted Residuals and Linear Bottlenecks", CVPR 2018: 1280 features."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..task import Task
from .base import StemParams as Params
from .base import mobilenet

ACCEPTS = ("image",)
SMALLEST = 32


def build(task: Task, **params: Any) -> nn.Module:
    """The network without its classifier and without pretrained weights."""
    return mobilenet(task, "mobilenet_v2", Params(**params).stem, 1280)
