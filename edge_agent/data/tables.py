"""``csv:FILE?label=activity&columns=ax,ay,az``: tables with a line of column names, of sensor recordings or of inputs.

FILE ends in ``.csv`` or ``.csv.gz``. It may be a folder of such files, each a recording, in sub-folders by class or
with a column of labels. Options: ``label`` (column of class names), ``target`` (column of numbers to predict, instead
of labels), ``columns`` (of values, in this order; default: all others), ``recording`` (column that tells recordings
apart), ``time`` (column of numbers or ISO dates; rows are sorted by it), ``gaps=cut`` (leave out rows with missing
values instead of refusing them), ``delimiter`` (default: found).

A row is one sample of a recording, which the task's input spec cuts into windows. No window reaches over a change of
recording or label, a row left out, or a time step more than three times the usual one. Recordings that a column or
files tell apart are held out whole; else the end of each stretch of one label is.

``row=window``: each row is a whole window, ``shape=channels,length`` (default: one channel). ``row=image``: each row is
an image, ``shape=height,width`` or ``height,width,channels`` (default: square and grey), 0..255 or 0..1.
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from csv import Error as CsvError
from csv import reader
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, Literal, TextIO, cast

import numpy as np
from pydantic import Field

from ..core.errors import DataError, cause
from ..core.storage import open_regular
from ..core.task import WindowInput
from .base import DataSource, Integers, Options, Raw, Strings, near
from .expansion import BoundedReader, count_content
from .images import files_by_class

SUFFIXES = (".csv", ".csv.gz")
_MAX_ROWS = 1 << 24
_MAX_LINE = 1 << 20
_MOST_COLUMNS = 1 << 16
"""Columns of one file: an image of 147 x 147 x 3 in each row has as many."""

_MOST_MISTAKES = 20
"""Mistakes that are listed; the others are like them."""

_LONGEST_NAME = 256
_LARGEST = float(np.finfo(np.float32).max)
"""Characters of a label or the name of a recording, of which arrays take the longest for each row."""

_LONGEST_STEP = 3.0
"""A time step longer than this many usual ones ends a recording."""


class CsvOptions(Options):
    """Which columns mean what."""

    label: str | None = Field(None, description="column of class names")
    target: str | None = Field(None, description="column of numbers to predict, instead of labels")
    columns: Strings = Field((), description="columns of values; default: all others")
    recording: str | None = Field(None, description="column that tells recordings apart; they are held out whole")
    time: str | None = Field(None, description="column of numbers or ISO dates by which rows are sorted")
    row: Literal["sample", "window", "image"] = Field("sample", description="what one row is")
    shape: Integers = Field((), description="of one input, where a row is a window or an image")
    gaps: Literal["refuse", "cut"] = Field("refuse", description="cut: leave out rows with missing values")
    delimiter: str | None = Field(None, min_length=1, max_length=1, description="between cells; default: found")


@dataclass(frozen=True)
class _Segment:
    """Rows without a break in between: values (time, channels), and numbers to predict and lines (time,) of a file."""

    values: np.ndarray
    targets: np.ndarray | None
    label: str
    recording: str
    file: str
    lines: np.ndarray

    def name_at(self, row: int) -> str:
        return f"{self.file} line {self.lines[row]}"


def read(where: str, options: CsvOptions) -> Raw:
    """Return the rows of all files, as recordings or as inputs.

    Raises:
        DataError: A column does not exist, or a cell holds something else; every mistake of a file is listed.
    """
    if options.label and options.target:
        raise DataError(f"csv: '{where}': label={options.label} and target={options.target}; expected one of them")
    root = Path(where).expanduser()
    paths = [root]
    classes = [""]
    names: tuple[str, ...] = (root.name,)
    skipped: tuple[str, ...] = ()
    reason = f"csv: '{where}': no column of labels is named (label=COLUMN)"
    if root.is_dir():
        files = files_by_class(root, "csv", SUFFIXES)
        paths = files.paths
        names = files.names
        reason = files.unlabelled
        skipped = files.skipped
        classes = [files.class_names[label] for label in files.labels] if files.class_names else [""] * len(paths)
    segments: list[_Segment] = []
    columns: tuple[str, ...] = ()
    total = 0
    for path, name, label in zip(paths, names, classes, strict=True):
        table = _table(path, options)
        total += len(table.lines)
        columns = columns or table.columns
        if {*table.columns} != {*columns}:
            raise DataError(
                f"csv: '{path}' has the columns of values {', '.join(table.columns)}, '{paths[0]}' has "
                f"{', '.join(columns)}; name those to use (columns=…)"
            )
        table.columns = columns  # in one order in all files
        those = _segments(path, name, table)
        segments += those if options.label else [replace(segment, label=label) for segment in those]
    if not segments:
        left = (
            f": gaps=cut leaves out all {total}, as values are missing in each; choose columns=NAME,NAME"
            if total
            else ""
        )
        raise DataError(f"csv: '{where}' has no rows of data{left}")
    is_labelled = options.target is None and bool(segments[0].label)
    class_names, labels = np.unique([segment.label for segment in segments], return_inverse=True)
    are_apart = len(paths) > 1 or options.recording is not None
    groups = np.unique([segment.recording for segment in segments], return_inverse=True)[1]
    raw = Raw(
        "recording",
        [segment.values for segment in segments],
        labels.astype(np.int64),
        tuple(map(str, class_names)) if is_labelled else (),
        groups if are_apart else np.arange(len(segments)),
        names=tuple(segment.name_at(0) for segment in segments),
        unlabelled="" if is_labelled else reason,
        are_whole=are_apart,
        targets=[np.asarray(segment.targets) for segment in segments] if options.target else None,
        name_at=lambda number, row: segments[number].name_at(row),
        skipped=skipped,
    )
    return raw if options.row == "sample" else _rows_as_inputs(raw, segments, options, where)


def _rows_as_inputs(raw: Raw, segments: Sequence[_Segment], options: CsvOptions, where: str) -> Raw:
    """Return the same data where each row is an input."""
    values = np.concatenate(raw.items)
    shape = options.shape
    wide = values.shape[1]
    if not shape:
        shape = (1, wide) if options.row == "window" else (math.isqrt(wide), math.isqrt(wide))
    if math.prod(shape) != wide or len(shape) not in ({2} if options.row == "window" else {2, 3}):
        form = "channels,length" if options.row == "window" else "height,width or shape=height,width,channels"
        given = ",".join(map(str, shape))
        raise DataError(f"csv: '{where}': {wide} columns of values are not of shape {given}; give shape={form}")
    items = values.reshape(len(values), *shape)
    if options.row == "image" and items.max() > 1 and np.array_equal(items, items.astype(np.uint8)):
        items = items.astype(np.uint8)
    counts = [len(rows) for rows in raw.items]
    natural = WindowInput(channels=shape[0], length=shape[1], stride=shape[1]) if options.row == "window" else None
    return replace(
        raw,
        kind="window" if options.row == "window" else "image",
        items=[*items],
        labels=np.repeat(raw.labels, counts),
        groups=np.repeat(np.asarray(raw.groups), counts) if raw.are_whole else None,
        natural=natural,
        names=tuple(segment.name_at(row) for segment in segments for row in range(len(segment.lines))),
        targets=None if raw.targets is None else [*np.concatenate(raw.targets)],
    )


def read_recording(path: Path) -> np.ndarray:
    """Return the recording (time, channels) in a file whose columns are all values.

    Raises:
        DataError: The file does not exist, or a cell is not a number.
    """
    try:
        segments = _segments(path, path.name, _table(path, CsvOptions()))
    except DataError as error:
        raise DataError(f"{error}; --data 'csv:{path}?columns=NAME,NAME' takes some of its columns") from error
    if not segments:
        raise DataError("has no rows of data")
    return segments[0].values


def _table(path: Path, options: CsvOptions) -> _Table:
    """Return the columns of a file.

    Raises:
        DataError: The file cannot be read; every mistake is listed.
    """
    try:
        with _opened(path) as file:
            table = _Table(file, options)
    except (OSError, EOFError, UnicodeDecodeError, CsvError) as error:
        raise DataError(f"csv: '{path}' cannot be read: {cause(error)}; expected a table in UTF-8") from error
    table.check(path)
    return table


def _segments(path: Path, name: str, table: _Table) -> list[_Segment]:
    """Return the rows of a file, sorted, and cut wherever a window must not reach over."""
    options = table.options
    count = len(table.lines)
    labels, recordings = (
        np.array(table.texts[column], np.str_) if column else np.full(count, "")
        for column in (options.label, options.recording)
    )
    times = np.array(table.numbers[options.time]) if options.time else np.arange(count, dtype=np.float64)
    order = np.lexsort((times, recordings))
    is_usable = table.is_usable()[order]
    labels = labels[order]
    recordings = recordings[order]
    times = times[order]
    same = recordings[1:] == recordings[:-1]
    breaks = ~same | (labels[1:] != labels[:-1]) | (is_usable[1:] != is_usable[:-1])
    if options.time and same.any():
        steps = np.diff(times)
        if (twice := same & (steps <= 0)).any():
            line = table.lines[order[1:][twice][0]]
            raise DataError(
                f"csv: '{path}': {twice.sum()} rows have the time of another one, first in line {line}; name the "
                "column that tells recordings apart (recording=COLUMN), or remove them"
            )
        breaks |= same & (steps > _LONGEST_STEP * np.median(steps[same]))
    values = np.stack([np.array(table.numbers[column]) for column in table.columns], axis=1)
    targets = np.array(table.numbers[options.target]) if options.target else None
    lines = np.array(table.lines, np.int32)
    return [
        _Segment(
            values[order[rows]].astype(np.float32),
            None if targets is None else targets[order[rows]],
            str(labels[rows[0]]),
            f"{name} {recordings[rows[0]]}",
            name,
            lines[order[rows]],
        )
        for rows in np.split(np.arange(count), np.flatnonzero(breaks) + 1)
        if len(rows) and is_usable[rows[0]]
    ]


class _Table:
    """The columns of a file that the options name, the line of each row, and everything that is wrong with them."""

    def __init__(self, file: TextIO, options: CsvOptions) -> None:
        lines = _lines(file)
        first = next(lines, "")
        delimiter = options.delimiter or max(",;\t", key=first.count)
        header = [cell.strip() for cell in next(reader([first], delimiter=delimiter), [])]
        column_count = len(header)
        header = header[:_MOST_COLUMNS]
        self.options = options
        self.header = header
        texts = [name for name in (options.label, options.recording) if name]
        singles = [name for name in (options.time, options.target) if name]
        self.columns = options.columns or tuple(name for name in header if name and name not in {*texts, *singles})
        named = [*dict.fromkeys((*self.columns, *singles, *texts))]
        counts = Counter(header)
        self.mistakes = [f"no column '{name}'{near(name, header)}" for name in named if name not in counts]
        self.mistakes += [f"{counts[name]} columns are named '{name}'" for name in named if counts[name] > 1]
        if column_count > _MOST_COLUMNS:
            self.mistakes = [f"{column_count} columns, expected at most {_MOST_COLUMNS}; exchange rows and columns"]
        elif header and all(map(_is_number, header)):
            self.mistakes = [f"its first line has numbers ({', '.join(header[:4])}), expected names of columns"]
        elif not self.columns:
            self.mistakes.append("no column of values is left")
        self.numbers = {name: array("d") for name in named if name not in texts}
        self.texts: dict[str, list[str]] = {name: [] for name in texts}
        self.lines = array("q")
        self._wrong: dict[tuple[str, str], tuple[int, int, str]] = {}
        if not self.mistakes:
            self._read(lines, delimiter)

    def _read(self, lines: Iterator[str], delimiter: str) -> None:
        rows = reader(lines, delimiter=delimiter)
        positions = {name: position for position, name in enumerate(self.header)}  # those that are read occur once
        numbers = [(name, positions[name], values.append) for name, values in self.numbers.items()]
        texts = [(name, positions[name], values.append) for name, values in self.texts.items()]
        for cells in rows:
            line = rows.line_num + 1
            if not cells:
                continue
            if len(cells) != len(self.header):
                self._note("", f"cells instead of {len(self.header)}", line, str(len(cells)))
                continue
            if len(self.lines) == _MAX_ROWS:
                self.mistakes.append(f"more than {_MAX_ROWS} rows; cut it into several files")
                return
            self.lines.append(line)
            for name, position, write in texts:
                write(cell := cells[position].strip())
                if len(cell) > _LONGEST_NAME:
                    self._note(name, f"longer than {_LONGEST_NAME} characters", line, cell)
            for name, position, append in numbers:
                cell = cells[position]
                try:
                    value = float(cell)
                except ValueError:
                    value = math.nan
                append(value if abs(value) <= _LARGEST and "_" not in cell else self._unusual(name, cell.strip(), line))

    def _unusual(self, name: str, cell: str, line: int) -> float:
        """The value of a cell that is no plain number: a date of the column of times, a missing value, or a mistake."""
        if _is_number(cell):
            if math.isfinite(float(cell)):  # Python reads 1_000, which no other program writes
                what = "no number (it has an underscore)" if "_" in cell else "beyond ±3.4e38, the range of 32 bits"
                self._note(name, what, line, cell)
            return math.nan
        if name == self.options.time and cell:
            try:
                moment = datetime.fromisoformat(cell.replace("Z", "+00:00"))
            except ValueError:
                self._note(name, "no number or date", line, cell)
                return math.nan
            return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
        if cell.lower() not in {"", "na", "n/a", "null", "none", "?"}:
            self._note(name, "no number", line, cell)
        return math.nan

    def _note(self, name: str, what: str, line: int, cell: str) -> None:
        count, first, shown = self._wrong.get((name, what), (0, line, cell))
        self._wrong[name, what] = count + 1, first, shown

    def is_usable(self) -> np.ndarray:
        """Return whether a row (n,) has all its values."""
        result = np.ones(len(self.lines), bool)
        for values in self.numbers.values():
            result &= np.isfinite(np.array(values))
        if self.options.label:
            result &= np.array(self.texts[self.options.label], np.str_) != ""
        return result

    def check(self, path: Path) -> None:
        """Check that nothing is wrong with the table.

        Raises:
            DataError: The table has mistakes; every one is listed.
        """
        mistakes = list(self.mistakes)
        for (name, what), (count, line, cell) in itertools.islice(self._wrong.items(), _MOST_MISTAKES):
            decimal = "; write decimals with a point" if _is_number(cell.replace(",", ".", 1)) and "," in cell else ""
            text = "; if it has the classes: label=" + name if self._is_text(name, count) else ""
            other = f"column '{name}': {count} cells are {what}, first '{cell[:40]}' in line {line}{decimal}{text}"
            rows = f"{count} rows have" if count > 1 else "1 row has"
            mistakes.append(other if name else f"{rows} {cell} {what}, first line {line}; correct or remove such lines")
        if self.options.gaps == "refuse" and not mistakes:
            mistakes += self._missing(self.numbers)
        elif self.options.time:
            mistakes += self._missing([self.options.time])
        if mistakes:
            has = "" if len(self.header) > 50 else f"; it has {', '.join(self.header) or 'no columns'}"
            raise DataError(f"csv: '{path}': {'; '.join(mistakes[:_MOST_MISTAKES])}{has}")

    def _is_text(self, name: str, count: int) -> bool:
        """Return whether a column whose name says nothing about it has no numbers at all: ``count`` cells are none."""
        named = {*self.options.columns, self.options.time, self.options.target}
        return not self.options.label and name not in named and count == len(self.lines)

    def _missing(self, columns: Iterable[str]) -> Iterator[str]:
        for name in columns:
            gaps = np.flatnonzero(~np.isfinite(np.array(self.numbers[name])))
            if len(gaps):
                line = self.lines[int(gaps[0])]
                advice = "; correct them" if name == self.options.time else "; gaps=cut leaves these rows out"
                yield f"column '{name}': {len(gaps)} values are missing or not finite, first in line {line}{advice}"
        if self.options.label and (
            empty := [row for row, text in enumerate(self.texts[self.options.label]) if not text]
        ):
            where = f"first in line {self.lines[empty[0]]}; gaps=cut leaves these rows out"
            yield f"column '{self.options.label}': {len(empty)} labels are missing, {where}"


def _opened(path: Path) -> TextIO:
    """Open a table, unpacked where it is compressed.

    Raises:
        DataError: The file expands beyond its limit.
        OSError: The file cannot be read.
    """
    file = open_regular(path)
    try:
        content = _unpacked(file, path) if path.suffix.lower() == ".gz" else file
    except BaseException:
        file.close()
        raise
    return io.TextIOWrapper(content, encoding="utf-8-sig", newline="")


def _unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    advice = "if it is meant so, unpack it first (gunzip)"
    # Its length is counted before a row is read: unpacking takes a small part of the time of reading cells.
    count_content(cast("BinaryIO", gzip.GzipFile(fileobj=file)), file, path, advice)
    file.seek(0)
    bounded = BoundedReader(cast("BinaryIO", gzip.GzipFile(fileobj=file)), file, path, advice)
    return cast("BinaryIO", io.BufferedReader(bounded))


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; one that never ends is cut."""
    return iter(lambda: file.readline(_MAX_LINE), "")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def inspect(where: str, options: CsvOptions) -> None:  # noqa: ARG001 - the columns are checked when they are read
    """Check that there are such files."""
    root = Path(where).expanduser()
    if root.is_dir():
        files_by_class(root, "csv", SUFFIXES)


csv = DataSource(CsvOptions, read, needs_path=True, inspect=inspect)
