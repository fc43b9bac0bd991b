"""The contract of a choice of what learns, and how the rest of an encoder is frozen."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar

from pydantic import BaseModel
from torch import nn

from ...core.task import Frozen, Tensors
from ..parts import NORM_LAYERS

COUNTER = "num_batches_tracked"
"""The last word of the names of batch counters, which never travel."""


class NoParams(Frozen):
    """The parameters of a choice without parameters."""


class Peft(ABC):
    """One choice of the tensors of an encoder that learn and travel; all others are frozen."""

    Params: ClassVar[type[BaseModel]] = NoParams

    needs: ClassVar[str] = "layer that it could train"
    """What an encoder lacks of which nothing would learn, for the message."""

    source: ClassVar[str] = ""
    """Paper: authors, title, venue; empty: common practice."""

    def __init__(self, params: Any) -> None:
        self.params = params

    @abstractmethod
    def prepare(self, encoder: nn.Module) -> frozenset[str]:
        """Add what is missing for this choice, and return the names of the encoder's tensors that learn.

        The encoder has the weights to begin with, on the CPU, and computes the same afterwards. Batch counters need
        not be named.
        """

    def merge(self, tensors: Tensors) -> Tensors:
        """Return the tensors of an ordinary encoder from those of a prepared one; default: they are the same."""
        return tensors

    def plain(self, encoder: nn.Module) -> nn.Module:
        """Return the ordinary encoder whose tensors `merge` makes from a prepared one; default: it is one."""
        return encoder


def freeze(encoder: nn.Module, learning: Collection[str]) -> frozenset[str]:
    """Freeze all but the named tensors of an encoder; returns the names of the frozen ones, batch counters aside.

    Frozen weights take no gradient. Frozen running statistics stay as they are: their layers remain in eval mode.
    """
    for name, weight in encoder.named_parameters():
        weight.requires_grad_(name in learning)
    for path, layer in encoder.named_modules():
        has_statistics = isinstance(layer, NORM_LAYERS) and layer.running_mean is not None
        if has_statistics and _join(path, "running_mean") not in learning:
            hold_in_eval_mode(layer)
    names = (name for name in encoder.state_dict() if not name.endswith(COUNTER))
    return frozenset(name for name in names if name not in learning)


def hold_in_eval_mode(layer: nn.Module) -> None:
    """Keep a layer in eval mode, also when the model that contains it is set to train mode."""
    layer.eval()
    layer.train = functools.partial(_remain, layer)  # type: ignore[method-assign]


def tensors_of(encoder: nn.Module, paths: Collection[str]) -> frozenset[str]:
    """Return the names of all tensors of the encoder that are in the modules at these paths."""
    prefixes = tuple(f"{path}." for path in paths)
    return frozenset(name for name in encoder.state_dict() if name.startswith(prefixes))


def _remain(layer: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001 - nn.Module.train's form
    """Stand in for `nn.Module.train` of a layer that stays in eval mode."""
    return layer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
