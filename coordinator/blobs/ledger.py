"""What this coordinator has put into a store of others, on disk, so that what is not needed any more can be removed.

A name is noted before its file can be in the store, and taken out after the file was removed. So whatever a killed
coordinator leaves there is known to the next one, and nothing that others have put beside it ever is: the store is
never listed. A note that a power cut takes leaves a file in the store, and no more.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from edge_agent.core.errors import StateError, cause
from edge_agent.core.storage import read_regular, write_atomic

log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,200}")
"""The pattern of the names that are noted: no path, and nothing that a damaged file may hold by chance."""

MOST_LINES = 20_000
"""The most lines that are appended before the file is rewritten with the names that are left."""

_STORE = "store "
"""The beginning of the first line, which names the store."""


class StoreLedger:
    """The names of files in one store, in a file of which each line adds a name (``+``) or takes it out (``-``)."""

    def __init__(self, path: Path, store: str) -> None:
        """Read what an earlier process has noted.

        Args:
            path: The file; it is made if it is not there.
            store: The store. Names of another one, which was configured before, are left where they are.

        Raises:
            StateError: The file cannot be read or written.
        """
        self._path = path
        self._store = store
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._lines = 0
        """The lines that were appended since the file was last rewritten."""

        try:
            self._read()
            self._write()
        except OSError as error:
            raise StateError(f"{path}: the list of what is in {store} cannot be kept: {cause(error)}") from error

    def names(self) -> frozenset[str]:
        """Return the names of what is, or may be, in the store."""
        with self._lock:
            return frozenset(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Note names of files that may be in the store from now on.

        Raises:
            OSError: They cannot be noted; nothing may be put under them.
        """
        with self._lock:
            # Most lines are of names that were taken out since: the file is rewritten before it is long.
            if self._lines > MOST_LINES:
                self._write()
            new = [name for name in names if name not in self._names]
            self._append("+", new)
            self._names.update(new)

    def discard(self, name: str) -> None:
        """Note that a file is in the store no longer."""
        with self._lock:
            if name not in self._names:
                return
            self._names.discard(name)
            try:
                self._append("-", [name])
            except OSError as error:  # it is removed once more by the next process
                log.warning("store_not_noted path=%s reason=%s", self._path, cause(error))

    def _append(self, sign: str, names: Iterable[str]) -> None:
        lines = [f"{sign}{name}\n" for name in names]
        if not lines:
            return
        with self._path.open("a", encoding="ascii") as file:
            file.write("".join(lines))
        self._lines += len(lines)

    def _read(self) -> None:
        """Read the lines, the last of which may be torn.

        Raises:
            OSError: The file cannot be read.
        """
        try:
            text = read_regular(self._path).decode("ascii", "replace")
        except FileNotFoundError:
            return
        # What follows the last line feed was torn: nothing was put under that name.
        first, *lines, _ = text.split("\n")
        if first != _STORE + self._store:
            log.warning("store_changed names=%d: what is in the former store stays there", len(lines))
            return
        for line in lines:
            name = line[1:]
            if not _NAME.fullmatch(name):
                continue
            if line.startswith("+"):
                self._names.add(name)
            else:
                self._names.discard(name)

    def _write(self) -> None:
        """Rewrite the file without the names that were taken out.

        Raises:
            OSError: The file cannot be written.
        """
        lines = [_STORE + self._store, *(f"+{name}" for name in sorted(self._names)), ""]
        write_atomic(self._path, "\n".join(lines).encode("ascii", "replace"))
        self._lines = 0
