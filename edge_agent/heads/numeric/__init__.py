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
    """Names of all numeric heads found; nothing is imported."""
    return registry.names()


def get(name: str) -> type[NumericHead]:
    """The head's class.

    Raises:
        UnknownName: no such head; the nearest name is suggested.
        UsageError: what another package offers under this name is no whole head.
    """
    return registry.load_class(name, NumericHead)  # type: ignore[type-abstract]


def create(name: str, params: Mapping[str, Any] | None = None) -> NumericHead:
    """An unfitted head with checked parameters.

    Raises:
        UnknownName: no such head.
        ConfigError: unknown or impossible parameters, all of them listed.
        UsageError: as `get`.
    """
    kind = get(name)
    return kind(parse(kind.Params, params or {}, where=f"parameters of head '{name}'"))
