"""Index tables: which client has which row of the data, as other programs write it, checked and read as a partition.

A table has a line for each sample of a client: ``client``, ``row`` (from 0 on) and perhaps ``part``, which is train,
test or validation (default: train). It is a CSV file with a line of names, a Parquet file, or a JSON file: a list of
objects, or an object of columns. Rows of train and validation count in the training samples of the data; those of test
in the test part of the data where there is one, else in the same samples.

Samples for validation are neither trained nor tested on; `IndexTable.divide` makes a second partition that is evaluated
on them, to choose settings by.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.core.errors import ConfigError, DataError, cause, nearest
from edge_agent.core.storage import read_regular
from edge_agent.data import partition
from edge_agent.data.base import Users
from edge_agent.data.columns import import_pyarrow
from edge_agent.data.expansion import MEMORY_SHARE, json_memory_bytes, memory_budget_bytes
from edge_agent.data.partition import Division

from ..text import counted
from .users import client_names

log = logging.getLogger(__name__)

TABLE_SUFFIXES = (".csv", ".parquet")
"""How names of files end that are such tables; of ``.json`` files the content tells them from partitions."""

RULE = "table"
"""The rule of a partition that comes from a table."""

PARTS = ("train", "test", "validation")
_COLUMNS = ("client", "row", "part")
_MOST_BYTES = 1 << 30
_MEMORY_OF_CSV = 30
"""Bytes of memory that Python takes for a byte of a table such as ``ann,17,train``."""

_MEMORY_OF_ROW = 400
"""Bytes of memory that Python takes for a row of a Parquet file, which may take next to nothing there."""

_BLOCK_ROWS = 1024
"""Rows of a Parquet file that are unpacked at once: a text may be stored once for all of them."""

_LONGEST_NAME = 256
"""The most characters of a client's name."""

_BEGIN_OF_PARTITIONS = b'{"clients":'
"""The first bytes of partitions as they are saved, which may have many megabytes: they are not parsed to tell."""

_MOST_MISTAKES = 20
_SHOWN_LINES = 5
"""Lines that a mistake names."""


@dataclass(frozen=True)
class IndexTable:
    """The columns of a table, one entry for each of its lines."""

    path: Path
    clients: np.ndarray
    """Names of clients (n,), text."""

    rows: np.ndarray
    """Rows (n,) int64 of the data."""

    parts: np.ndarray
    """Positions (n,) int64 in `PARTS`."""

    sha256: str
    """Hash (hex) of the file."""

    first_line: int = 1
    """The number by which people know the first entry: 2 in CSV, whose first line has the names."""

    @property
    def has_validation(self) -> bool:
        """Whether samples are kept apart to choose settings by."""
        return bool((self.parts == PARTS.index("validation")).any())

    def divide(self, pools: partition.Pools, tested_part: str = "test") -> Division:
        """Return the partition of the pools that the table describes.

        Args:
            pools: All samples of the data.
            tested_part: The part that clients are evaluated on: ``test``, or ``validation``.

        Raises:
            ConfigError: Rows repeat or exceed, or clients have no training samples; all mistakes are listed.
        """
        test_pool = pools.train if pools.test is None or tested_part == "validation" else pools.test
        self._check(pools)
        # Validation samples are of the training pool, so that the partition then has this pool alone.
        mark = pools.mark if test_pool is pools.test else partition.Pool.of(pools.train.labels, None)
        clients, numbers = np.unique(self.clients, return_inverse=True)
        entries_of = Users(numbers, tuple(clients.tolist())).rows()
        names = client_names(entries_of)
        shares = {}
        for client, entries in entries_of.items():
            rows = self.rows[entries]
            parts = self.parts[entries]
            train = rows[parts == PARTS.index("train")]
            test = rows[parts == PARTS.index(tested_part)]
            shares[names[client]] = (train, test)
        self._warn_of_shared_rows()
        settings = {"table": self.path.name, "table_sha256": self.sha256, "tested_part": tested_part}
        return partition.divided(RULE, settings, mark, shares)

    def _check(self, pools: partition.Pools) -> None:
        """Check the rows of all clients.

        Raises:
            ConfigError: Rows repeat or exceed, or clients have no training samples; all mistakes are listed.
        """
        mistakes = _Mistakes(self.first_line)
        # 1. Rows lie in their pool.
        counts = np.full(len(PARTS), len(pools.train))
        if pools.test is not None:
            counts[PARTS.index("test")] = len(pools.test)
        for part, count in zip(range(len(PARTS)), counts.tolist(), strict=True):
            exceeding = np.flatnonzero((self.parts == part) & ((self.rows < 0) | (self.rows >= count)))
            if len(exceeding):
                values = ", ".join(map(str, self.rows[exceeding[:_SHOWN_LINES]]))
                mistakes.add(f"rows of part {PARTS[part]} beyond 0..{count - 1}: {values}", exceeding)
        # 2. No client has a row twice. Rows of two pools are different samples.
        is_test = (self.parts == PARTS.index("test")) if pools.test is not None else np.zeros(len(self.rows), bool)
        _, client_numbers = np.unique(self.clients, return_inverse=True)
        keys = np.stack([client_numbers, is_test.astype(np.int64), self.rows], axis=1)
        _, firsts = np.unique(keys, axis=0, return_index=True)
        repeated = np.setdiff1d(np.arange(len(self.rows)), firsts)
        if len(repeated):
            mistakes.add("rows that their client has already, in the same or another part", repeated)
        # 3. Every client can train.
        trains = set(self.clients[self.parts == PARTS.index("train")].tolist())
        idle = sorted(set(self.clients.tolist()) - trains)
        if idle:
            listed = ", ".join(idle[:_MOST_MISTAKES])
            mistakes.add(f"{counted(len(idle), 'client')} without training samples: {listed}", ())
        mistakes.raise_for(self.path)

    def _warn_of_shared_rows(self) -> None:
        """Log how many samples several clients train on."""
        rows = self.rows[self.parts == PARTS.index("train")]
        shared = len(rows) - len(np.unique(rows))
        if shared:
            log.warning("shared_rows table=%s count=%d: several clients train on one sample", self.path, shared)


@dataclass
class _Mistakes:
    """What is wrong in a table, with the lines in which it is."""

    first_line: int
    texts: list[str] = field(default_factory=list)

    def add(self, text: str, entries: Sequence[int] | np.ndarray) -> None:
        """Note a mistake; ``entries`` count from 0."""
        lines = [str(int(entry) + self.first_line) for entry in entries[:_SHOWN_LINES]]
        where = f" (line {', '.join(lines)}" if lines else ""
        if len(entries) > _SHOWN_LINES:
            where += f" and {len(entries) - _SHOWN_LINES} more"
        self.texts.append(f"{text}{where}{')' if where else ''}")

    def raise_for(self, path: Path) -> None:
        """Raise where there are mistakes.

        Raises:
            ConfigError: There are some; all are listed.
        """
        if self.texts:
            raise ConfigError(f"index table {path}", self.texts[:_MOST_MISTAKES])


def is_table(path: Path) -> bool:
    """Return whether a file holds an index table, and not a partition that was saved; False where it is not there."""
    if path.suffix.lower() in TABLE_SUFFIXES:
        return True
    try:
        raw = read_regular(path, _MOST_BYTES)
        if raw.startswith(_BEGIN_OF_PARTITIONS):
            return False
        if json_memory_bytes(raw) > _free_bytes():  # reading it as a table says so
            return True
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError):  # which reading it as a partition says better
        return False
    if isinstance(content, list):
        return True
    return isinstance(content, dict) and "pool" not in content and {"client", "row"} <= content.keys()


def read_table(path: Path) -> IndexTable:
    """Return the table in a file.

    Raises:
        DataError: The file cannot be read, or has no entries.
        ConfigError: Columns are missing, or cells hold something else; all mistakes are listed.
        MissingCapability: It is a Parquet file, and pyarrow is not installed.
    """
    readers = {".csv": _columns_of_csv, ".parquet": _columns_of_parquet}
    read_columns = readers.get(path.suffix.lower(), _columns_of_json)
    try:
        content = read_regular(path, _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise DataError(f"{path}: has more than {_MOST_BYTES >> 20} MiB, expected an index table; divide it")
        columns = read_columns(path, content)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise DataError(
            f"{path}: cannot be read as an index table: {cause(error)}; expected CSV, Parquet or JSON with the columns "
            "client, row and perhaps part"
        ) from error
    first_line = 2 if path.suffix.lower() == ".csv" else 1
    mistakes = _Mistakes(first_line)
    _check_columns(columns, mistakes)
    mistakes.raise_for(path)
    clients = columns["client"]
    if not clients:
        raise DataError(f"{path}: the table has no entries; expected a line for each sample of a client")
    parts = columns.get("part") or ["train"] * len(clients)
    values = _values_of(clients, columns["row"], parts, mistakes)
    mistakes.raise_for(path)
    return IndexTable(path, *values, sha256=hashlib.sha256(content).hexdigest(), first_line=first_line)


def division_for_validation(path: Path, pools: partition.Pools) -> Division | None:
    """Return the partition that evaluates clients on their samples for validation; None where the table has none.

    Raises:
        HeadwaterError: See `read_table` and `IndexTable.divide`.
    """
    table = read_table(path)
    return table.divide(pools, "validation") if table.has_validation else None


def _check_columns(columns: dict[str, list[Any]], mistakes: _Mistakes) -> None:
    """Note columns that are missing, unknown, or of different lengths."""
    for name in ("client", "row"):
        if name not in columns:
            close = nearest(name, columns)
            hint = f" (is '{close}' meant?)" if close else ""
            listed = ", ".join(map(str, columns)) or "none"
            mistakes.add(f"no column '{name}'{hint}; it has {listed}", ())
    lengths = {name: len(columns[name]) for name in _COLUMNS if name in columns}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        mistakes.add(f"columns of different lengths: {listed}", ())


def _values_of(
    clients: Iterable[Any], rows: Iterable[Any], parts: Iterable[Any], mistakes: _Mistakes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the columns as arrays (n,): names, rows and positions of parts; cells that hold none are noted."""
    names = [_name_in(client) for client in clients]
    numbers = [_number_in(row) for row in rows]
    positions = [_part_in(part) for part in parts]
    for values, problem in (
        (names, f"clients that are no names: expected text of at most {_LONGEST_NAME} characters, or whole numbers"),
        (numbers, "rows that are no whole numbers from 0 on"),
        (positions, f"unknown parts: expected {', '.join(PARTS)}"),
    ):
        wrong = [entry for entry, value in enumerate(values) if value is None]
        if wrong:
            mistakes.add(problem, wrong)
    if mistakes.texts:
        none = np.zeros(0, np.int64)
        return none, none, none
    return np.array(names), np.array(numbers, np.int64), np.array(positions, np.int64)


def _name_in(cell: Any) -> str | None:
    """Return the name of a client; None where a cell holds none."""
    if isinstance(cell, bool) or not isinstance(cell, str | int | np.integer):
        return None
    name = str(cell).strip()
    return name if 0 < len(name) <= _LONGEST_NAME else None


def _number_in(cell: Any) -> int | None:
    """Return a row; None where a cell holds none."""
    if isinstance(cell, bool):
        return None
    if isinstance(cell, int | np.integer):
        return int(cell) if 0 <= cell < 1 << 62 else None
    text = cell.strip() if isinstance(cell, str) else ""
    is_number = text.isascii() and text.isdigit() and len(text) < 19
    return int(text) if is_number else None


def _part_in(cell: Any) -> int | None:
    """Return the position of a part in `PARTS`; of an empty cell that of train; None where it is none of them."""
    if cell is None:
        return 0
    text = cell.strip().lower() if isinstance(cell, str) else "?"
    if not text:
        return 0
    return PARTS.index(text) if text in PARTS else None


# --- forms of files --------------------------------------------------------------------------------------------------


def _free_bytes() -> int:
    """Return the free memory in bytes."""
    return memory_budget_bytes() * MEMORY_SHARE


def _check_fits(path: Path, needed_bytes: int) -> None:
    """Check that a table can be read into memory.

    Raises:
        DataError: It cannot.
    """
    free_bytes = _free_bytes()
    if needed_bytes > free_bytes:
        raise DataError(
            f"{path}: takes about {needed_bytes / 1e6:.0f} MB of memory as an index table, and "
            f"{free_bytes / 1e6:.0f} MB are free here; name fewer rows"
        )


def _columns_of_csv(path: Path, content: bytes) -> dict[str, list[Any]]:
    """Return the columns of a CSV file, by the names in its first line."""
    _check_fits(path, len(content) * _MEMORY_OF_CSV)
    lines = content.decode("utf-8-sig").splitlines()
    first = lines[0] if lines else ""
    delimiter = max(",;\t", key=first.count)
    rows = csv.reader(lines, delimiter=delimiter)
    header = [name.strip() for name in next(rows, [])]
    if len(set(header)) < len(header):
        raise ConfigError(f"index table {path}", [f"columns with one name: {', '.join(header)}"])
    columns: dict[str, list[Any]] = {name: [] for name in header if name}
    mistakes = _Mistakes(first_line=2)
    for entry, cells in enumerate(_without_empty_end(rows)):
        if len(cells) != len(header):
            mistakes.add(f"{len(cells)} cells instead of {len(header)}", [entry])
            continue
        for name, cell in zip(header, cells, strict=True):
            if name:
                columns[name].append(cell)
    mistakes.raise_for(path)
    return columns


def _without_empty_end(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the rows up to the last one with cells; empty lines between two rows are rows without cells."""
    empty: list[list[str]] = []
    for cells in rows:
        if not cells:
            empty.append(cells)
            continue
        yield from empty
        empty.clear()
        yield cells


def _columns_of_parquet(path: Path, content: bytes) -> dict[str, list[Any]]:
    """Return the columns of a Parquet file."""
    pa = import_pyarrow("reading an index table in a Parquet file")
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {}
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        names = [name for name in _COLUMNS if name in file.schema_arrow.names]
        if not {"client", "row"} <= set(names):
            return {name: [] for name in file.schema_arrow.names}
        _check_fits(path, file.metadata.num_rows * _MEMORY_OF_ROW)
        for batch in file.iter_batches(_BLOCK_ROWS, columns=names, use_threads=False):
            for name, values in batch.to_pydict().items():
                columns.setdefault(name, []).extend(map(_without_long_text, values))
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read as a Parquet file: {cause(error)}; copy or save it again") from error
    return columns or {name: [] for name in names}


def _without_long_text(value: Any) -> Any:
    """Return the value of a cell; of a text that is too long for a name its begin, which is still too long."""
    return value[: _LONGEST_NAME + 1] if isinstance(value, str) else value


def _columns_of_json(path: Path, content: bytes) -> dict[str, list[Any]]:
    """Return the columns of a JSON file: a list of objects, or an object of lists."""
    _check_fits(path, json_memory_bytes(content))
    parsed = json.loads(content)
    if isinstance(parsed, dict):
        return _columns_of_object(path, parsed)
    if isinstance(parsed, list):
        return _columns_of_entries(path, parsed)
    raise ConfigError(f"index table {path}", ["expected a list of objects, or an object of lists"])


def _columns_of_object(path: Path, parsed: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the columns of an object of lists; other things in it are left out unless they have a column's name."""
    wrong = [name for name in _COLUMNS if name in parsed and not isinstance(parsed[name], list)]
    if wrong:
        raise ConfigError(f"index table {path}", [f"column '{name}' is no list" for name in wrong])
    return {name: values for name, values in parsed.items() if isinstance(values, list)}


def _columns_of_entries(path: Path, entries: list[Any]) -> dict[str, list[Any]]:
    """Return the columns of a list of objects; an object that lacks a column has None there."""
    mistakes = _Mistakes(first_line=1)
    wrong_entries = [number for number, entry in enumerate(entries) if not isinstance(entry, dict)]
    if wrong_entries:
        mistakes.add("entries that are no objects", wrong_entries)
    mistakes.raise_for(path)
    names = dict[str, None]()
    for entry in entries:
        names.update(dict.fromkeys(entry))
    return {name: [entry.get(name) for entry in entries] for name in names}
