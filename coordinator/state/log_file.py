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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import JsonValue

from edge_agent.core.locks import private_files
from edge_agent.core.logs import JsonLines
from edge_agent.core.storage import open_regular

NAME = "log.jsonl"
MOST_BYTES = 4 << 20
"""Of one of the two files: with those of a thousand agents, some ten thousand lines."""

HEAD_BYTES = 256
"""By which a reader knows a file again: its first line begins with a time in milliseconds."""

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


class _Position(NamedTuple):
    """How far a file was read. It is known by its inode and first bytes: the inode of a removed file is used again."""

    inode: int
    head: bytes
    offset: int

    def is_in(self, file: BinaryIO) -> bool:
        """Return whether this is the file, and it still has what was read."""
        status = os.fstat(file.fileno())
        file.seek(0)
        return (status.st_ino, file.read(len(self.head))) == (self.inode, self.head) and status.st_size >= self.offset


_STANDARD = frozenset({"time", "level", "logger", "event", "text", "traceback"})
"""Fields of a log line that are no values of its event."""


@dataclass(frozen=True)
class LogLine:
    """A line of the log."""

    time: str
    """When it was written (ISO 8601)."""

    level: str
    event: str
    """What happened, as a word; ``log``: the line does not say."""

    text: str
    """For people; empty: the values say it."""

    values: Mapping[str, JsonValue]
    """What was logged with the event, by name."""

    @property
    def run(self) -> str | None:
        """The run that it is about, by name or id; None: none is named."""
        run = self.values.get("run")
        return run if isinstance(run, str) else None


class LogReader:
    """Reads the lines of a state folder in order; `new` continues where it ended, also after one was renamed or cut."""

    def __init__(self, state: Path) -> None:
        self._path = state / NAME
        self._older_path = state / f"{NAME}.1"
        self._position: _Position | None = None
        self._older: _Position | None = None

    def new(self) -> list[LogLine]:
        """Return the complete lines that were not read before, without those that are no JSON objects."""
        lines: list[bytes] = []
        try:
            with open_regular(self._path) as file:
                if self._position is None or not self._position.is_in(file):
                    lines += self._rest_of_older()
                    self._position = None
                self._position, more = _read_on(file, self._position)
        except FileNotFoundError:
            return []
        return [line for line in map(_parse, lines + more) if line is not None]

    def _rest_of_older(self) -> list[bytes]:
        """Return the unread lines of the older file: all after two rotations, none where only the newer was cut."""
        lines: list[bytes] = []
        with contextlib.suppress(OSError), open_regular(self._older_path) as file:
            read_before = None
            for position in (self._position, self._older):
                if position is not None and position.is_in(file):
                    read_before = position
                    break
            self._older, lines = _read_on(file, read_before)
        return lines


def _read_on(file: BinaryIO, position: _Position | None) -> tuple[_Position, list[bytes]]:
    """Return the complete lines after a position, and the one after them."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    file.seek(0 if position is None else position.offset)
    *complete, rest = file.read().split(b"\n")
    return _Position(os.fstat(file.fileno()).st_ino, head, file.tell() - len(rest)), complete


def _parse(line: bytes) -> LogLine | None:
    """Return a line of the log; None for what is not a JSON object with a time."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("time"), str):
        return None
    return LogLine(
        time=body["time"],
        level=str(body.get("level")),
        event=str(body.get("event", "log")),
        text=str(body.get("text") or ""),
        values={name: value for name, value in body.items() if name not in _STANDARD},
    )
