"""Encoders, one file each: inputs (n, ...) float32 become features (n, feature_dim) float32.

The file name is the registry; others' packages add encoders through the entry-point group ``headwater.encoders``.
Importing this module imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..config import mistakes_of
from ..errors import ConfigError
from ..registry import Registry
from ..task import Frozen, Task

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NoParams", "check", "create", "names", "registry"]

registry = Registry("encoder", __name__, entry_points="headwater.encoders")


class NoParams(Frozen):
    """An encoder without parameters: what holds for one that states no ``Params``."""


def names() -> tuple[str, ...]:
    """Names of all encoders found; nothing is imported."""
    return registry.names()


def create(task: Task) -> nn.Module:
    """The task's encoder, which has an attribute ``feature_dim``; fresh weights from torch's global generator.

    Raises:
        UnknownName: no such encoder; the nearest name is suggested.
        ConfigError: parameters that it does not have, or inputs that it cannot take; all mistakes are listed.
        MissingCapability: torch or torchvision is not installed.
    """
    encoder: nn.Module = check(task).build(task, **task.encoder_params)
    return encoder


def check(task: Task) -> Any:
    """The module of the task's encoder, which can be built with the task's parameters; nothing is built.

    Raises:
        UnknownName: as `create`.
        ConfigError: as `create`.
        MissingCapability: as `create`.
    """
    module = registry.load(task.encoder)
    params = getattr(module, "Params", NoParams)
    mistakes = _unfit_inputs(module, task)
    try:
        params.model_validate(task.encoder_params)
    except ValidationError as error:
        mistakes += mistakes_of(error, params)
    if mistakes:
        raise ConfigError(f"encoder '{task.encoder}'", mistakes)
    return module


def _unfit_inputs(module: Any, task: Task) -> list[str]:
    """What of the task's inputs this encoder cannot take. Members may state ``ACCEPTS`` and ``SMALLEST``."""
    accepts, smallest = getattr(module, "ACCEPTS", ("image", "window")), getattr(module, "SMALLEST", 1)
    if task.input.kind not in accepts:
        suited = [name for name in names() if task.input.kind in getattr(registry.load(name), "ACCEPTS", ())]
        mistake = f"task.input.kind is '{task.input.kind}', this encoder takes {' or '.join(accepts)}"
        return [f"{mistake}; encoders for {task.input.kind}s: {', '.join(suited)}"]
    sides = task.input_shape[1:]
    if min(sides) < smallest:
        size = " x ".join(map(str, sides))
        return [f"inputs of {size}, this encoder needs at least {smallest} on each side; enlarge task.input"]
    return []
