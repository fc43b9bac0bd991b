"""Federated methods, one file each. The file name is the registry: nothing is listed anywhere.

Others' packages add methods through the entry-point group ``headwater.methods``. The contract is imported when it is
first used: names alone need neither numpy nor pydantic.

Read in this order: `base` (the contract), `values` (what passes between its halves), `fedavg` and `fedrep` (two short
methods), `families` (what groups of methods share), then the method that you look for. A method does not know that a
broker or an agent exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core.errors import UsageError
from ..core.registry import PinnedFile, Registry, own_name

if TYPE_CHECKING:
    from ..core.search_space import Choices, Range
    from ..heads.base import Contribute
    from .base import Method, weighted_mean
    from .values import (
        Client,
        LocalWork,
        MethodParams,
        Stage,
        Update,
        grades,
        ours,
        paper_values,
        refreshed_stats,
        search_space,
        searched,
    )

__all__ = [
    "Choices",
    "Client",
    "LocalWork",
    "Method",
    "MethodParams",
    "Range",
    "Stage",
    "Update",
    "add",
    "contribution",
    "create",
    "get",
    "grades",
    "names",
    "ours",
    "paper_values",
    "refreshed_stats",
    "registry",
    "search_space",
    "searched",
    "weighted_mean",
]

_HOMES = {
    "Choices": "..core.search_space",
    "Method": ".base",
    "Range": "..core.search_space",
    "weighted_mean": ".base",
}
"""Name -> its module, of what is not in `values`."""

registry = Registry("method", __name__, entry_points="headwater.methods", besides=("families", "values"))


def names() -> tuple[str, ...]:
    """Return names of all methods found; nothing is imported."""
    return registry.names()


def get(name: str) -> type[Method]:
    """Return the method's class; imports that one file (which may import torch).

    ``name`` may also be a `PinnedFile` as text, from this process's own configuration, journal or command line: that
    file is run, and its class is known under its own name from then on. No other side can name a file.

    Raises:
        UnknownName: No method has this name; the message suggests the nearest name.
        UsageError: The object that another package offers under this name is not a complete method, or a pinned file
            has changed.
    """
    from .base import Method

    pinned = PinnedFile.parse(name)
    if pinned is not None:
        name = add(pinned.load("method"))
    return registry.load_class(name, Method)


def add(kind: Any) -> str:
    """Make a class known to this process under its own name, which is returned.

    Raises:
        UsageError: The class is not a subclass of `Method`, or its name belongs to a method that ships or cannot be
            sent.
    """
    from ..core.config import NAME_PATTERN
    from .base import Method

    shown = getattr(kind, "__name__", f"of type {type(kind).__name__}")
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UsageError(f"method '{shown}': expected a subclass of edge_agent.methods.Method")
    name = own_name(shown)
    if registry.ships(name):
        raise UsageError(f"method '{name}': there is one of this name already; give yours another name")
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"method '{name}': expected a name of letters, digits, '-' and '_', at most 63")
    kind.name = name  # type: ignore[method-assign, assignment]
    registry.add(name, kind)
    return name


def create(
    name: str, params: Mapping[str, Any] | None = None, *, paper: bool = False, paper_for: str | None = None
) -> Method:
    """Return a method with checked parameters; with ``paper``, published values take the place of our defaults.

    ``paper_for`` is the data set whose published values are taken where they differ from one to the other; the others
    are taken as well then.

    Raises:
        UnknownName: No method has this name, or no published values are for such a data set.
        UsageError: The published values of the method are for other data sets.
        ConfigError: Parameters are unknown or out of range; all of them are listed.
        UsageError: See `get`.
    """
    from ..core.config import parse
    from ..core.published import values_for
    from .values import paper_values

    kind = get(name)
    values: dict[str, Any] = {}
    if paper or paper_for is not None:
        values |= paper_values(kind.Params)
    if paper_for is not None:
        values |= values_for(kind.Params, paper_for, name)
    values |= params or {}
    return kind(parse(kind.Params, values, where=f"parameters of method '{name}'"))


def contribution(name: str) -> Contribute | None:
    """Return how a device without torch takes part in rounds of a method: by the head of its name, or by its own file.

    None: it cannot. Only a method that is not the name of a head with that half is imported.

    Raises:
        UnknownName, UsageError: See `get`.
        ImportError: The method's file needs torch, which is not installed here; then it has no such half.
    """
    from ..heads import contribution as of_head

    return of_head(name) or get(name).contribute


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_HOMES.get(name, ".values"), __name__), name)
