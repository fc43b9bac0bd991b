"""Heads whose answer is a number and no class: one file each, as the heads of classes are.

``ridge_regression`` predicts a number that the data name; ``mahalanobis`` says how unlike normal samples an input is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.config import parse
from ...core.registry import Registry
from .base import NumericData, NumericHead

__all__ = ["NumericData", "NumericHead", "create", "get", "names", "registry"]

registry = Registry("numeric head", __name__, entry_points="headwater.numeric_heads")


def names() -> tuple[str, ...]:
    """Return names of all numeric heads found; nothing is imported."""
    return registry.names()


def get(name: str) -> type[NumericHead]:
    """Return the head's class.

    Raises:
        UnknownName: No head has this name; the message suggests the nearest name.
        UsageError: The object that another package offers under this name is not a complete head.
    """
    return registry.load_class(name, NumericHead)  # type: ignore[type-abstract]


def create(name: str, params: Mapping[str, Any] | None = None) -> NumericHead:
    """Return an unfitted head with checked parameters.

    Raises:
        UnknownName: No head has this name.
        ConfigError: Parameters are unknown or out of range; all of them are listed.
        UsageError: See `get`.
    """
    kind = get(name)
    return kind(parse(kind.Params, params or {}, where=f"parameters of head '{name}'"))
