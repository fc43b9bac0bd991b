"""Registries of methods, heads, encoders and data sources, which are found by the names of their files.

To add a member is to add its file. Only a file that holds several members, as those of encoders do, is listed with
their names. Other packages register members through an entry-point group.
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
    """The members of one kind, such as all heads: one file or folder of a package each.

    Args:
        kind: What a member is, for messages.
        packages: Packages whose files are members, but for ``base`` and files with private names.
        entry_points: The entry-point group by which other packages register members.
        besides: Names of files that are not members.
        families: File -> names of the members in it, for files that hold several.
        suffix: How the names of the files end; a member's name is without it. Then other files are no members, and a
            member may be called like a package or a module of the standard library, which no file may.
    """

    def __init__(
        self,
        kind: str,
        *packages: str,
        entry_points: str | None = None,
        besides: Iterable[str] = (),
        families: Mapping[str, Iterable[str]] | None = None,
        suffix: str = "",
    ) -> None:
        self.kind = kind
        self.packages = packages
        self.entry_points = entry_points
        self.suffix = suffix
        self.families: dict[str, str] = {}
        for file, members in (families or {}).items():
            self.families.update(dict.fromkeys(members, file))
        self.besides = frozenset({"base", *besides, *self.families.values()})
        self._extra: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names of all members, sorted, without importing any."""
        return tuple(sorted({*self._files, *self.families, *self._extra, *self._plugins}))

    def load(self, name: str) -> Any:
        """Return the member called ``name``: its module, or the object that a family or another package has under it.

        Raises:
            UnknownName: The registry has no such member; the message suggests the nearest name.
        """
        if name in self._extra:
            return self._extra[name]
        if name in self.families:
            module = importlib.import_module(f"{self.packages[0]}.{self.families[name]}")
            return getattr(module, name)
        if name in self._files:
            return importlib.import_module(f"{self._files[name]}.{name}{self.suffix}")
        if name in self._plugins:
            return self._plugins[name].load()
        raise UnknownName(self.kind, name, self.names())

    def load_class(self, name: str, base: type[T]) -> type[T]:
        """Return the class of a member: the only subclass of ``base`` in its module, or the registered class itself.

        Raises:
            UnknownName: The registry has no such member; the message suggests the nearest name.
            UsageError: The module has no subclass or several, or the subclass lacks an abstract method of ``base``.
        """
        member = self.load(name)
        classes = _subclasses_in(member, base)
        contract = f"{base.__module__}.{base.__qualname__}"
        if len(classes) != 1:
            names = ", ".join(candidate.__qualname__ for candidate in classes) or "none"
            raise UsageError(f"{self.kind} '{name}' ({member!r}): expected one subclass of {contract}, found {names}")
        only = classes[0]
        missing = sorted(getattr(only, "__abstractmethods__", ()))
        if missing:
            where = f"{only.__module__}.{only.__qualname__}"
            raise UsageError(
                f"{self.kind} '{name}' ({where}) has no {', '.join(missing)}; {contract} describes what to implement"
            )
        if self.plugged_in(name) and hasattr(base, "name"):
            # By default the name is that of the file, which the entry point of another package may not follow.
            only.name = name  # type: ignore[attr-defined]
        return only

    def add(self, name: str, member: Any) -> None:
        """Register an object or module for this process, as examples and tests do."""
        self._extra[name] = member

    def ships(self, name: str) -> bool:
        """Return whether Headwater or another installed package has a member of this name."""
        return name in self._files or name in self.families or name in self._plugins

    def plugged_in(self, name: str) -> str:
        """Return the module of the member that another package offers under this name.

        It is empty where no package does, or where `load` returns another member of this name.
        """
        is_hidden = name in self._extra or name in self._files or name in self.families
        if is_hidden or name not in self._plugins:
            return ""
        return self._plugins[name].module

    def is_shipped(self, name: str) -> bool:
        """Return whether the member that `load` returns is a file of Headwater, not plugged in or registered."""
        return name not in self._extra and (name in self._files or name in self.families)

    # Both are read once in a process: to look up what is installed takes milliseconds, on a small device tens of them,
    # and fitting a head by cross-validation asks for its class a hundred times.

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        """The package of each member that is a file or folder of its own."""
        packages = {}
        for package in self.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                is_member = not module.name.startswith("_") and module.name not in self.besides
                if is_member and module.name.endswith(self.suffix):
                    packages[module.name.removesuffix(self.suffix)] = package
        return packages

    @functools.cached_property
    def _plugins(self) -> dict[str, metadata.EntryPoint]:
        """The entry point of each member that another package offers."""
        if self.entry_points is None:
            return {}
        return {point.name: point for point in metadata.entry_points(group=self.entry_points)}


def _subclasses_in(member: Any, base: type[T]) -> list[type[T]]:
    """Return the public subclasses of ``base`` that a module defines, each once; or ``member``, if it is one."""
    if isinstance(member, ModuleType):
        public = [value for key, value in vars(member).items() if not key.startswith("_")]
        candidates = [value for value in public if getattr(value, "__module__", "") == member.__name__]
    else:
        candidates = [member]
    classes = [value for value in candidates if isinstance(value, type) and issubclass(value, base)]
    return list(dict.fromkeys(classes))


def is_reference(name: str) -> bool:
    """Return whether ``name`` has the form ``PATH.py:NAME``."""
    path, _, attribute = name.rpartition(":")
    return path.endswith(".py") and attribute.isidentifier()


def own_name(name: str) -> str:
    """Return the name of a user's class or function as a method or encoder, which are called in lower case."""
    return name.lower().strip("_<>")


@dataclass(frozen=True)
class PinnedFile:
    """A class in a user's file, with the hash of the file, so that no other content is ever loaded.

    Its text form is ``PATH.py:NAME#SHA256``. Only this file is compared, not the modules that it imports.

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
        """Pin ``PATH.py:NAME`` to the file's present content; relative paths count from ``folder``.

        Raises:
            UsageError: ``reference`` has another form, or the file cannot be read.
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
        """The name of the class as a method or encoder."""
        return own_name(self.name)

    def load(self, kind: str) -> Any:
        """Run the file, once in a process for each content, and return the class.

        Raises:
            UsageError: The file is missing or has changed, its import fails, or it does not define the name.
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
    """Return the content of a user's file.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        return read_regular(path)
    except OSError as error:
        raise UsageError(
            f"{kind} '{reference}': {path} cannot be read: {cause(error)}; expected PATH.py:NAME"
        ) from error


def absolute(reference: str, folder: Path | None = None) -> str:
    """Return ``PATH.py:NAME`` with an absolute path, counted from ``folder`` or the working folder.

    Options behind a question mark stay, and names of another form are returned as they are.
    """
    reference, mark, options = reference.partition("?")
    if is_reference(reference):
        path, _, name = reference.rpartition(":")
        reference = f"{((folder or Path.cwd()) / Path(path).expanduser()).absolute()}:{name}"
    return f"{reference}{mark}{options}"


def load_reference(kind: str, reference: str) -> Any:
    """Return the object that ``PATH.py:NAME`` names; a file is imported once, and again after its content has changed.

    It is only for references of this process's own user: importing a file runs it. ``kind`` is for messages.

    Raises:
        UsageError: The file does not exist, cannot be imported, or does not define the name.
    """
    path, _, name = absolute(reference).rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"{kind} '{reference}': there is no file {file}; expected PATH.py:NAME")
    module = f"headwater_own_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}.{file.stem}"
    content = _content(kind, reference, file)
    loaded = sys.modules.get(module)
    if loaded is not None and vars(loaded).get(_IMPORTED_CONTENT) != content:
        del sys.modules[module]
    return _load_name(kind, file, name, module, content)


class _ReadSource(SourceLoader):
    """A loader of a module from the very bytes that were read; the file may have changed since.

    No compiled file is read or written: its stamp does not tell two contents of one size in one second apart.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - one module each
        """Return the path of the file, which tracebacks show."""
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        """Return the bytes of the source file, the only one that exists for this loader.

        Raises:
            OSError: Another path is requested.
        """
        if path != str(self._path):
            raise FileNotFoundError(path)
        return self._content


_IMPORTED_CONTENT = "__headwater_imported_content__"
"""Name in a module of a user's file under which the bytes stand that it was imported from."""


def _import_file(where: str, file: Path, module: str, content: bytes) -> None:
    """Import a user's file as a module.

    Args:
        where: What the file is for, for messages.
        file: The file.
        module: The name of the module.
        content: The bytes of the file, which are imported.

    Raises:
        UsageError: The file cannot be imported; then there is no such module.
    """
    spec = importlib.util.spec_from_file_location(module, file, loader=_ReadSource(file, content))
    if spec is None or spec.loader is None:
        raise UsageError(f"{where}: {file} is not a Python file; expected PATH.py:NAME")
    sys.modules[module] = importlib.util.module_from_spec(spec)
    setattr(sys.modules[module], _IMPORTED_CONTENT, content)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # it may import what is beside it
    try:
        spec.loader.exec_module(sys.modules[module])
    # The import of a user's file may raise anything, and a script that reads its own options raises SystemExit. Both
    # become one message.
    except (Exception, SystemExit) as error:
        del sys.modules[module]
        raise UsageError(f"{where}: importing {file} failed: {type(error).__name__}: {error}") from error


def _load_name(kind: str, file: Path, name: str, module: str, content: bytes) -> Any:
    """Return an object of a user's file, which is imported unless a module of this name is there.

    Args:
        kind: What the object is, for messages.
        file: The file.
        name: The object's name in it.
        module: The name of the module, by which it is found again.
        content: The bytes of the file, which are imported.

    Raises:
        UsageError: The file cannot be imported, or has no such name.
    """
    reference = f"{file}:{name}"
    if module not in sys.modules:
        _import_file(f"{kind} '{reference}'", file, module, content)
    try:
        return getattr(sys.modules[module], name)
    except AttributeError as error:
        names = [public for public in vars(sys.modules[module]) if not public.startswith("_")]
        close = nearest(name, names)
        hint = f"did you mean '{close}'?" if close else f"it has {', '.join(names[:10]) or 'nothing'}"
        raise UsageError(f"{kind} '{reference}': {file} has no '{name}'; {hint}") from error
