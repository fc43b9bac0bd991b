"""Personal heads for devices without torch: one file each, the file name is the registry.

``fit`` and ``predict_proba`` work on cached features (n, d) float32. Nothing here imports torch; scikit-learn is
imported inside ``fit`` of those heads that use it, and only there.

Read in this order: `base` (the contract), `lr` (a short head), `saved` (how a head is stored and read without pickle),
then the head that you look for. Which head is best on a device's samples is decided in `edge_agent.personal.choice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.config import parse
from ..core.errors import UsageError
from ..core.registry import Registry
from .base import Contribute, FitData, Head, HeadParams, softmax

__all__ = [
    "AUTO",
    "Contribute",
    "FitData",
    "Head",
    "HeadParams",
    "check",
    "contribution",
    "create",
    "get",
    "names",
    "registry",
    "softmax",
]

AUTO = "auto"
"""The name that stands for the best head on the device's samples; see `edge_agent.personal.choice`."""

registry = Registry("head", __name__, entry_points="headwater.heads", besides=("numeric", "saved"))


def names() -> tuple[str, ...]:
    """Return names of all heads found; nothing is imported."""
    return registry.names()


def get(name: str) -> type[Head]:
    """Return the head's class.

    Raises:
        UnknownName: No head has this name; the message suggests the nearest name.
        UsageError: The object that another package offers under this name is not a complete head, or the head is
            numeric.
    """
    from . import numeric

    if name not in registry.names() and name in numeric.names():
        raise UsageError(
            f"head '{name}' answers with numbers and not with classes; 'edge-agent fit', 'predict' and 'evaluate' and "
            "Personalizer use it, agents and comparisons do not"
        )
    return registry.load_class(name, Head)  # type: ignore[type-abstract]


def create(name: str, params: Mapping[str, Any] | None = None) -> Head:
    """Return an unfitted head with checked parameters.

    Raises:
        UnknownName: No head has this name.
        ConfigError: Parameters are unknown or out of range; all of them are listed.
        UsageError: See `get`.
    """
    kind = get(name)
    return kind(parse(kind.Params, params or {}, where=f"parameters of head '{name}'"))


def check(name: str, params: Mapping[str, Any]) -> None:
    """Find mistakes in a head's name, or `AUTO`, and its parameters before anything is computed.

    Raises:
        UnknownName: No head has this name.
        ConfigError: Parameters of the head are unknown or out of range.
        UsageError: Parameters are given for ``auto``, which could be those of any head; otherwise see `get`.
    """
    if name != AUTO:
        create(name, params)
    elif params:
        raise UsageError(f"head '{AUTO}' takes no parameters, found {', '.join(params)}; name the head they are for")


def contribution(method: str) -> Contribute | None:
    """Return how a device without torch takes part in rounds of a method, by the head of its name; None: it cannot."""
    return get(method).contribute if method in names() else None
