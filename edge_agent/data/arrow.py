"""``arrow:FOLDER?split=train``: a data set of Hugging Face, as its ``save_to_disk`` leaves it.

FOLDER is that of a ``Dataset``, or of a ``DatasetDict`` with a folder for each part. Names of classes are those of its
``ClassLabel``; images are decoded from their bytes, or from the files that their paths name. Options: ``split`` (one of
its parts, or ``all``; default: train, or the only one), ``input``, ``label`` (columns; default: the usual names, or the
only column of images and the only one of classes), ``group`` (column that tells recordings apart, which are held out
whole), ``user`` (column of the users who made the samples, for ``partition users``), ``kind=image|window|recording``
(of lists of numbers), ``shape`` (of flat lists), ``class_names``, ``n`` (a random part of that size), ``seed``.

Where there is a part for testing (or else validation), simulations test on it. Files are mapped, not read into memory.
Needs pyarrow, which the extra ``tables`` installs; the library ``datasets`` is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DataError, StateError, cause
from ..core.large_arrays import map_array, release
from ..core.storage import open_regular, read_json
from .columns import (
    ColumnOptions,
    choose_splits,
    mistakes_in_types,
    parts_among,
    table_source,
    without_extension,
)

_EXPECTED = "expected the folder that save_to_disk of Hugging Face's library has written"
_SUFFIX = ".arrow"


class _MappedTable:
    """The rows of some Arrow files, one after another, which stay on disk; see `columns.Table`."""

    def __init__(self, where: str, folder: Path, files: Sequence[Path]) -> None:
        import pyarrow as pa

        self.where = where
        self.folder = folder
        opened = [_open_file(where, file) for file in files]
        tables = [table for table, _ in opened]
        self._contents = [content for _, content in opened]
        mistakes = mistakes_in_types(
            ((file.name, table.schema) for file, table in zip(files[1:], tables[1:], strict=True)), tables[0].schema
        )
        if mistakes:
            raise DataError(f"{where}: its files differ from '{files[0].name}': {'; '.join(mistakes)}; save it again")
        self.schema = tables[0].schema
        self._table = pa.concat_tables([table.select(self.schema.names) for table in tables])
        self.rows = self._table.num_rows
        self._files = files
        self._counts = [table.num_rows for table in tables]

    def column(self, name: str) -> Any:
        """Return a column, whose bytes stay on disk until they are looked at.

        Raises:
            DataError: The column is damaged.
        """
        import pyarrow as pa

        column = without_extension(self._table.column(name))
        # Offsets in a damaged file would lead out of it.
        try:
            column.validate(full=True)
        except pa.ArrowException as error:
            raise DataError(
                f"{self.where}: column '{name}' is damaged ({cause(error)}); copy or save it again"
            ) from error
        return column

    def release(self) -> None:
        """Drop from memory what was read of the files."""
        for content in self._contents:
            release(content)

    def cells(self, name: str) -> Sequence[Any]:
        """Return the cells of a column, which stay on disk until they are asked for."""
        cells: Sequence[Any] = self.column(name)
        return cells

    def row_name(self, row: int) -> str:
        """Return the number of a row in its file, and the file where there are several."""
        for file, count in zip(self._files, self._counts, strict=True):
            if row < count:
                return f"row {row}" if len(self._files) == 1 else f"{file.parent.name}/{file.name} row {row}"
            row -= count
        return f"row {row}"


def _open_file(where: str, path: Path) -> tuple[Any, np.ndarray]:
    """Return the table in an Arrow file, and the mapped bytes (n,) uint8 of the file, which hold its values.

    Raises:
        DataError: It cannot be read, is cut, or is of another form.
    """
    import pyarrow as pa

    try:
        with open_regular(path) as file:
            content = map_array(file, np.dtype(np.uint8), (os.fstat(file.fileno()).st_size,), 0)
        source = pa.BufferReader(pa.py_buffer(content))
        # The library writes streams; other programs write the form for random access.
        try:
            return pa.ipc.open_file(source).read_all(), content
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all(), content
    # An empty file cannot be mapped, which is a ValueError.
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{where}: '{path}' cannot be read as an Arrow table: {cause(error)}; it is damaged or was not copied "
            "whole: copy or save it again"
        ) from error


def _splits_in(where: str) -> dict[str, Path]:
    """Return the folder of each part; of a set without parts that of the set itself, under an empty name.

    Raises:
        DataError: The folder is none of a saved data set.
    """
    root = Path(where).expanduser()
    if not root.is_dir():
        raise DataError(f"arrow: '{where}' is no folder; {_EXPECTED}")
    listed = _json_in(root / "dataset_dict.json")
    if listed is None:
        return {"": root}
    names = listed.get("splits")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"arrow: '{root / 'dataset_dict.json'}' lists no parts ('splits'); save the data set again")
    folders = {name: root / name for name in names}
    missing = [name for name, folder in folders.items() if not folder.is_dir()]
    if missing:
        raise DataError(f"arrow: '{where}' lacks the folders of its parts {', '.join(missing)}; copy it again")
    return folders


def _files_of(folder: Path) -> list[Path]:
    """Return the Arrow files of a data set's folder, in the order of its rows.

    Raises:
        DataError: Files are missing, or there are none.
    """
    state = _json_in(folder / "state.json")
    # 1. A folder without a description has the files that are in it.
    if state is None:
        files = sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)
        if not files:
            raise DataError(f"arrow: no state.json and no *{_SUFFIX} in '{folder}'; {_EXPECTED}")
        return files
    # 2. Others have those that the description lists.
    names = _names_listed_in(state)
    if not names:
        raise DataError(
            f"arrow: '{folder / 'state.json'}' lists no files in this folder ('_data_files'); save it again"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"arrow: '{folder}' lacks {', '.join(missing)}; copy the data set again")
    return [folder / name for name in names]


def _names_listed_in(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the files that the description of a data set lists; none where an entry is no such name."""
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return []
    names = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        # The description comes from others: a name with folders would lead out of this one.
        if not isinstance(name, str) or Path(name).name != name:
            return []
        names.append(name)
    return names


def _json_in(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None where there is no such file.

    Raises:
        DataError: The file holds something else.
    """
    try:
        return read_json(path)
    except StateError as error:
        raise DataError(f"arrow: '{path}' is damaged; {_EXPECTED}, copy or save it again") from error


def _open_table(where: str, options: ColumnOptions) -> _MappedTable:
    """Return the rows of the chosen parts.

    Raises:
        DataError: There is no such part, or its files cannot be read.
    """
    folders = _splits_in(where)
    name = f"arrow: '{where}'"
    if list(folders) == [""]:
        if options.split not in {None, "all"}:
            raise DataError(f"{name}: has no parts, and split={options.split} was given; leave it out")
        chosen: tuple[str, ...] = ("",)
    else:
        chosen = choose_splits(list(folders), options.split, name)
    files: list[Path] = []
    for split in chosen:
        files += _files_of(folders[split])
    return _MappedTable(name, Path(where).expanduser(), files)


def parts(where: str, options: ColumnOptions) -> tuple[str, str] | None:  # noqa: ARG001 - the folder alone says it
    """Return the names of the training and test part; None where there is one part alone."""
    return parts_among(list(_splits_in(where)))


SOURCE = table_source("arrow", _open_table, parts)
