"""MobileNetV3-small of Howard et al., "Searching for MobileNetV3", ICCV 2019: 576 features."""

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
    return mobilenet(task, networks().mobilenet_v3_small, Params(**params).stem, 576)
