"""Samples of sensors as they come: lines of numbers from a program, a pipe, a file or an MQTT topic.

A line holds one sample: a number for each channel, separated by commas, semicolons, tabs or spaces. Where the first
line has names, a column called ``time`` holds seconds. Nothing is guessed: a line that is no sample is an error, which
names the line's number.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from ...core.errors import DataError, SourceEnded, SourceLost, cause

MOST_LINE_BYTES = 64 << 10
"""The longest line: 1024 channels of 60 characters."""

_WAITING_LINES = 20_000
"""Lines that wait while windows are answered. A pipe makes its writer wait beyond that, so that nothing is lost."""

_TIME = "time"
_SEPARATORS = re.compile(r"[,;\t ]+")


@dataclass(frozen=True)
class Sample:
    """One sample of all channels.

    Attributes:
        values: The values, (channels,) float64, in the units of the sensor.
        at: Its time in seconds, where the stream has a column for it; None: it has none.
        line: The number of its line, from 1.
    """

    values: np.ndarray
    at: float | None
    line: int


class LineReader:
    """Turns lines into samples; the first line may have names of columns."""

    def __init__(self) -> None:
        self._time_column: int | None = None
        self._columns = 0
        self.number = 0
        """The number of lines so far."""

    def read(self, line: bytes) -> Sample | None:
        """Return the sample of a line; None for an empty one, and for names of columns in the first line.

        Raises:
            DataError: The line is too long, holds something else than numbers, or another number of them.
        """
        self.number += 1
        if len(line) > MOST_LINE_BYTES:
            raise DataError(f"line {self.number} has more than {MOST_LINE_BYTES} bytes; expected one sample in a line")
        fields = [field for field in _SEPARATORS.split(line.decode("utf-8", "replace").strip()) if field]
        if not fields:
            return None
        numbers = _numbers_of(fields)
        if self.number == 1 and not numbers:
            self._take_names([field.strip('"').lower() for field in fields])
            return None
        if len(numbers) < len(fields):
            raise DataError(f"line {self.number} holds {' '.join(fields)[:60]!r}; expected numbers alone")
        if self._columns and len(numbers) != self._columns:
            raise DataError(f"line {self.number} has {len(numbers)} values, the lines before {self._columns}")
        self._columns = len(numbers)
        at = None if self._time_column is None else numbers.pop(self._time_column)
        return Sample(np.array(numbers), at, self.number)

    def _take_names(self, names: list[str]) -> None:
        if _TIME in names:
            self._time_column = names.index(_TIME)
        self._columns = len(names)


def _numbers_of(fields: Sequence[str]) -> list[float]:
    """Return the fields that are finite numbers."""
    numbers = []
    for field in fields:
        with contextlib.suppress(ValueError):
            number = float(field)
            if math.isfinite(number):
                numbers.append(number)
    return numbers


class Lines(Protocol):
    """Where lines come from."""

    name: str
    """What it is called on the page and in metrics."""

    def open(self) -> None:
        """Begin to take lines.

        Raises:
            SourceLost: There are none.
        """

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; None where none comes within ``wait_s``.

        Raises:
            SourceEnded: There were no more than these.
            SourceLost: There are no more for now.
        """

    def close(self) -> None:
        """Take no more lines."""


class StreamLines:
    """Lines of standard input, of a pipe with a name, of a device such as a serial port, or of a file."""

    def __init__(self, path: Path | None, due: Callable[[bytes], float] | None = None) -> None:
        """Name a file, a pipe or a device; None: standard input.

        Args:
            path: Where the lines are.
            due: Returns after how many seconds since the first one a line is due, for recordings that are played as
                they were made; None: each at once.
        """
        self.name = "sensor" if path is None else f"sensor {path.name}"
        self._path = path
        self._due = due
        self._queue: queue.Queue[bytes | SourceLost] = queue.Queue(_WAITING_LINES)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to read in a thread: a pipe without a writer would make the program wait."""
        if self._thread is not None:
            raise SourceEnded("its lines were read")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; see `Lines.read`."""
        try:
            item = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(item, SourceLost):
            raise item
        return item

    def close(self) -> None:
        """Take no more lines; a thread that waits for some ends with the program."""
        self._stop.set()

    def _run(self) -> None:
        try:
            # A descriptor of its own: closing the file leaves standard input open.
            file = os.fdopen(os.dup(0), "rb") if self._path is None else self._path.open("rb")
            with file:
                self._take(file)
        except OSError as error:
            self._queue.put(SourceLost(f"it cannot be read: {cause(error)}"))
            return
        self._queue.put(SourceEnded("its lines were read"))

    def _take(self, file: BinaryIO) -> None:
        """Put lines into the queue, each when it is due."""
        began_at = time.monotonic()
        while not self._stop.is_set():
            line = file.readline(MOST_LINE_BYTES + 2)
            if not line:
                return
            if self._due is not None:
                self._stop.wait(max(0.0, began_at + self._due(line) - time.monotonic()))
            self._queue.put(line)


class PlayedAt:
    """When the lines of a recording are due if it is played at ``speed`` times the speed at which it was made."""

    def __init__(self, speed: float, rate: float | None) -> None:
        """Begin with the first line.

        Args:
            speed: How many times as fast.
            rate: Samples in a second, of recordings without a column for the time.
        """
        self._speed = speed
        self._rate = rate
        self._reader = LineReader()
        self._first: float | None = None
        self._count = 0

    def __call__(self, line: bytes) -> float:
        """Return after how many seconds a line is due; one that is no sample is due at once."""
        try:
            sample = self._reader.read(line)
        except DataError:
            return 0.0
        if sample is None:
            return 0.0
        self._count += 1
        at = sample.at
        if at is None:
            at = 0.0 if self._rate is None else (self._count - 1) / self._rate
        if self._first is None:
            self._first = at
        return (at - self._first) / self._speed
