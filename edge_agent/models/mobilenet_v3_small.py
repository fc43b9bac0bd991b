"""MobileNetV3-small of Howard et al., "Searching for MobileNetV3", ICCV 2019: 576 features."""

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
    return mobilenet(task, "mobilenet_v3_small", Params(**params).stem, 576)
