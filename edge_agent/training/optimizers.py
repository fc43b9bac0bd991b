"""Moments of optimizers that outlive a round: as named arrays in a client's memory, and back bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..errors import StateError
from ..methods.values import Client, MethodParams
from ..task import Tensors
from .loops import Loss, local_optimizer, train
from .parts import Parts

OptimizerState = Literal["reset", "persist"]
"""``reset``: every round starts without moments. ``persist``: a client continues with those of its last round."""


def train_parts(client: Client, loss: Loss, params: Any, parts: Iterable[str], label: str, **options: Any) -> float:
    """`loops.train` of the weights of ``parts`` alone, whose moments are kept as ``params.optimizer_state`` says.

    Raises:
        TrainingFailed: as `loops.train`.
        StateError: as `lasting`.
    """
    optimizer = optimizer_of(client.model, parts, params)
    with lasting(client, optimizer, label, params.optimizer_state):
        return train(client, loss, params, optimizer=optimizer, **options)


def optimizer_of(model: Parts, parts: Iterable[str], params: MethodParams) -> torch.optim.Optimizer:
    """The optimizer that ``params`` ask for, of the weights of these parts."""
    return local_optimizer([weight for name in parts for weight in model.part(name).parameters()], params)


@contextlib.contextmanager
def lasting(client: Client, optimizer: torch.optim.Optimizer, label: str, mode: OptimizerState) -> Iterator[None]:
    """Inside, the optimizer continues from the moments kept as ``label``; at the end they are kept again.

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
    arrays: Tensors = {}
    for name, parameter in _named(optimizer, model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                # A step counter lies on the host, moments beside their parameter and in its memory layout.
                flat = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                arrays[f"{_prefix(label, name)}{key}"] = flat.numpy()
    return arrays


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, memory: Tensors, label: str) -> None:
    """Give a fresh optimizer the state that `moments` took; parameters of which nothing was kept start afresh.

    Raises:
        StateError: an array is neither a number nor of its parameter's shape.
    """
    state = {}
    for index, (name, parameter) in enumerate(_named(optimizer, model)):
        prefix = _prefix(label, name)
        kept = {key.removeprefix(prefix): array for key, array in memory.items() if key.startswith(prefix)}
        if kept:
            state[index] = {key: _beside(parameter, array, prefix + key) for key, array in kept.items()}
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
        actual, expected = list(array.shape), list(parameter.shape)
        raise StateError(f"kept '{name}' is {actual}, its parameter {expected}; remove what was kept of this run")
    return torch.empty_like(parameter).copy_(torch.tensor(array))
