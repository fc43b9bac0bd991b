"""ResNet18 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 512 features."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..task import Task
from .base import StemParams as Params
from .base import resnet

ACCEPTS = ("image",)
SMALLEST = 32


def build(task: Task, **params: Any) -> nn.Module:
    """The network without its classifier and without pretrained weights."""
    return resnet(task, "resnet18", Params(**params).stem)
