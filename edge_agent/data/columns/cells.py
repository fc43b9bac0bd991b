"""Cells of a column of inputs, each decoded to an image or an array when it is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import DataError, HeadwaterError, cause
from .kinds import is_list


class Cells(Sequence[Any]):
    """The cells of some rows as images or arrays, each decoded when it is read."""

    def __init__(self, cells: Sequence[Any], rows: np.ndarray, read: Callable[[Any], Any]) -> None:
        self._cells = cells
        self._rows = rows
        self._read = read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the item at ``index``; DataError where its cell holds none."""
        if isinstance(index, slice):
            return Cells(self._cells, self._rows[index], self._read)
        try:
            return self._read(self._cells[int(self._rows[index])])
        except HeadwaterError:
            raise
        # As `damage_as_data_error`; whoever asks for the item names it.
        except Exception as error:
            raise DataError(f"cannot be read: {cause(error)}; the file is damaged, copy or save it again") from error


def image_in(cell: Any, folder: Path) -> Any:
    """Return the image of a cell, as a Pillow image.

    Raises:
        DataError: The cell is empty, or what it holds cannot be read as an image.
    """
    from ..images import decode_image, decoded

    value = cell.as_py()
    path = None
    if isinstance(value, dict):  # Hugging Face's Image: the bytes, or where they are
        path = value.get("path")
        value = value.get("bytes")
    if isinstance(value, bytes):
        return decode_image(io.BytesIO(value))
    path = value if isinstance(value, str) else path
    if not path:
        raise DataError("holds no image: neither bytes nor a path")
    file = folder / path
    if not file.is_file():
        raise DataError(f"names the image '{path}', which is not there; expected a path from {folder}, or bytes")
    return decoded(file)


def array_in(cell: Any, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of a cell as an array with one axis for each depth of its lists.

    Args:
        cell: A ``pyarrow.ListScalar``.
        shape: The shape of a flat list; empty: that of the lists.

    Raises:
        DataError: The cell, a list or a number in it is empty, the lists have unequal lengths, or not so many numbers.
    """
    if not cell.is_valid:
        raise DataError("holds no input: the cell is empty")
    values = cell.values
    axes = [len(values)]
    while is_list(values.type):
        axes.append(_common_length(values))
        values = values.flatten()
    if values.null_count:
        raise DataError(f"has {values.null_count} empty numbers; fill them, or leave this row out")
    flat = np.asarray(values.to_numpy(zero_copy_only=False))
    if not flat.size:
        raise DataError("holds an empty list; expected numbers")
    expected = tuple(shape) or tuple(axes)
    if flat.size != np.prod(expected, dtype=np.int64):
        raise DataError(f"has {flat.size} numbers, expected {' x '.join(map(str, expected))}")
    return flat.reshape(expected)


def _common_length(lists: Any) -> int:
    """Return the length that all lists of an array have.

    Raises:
        DataError: A list is empty, or they have unequal lengths.
    """
    if lists.null_count:
        raise DataError("has an empty list in it; fill it, or leave this row out")
    lengths = np.unique(np.asarray(lists.value_lengths()))
    if len(lengths) > 1:
        raise DataError(f"has lists of {lengths[0]} to {lengths[-1]} numbers side by side; expected one length")
    return int(lengths[0]) if len(lengths) else 0
