"""Personal heads for devices without torch: one file each, the file name is the registry.

``fit`` and ``predict_proba`` work on cached features (n, d) float32. Nothing here imports torch; scikit-learn is
imported inside ``fit`` of those heads that use it, and only there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from pydantic import ValidationError

from ..config import mistakes_of
from ..errors import ConfigError
from ..registry import Registry
from ..task import Tensors
from .base import FitData, Head, HeadParams

__all__ = ["Contribute", "FitData", "Head", "HeadParams", "contribution", "create", "get", "names", "registry"]

registry = Registry("head", __name__, entry_points="headwater.heads", besides=("saved",))


Contribute = Callable[[FitData, Tensors, np.random.Generator], Tensors]
"""Features and what was received -> what a device without torch sends in a round of training."""


def names() -> tuple[str, ...]:
    """Names of all heads found; nothing is imported."""
    return registry.names()


def get(name: str) -> type[Head]:
    """The head's class.

    Raises:
        UnknownName: no such head; the nearest name is suggested.
    """
    member = registry.load(name)
    kind: type[Head] = member.Head if isinstance(member, ModuleType) else member
    return kind


def create(name: str, params: Mapping[str, Any] | None = None) -> Head:
    """An unfitted head with checked parameters.

    Raises:
        UnknownName: no such head.
        ConfigError: unknown or impossible parameters, all of them listed.
        UsageError: a head of another package lacks what every head must have.
    """
    kind = get(name)
    registry.check_is_whole(name, kind)
    try:
        return kind(kind.Params.model_validate(dict(params or {})))
    except ValidationError as error:
        raise ConfigError(f"parameters of head '{name}'", mistakes_of(error, kind.Params)) from error


def contribution(method: str) -> Contribute | None:
    """How a device without torch takes part in rounds of a method; None where the method has nothing for it.

    It is the function ``contribute`` in the file of the head that is called as the method.
    """
    if method not in names():
        return None
    found: Contribute | None = getattr(registry.load(method), "contribute", None)
    return found
