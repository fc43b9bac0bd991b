"""One linear layer on the flattened input: the smallest encoder, whose results can be worked out by hand."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field
from torch import nn

from ..task import Frozen, Task
from .base import Layers

ACCEPTS = ("image", "window")


class Params(Frozen):
    """Parameters of this encoder."""

    feature_dim: int = Field(16, ge=1, le=4096, description="width of the answer, d")
    bias: bool = Field(True, description="whether the layer has a bias")


def build(task: Task, **params: Any) -> nn.Module:
    """Flatten, then one linear layer."""
    chosen = Params(**params)
    layer = nn.Linear(math.prod(task.input_shape), chosen.feature_dim, bias=chosen.bias)
    return Layers(chosen.feature_dim, [nn.Flatten(), layer])
