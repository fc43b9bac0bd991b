"""The coordinator's own log in its state folder, as JSON lines and of bounded size: waits, faults, who came and left.

The journal has what a run is derived from; this has what people ask for afterwards. It is not needed to resume, is not
synced, and may be removed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from edge_agent.logs import JsonLines
from edge_agent.storage import private_files

NAME = "log.jsonl"
MOST_BYTES = 4 << 20
"""Of one of the two files: with those of a thousand agents, some ten thousand lines."""

_LOGGER = "coordinator"


class _Lines(RotatingFileHandler):
    """Writes lines that only this user can read; a full disk costs lines, and nothing else."""

    def _open(self) -> io.TextIOWrapper:
        with private_files():
            return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of the standard library
        """Drop the line: the status reports a full disk."""


@contextlib.contextmanager
def logging_to(folder: Path, name: str = _LOGGER) -> Iterator[None]:
    """Inside, what is logged from INFO on under this name also goes to ``log.jsonl`` in the folder."""
    handler = _Lines(folder / NAME, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", delay=True)
    handler.setLevel(logging.INFO)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


class LogReader:
    """Reads the lines of a state folder in order; `new` continues where it ended, also after the file was renamed."""

    def __init__(self, state: Path) -> None:
        self._path, self._older = state / NAME, state / f"{NAME}.1"
        self._inode, self._offset = 0, 0

    def new(self) -> list[dict[str, Any]]:
        """Complete lines that were not read before; those that are no JSON objects are left out."""
        lines: list[bytes] = []
        try:
            with self._path.open("rb") as file:
                inode = _inode(file)
                if inode != self._inode:
                    with contextlib.suppress(OSError), self._older.open("rb") as older:
                        is_known = self._inode == _inode(older)
                        if is_known or not self._inode:
                            older.seek(self._offset if is_known else 0)
                            lines += older.read().split(b"\n")[:-1]
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                *complete, rest = file.read().split(b"\n")
                self._offset = file.tell() - len(rest)
                lines += complete
        except FileNotFoundError:
            return []
        return [line for line in map(_object, lines) if line is not None]


def _inode(file: io.BufferedReader) -> int:
    return os.fstat(file.fileno()).st_ino


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) and isinstance(result.get("time"), str) else None
