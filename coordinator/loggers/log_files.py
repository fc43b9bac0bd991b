"""Logs that are files: a folder for each run, files that grow by whole lines, and copies of the result's own files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

from edge_agent.core.storage import check_writable, naming, read_regular, sync, sync_folder, write_atomic

from .base import Logger
from .records import RunDescription, RunEnd


class LineFile:
    """A file that grows by whole lines, or records; each batch is on the disk when `append` returns.

    A batch is one write of the operating system: a process that is killed leaves all of it or nothing. What a full disk
    has taken of a batch is cut off when the batch is tried again.
    """

    def __init__(self, path: Path, first: bytes = b"") -> None:
        """Make the file with this content, or replace the one that is there.

        Raises:
            OSError: It cannot be written.
        """
        self.path = path
        write_atomic(path, first)
        self._size = len(first)

    def append(self, content: bytes) -> None:
        """Add lines.

        Raises:
            OSError: They cannot be written; the same content may be given again.
        """
        with naming(self.path), self.path.open("r+b", buffering=0) as file:
            file.truncate(self._size)
            file.seek(self._size)
            rest = memoryview(content)
            while rest:  # one write, but on a full disk, which takes a part before the next one raises the error
                rest = rest[file.write(rest) :]
            sync(file.fileno())
        self._size += len(content)


class FolderLogger(Logger):
    """A log that is a folder for each run. The target is the folder that these are in.

    A run that is resumed gives all rows again from the first, so the files are written again: they are the same as if
    it had not been stopped.
    """

    writes_files: ClassVar[bool] = True

    def __init__(self, target: str = "", folder: Path = Path()) -> None:
        """Only assign; the parameters are those of the contract."""
        super().__init__(target, folder)
        self.run_folder = self.root
        """The folder of the run, once it has begun."""

        self.run = RunDescription("", "", Path())
        """The run, once it has begun."""

    @classmethod
    def absolute_target(cls, target: str, folder: Path) -> str:
        """Return the folder with an absolute path; empty where none is named."""
        return str((folder / Path(target).expanduser()).absolute()) if target else ""

    def check(self) -> None:
        """Return quietly where the folder can be written.

        Raises:
            MissingCapability, UsageError: As in the contract.
        """
        super().check()
        check_writable(self.root)

    @property
    def root(self) -> Path:
        """The folder of the folders of runs."""
        if self.target:
            return Path(self.target).expanduser().absolute()
        return self.folder.absolute()

    @property
    def where(self) -> str:
        """The folder of the run, or that of all runs before one has begun."""
        return str(self.run_folder)

    def begin(self, run: RunDescription) -> None:
        """Make the folder of the run, and describe it in ``run.json``."""
        self.run_folder = self.root / run.path
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.run = run
        self._write_description()

    def end(self, end: RunEnd) -> None:
        """Add the final figures to ``run.json``, and copy what belongs to the result."""
        for name, path in end.artefacts.items():
            if path.exists():
                write_atomic(self.run_folder / name, read_regular(path))
        self._write_description(end)
        sync_folder(self.run_folder)

    def _write_description(self, end: RunEnd | None = None) -> None:
        """Write ``run.json``: name, tags, note and parameters, and how the run has ended."""
        run = self.run
        content = {
            "uid": run.uid,
            "name": run.name,
            "folder": os.fspath(run.folder),
            "params": dict(run.params),
            "tags": dict(run.tags),
            "note": run.note,
            "parent": None if run.parent is None else vars(run.parent),
            "status": "running" if end is None else end.status,
            "reason": "" if end is None else end.reason,
            "rounds_done": None if end is None else end.round,
            "figures": {} if end is None else dict(end.figures),
        }
        write_atomic(self.run_folder / "run.json", f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode())
