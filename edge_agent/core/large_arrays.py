"""Arrays on disk: large files that are mapped instead of read, and scratch files for what is computed of them.

A mapped array is used as any other. Its pages are read when they are touched, and the system may drop them again at any
time. `release` drops them at once, so that a process that goes through a set holds a small part of it. A file must not
be changed while it is mapped: the values change with it, and the process ends where the file is cut.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from typing import BinaryIO

import numpy as np

_log = logging.getLogger(__name__)

LARGE_BYTES = 128 << 20
"""Arrays of so many bytes or more are kept on disk; smaller ones are faster in memory and hardly matter."""


_ROWS_AT_ONCE = 64
"""Rows of an array on disk that are copied at once."""


def map_array(file: BinaryIO, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """Return the array that begins at a byte of an open file, mapped and read-only; the file may be closed then.

    Args:
        file: The file, of which the array's bytes are there.
        dtype: The type of the values.
        shape: The shape; values are in C order.
        offset: The byte of the file where the array begins.
    """
    # A mapping begins at a multiple of the system's granularity.
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    length = math.prod(shape) * dtype.itemsize + skipped
    mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=offset - skipped)
    array: np.ndarray = np.ndarray(shape, dtype, buffer=mapping, offset=skipped)
    return array


def new_array(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return a new array: in memory, or, where it is large, in a file without a name that goes with the array.

    The file is in the folder for temporary files (``TMPDIR``). Where there is no room for it, the array is in memory.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if size_bytes < LARGE_BYTES:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile() as file:
            reserve(file, size_bytes)
            mapping = mmap.mmap(file.fileno(), size_bytes)
    except OSError as error:
        _log.warning(
            "not_on_disk mb=%d folder=%s reason=%s: kept in memory; TMPDIR names another folder",
            size_bytes >> 20,
            tempfile.gettempdir(),
            error.strerror,
        )
        return np.empty(shape, dtype)
    array: np.ndarray = np.ndarray(shape, dtype, buffer=mapping)
    return array


def reserve(file: BinaryIO, size_bytes: int) -> None:
    """Make a file so long, with its blocks taken from the disk: a full disk must be known before a page is written.

    Raises:
        OSError: There is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    else:  # pragma: no cover - Windows and macOS, which have no such call
        file.truncate(size_bytes)


def release(array: np.ndarray | memoryview) -> None:
    """Drop the pages of a large mapped array, or view, from this process; they are read again when they are touched.

    What was written stays in the file. An array in memory is left as it is.
    """
    mapping = _mapping_of(array)
    if mapping is not None and len(mapping) >= LARGE_BYTES and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)


def take_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a copy in memory of the rows (m,) of an array, in that order.

    Of an array on disk a few are copied at once: the system maps up to two megabytes around each byte that is touched,
    so that rows from all over a file would bring in all of it.
    """
    if not is_mapped(array) or array.nbytes < LARGE_BYTES:
        return np.asarray(array[rows])
    result: np.ndarray = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        result[begin : begin + _ROWS_AT_ONCE] = array[rows[begin : begin + _ROWS_AT_ONCE]]
        release(array)
    return result


def is_mapped(array: np.ndarray) -> bool:
    """Return whether an array is on disk, or a view of one that is."""
    return _mapping_of(array) is not None


def _mapping_of(array: object) -> mmap.mmap | None:
    """Return the mapping that holds the values of an array; None where memory does."""
    owner = array
    while owner is not None:
        if isinstance(owner, mmap.mmap):
            return owner
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return None
