"""New files in a folder, each once: what a camera's own program, a phone or a person puts there. They stay there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...core.errors import SourceLost, cause
from ...core.storage import read_regular
from ...wire.messages.fields import printable
from .source import Frame

log = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
_SETTLED_S = 0.5
"""For so long a file has not changed when it is read: one that is being copied is not whole yet."""

_MOST_KNOWN = 100_000
"""Files that are remembered; of a folder with more, the oldest are forgotten, which are not looked at again either."""

Mark = tuple[str, int, int]
"""The name of a file, and the time and size of its last change: what is written anew is a new input."""


class FolderSource:
    """The files of a folder that come from now on, oldest first."""

    are_all_wanted = True

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Name a folder; what is in it when it is opened for the first time does not count."""
        self.name = f"folder {printable(folder.name)}"
        self._folder = folder
        self._now = now
        self._known: dict[Mark, None] | None = None
        self._waits = threading.Event()

    def open(self) -> None:
        """Look what is there.

        Raises:
            SourceLost: The folder is not there, or cannot be read.
        """
        present = self._present()
        if self._known is None:
            self._known = dict.fromkeys(present)

    def read(self, wait_s: float) -> Frame | None:
        """Return the oldest file that has not been returned; see `Source.read`."""
        known = self._known
        if known is None:
            raise SourceLost("it is not open")
        for mark in self._present():
            is_settled = abs(self._now() - mark[1] / 1e9) >= _SETTLED_S
            if mark in known or not is_settled:
                continue
            known[mark] = None
            while len(known) > _MOST_KNOWN:
                del known[next(iter(known))]
            name = printable(mark[0])  # whoever puts files here names them: it must not break a line of the log
            try:
                return Frame(read_regular(self._folder / mark[0], _MOST_BYTES), name)
            except FileNotFoundError:  # it was removed meanwhile
                continue
            except OSError as error:
                log.warning("file_not_read source=%s file=%s reason=%s", self.name, name, cause(error))
        self._waits.wait(wait_s)
        return None

    def close(self) -> None:
        """Do nothing: nothing of the folder is open."""

    def _present(self) -> list[Mark]:
        """Return the marks of the files that are there, oldest first; hidden ones do not count.

        Raises:
            SourceLost: The folder is not there, or cannot be read.
        """
        marks = []
        try:
            for path in self._folder.iterdir():
                if path.name.startswith(".") or not path.is_file():
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    marks.append((path.name, status.st_mtime_ns, status.st_size))
        except OSError as error:
            raise SourceLost(f"the folder cannot be read: {cause(error)}") from error
        return sorted(marks, key=lambda mark: (mark[1], mark[0]))
