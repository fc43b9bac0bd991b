"""MobileNetV2 of Sandler et al., "Inverted Residuals and Linear Bottlenecks", CVPR 2018: 1280 features."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import nn

from ..task import Frozen, Task
from ._torchvision import networks
from .base import Stem, mobilenet

ACCEPTS = ("image",)
SMALLEST = 32


class Params(Frozen):
    """Parameters of this encoder."""

    stem: Stem = Field("imagenet", description="'small' keeps the size of small images: better features, ~4x the work")


def build(task: Task, **params: Any) -> nn.Module:
    """The network without its classifier and without pretrained weights."""
    return mobilenet(task, networks().mobilenet_v2, Params(**params).stem, 1280)
