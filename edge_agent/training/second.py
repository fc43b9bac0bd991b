"""A second, personal network beside the shared one: part ``personal``, made of an encoder and a head like the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.func import functional_call

from ..task import Task
from .loops import evaluate
from .parts import Parts, encoder_and_head

PERSONAL = "personal"


def two_networks(task: Task) -> Parts:
    """Encoder and head, and a copy of both as the part ``personal``: they start from the same weights.

    Raises:
        UnknownName: no such encoder.
        ConfigError: the encoder does not fit the task.
    """
    model = encoder_and_head(task)
    model.add_module(PERSONAL, copy.deepcopy(model))
    return model


def second(model: Parts, name: str = PERSONAL) -> Parts:
    """The personal network.

    Raises:
        UnknownName: the model has none.
    """
    return cast("Parts", model.part(name))


def pairs(model: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The weights of the personal network, each with its counterpart in the shared one."""
    shared = dict(model.named_parameters())
    return [(weight, shared[name]) for name, weight in second(model).named_parameters()]


def shared_weights(model: Parts) -> list[torch.Tensor]:
    """The weights of encoder and head."""
    return [weight for _, weight in pairs(model)]


def copy_tensors(source: nn.Module, target: nn.Module, *, buffers_only: bool = False) -> None:
    """Give ``target`` the tensors of ``source`` that have the same names: all of them, or its buffers alone."""
    wanted = dict(target.named_buffers()) if buffers_only else target.state_dict()
    found = source.state_dict()
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in found:
                tensor.copy_(found[name])


def probabilities_with(model: nn.Module, weights: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Class probabilities (n, K) of a model with other weights in the places named; the model keeps its own.

    Raises:
        DataError: no inputs.
    """
    tensors = dict(weights)
    return evaluate(lambda piece: torch.softmax(functional_call(model, tensors, (piece,)), dim=1), model, inputs)
