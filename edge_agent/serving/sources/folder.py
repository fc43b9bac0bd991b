"""New files in a folder, each answered once. A camera's own program, a phone or a person puts them there; they stay."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...core.errors import SourceLost, cause
from ...core.formats import printable
from ...core.storage import read_regular
from .source import Frame

log = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
"""The largest file that is read."""

_SETTLED_S = 0.5
"""Seconds without a change after which a file is read; before that it may still be being written."""


class _FileVersion(NamedTuple):
    """A file at a certain time. A file that is written again has another version, and is a new input.

    Attributes:
        name: The name of the file in the folder.
        modified_ns: When it was last modified, in nanoseconds since 1970.
        size_bytes: Its size.
    """

    name: str
    modified_ns: int
    size_bytes: int


class FolderSource:
    """The files that are put into a folder from now on, oldest first."""

    needs_every_frame = True

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Create a source that is not open; files that are there when it is first opened are not answered."""
        self.name = f"folder {printable(folder.name)}"
        self._folder = folder
        self._now = now
        self._known: set[_FileVersion] | None = None
        """The files in the folder that are not answered any more; None before `open`."""

        self._pause = threading.Event()

    def open(self) -> None:
        """Remember the files that are there.

        Raises:
            SourceLost: The folder is missing, or cannot be read.
        """
        present = self._list_files()
        if self._known is None:
            self._known = set(present)

    def read(self, wait_s: float) -> Frame | None:
        """Return the oldest file that was not returned before; see `Source.read`."""
        if self._known is None:
            raise SourceLost("it is not open")
        files = self._list_files()
        # Files that are gone are forgotten, so that as many are remembered as there are in the folder.
        known = self._known.intersection(files)
        self._known = known
        for file in files:
            # The absolute value: the clock of the file's writer may be ahead.
            is_settled = abs(self._now() - file.modified_ns / 1e9) >= _SETTLED_S
            if file in known or not is_settled:
                continue
            known.add(file)
            # Others choose the names of files, so they are made printable: a name must not break a line of the log.
            name = printable(file.name)
            try:
                return Frame(read_regular(self._folder / file.name, _MOST_BYTES), name)
            except FileNotFoundError:  # it was removed meanwhile
                continue
            except OSError as error:
                log.warning("file_not_read source=%s file=%s reason=%s", self.name, name, cause(error))
        self._pause.wait(wait_s)
        return None

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _list_files(self) -> list[_FileVersion]:
        """Return the files in the folder, oldest first; hidden ones are left out.

        Raises:
            SourceLost: The folder is missing, or cannot be read.
        """
        files = []
        try:
            for path in self._folder.iterdir():
                if path.name.startswith(".") or not path.is_file():
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append(_FileVersion(path.name, status.st_mtime_ns, status.st_size))
        except OSError as error:
            raise SourceLost(f"the folder cannot be read: {cause(error)}") from error
        return sorted(files, key=lambda file: (file.modified_ns, file.name))
