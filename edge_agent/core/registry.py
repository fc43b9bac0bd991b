"""File names as registries: `methods`, `heads`, `models` and data sources are found by the file they live in.

Nothing has to be listed anywhere to add one; only a file that holds several, as those of encoders do, is listed with
their names. Packages of others join through an entry-point group.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .errors import UnknownName, UsageError, cause, nearest
from .storage import read_regular

T = TypeVar("T")


class Registry:
    """The members of ``packages``, one file (or folder) each; not ``base``, private names and ``besides``.

    Files in ``families`` (file -> members) hold several members, each under its own name.
    """

    def __init__(
        self,
        kind: str,
        *packages: str,
        entry_points: str | None = None,
        besides: Iterable[str] = (),
        families: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.kind = kind
        self.packages = packages
        self.entry_points = entry_points
        self.families = {member: file for file, members in (families or {}).items() for member in members}
        self.besides = frozenset({"base", *besides, *self.families.values()})
        self._extra: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """All member names, sorted; nothing is imported."""
        return tuple(sorted({*self._files, *self.families, *self._extra, *self._plugins}))

    def load(self, name: str) -> Any:
        """The member's module, or the object of a family, registered or plugged in under ``name``.

        Raises:
            UnknownName: no such member; the nearest name is suggested.
        """
        if name in self._extra:
            return self._extra[name]
        if file := self.families.get(name):
            return getattr(importlib.import_module(f"{self.packages[0]}.{file}"), name)
        if package := self._files.get(name):
            return importlib.import_module(f"{package}.{name}")
        plugins = self._plugins
        if name in plugins:
            return plugins[name].load()
        raise UnknownName(self.kind, name, self.names())

    def load_class(self, name: str, base: type[T]) -> type[T]:
        """The only subclass of ``base`` in the member's module, or the class registered or plugged in.

        Raises:
            UnknownName: no such member; the nearest name is suggested.
            UsageError: no subclass, more than one, or one without a method that ``base`` asks for.
        """
        member = self.load(name)
        is_plugged_in = bool(self.plugged_in(name))
        if isinstance(member, ModuleType):
            own = [result for key, result in vars(member).items() if not key.startswith("_")]
            inside = [result for result in own if getattr(result, "__module__", "") == member.__name__]
        else:
            inside = [member]
        classes = list(
            dict.fromkeys(result for result in inside if isinstance(result, type) and issubclass(result, base))
        )
        contract = f"{base.__module__}.{base.__qualname__}"
        if len(classes) != 1:
            have = ", ".join(result.__qualname__ for result in classes) or "none"
            raise UsageError(f"{self.kind} '{name}' ({member!r}): expected one subclass of {contract}, found {have}")
        if missing := sorted(getattr(classes[0], "__abstractmethods__", ())):
            what = ", ".join(missing)
            where = f"{classes[0].__module__}.{classes[0].__qualname__}"
            raise UsageError(f"{self.kind} '{name}' ({where}) has no {what}; {contract} says what that is")
        if is_plugged_in and hasattr(base, "name"):
            # By default the name is that of the file, which the entry point of another package may not follow.
            classes[0].name = name  # type: ignore[attr-defined]
        return classes[0]

    def add(self, name: str, member: Any) -> None:
        """Register an own object or module for this process (examples and tests do)."""
        self._extra[name] = member

    def ships(self, name: str) -> bool:
        """Whether a file of ours, or of an installed package, has this name."""
        return name in self._files or name in self.families or name in self._plugins

    def plugged_in(self, name: str) -> str:
        """The module that another package offers under this name; empty: none does, or `load` gives something else."""
        if name in self._extra or name in self._files or name in self.families or name not in self._plugins:
            return ""
        return self._plugins[name].module

    def is_shipped(self, name: str) -> bool:
        """Whether what `load` gives for this name is a file of Headwater itself, neither plugged in nor registered."""
        return name not in self._extra and (name in self._files or name in self.families)

    # Both are read once in a process: to look up what is installed takes milliseconds, on a small device tens of them,
    # and fitting a head by cross-validation asks for its class a hundred times.

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        return {
            result.name: package
            for package in self.packages
            for result in pkgutil.iter_modules(importlib.import_module(package).__path__)
            if not result.name.startswith("_") and result.name not in self.besides
        }

    @functools.cached_property
    def _plugins(self) -> dict[str, metadata.EntryPoint]:
        if self.entry_points is None:
            return {}
        return {point.name: point for point in metadata.entry_points(group=self.entry_points)}


def is_reference(name: str) -> bool:
    """Whether ``name`` has the form ``PATH.py:NAME``."""
    path, _, attribute = name.rpartition(":")
    return path.endswith(".py") and attribute.isidentifier()


def own_name(name: str) -> str:
    """The name by which a class or function of a user's is known: names of methods and encoders are in lower case."""
    return name.lower().strip("_<>")


@dataclass(frozen=True)
class PinnedFile:
    """A class in a file of a user, and the hash of that file: what is loaded is what was hashed.

    As text it is ``PATH.py:NAME#SHA256``. Only this file is compared, not what it imports.

    Attributes:
        path: The file, absolute.
        name: The class in it.
        sha256: Hash (hex) of the file's bytes.
    """

    path: Path
    name: str
    sha256: str

    @classmethod
    def of(cls, kind: str, reference: str, folder: Path | None = None) -> PinnedFile:
        """Pin ``PATH.py:NAME`` to what the file holds now; relative paths count from ``folder``.

        Raises:
            UsageError: not of that form, or the file cannot be read.
        """
        if not is_reference(reference):
            raise UsageError(f"{kind} '{reference}': expected PATH.py:NAME")
        path, _, name = absolute(reference, folder).rpartition(":")
        content = _content(kind, reference, Path(path))
        return cls(Path(path), name, hashlib.sha256(content).hexdigest())

    @classmethod
    def parse(cls, text: str) -> PinnedFile | None:
        """Read ``PATH.py:NAME#SHA256``; None where the text has another form."""
        reference, _, sha256 = text.rpartition("#")
        if not is_reference(reference) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
            return None
        path, _, name = reference.rpartition(":")
        return cls(Path(path), name, sha256)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}#{self.sha256}"

    @property
    def known_as(self) -> str:
        """The name by which others know what is in it."""
        return own_name(self.name)

    def load(self, kind: str) -> Any:
        """Run the file, once in a process for each content, and return what it names.

        Raises:
            UsageError: the file is gone or has changed, its import fails, or it does not have the name.
        """
        content = _content(kind, f"{self.path}:{self.name}", self.path)
        present = hashlib.sha256(content).hexdigest()
        if present != self.sha256:
            raise UsageError(
                f"{kind} '{self.path}:{self.name}': the file has changed: its SHA-256 is {present[:16]}, expected "
                f"{self.sha256[:16]}; put the file back as it was, or request the run again"
            )
        return _load_name(kind, self.path, self.name, f"headwater_own_{self.sha256[:16]}.{self.path.stem}", content)


def _content(kind: str, reference: str, path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise UsageError(
            f"{kind} '{reference}': {path} cannot be read: {cause(error)}; expected PATH.py:NAME"
        ) from error


def absolute(reference: str, folder: Path | None = None) -> str:
    """``PATH.py:NAME`` with an absolute path (from ``folder`` or the working folder); other names as they are."""
    reference, mark, options = reference.partition("?")
    if is_reference(reference):
        path, _, name = reference.rpartition(":")
        reference = f"{((folder or Path.cwd()) / Path(path).expanduser()).absolute()}:{name}"
    return f"{reference}{mark}{options}"


def load_reference(kind: str, reference: str) -> Any:
    """What ``PATH.py:NAME`` names, for a ``kind`` of part. Each file is imported once in a process.

    Only for references that a user of this process has given: importing a file runs it.

    Raises:
        UsageError: no such file or name, or the file cannot be imported.
    """
    path, _, name = absolute(reference).rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"{kind} '{reference}': there is no file {file}; expected PATH.py:NAME")
    module = f"headwater_own_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}.{file.stem}"
    return _load_name(kind, file, name, module, None)


class _HashedSource(SourceLoader):
    """Loads a module from the bytes that were hashed; the file may have changed since. No compiled file is written."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - one module each
        """The file, which tracebacks name."""
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        """The bytes of the file; there are no others, such as those of a compiled one.

        Raises:
            OSError: something else is asked for.
        """
        if path != str(self._path):
            raise FileNotFoundError(path)
        return self._content


def _load_name(kind: str, file: Path, name: str, module: str, content: bytes | None) -> Any:
    """The object called ``name`` in a file, which is imported as ``module``; ``content``: what the file holds."""
    reference = f"{file}:{name}"
    if module not in sys.modules:
        loader = None if content is None else _HashedSource(file, content)
        spec = importlib.util.spec_from_file_location(module, file, loader=loader)
        if spec is None or spec.loader is None:
            raise UsageError(f"{kind} '{reference}': {file} is no Python file")
        sys.modules[module] = importlib.util.module_from_spec(spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # it may import what is beside it
        try:
            spec.loader.exec_module(sys.modules[module])
        # Whatever the import of a user's file raises is that file's matter, and no reason for a traceback.
        except Exception as error:
            del sys.modules[module]
            reason = f"importing {file} failed: {type(error).__name__}: {error}"
            raise UsageError(f"{kind} '{reference}': {reason}") from error
    try:
        return getattr(sys.modules[module], name)
    except AttributeError as error:
        names = [known for known in vars(sys.modules[module]) if not known.startswith("_")]
        close = nearest(name, names)
        hint = f"did you mean '{close}'?" if close else f"it has {', '.join(names[:10]) or 'nothing'}"
        raise UsageError(f"{kind} '{reference}': {file} has no '{name}'; {hint}") from error
