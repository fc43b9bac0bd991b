"""File names as registries: `methods`, `heads`, `models` and data sources are found by the file they live in.

Nothing has to be listed anywhere to add one. Packages of others join through an entry-point group.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType
from typing import Any

from .errors import UnknownName, UsageError


class Registry:
    """The members of one package, one file (or folder) each; not ``base``, private names and ``besides``."""

    def __init__(
        self, kind: str, package: str, *, entry_points: str | None = None, besides: Iterable[str] = ()
    ) -> None:
        self.kind, self.package, self.entry_points = kind, package, entry_points
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
        if name in self._files():
            return importlib.import_module(f"{self.package}.{name}")
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
            raise UsageError(f"{self.kind} '{name}' ({where}) has no {what}; {self.package}.base says what that is")

    def add(self, name: str, member: Any) -> None:
        """Register an object or module of one's own for this process (examples and tests do)."""
        self._extra[name] = member

    def _files(self) -> Iterable[str]:
        folder = _package(self.package).__path__
        return [
            m.name for m in pkgutil.iter_modules(folder) if not m.name.startswith("_") and m.name not in self.besides
        ]

    def _plugins(self) -> dict[str, metadata.EntryPoint]:
        if self.entry_points is None:
            return {}
        return {point.name: point for point in metadata.entry_points(group=self.entry_points)}


def _package(name: str) -> ModuleType:
    return importlib.import_module(name)
