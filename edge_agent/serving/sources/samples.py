"""Samples of sensors, as lines of numbers from a program, a pipe, a file or an MQTT topic.

A line holds one sample: a number for each channel, separated by commas, semicolons, tabs or spaces. The first line may
have names of columns; a column called ``time`` holds seconds. A line that cannot be parsed raises an error with its
number.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from ...core.errors import DataError, SourceEnded, SourceLost, cause

MOST_LINE_BYTES = 64 << 10
"""The longest line: more than 1,000 channels of 60 characters each."""

_WAITING_LINES = 20_000
"""Lines that may wait while windows are answered. Beyond that reading stops, and a pipe blocks its writer."""

_TIME = "time"
"""The column that holds the time of a sample, in seconds."""

_SEPARATORS = re.compile(r"[,;\t ]+")


@dataclass(frozen=True)
class Sample:
    """One sample of all channels.

    Attributes:
        values: The values, (channels,) float64, in the units of the sensor.
        at: Its time in seconds; None if the stream has no time column.
        line: The number of its line; the first line is 1.
    """

    values: np.ndarray
    at: float | None
    line: int


class LineReader:
    """Parses lines into samples; the first line may have names of columns."""

    def __init__(self) -> None:
        self._time_column: int | None = None
        self._columns = 0
        """Values in each line, with the time; 0: not known yet."""

        self.number = 0
        """How many lines were read so far."""

    def read(self, line: bytes) -> Sample | None:
        """Return the sample in a line; None for an empty line, and for names of columns in the first line.

        Raises:
            DataError: The line is too long, holds a field that is not a finite number, or has more or fewer values than
                the lines before.
        """
        self.number += 1
        if len(line) > MOST_LINE_BYTES:
            raise DataError(f"line {self.number} has more than {MOST_LINE_BYTES} bytes; expected one sample a line")
        fields = [field for field in _SEPARATORS.split(line.decode("utf-8", "replace").strip()) if field]
        if not fields:
            return None
        numbers = _numbers_of(fields)
        if self.number == 1 and not numbers:
            self._read_column_names([field.strip('"').lower() for field in fields])
            return None
        if len(numbers) < len(fields):
            raise DataError(f"line {self.number} holds {' '.join(fields)[:60]!r}; expected only numbers")
        if self._columns and len(numbers) != self._columns:
            raise DataError(f"line {self.number} has {len(numbers)} values, the lines before {self._columns}")
        self._columns = len(numbers)
        at = None if self._time_column is None else numbers.pop(self._time_column)
        return Sample(np.array(numbers), at, self.number)

    def _read_column_names(self, names: list[str]) -> None:
        """Remember the number of columns, and which one is the time."""
        if _TIME in names:
            self._time_column = names.index(_TIME)
        self._columns = len(names)


def _numbers_of(fields: Sequence[str]) -> list[float]:
    """Return those fields that are finite numbers, as numbers."""
    numbers = []
    for field in fields:
        with contextlib.suppress(ValueError):
            number = float(field)
            if math.isfinite(number):
                numbers.append(number)
    return numbers


class LineSource(Protocol):
    """A source of lines."""

    name: str
    """Its name on the page and in metrics."""

    def open(self) -> None:
        """Start to receive lines.

        Raises:
            SourceLost: The source is not there.
        """

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; None if none comes within ``wait_s`` seconds.

        Raises:
            SourceEnded: All lines were read, and no more will come.
            SourceLost: No more lines come until the source is opened again.
        """

    def close(self) -> None:
        """Stop receiving lines."""


class StreamLineSource:
    """Lines from standard input, a named pipe, a device such as a serial port, or a file."""

    def __init__(self, path: Path | None, schedule: Callable[[bytes], float] | None = None) -> None:
        """Create a source that is not open.

        Args:
            path: The file, pipe or device to read; None: standard input.
            schedule: Returns how many seconds after the start a line is due, for recordings that are replayed at a
                given speed; see `PlaybackSchedule`. None: each line is due at once.
        """
        self.name = "sensor" if path is None else f"sensor {path.name}"
        self._path = path
        self._schedule = schedule
        self._queue: queue.Queue[bytes | SourceLost] = queue.Queue(_WAITING_LINES)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_device = False
        """Whether the lines come from a device, such as a serial port, which may be plugged in again."""

    def open(self) -> None:
        """Start a thread that reads: opening a pipe blocks until it has a writer.

        Raises:
            SourceEnded: Standard input or a file has been read to its end.
        """
        if self._thread is not None and not self._is_device:
            raise SourceEnded("its lines were read")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def read(self, wait_s: float) -> bytes | None:
        """Return the next line; see `LineSource.read`."""
        try:
            item = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(item, SourceLost):
            raise item
        return item

    def close(self) -> None:
        """Stop receiving lines. A thread that is blocked by the system ends with the program."""
        self._stop.set()

    def _run(self) -> None:
        """Read all lines, and put the reason why they ended into the queue."""
        try:
            # The descriptor is duplicated, so that closing the file leaves standard input open.
            file = os.fdopen(os.dup(0), "rb") if self._path is None else self._path.open("rb")
            with file:
                is_character_device = stat.S_ISCHR(os.fstat(file.fileno()).st_mode)
                self._is_device = self._path is not None and is_character_device
                self._enqueue_lines(file)
        except OSError as error:
            self._queue.put(SourceLost(f"it cannot be read: {cause(error)}"))
            return
        # A device has no end: it was unplugged.
        self._queue.put(SourceLost("it was disconnected") if self._is_device else SourceEnded("its lines were read"))

    def _enqueue_lines(self, file: BinaryIO) -> None:
        """Put the lines into the queue, each when it is due."""
        started_at = time.monotonic()
        while not self._stop.is_set():
            # A longer line is cut here, and rejected by the reader because it exceeds the limit.
            line = file.readline(MOST_LINE_BYTES + 2)
            if not line:
                return
            if self._schedule is not None:
                due_at = started_at + self._schedule(line)
                self._stop.wait(max(0.0, due_at - time.monotonic()))
            self._queue.put(line)


class PlaybackSchedule:
    """When the lines of a recording are due if it is replayed at ``speed`` times real time."""

    def __init__(self, speed: float, rate: float | None) -> None:
        """Create a schedule that starts with the first line.

        Args:
            speed: Speed as a multiple of real time, above 0.
            rate: Samples per second, for recordings without a time column; None: every line is due at once.
        """
        self._speed = speed
        self._rate = rate
        self._reader = LineReader()
        self._first_at: float | None = None
        self._count = 0

    def __call__(self, line: bytes) -> float:
        """Return how many seconds after the first sample a line is due; a line without a sample is due at once."""
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
        if self._first_at is None:
            self._first_at = at
        return (at - self._first_at) / self._speed
