"""``csv:FILE?label=activity&columns=ax,ay,az``: tables with a line of column names, of sensor recordings or of inputs.

FILE ends in ``.csv`` or ``.csv.gz``. It may be a folder of such files, each a recording, in sub-folders by class or
with a column of labels. Options: ``label`` (column of class names), ``target`` (column of numbers to predict, instead
of labels), ``columns`` (of values, in this order; default: all others), ``recording`` (column that tells recordings
apart), ``time`` (column of numbers or ISO dates; rows are sorted by it), ``gaps=cut`` (leave out rows with missing
values instead of refusing them), ``delimiter`` (default: found).

A row is one sample of a recording, which the task's input spec cuts into windows. No window reaches over a change of
recording or label, a row that is left out, or a time step of more than three times the usual one. Where a column or
files tell recordings apart, whole recordings are held out; otherwise the end of each stretch of one label is.

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
from ..core.reading import each, each_line
from ..core.storage import open_regular
from ..core.task import WindowInput
from .base import DataSource, Options, Raw, Shape, Strings, near
from .expansion import BoundedReader, count_content
from .images import ClassFiles, files_by_class

SUFFIXES = (".csv", ".csv.gz")
_MAX_ROWS = 1 << 24
_MAX_LINE = 1 << 20
_MOST_COLUMNS = 1 << 16
"""Columns of one file: an image of 147 x 147 x 3 in each row has as many."""

_MOST_MISTAKES = 20
"""Mistakes that are listed; the others are like them."""

_LONGEST_NAME = 256
"""The most characters of a label or of the name of a recording; arrays take as many for each row as the longest has."""

_MOST_LISTED_COLUMNS = 50
"""The most columns of a file that a message lists."""

_MISSING = frozenset({"", "na", "n/a", "null", "none", "?"})
"""Cells that stand for a missing value, in lower case."""

_LARGEST = float(np.finfo(np.float32).max)
"""The largest value of a cell."""

_LONGEST_STEP = 3.0
"""A time step longer than this many usual ones ends a recording."""


class CsvOptions(Options):
    """The options of a table: the meaning of its columns."""

    label: str | None = Field(None, description="column of class names")
    target: str | None = Field(None, description="column of numbers to predict, instead of labels")
    columns: Strings = Field((), description="columns of values; default: all others")
    recording: str | None = Field(None, description="column that tells recordings apart; they are held out whole")
    time: str | None = Field(None, description="column of numbers or ISO dates by which rows are sorted")
    row: Literal["sample", "window", "image"] = Field("sample", description="what one row is")
    shape: Shape = Field((), description="of one input, where a row is a window or an image")
    gaps: Literal["refuse", "cut"] = Field("refuse", description="cut: leave out rows with missing values")
    delimiter: str | None = Field(None, min_length=1, max_length=1, description="between cells; default: found")


@dataclass(frozen=True)
class _Segment:
    """A stretch of rows without a break: values (time, channels), numbers to predict (time,), and lines (time,)."""

    values: np.ndarray
    targets: np.ndarray | None
    label: str
    recording: str
    file: str
    lines: np.ndarray

    def name_at(self, row: int) -> str:
        """Return the name of a row for people: its file and its line there."""
        return f"{self.file} line {self.lines[row]}"


def read(where: str, options: CsvOptions) -> Raw:
    """Return the rows of all files, as recordings or as inputs.

    Raises:
        DataError: A column does not exist, or a cell holds something else; every mistake of a file is listed.
    """
    if options.label and options.target:
        raise DataError(f"csv: '{where}': label={options.label} and target={options.target}; expected one of them")
    # A folder has a file of recordings, or several, for each class; in a single file a column may tell the classes.
    root = Path(where).expanduser()
    if root.is_dir():
        files = files_by_class(root, "csv", SUFFIXES)
    else:
        reason = f"csv: '{where}': no column of labels is named (label=COLUMN)"
        files = ClassFiles([root], np.full(1, -1), (), (root.name,), reason)
    segments = _segments_of_files(files, options, where)
    raw = _segments_as_recordings(segments, files, options)
    if options.row == "sample":
        return raw
    return _rows_as_inputs(raw, segments, options, where)


def _segments_as_recordings(segments: Sequence[_Segment], files: ClassFiles, options: CsvOptions) -> Raw:
    """Return stretches of rows as recordings, with the classes that occur in them.

    A table of numbers to predict has no classes, nor has one without a column of labels.
    """
    is_labelled = options.target is None and bool(segments[0].label)
    names, labels = np.unique([segment.label for segment in segments], return_inverse=True)
    class_names: tuple[str, ...] = ()
    if is_labelled:
        class_names = tuple(map(str, names))
    targets = None
    if options.target:
        targets = [np.asarray(segment.targets) for segment in segments]
    # Recordings are held out whole where the user tells them apart, by files or by a column; else by their ends.
    are_apart = len(files.paths) > 1 or options.recording is not None
    groups = np.arange(len(segments))
    if are_apart:
        groups = np.unique([segment.recording for segment in segments], return_inverse=True)[1]
    return Raw(
        "recording",
        [segment.values for segment in segments],
        labels.astype(np.int64),
        class_names,
        groups,
        names=tuple(segment.name_at(0) for segment in segments),
        unlabelled="" if is_labelled else files.unlabelled,
        are_whole=are_apart,
        targets=targets,
        name_at=lambda number, row: segments[number].name_at(row),
        skipped=files.skipped,
    )


def _segments_of_files(files: ClassFiles, options: CsvOptions, where: str) -> list[_Segment]:
    """Return the stretches of rows of all files, with the columns of values in one order.

    Raises:
        DataError: The files have different columns of values, or no usable rows.
    """
    segments: list[_Segment] = []
    columns: tuple[str, ...] = ()
    total = 0
    for path, name, label in each([*zip(files.paths, files.names, files.labels, strict=True)], "files"):
        table = _table(path, options)
        total += len(table.lines)
        columns = columns or table.columns
        if {*table.columns} != {*columns}:
            raise DataError(
                f"csv: '{path}' has the columns of values {', '.join(table.columns)}, '{files.paths[0]}' has "
                f"{', '.join(columns)}; name those to use (columns=…)"
            )
        table.columns = columns
        of_file = _segments(path, name, table)
        if not options.label:
            class_name = files.class_names[label] if files.class_names else ""
            of_file = [replace(segment, label=class_name) for segment in of_file]
        segments += of_file
    if segments:
        return segments
    if total:
        raise DataError(
            f"csv: '{where}' has no rows of data: gaps=cut leaves out all {total}, as values are missing in each; "
            "choose columns=NAME,NAME"
        )
    raise DataError(f"csv: '{where}' has no rows of data")


def _rows_as_inputs(raw: Raw, segments: Sequence[_Segment], options: CsvOptions, where: str) -> Raw:
    """Return the same data where each row is an input."""
    # 1. The inputs: the rows of all recordings, each in the shape of an input.
    values = np.concatenate(raw.items)
    shape = _shape_of_rows(values.shape[1], options, where)
    inputs = values.reshape(len(values), *shape)
    kind: Literal["window", "image"] = "image"
    natural = None
    if options.row == "window":
        kind = "window"
        natural = WindowInput(channels=shape[0], length=shape[1], stride=shape[1])
    elif _are_pixels(inputs):
        inputs = inputs.astype(np.uint8)
    # 2. What is known of a recording is known of each of its rows.
    counts = [len(rows) for rows in raw.items]
    names: list[str] = []
    for segment in segments:
        names += [segment.name_at(row) for row in range(len(segment.lines))]
    groups = None
    if raw.are_whole:
        groups = np.repeat(np.asarray(raw.groups), counts)
    targets = None
    if raw.targets is not None:
        targets = [*np.concatenate(raw.targets)]
    return replace(
        raw,
        kind=kind,
        items=[*inputs],
        labels=np.repeat(raw.labels, counts),
        groups=groups,
        natural=natural,
        names=tuple(names),
        targets=targets,
    )


def _are_pixels(values: np.ndarray) -> bool:
    """Return whether values are whole numbers 0..255, some of them above 1, and so pixels of 8 bits."""
    return bool(values.max() > 1) and np.array_equal(values, values.astype(np.uint8))


def _shape_of_rows(columns: int, options: CsvOptions, where: str) -> tuple[int, ...]:
    """Return the shape of a row as an input: that of the options, else one channel, or a square image.

    Raises:
        DataError: The columns are not as many as the shape has values.
    """
    # 1. What a row may be: the shape without an option, the numbers of axes, and how the option is written.
    if options.row == "window":
        shape: tuple[int, ...] = (1, columns)
        ranks = {2}
        form = "channels,length"
    else:
        side = math.isqrt(columns)
        shape = (side, side)
        ranks = {2, 3}
        form = "height,width or shape=height,width,channels"
    # 2. The shape that the options state has to have as many values as there are columns.
    if options.shape:
        shape = options.shape
    if math.prod(shape) != columns or len(shape) not in ranks:
        listed = ",".join(map(str, shape))
        raise DataError(f"csv: '{where}': {columns} columns of values are not of shape {listed}; give shape={form}")
    return shape


def read_recording(path: Path, *, has_options: bool = True) -> np.ndarray:
    """Return the recording (time, channels) float32 in a file whose columns are all values.

    Args:
        path: The file.
        has_options: Whether columns could be chosen by options instead, as on the command line; errors then say how.

    Raises:
        DataError: The file does not exist, or a cell is not a number.
    """
    try:
        segments = _segments(path, path.name, _table(path, CsvOptions(), has_options=has_options))
    except DataError as error:
        if not has_options:
            raise
        raise DataError(f"{error}; --data 'csv:{path}?columns=NAME,NAME' takes some of its columns") from error
    if not segments:
        raise DataError("has no rows of data")
    return segments[0].values


def _table(path: Path, options: CsvOptions, *, has_options: bool = True) -> _Table:
    """Return the columns of a file; ``has_options``: whether errors name the options that would help.

    Raises:
        DataError: The file cannot be read; every mistake is listed.
    """
    try:
        with _opened(path) as file:
            table = _Table(file, options, has_options=has_options, size_bytes=path.stat().st_size)
    except (OSError, EOFError, UnicodeDecodeError, CsvError) as error:
        raise DataError(f"csv: '{path}' cannot be read: {cause(error)}; expected a table in UTF-8") from error
    table.check(path)
    return table


def _segments(path: Path, name: str, table: _Table) -> list[_Segment]:
    """Return the rows of a file, sorted, and cut wherever a window must not reach over.

    Raises:
        DataError: Two rows of one recording have the same time.
    """
    options = table.options
    count = len(table.lines)
    labels = _texts_of(table, options.label)
    recordings = _texts_of(table, options.recording)
    times = np.arange(count, dtype=np.float64)
    if options.time:
        times = np.array(table.numbers[options.time])
    # 1. Recording after recording, each in the order of time.
    order = np.lexsort((times, recordings))
    is_usable = table.is_usable()[order]
    labels = labels[order]
    recordings = recordings[order]
    times = times[order]
    # 2. A stretch ends where another recording, another class or unusable rows begin, or time leaps.
    same = recordings[1:] == recordings[:-1]
    breaks = ~same | (labels[1:] != labels[:-1]) | (is_usable[1:] != is_usable[:-1])
    if options.time and same.any():
        steps = np.diff(times)
        repeated = same & (steps <= 0)
        if repeated.any():
            line = table.lines[order[1:][repeated][0]]
            raise DataError(
                f"csv: '{path}': {repeated.sum()} rows have the time of another one, first in line {line}; name the "
                "column that tells recordings apart (recording=COLUMN), or remove them"
            )
        breaks |= same & (steps > _LONGEST_STEP * np.median(steps[same]))
    # 3. The stretches of usable rows.
    values = np.stack([np.array(table.numbers[column]) for column in table.columns], axis=1)
    targets = None
    if options.target:
        targets = np.array(table.numbers[options.target])
    lines = np.array(table.lines, np.int32)
    segments: list[_Segment] = []
    for rows in np.split(np.arange(count), np.flatnonzero(breaks) + 1):
        if not len(rows) or not is_usable[rows[0]]:
            continue
        rows_in_file = order[rows]
        segments.append(
            _Segment(
                values=values[rows_in_file].astype(np.float32),
                targets=None if targets is None else targets[rows_in_file],
                label=str(labels[rows[0]]),
                recording=f"{name} {recordings[rows[0]]}",
                file=name,
                lines=lines[rows_in_file],
            )
        )
    return segments


def _texts_of(table: _Table, column: str | None) -> np.ndarray:
    """Return the texts (n,) of a column; empty ones where no column is named."""
    if not column:
        return np.full(len(table.lines), "")
    return np.array(table.texts[column], np.str_)


class _Table:
    """The columns of a file that the options name, the line of each row, and everything that is wrong with them."""

    def __init__(self, file: TextIO, options: CsvOptions, *, has_options: bool = True, size_bytes: int = 0) -> None:
        """Read a file that is open as text; mistakes are noted, and raised by `check`.

        ``has_options``: whether its sender could give options, so that advice may name them. ``size_bytes``: the size
        of the file on disk, for progress.
        """
        self._has_options = has_options
        # 1. The names of the columns, in the first line.
        lines = each_line(_lines(file), size_bytes)
        first = next(lines, "")
        delimiter = options.delimiter or max(",;\t", key=first.count)
        header = [cell.strip() for cell in next(reader([first], delimiter=delimiter), [])]
        column_count = len(header)
        header = header[:_MOST_COLUMNS]
        self.options = options
        self.header = header
        # 2. The columns to read: those of values are the stated ones, or all that have no other purpose.
        text_columns = [name for name in (options.label, options.recording) if name]
        single_columns = [name for name in (options.time, options.target) if name]
        has_purpose = {*text_columns, *single_columns}
        self.columns = options.columns or tuple(name for name in header if name and name not in has_purpose)
        named = [*dict.fromkeys((*self.columns, *single_columns, *text_columns))]
        self.mistakes = self._mistakes_in_header(named, column_count)
        # 3. Their cells.
        self.numbers = {name: array("d") for name in named if name not in text_columns}
        self.texts: dict[str, list[str]] = {name: [] for name in text_columns}
        self.lines = array("q")
        self._wrong: dict[tuple[str, str], tuple[int, int, str]] = {}
        if not self.mistakes:
            self._read(lines, delimiter)

    def _mistakes_in_header(self, named: Sequence[str], column_count: int) -> list[str]:
        """Return what is wrong with the first line: ``named`` are the columns to read, of ``column_count`` in all."""
        # 1. A first line that names no columns at all: more messages about it would not help.
        if column_count > _MOST_COLUMNS:
            return [f"{column_count} columns, expected at most {_MOST_COLUMNS}; exchange rows and columns"]
        has_numbers_alone = bool(self.header) and all(map(_is_number, self.header))
        if has_numbers_alone:
            return [f"its first line has numbers ({', '.join(self.header[:4])}), expected names of columns"]
        # 2. Names that do not tell one column: those of none come first, then those of several.
        counts = Counter(self.header)
        mistakes: list[str] = []
        ambiguous: list[str] = []
        for name in named:
            if name not in counts:
                mistakes.append(f"no column '{name}'{near(name, self.header)}")
            elif counts[name] > 1:
                ambiguous.append(f"{counts[name]} columns are named '{name}'")
        mistakes += ambiguous
        if not self.columns:
            mistakes.append("no column of values is left")
        return mistakes

    def _read(self, lines: Iterator[str], delimiter: str) -> None:
        """Read the rows, and note every cell that is not what its column should hold.

        Tables have millions of cells, so that the loop looks nothing up and calls nothing for an ordinary cell.
        """
        rows = reader(lines, delimiter=delimiter)
        positions = {name: position for position, name in enumerate(self.header)}  # those that are read occur once
        numbers = [(name, positions[name], values.append) for name, values in self.numbers.items()]
        texts = [(name, positions[name], values.append) for name, values in self.texts.items()]
        for cells in rows:
            line = rows.line_num + 1
            # 1. An empty line is no row; one of another number of cells cannot be told apart into columns.
            if not cells:
                continue
            if len(cells) != len(self.header):
                self._note("", f"cells instead of {len(self.header)}", line, str(len(cells)))
                continue
            if len(self.lines) == _MAX_ROWS:
                self.mistakes.append(f"more than {_MAX_ROWS} rows; cut it into several files")
                return
            self.lines.append(line)
            # 2. The cells of labels and recordings.
            for name, position, append_text in texts:
                text = cells[position].strip()
                append_text(text)
                if len(text) > _LONGEST_NAME:
                    self._note(name, f"longer than {_LONGEST_NAME} characters", line, text)
            # 3. The cells of values. Nearly all of them are plain numbers; only the others take the slow way.
            for name, position, append in numbers:
                cell = cells[position]
                try:
                    value = float(cell)
                except ValueError:
                    value = math.nan
                if not abs(value) <= _LARGEST or "_" in cell:
                    value = self._unusual(name, cell.strip(), line)
                append(value)

    def _unusual(self, name: str, cell: str, line: int) -> float:
        """Return the value of a cell that is not a plain number.

        A date in the column of times is a number of seconds since 1970. Anything else is NaN; a cell that does not
        stand for a missing value is noted as a mistake.
        """
        if _is_number(cell):
            self._note_unusual_number(name, cell, line)
            return math.nan
        if name == self.options.time and cell:
            seconds = _seconds_of_date(cell)
            if math.isnan(seconds):
                self._note(name, "no number or date", line, cell)
            return seconds
        if cell.lower() not in _MISSING:
            self._note(name, "no number", line, cell)
        return math.nan

    def _note_unusual_number(self, name: str, cell: str, line: int) -> None:
        """Note what is wrong with a number that is none of a table; infinities and NaN are missing values."""
        if not math.isfinite(float(cell)):
            return
        if "_" in cell:  # Python reads 1_000, which no other program writes
            self._note(name, "no number (it has an underscore)", line, cell)
        else:
            self._note(name, "beyond ±3.4e38, the range of 32 bits", line, cell)

    def _note(self, name: str, mistake: str, line: int, cell: str) -> None:
        """Count a mistake of this kind in a column; the first one is kept with its line and cell.

        Args:
            name: The column; empty: the mistake is one of whole rows.
            mistake: The kind of the mistake, as `_describe_cells` names it.
            line: The line of the file.
            cell: The content of the cell.
        """
        count, first_line, first_cell = self._wrong.get((name, mistake), (0, line, cell))
        self._wrong[name, mistake] = count + 1, first_line, first_cell

    def is_usable(self) -> np.ndarray:
        """Return whether each row has all its values, and its label where the table has labels, (n,) bool."""
        is_whole = np.ones(len(self.lines), bool)
        for values in self.numbers.values():
            is_whole &= np.isfinite(np.array(values))
        if self.options.label:
            is_whole &= np.array(self.texts[self.options.label], np.str_) != ""
        return is_whole

    def check(self, path: Path) -> None:
        """Check that nothing is wrong with the table.

        Raises:
            DataError: The table has mistakes; every one is listed.
        """
        # 1. Mistakes in the first line, then those in rows and cells.
        mistakes = list(self.mistakes)
        for (name, mistake), (count, line, cell) in itertools.islice(self._wrong.items(), _MOST_MISTAKES):
            if name:
                mistakes.append(self._describe_cells(name, mistake, count, line, cell))
            else:
                mistakes.append(_describe_rows(mistake, count, line, cell))
        # 2. Missing values, which may be cells that were noted already. Rows are sorted by time, so none may lack that.
        if self.options.gaps == "refuse" and not mistakes:
            mistakes += self._missing(self.numbers)
        elif self.options.time:
            mistakes += self._missing([self.options.time])
        if not mistakes:
            return
        columns = ""
        if len(self.header) <= _MOST_LISTED_COLUMNS:
            columns = f"; it has {', '.join(self.header) or 'no columns'}"
        raise DataError(f"csv: '{path}': {'; '.join(mistakes[:_MOST_MISTAKES])}{columns}")

    def _describe_cells(self, name: str, mistake: str, count: int, line: int, cell: str) -> str:
        """Return a mistake of ``count`` cells of a column, of which ``cell`` in ``line`` is the first, with a hint."""
        hint = ""
        if "," in cell and _is_number(cell.replace(",", ".", 1)):
            hint += "; write decimals with a point"
        if self._has_options and self._is_text(name, count):
            hint += f"; if it has the classes: label={name}"
        return f"column '{name}': {count} cells are {mistake}, first '{cell[:40]}' in line {line}{hint}"

    def _is_text(self, name: str, count: int) -> bool:
        """Return whether a column may be that of labels, which no option has named: none of its cells is a number.

        Args:
            name: The column.
            count: How many of its cells are no numbers.
        """
        if self.options.label:
            return False
        named = {*self.options.columns, self.options.time, self.options.target}
        return name not in named and count == len(self.lines)

    def _missing(self, columns: Iterable[str]) -> Iterator[str]:
        """Yield a mistake for each of these columns with missing values, and for missing labels."""
        for name in columns:
            gaps = np.flatnonzero(~np.isfinite(np.array(self.numbers[name])))
            if not len(gaps):
                continue
            line = self.lines[int(gaps[0])]
            can_be_cut = self._has_options and name != self.options.time
            advice = "gaps=cut leaves these rows out" if can_be_cut else "correct them"
            yield f"column '{name}': {len(gaps)} values are missing or not finite, first in line {line}; {advice}"
        label = self.options.label
        if not label:
            return
        empty_rows = [row for row, text in enumerate(self.texts[label]) if not text]
        if empty_rows:
            line = self.lines[empty_rows[0]]
            advice = "gaps=cut leaves these rows out"
            yield f"column '{label}': {len(empty_rows)} labels are missing, first in line {line}; {advice}"


def _describe_rows(mistake: str, count: int, line: int, cell: str) -> str:
    """Return a mistake of ``count`` rows; the first one is in ``line``, and ``cell`` says how many cells it has."""
    rows = "1 row has"
    if count > 1:
        rows = f"{count} rows have"
    return f"{rows} {cell} {mistake}, first line {line}; correct or remove such lines"


def _seconds_of_date(cell: str) -> float:
    """Return the seconds since 1970 of an ISO date, which is in UTC where it states no zone; NaN where it is none."""
    try:
        moment = datetime.fromisoformat(cell.replace("Z", "+00:00"))
    except ValueError:
        return math.nan
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()


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
    """Return the content of a compressed file, which stops where it expands beyond its limit."""
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
    """Return whether Python reads a cell as a number, also as an infinite one or none."""
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
