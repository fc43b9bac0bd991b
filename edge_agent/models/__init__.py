"""Encoders: inputs (n, ...) float32 become features (n, feature_dim) float32.

Each is an `Encoder` in one of the files in ``FAMILIES``, or in its own file with its name. Others' packages add
encoders through the entry-point group ``headwater.encoders``. Importing this module imports no torch.

Read in this order: `base` (the contract), `small` (two short encoders), `papers`, `characters`, `torchvision_networks`.
How an encoder is trained is not said here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from ..core.config import mistakes_of
from ..core.errors import ConfigError, UsageError
from ..core.registry import Registry
from ..core.task import Frozen, Task

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Encoder", "NoParams", "check", "create", "import_torchvision", "names", "registry"]

FAMILIES = {
    "characters": ("char_cnn", "char_lstm"),
    "starter": ("starter_cnn",),
    "papers": ("alexnet_bn", "digits_cnn", "fedpac_cnn", "fedrir_cnn", "mobilenet_v1"),
    "small": ("cnn1d", "linear", "small_cnn"),
    "torchvision_networks": (
        "efficientnet_b0",
        "mobilenet_v2",
        "mobilenet_v3_large",
        "mobilenet_v3_small",
        "resnet18",
        "resnet34",
        "resnet50",
        "vit",
    ),
}
"""File -> names of the encoders in it."""

registry = Registry("encoder", __name__, entry_points="headwater.encoders", families=FAMILIES)


class NoParams(Frozen):
    """The parameters of an encoder without parameters."""


@dataclass(frozen=True)
class Encoder:
    """How an encoder is built, and from which inputs.

    ``build`` gets the task and checked ``Params``, and returns a module with an attribute ``feature_dim`` and fresh
    weights from torch's global generator.
    """

    build: Callable[[Task, Any], nn.Module]
    Params: type[BaseModel] = NoParams
    accepts: tuple[str, ...] = ("image", "window")
    smallest: int = 1
    """Pixels or samples that each side of an input needs at least."""


def import_torchvision() -> ModuleType:
    """Import torchvision also where its compiled part does not match the installed torch; returns it.

    A CPU build of torch beside the wheel of torchvision from PyPI makes a plain ``import torchvision`` fail. After this
    call it works in this process, without the compiled operators (``ops.nms``, decoding of images).

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    from ._torchvision import import_torchvision as ready

    return ready()


def names() -> tuple[str, ...]:
    """Return the names of all encoders found; nothing is imported."""
    return registry.names()


def get(name: str) -> Encoder:
    """Return the encoder of this name; nothing is built.

    Raises:
        UnknownName: no such encoder; the nearest name is suggested.
        UsageError: what another package offers under this name is no `Encoder`.
    """
    member = registry.load(name)
    if isinstance(member, ModuleType):
        member = vars(member).get(name)
    if not isinstance(member, Encoder):
        raise UsageError(f"encoder '{name}' ({member!r}): expected an edge_agent.models.Encoder")
    return member


def create(task: Task) -> nn.Module:
    """Return the task's encoder, which has an attribute ``feature_dim``; fresh weights from torch's global generator.

    Raises:
        UnknownName: as `get`.
        UsageError: as `get`.
        ConfigError: parameters that it does not have, or inputs that it cannot take; all mistakes are listed.
        MissingCapability: torch or torchvision is not installed.
    """
    encoder = check(task)
    return encoder.build(task, encoder.Params.model_validate(task.encoder_params))


def check(task: Task) -> Encoder:
    """Return the task's encoder, which can be built with the task's parameters; nothing is built.

    Raises:
        UnknownName: as `create`.
        UsageError: as `create`.
        ConfigError: as `create`.
        MissingCapability: as `create`.
    """
    encoder = get(task.encoder)
    mistakes = list[str]()
    sides = task.input_shape[1:]
    if task.input.kind not in encoder.accepts:
        mistake = f"task.input.kind is '{task.input.kind}', this encoder takes {' or '.join(encoder.accepts)}"
        suited = [name for name in names() if task.input.kind in _kinds_of(name)]
        mistakes = [f"{mistake}; encoders for {task.input.kind}s: {', '.join(suited)}"]
    elif min(sides) < encoder.smallest:
        size = " x ".join(map(str, sides))
        mistake = f"inputs of {size}, this encoder needs at least {encoder.smallest} on each side; enlarge task.input"
        mistakes = [mistake]
    try:
        encoder.Params.model_validate(task.encoder_params)
    except ValidationError as error:
        mistakes += mistakes_of(error, encoder.Params)
    if mistakes:
        raise ConfigError(f"encoder '{task.encoder}'", mistakes)
    return encoder


def _kinds_of(name: str) -> tuple[str, ...]:
    """Kinds of inputs that an encoder can take; none where that of another package cannot be used."""
    try:
        return get(name).accepts
    except (UsageError, ImportError):
        return ()
