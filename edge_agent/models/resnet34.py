"""ResNet34 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: 512 features."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import nn

from ..task import Frozen, Task
from ._torchvision import networks
from .base import Stem, resnet

ACCEPTS = ("image",)
SMALLEST = 32


class Params(Frozen):
    """Parameters of this encoder."""

    stem: Stem = Field("imagenet", description="'small' keeps the size of small images: better features, ~15x the work")


def build(task: Task, **params: Any) -> nn.Module:
    """The network without its classifier and without pretrained weights."""
    return resnet(task, networks().resnet34, Params(**params).stem)
