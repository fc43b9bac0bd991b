"""``parquet:FILE?input=image&label=label``: tables in Parquet files, such as those of Hugging Face's data sets.

FILE may be a folder of ``.parquet`` files, also in sub-folders, or a pattern such as ``data/train-*.parquet``. Files
are read in the order of their names. Those whose names, or those of their sub-folders, begin with train, test,
validation, valid, val or dev are parts. Names of classes are those that Hugging Face's library writes into the file.
Options: ``split`` (a part, or ``all``; default: train, or the only one); all others are those of ``arrow``.

A few rows are in memory at once. Where there is a part for testing (or else validation), simulations test on it.
Needs pyarrow, which the extra ``tables`` installs.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import DataError, cause
from ..core.storage import open_regular
from .columns import (
    ColumnOptions,
    choose_splits,
    mistakes_in_types,
    parts_among,
    table_source,
    without_extension,
)
from .expansion import memory_budget_bytes

_SUFFIX = ".parquet"
_BLOCK_ROWS = 64
"""The most rows of inputs that are unpacked at once: a file of kilobytes may hold one large image a million times."""

_BYTES_OF_NUMBER = 8
"""The most bytes of a number; in the file it may take a thousandth of that."""

_BLOCK_LABELS = 1 << 16
"""Rows of a column of labels that are unpacked at once."""

_BLOCK_TEXTS = 1 << 10
"""Rows of a column of texts that are unpacked at once, for the reason of `_BLOCK_ROWS`."""

_BYTES_OF_VALUE = 8
"""The memory that a label takes."""

_PART = re.compile(r"(train|test|validation|valid|val|dev)(?![a-z0-9])")
_NO_PART = "data"
"""The part of files whose names say none."""


class _ParquetTable:
    """The rows of some Parquet files, one after another, which stay on disk; see `columns.Table`."""

    def __init__(self, where: str, folder: Path, files: Sequence[Path]) -> None:
        self.where = where
        self.folder = folder
        self._files = files
        self._opened = [_open_file(where, file) for file in files]
        first = self._opened[0].schema_arrow
        others = zip(files[1:], self._opened[1:], strict=True)
        mistakes = mistakes_in_types(((file.name, opened.schema_arrow) for file, opened in others), first)
        if mistakes:
            raise DataError(
                f"{where}: its files differ from '{files[0].name}': {'; '.join(mistakes)}; name those that belong "
                "together by a pattern"
            )
        self.schema = first
        counts = [opened.metadata.num_rows for opened in self._opened]
        self._begins: list[int] = [0, *itertools.accumulate(counts)]
        self.rows = self._begins[-1]

    def column(self, name: str) -> Any:
        """Return all rows of one column.

        Raises:
            DataError: It cannot be read, or its rows would not fit into memory.
        """
        import pyarrow as pa

        budget_bytes = memory_budget_bytes()
        most = budget_bytes // _BYTES_OF_VALUE
        if self.rows > most:
            raise DataError(
                f"{self.where}: states {self.rows} rows, and the free memory here is enough for the labels of {most}; "
                "name some of the files, by a pattern"
            )
        kind = self.schema.field(name).type
        is_fixed = pa.types.is_primitive(kind)
        chunks: list[Any] = []
        size_bytes = 0
        for number in range(len(self._files)):
            for block in self._blocks(number, name, 0, rows=_BLOCK_LABELS if is_fixed else _BLOCK_TEXTS):
                # A text that is stored once may be that of many rows: it is kept once, too.
                chunk = block if is_fixed or pa.types.is_dictionary(block.type) else block.dictionary_encode()
                size_bytes += chunk.nbytes
                if size_bytes > budget_bytes:
                    raise DataError(
                        f"{self.where}: column '{name}' takes more than {budget_bytes / 1e6:.0f} MB, which is what the "
                        "free memory here allows for it; name another column, or some of the files by a pattern"
                    )
                chunks.append(chunk)
        column_type = chunks[0].type if chunks else kind
        return without_extension(pa.chunked_array(chunks, column_type))

    def _blocks(self, number: int, name: str, first_group: int, *, rows: int) -> Iterator[Any]:
        """Yield a column of a file in blocks of at most so many rows, from the row group ``first_group`` on.

        Raises:
            DataError: The file is damaged.
        """
        import pyarrow as pa

        opened = self._opened[number]
        groups = list(range(first_group, opened.metadata.num_row_groups))
        try:
            for batch in opened.iter_batches(rows, row_groups=groups, columns=[name], use_threads=False):
                yield batch.column(0)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.where}: '{self._files[number].name}', column '{name}': {cause(error)}; the file is damaged or "
                "was not copied whole: copy it again"
            ) from error

    def cells(self, name: str) -> Sequence[Any]:
        """Return the cells of a column, of which a block is unpacked at once.

        Raises:
            DataError: A single row would not fit into memory.
        """
        block_rows = [self._choose_block_rows(number, name) for number in range(len(self._files))]
        return _Cells(self, name, block_rows)

    def _choose_block_rows(self, number: int, name: str) -> int:
        """Return how many rows of a column of inputs are unpacked at once: what one may hold, all of them may.

        Raises:
            DataError: A single row would not fit into memory.
        """
        budget_bytes = memory_budget_bytes()
        metadata = self._opened[number].metadata
        # 1. Where the type says how many numbers a row has, all rows are of that size.
        row_bytes = _numbers_in_row(self.schema.field(name).type) * _BYTES_OF_NUMBER
        largest_bytes = row_bytes
        # 2. Otherwise a row may hold all that is stored for a group of rows, and holds so much of it on average.
        if not row_bytes:
            for position in range(metadata.num_row_groups):
                group = metadata.row_group(position)
                row_bytes = max(row_bytes, group.total_byte_size // max(group.num_rows, 1))
                largest_bytes = max(largest_bytes, group.total_byte_size)
        if row_bytes > budget_bytes:
            raise DataError(
                f"{self.where}: '{self._files[number].name}' has rows of {row_bytes / 1e6:.0f} MB, and the free memory "
                f"here allows for {budget_bytes / 1e6:.0f} MB; save smaller inputs"
            )
        return min(max(budget_bytes // max(largest_bytes, 1), 1), _BLOCK_ROWS)

    def locate(self, row: int) -> tuple[int, int]:
        """Return the number of the file that a row is in, and the row in that file."""
        number = bisect.bisect_right(self._begins, row) - 1
        return number, row - self._begins[number]

    def blocks_from(self, number: int, name: str, row: int, block_rows: int) -> Iterator[tuple[int, Any]]:
        """Yield (first row, block) of a column of a file, from the row group on that holds ``row`` of it."""
        metadata = self._opened[number].metadata
        first_group = 0
        begin = 0
        while begin + metadata.row_group(first_group).num_rows <= row:
            begin += metadata.row_group(first_group).num_rows
            first_group += 1
        for block in self._blocks(number, name, first_group, rows=block_rows):
            yield begin, block
            begin += len(block)

    def release(self) -> None:
        """Do nothing: files are not mapped, and a block of rows is replaced by the next."""

    def row_name(self, row: int) -> str:
        """Return the number of a row in its file, and the file where there are several."""
        number, row_in_file = self.locate(row)
        return f"row {row_in_file}" if len(self._files) == 1 else f"{self._files[number].name} row {row_in_file}"


class _Cells(Sequence[Any]):
    """The cells of a column. Going through them in order unpacks each block once; others are looked for."""

    def __init__(self, table: _ParquetTable, name: str, block_rows: Sequence[int]) -> None:
        """Read a column of a table, in blocks of so many rows in each of its files."""
        self._table = table
        self._block_rows = block_rows
        self._rows = table.rows
        self._name = name
        self._file = -1
        self._blocks: Iterator[tuple[int, Any]] = iter(())
        self._begin = 0
        self._block: Any = ()

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        """Return a cell as a ``pyarrow.Scalar``; DataError where its file is damaged."""
        number, row = self._table.locate(index)
        if number != self._file or row < self._begin:
            self._file = number
            self._blocks = self._table.blocks_from(number, self._name, row, self._block_rows[number])
            self._begin = 0
            self._block = ()
        while row >= self._begin + len(self._block):
            following = next(self._blocks, None)
            if following is None:
                self._file = -1
                raise DataError("is not in its file, which holds fewer rows than it states; copy the file again")
            self._begin = following[0]
            self._block = _storage_of(following[1])
        return self._block[row - self._begin]


def _numbers_in_row(kind: Any) -> int:
    """Return how many numbers each row of a column of this type has; 0 where the type does not say it."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    count = 1
    while pa.types.is_fixed_size_list(kind):
        count *= kind.list_size
        kind = kind.value_type
    return count if pa.types.is_primitive(kind) else 0


def _storage_of(block: Any) -> Any:
    """Return an array as what an extension type stores."""
    return getattr(block, "storage", block)


def _open_file(where: str, path: Path) -> Any:
    """Return an open Parquet file; of its content only the description at its end is read.

    Raises:
        DataError: It is no such file, or is cut.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        open_regular(path).close()
        return pq.ParquetFile(path, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{where}: '{path}' cannot be read as a Parquet file: {cause(error)}; it is of another form or was not "
            "copied whole: copy or save it again"
        ) from error


def _files_at(where: str) -> list[Path]:
    """Return the files that a location stands for, by name.

    Raises:
        DataError: There are none.
    """
    root = Path(where).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        files = []
        for folder, names, leaves in os.walk(root):
            names[:] = sorted(name for name in names if not name.startswith("."))
            files += [Path(folder) / leaf for leaf in leaves if leaf.endswith(_SUFFIX) and not leaf.startswith(".")]
        expected = f"a folder with files that end in {_SUFFIX}"
    else:
        pattern = str(root.relative_to(root.anchor))
        files = [path for path in Path(root.anchor).glob(pattern) if path.is_file()]
        expected = "a file, a folder, or a pattern such as 'data/train-*.parquet'"
    if not files:
        raise DataError(f"parquet: no files at '{where}'; expected {expected}, check the path")
    return sorted(files)


def _splits_at(where: str) -> dict[str, list[Path]]:
    """Return the files of each part, whose names, or those of their sub-folders, begin with that of the part."""
    root = Path(where).expanduser()
    files_of: dict[str, list[Path]] = {}
    for file in _files_at(where):
        below = file.relative_to(root).parts if root.is_dir() else (file.name,)
        matches = filter(None, (_PART.match(name.lower()) for name in below))
        match = next(matches, None)
        files_of.setdefault(match[1] if match else _NO_PART, []).append(file)
    return files_of


def _open_table(where: str, options: ColumnOptions) -> _ParquetTable:
    """Return the rows of the chosen parts.

    Raises:
        DataError: There is no such part, or its files cannot be read.
    """
    files_of = _splits_at(where)
    name = f"parquet: '{where}'"
    files: list[Path] = []
    for split in choose_splits(list(files_of), options.split, name):
        files += files_of[split]
    root = Path(where).expanduser()
    return _ParquetTable(name, root if root.is_dir() else files[0].parent, files)


def parts(where: str, options: ColumnOptions) -> tuple[str, str] | None:  # noqa: ARG001 - the names of files say it
    """Return the names of the training and test part; None where there is one part alone."""
    return parts_among(list(_splits_at(where)))


SOURCE = table_source("parquet", _open_table, parts, takes_patterns=True)
