"""Personal heads for devices without torch: one file each, the file name is the registry.

``fit`` and ``predict_proba`` work on cached features (n, d) float32. Nothing here imports torch; scikit-learn is
imported inside ``fit`` of those heads that use it, and only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.config import parse
from ..core.errors import UsageError
from ..core.registry import Registry
from .base import Contribute, FitData, Head, HeadParams

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
]

AUTO = "auto"
"""In the place of a head's name: the best one on the device's samples; see `edge_agent.personal.choice`."""

registry = Registry("head", __name__, entry_points="headwater.heads", besides=("numeric", "saved"))


def names() -> tuple[str, ...]:
    """Names of all heads found; nothing is imported."""
    return registry.names()


def get(name: str) -> type[Head]:
    """The head's class.

    Raises:
        UnknownName: no such head; the nearest name is suggested.
        UsageError: what another package offers under this name is no whole head, or it is a numeric one.
    """
    from . import numeric

    if name not in registry.names() and name in numeric.names():
        raise UsageError(
            f"head '{name}' answers with numbers and not with classes; 'edge-agent fit', 'predict' and 'evaluate' and "
            "Personalizer use it, agents and comparisons do not"
        )
    return registry.load_class(name, Head)  # type: ignore[type-abstract]


def create(name: str, params: Mapping[str, Any] | None = None) -> Head:
    """An unfitted head with checked parameters.

    Raises:
        UnknownName: no such head.
        ConfigError: unknown or impossible parameters, all of them listed.
        UsageError: as `get`.
    """
    kind = get(name)
    return kind(parse(kind.Params, params or {}, where=f"parameters of head '{name}'"))


def check(name: str, params: Mapping[str, Any]) -> None:
    """Find mistakes in a head's name, or `AUTO`, and its parameters before anything is computed.

    Raises:
        UnknownName: no such head.
        ConfigError: impossible parameters of that head.
        UsageError: parameters for auto, which could be those of any head; else as `get`.
    """
    if name != AUTO:
        create(name, params)
    elif params:
        raise UsageError(f"head '{AUTO}' takes no parameters, found {', '.join(params)}; name the head they are for")


def contribution(method: str) -> Contribute | None:
    """How a device without torch takes part in rounds of a method: by the head of the same name; None: it cannot."""
    return get(method).contribute if method in names() else None
