"""Moments of optimizers that outlive a round: as named arrays in a client's memory, and back bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import nn

from ..errors import StateError
from ..methods.base import Client
from ..task import Tensors

OptimizerState = Literal["reset", "persist"]
"""``reset``: every round starts without moments. ``persist``: a client goes on with those of its last round."""


@contextlib.contextmanager
def lasting(client: Client, optimizer: torch.optim.Optimizer, label: str, mode: OptimizerState) -> Iterator[None]:
    """Inside, the optimizer goes on from the moments kept as ``label``; at the end they are kept anew.

    ``reset`` does nothing. Training that raises keeps nothing: the round has not happened.

    Raises:
        StateError: what was kept does not fit the parameters.
    """
    if mode == "persist":
        restore(optimizer, client.model, client.memory, label)
    yield
    if mode == "persist":
        client.memory.update(moments(optimizer, client.model, label))


def moments(optimizer: torch.optim.Optimizer, model: nn.Module, label: str) -> Tensors:
    """Copies of the optimizer's state: ``optimizer.<label>.<parameter>.<key>``, with names as in the model."""
    found: Tensors = {}
    for name, parameter in _named(optimizer, model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                # A step counter lies on the host, moments beside their parameter and in its memory layout.
                flat = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                found[f"{_prefix(label, name)}{key}"] = flat.numpy()
    return found


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, memory: Tensors, label: str) -> None:
    """Give a fresh optimizer the state that `moments` took; parameters of which nothing was kept start afresh.

    Raises:
        StateError: an array is neither a number nor of its parameter's shape.
    """
    state = {}
    for place, (name, parameter) in enumerate(_named(optimizer, model)):
        prefix = _prefix(label, name)
        kept = {key.removeprefix(prefix): array for key, array in memory.items() if key.startswith(prefix)}
        if kept:
            state[place] = {key: _beside(parameter, array, prefix + key) for key, array in kept.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _named(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in its own order, with their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def _prefix(label: str, name: str) -> str:
    return f"optimizer.{label}.{name}."


def _beside(parameter: torch.Tensor, array: np.ndarray, name: str) -> torch.Tensor:
    """The array as a tensor laid out like its parameter: fused optimizers walk through both in step."""
    if array.shape == ():
        return torch.tensor(array)
    if array.shape != tuple(parameter.shape):
        found, expected = list(array.shape), list(parameter.shape)
        raise StateError(f"kept '{name}' is {found}, its parameter {expected}; remove what was kept of this run")
    return torch.empty_like(parameter).copy_(torch.tensor(array))
