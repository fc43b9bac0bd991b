"""Parameter-efficient training: the part of an encoder that learns and travels, one file for each choice.

A run with `edge_agent.core.task.Task.peft` begins with an encoder that has learned elsewhere. Most of it is frozen,
which each device gets once; updates carry the rest alone. Methods do not know of it: they train what takes a gradient,
and average what they are sent. Other packages add choices through the entry-point group ``headwater.peft``.

Read in this order: `base` (the contract), `bn` (the shortest), `last_block`, `lora`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...core.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from ...core.task import Task, Tensors
    from ..parts import Parts
    from .base import Peft

__all__ = ["adapt", "check", "create", "merge", "names", "plain_encoder", "registry"]

registry = Registry("peft", __name__, entry_points="headwater.peft")

_ENCODER = "encoder."


def names() -> tuple[str, ...]:
    """Return the names of all choices found; nothing is imported."""
    return registry.names()


def create(task: Task) -> Peft | None:
    """Return the task's choice with checked parameters; None where the whole encoder learns.

    Raises:
        UnknownName: There is no such choice; the message suggests the nearest name.
        ConfigError: Parameters are unknown or out of range, all of them listed; or there are some without a choice.
    """
    if task.peft is None:
        if task.peft_params:
            raise ConfigError("peft_params", [f"{task.peft_params} without peft; give peft, or leave them out"])
        return None
    from ...core.config import parse
    from .base import Peft

    kind = registry.load_class(task.peft, Peft)  # type: ignore[type-abstract]  # the registry returns complete ones
    return kind(parse(kind.Params, task.peft_params, where=f"parameters of peft '{task.peft}'"))


def check(task: Task, objection: str) -> None:
    """Require that the run of a method can do what the task says of peft.

    Args:
        task: The task.
        objection: Why the method cannot train a part of its encoder; empty where it can.

    Raises:
        UnknownName, ConfigError: See `create`; or the method cannot do it.
    """
    chosen = create(task)
    if chosen is not None and objection:
        raise ConfigError(f"peft '{task.peft}'", [f"{objection}; leave peft out, or choose another method"])


def adapt(model: Parts, task: Task) -> Parts:
    """Let only a part of the model's encoder learn from now on, as the task says; returns the model.

    Its weights have to be those to begin with: low-rank adapters add nothing to them yet.

    Raises:
        UnknownName, ConfigError: See `create`; or nothing of this encoder would learn.
    """
    chosen = create(task)
    if chosen is None:
        return model
    from .base import freeze

    encoder = model.encoder
    learning = chosen.prepare(encoder)
    if not learning:
        raise ConfigError(
            f"peft '{task.peft}'", [f"encoder '{task.encoder}' has no {chosen.needs}; choose {_others(task.peft)}"]
        )
    model.frozen_names = frozenset(_ENCODER + name for name in freeze(encoder, learning))
    return model


def plain_encoder(model: Parts, task: Task) -> nn.Module:
    """Return the encoder of an adapted model as the ordinary one that `merge` makes; a copy where that is another.

    Raises:
        UnknownName, ConfigError: See `create`.
    """
    chosen = create(task)
    return model.encoder if chosen is None else chosen.plain(model.encoder)


def merge(tensors: Tensors, task: Task) -> Tensors:
    """Return a state's tensors with those of an ordinary encoder in the place of what the task's choice has added.

    Raises:
        UnknownName, ConfigError: See `create`.
    """
    chosen = create(task)
    if chosen is None:
        return tensors
    of_encoder = {name.removeprefix(_ENCODER): tensors[name] for name in tensors if name.startswith(_ENCODER)}
    others = {name: array for name, array in tensors.items() if not name.startswith(_ENCODER)}
    return {**others, **{_ENCODER + name: array for name, array in chosen.merge(of_encoder).items()}}


def _others(name: str | None) -> str:
    """Return the other choices for a message."""
    return " or ".join(other for other in names() if other != name)
