"""A disk that becomes full at a chosen write below a folder, or a process that dies there.

Writes are what a full disk can refuse: new files and folders, bytes, syncs, renames, and entries of a journal. A
process can also die before it removes a file, writes deferred entries, or publishes a message.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from federation_harness import Killed

from coordinator.journal.sqlite import SqliteJournal


class FullDisk:
    """Counts writes below ``folder``; from the one with number ``full_at`` on (0: the first) all of them fail."""

    def __init__(self, folder: Path, full_at: int | None = None) -> None:
        self.folder = str(folder.resolve())
        self.full_at = full_at
        self.writes: list[str] = []
        """What was written, such as ``fsync blobs/3f…``; the ones that failed are last."""

        self.has_room = True

    def write(self, what: str, path: Any) -> None:
        """One write to ``path``.

        Raises:
            OSError: the disk is full.
        """
        where = str(Path(path).absolute())
        if not where.startswith(self.folder):
            return
        self.writes.append(f"{what} {where.removeprefix(self.folder)}")
        if self.full_at is not None and len(self.writes) == self.full_at + 1:
            self.has_room = False
        if not self.has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[FullDisk]:
        """Inside, writes below the folder are of this disk."""
        real_open = io.open
        real_write = SqliteJournal._write

        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return real_open(file, mode, *arguments, **options)
            self.write("open", file)
            if "b" not in mode:
                return real_open(file, mode, *arguments, **options)
            raw = _Raw(file, mode.replace("b", ""), lambda: self.write("write", file))
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

        def journaled(journal: SqliteJournal, *arguments: Any) -> Any:
            try:
                self.write("journal", journal.path)
            except OSError as error:
                raise sqlite3.OperationalError("database or disk is full") from error
            return real_write(journal, *arguments)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(io, "open", opened))
            stack.enter_context(mock.patch.object(SqliteJournal, "_write", journaled))
            for name, counted in self._calls().items():
                stack.enter_context(mock.patch.object(os, name, counted))
            yield self

    def _calls(self) -> dict[str, Callable[..., Any]]:
        real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "replace", "mkdir")}

        def os_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                self.write("open", path)
            return real["open"](path, flags, *arguments, **options)

        def on_file(name: str) -> Callable[..., Any]:
            def call(descriptor: int, *arguments: Any) -> Any:
                self.write(name, Path(f"/proc/self/fd/{descriptor}").readlink())
                return real[name](descriptor, *arguments)

            return call

        def replace(source: Any, target: Any) -> None:
            self.write("replace", target)
            real["replace"](source, target)

        def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
            if not Path(path).is_dir():
                self.write("mkdir", path)
            real["mkdir"](path, *arguments, **options)

        return {
            "open": os_open,
            "pwrite": on_file("pwrite"),
            "fsync": on_file("fsync"),
            "replace": replace,
            "mkdir": mkdir,
        }


class DyingProcess(FullDisk):
    """The process that works below ``folder`` dies at a point, and writes and removes nothing until it is `started`.

    What it has written stays, as after ``kill -9``: also temporary files, which no clean-up of its removes.
    """

    def write(self, what: str, path: Any) -> None:
        """One point of the process.

        Raises:
            Killed: it dies here, or is dead.
        """
        try:
            super().write(what, path)
        except OSError as error:
            raise Killed from error

    def publishes_with(self, transport: Any) -> None:
        """Count what is published by ``transport`` as points, too."""
        real = transport.publish

        def publish(*arguments: Any, **options: Any) -> None:
            self.write("publish", self.folder)
            real(*arguments, **options)

        transport.publish = publish

    def started(self) -> None:
        """It lives again, and dies no more."""
        self.has_room = True
        self.full_at = None

    @contextlib.contextmanager
    def mounted(self) -> Iterator[FullDisk]:
        """As of a disk, with points before deferred entries are written."""
        real = SqliteJournal.flush

        def flush(journal: SqliteJournal) -> None:
            if journal.has_deferred:
                self.write("flush", journal.path)
            real(journal)

        with super().mounted(), mock.patch.object(SqliteJournal, "flush", flush):
            yield self

    def _calls(self) -> dict[str, Callable[..., Any]]:
        real = {name: getattr(os, name) for name in ("unlink", "remove", "rmdir")}

        def removing(name: str) -> Callable[..., Any]:
            def call(path: Any, *, dir_fd: int | None = None) -> None:
                folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
                if os.path.lexists(folder / path):
                    self.write(name, folder / path)
                real[name](path, dir_fd=dir_fd)

            return call

        return {**super()._calls(), **{name: removing(name) for name in real}}


class _Raw(io.FileIO):
    """A file whose bytes go to a disk that may be full."""

    def __init__(self, file: Any, mode: str, before_write: Callable[[], None]) -> None:
        super().__init__(file, mode)
        self._before_write = before_write

    def write(self, data: Any) -> int | None:
        self._before_write()
        return super().write(data)
