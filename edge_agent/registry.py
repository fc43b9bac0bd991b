"""File names as registries: `methods`, `heads`, `models` and data sources are found by the file they live in.

Nothing has to be listed anywhere to add one. Packages of others join through an entry-point group.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from .errors import UnknownName, UsageError


class Registry:
    """The members of ``packages``, one file (or folder) each; not ``base``, private names and ``besides``."""

    def __init__(self, kind: str, *packages: str, entry_points: str | None = None, besides: Iterable[str] = ()) -> None:
        self.kind, self.packages, self.entry_points = kind, packages, entry_points
        self.besides = frozenset({"base", *besides})
        self._extra: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """All member names, sorted; nothing is imported."""
        return tuple(sorted({*self._files(), *self._extra, *self._plugins()}))

    def load(self, name: str) -> Any:
        """The member's module, or the object registered or plugged in under ``name``.

        Raises:
            UnknownName: no such member; the nearest name is suggested.
        """
        if name in self._extra:
            return self._extra[name]
        if package := self._files().get(name):
            return importlib.import_module(f"{package}.{name}")
        plugins = self._plugins()
        if name in plugins:
            return plugins[name].load()
        raise UnknownName(self.kind, name, self.names())

    def check_is_whole(self, name: str, kind: type) -> None:
        """Return quietly where a class, found under ``name``, has all that its base class asks for.

        Raises:
            UsageError: it has not; what is missing is listed.
        """
        if missing := sorted(getattr(kind, "__abstractmethods__", ())):
            what, where = ", ".join(missing), f"{kind.__module__}.{kind.__qualname__}"
            raise UsageError(f"{self.kind} '{name}' ({where}) has no {what}; {self.packages[0]}.base says what that is")

    def add(self, name: str, member: Any) -> None:
        """Register an object or module of one's own for this process (examples and tests do)."""
        self._extra[name] = member

    def _files(self) -> dict[str, str]:
        return {
            found.name: package
            for package in self.packages
            for found in pkgutil.iter_modules(importlib.import_module(package).__path__)
            if not found.name.startswith("_") and found.name not in self.besides
        }

    def _plugins(self) -> dict[str, metadata.EntryPoint]:
        if self.entry_points is None:
            return {}
        return {point.name: point for point in metadata.entry_points(group=self.entry_points)}
