"""Limits on how far a file may expand in memory: an archive of 2 MB may hold 1.9 GB of zeros, JSON many short lists."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..core.errors import DataError
from ..core.limits import available_bytes, limit_bytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SMALL_BYTES = 32 << 20
"""The size in bytes up to which every file may expand, however small it is."""

MOST_EXPANSION = 30
"""The most times its size to which a file may expand beyond `SMALL_BYTES`; recordings and photos take 2 to 10."""

_BLOCK_BYTES = 1 << 20

MEMORY_SHARE = 4
"""Data may take the free memory divided by this number, because preprocessing holds copies of them."""


def memory_budget_bytes() -> int:
    """Return how many bytes of memory the data of one file may take: a share of what this process can still have."""
    limits = [count for count in (available_bytes(), limit_bytes()) if count is not None]
    if not limits:  # no system that says so
        return sys.maxsize
    return min(limits) // MEMORY_SHARE


_MEMORY_OF_JSON = 8
"""Bytes of memory that Python takes for a byte of JSON of short numbers such as ``1.0, ``, while it is parsed."""

_MEMORY_OF_LIST = 150
"""Bytes that a list or an object takes beyond that, however short it is in the file."""

_MEMORY_OF_QUOTE = 20
"""Bytes that a text takes beyond that, for each of its two quotes."""


def json_memory_bytes(raw: bytes) -> int:
    """Return about how many bytes of memory it takes to parse JSON: ``[[],[]]`` takes 20 times its size and more."""
    lists = raw.count(b"[") + raw.count(b"{")
    return len(raw) * _MEMORY_OF_JSON + lists * _MEMORY_OF_LIST + raw.count(b'"') * _MEMORY_OF_QUOTE


def most_content_bytes(compressed_bytes: int) -> int:
    """Return how many bytes a compressed file of that size may hold."""
    by_size = max(SMALL_BYTES, MOST_EXPANSION * compressed_bytes)
    return min(by_size, memory_budget_bytes())


def check_expansion(path: Path, compressed_bytes: int, content_bytes: int, advice: str) -> None:
    """Return quietly where a compressed file may hold so many bytes.

    Raises:
        DataError: The content expands too far, or takes more memory than is available; ``advice`` ends the message.
    """
    most = most_content_bytes(compressed_bytes)
    if content_bytes > most:
        raise DataError(
            f"'{path}' has {compressed_bytes / 1e6:.1f} MB and would expand to {content_bytes / 1e6:.0f} MB; expected "
            f"at most {most / 1e6:.0f} MB, for its size and the free memory here; {advice}"
        )


def count_content(unpacked: BinaryIO, file: BinaryIO, path: Path, advice: str) -> None:
    """Unpack a compressed file once to its end, and keep nothing of it.

    Args:
        unpacked: Reads the content of ``file``.
        file: The compressed file at ``path``.
        path: Where it is, for the message.
        advice: What to do if it is meant so.

    Raises:
        DataError: The file expands beyond its limit.
        OSError: The file cannot be read or is damaged; EOFError if it is truncated.
    """
    most_bytes = most_content_bytes(os.fstat(file.fileno()).st_size)
    content_bytes = 0
    while part := unpacked.read(_BLOCK_BYTES):
        content_bytes += len(part)
        if content_bytes > most_bytes:
            raise _too_long(path, most_bytes, advice)


def _too_long(path: Path, most_bytes: int, advice: str) -> DataError:
    return DataError(
        f"'{path}' expands to more than {most_bytes / 1e6:.1f} MB, expected at most that for its size and the free "
        f"memory here; {advice}"
    )


class BoundedReader(io.RawIOBase):
    """The content of a compressed file while it is unpacked, which ends with an error where it is too long."""

    def __init__(self, unpacked: BinaryIO, file: BinaryIO, path: Path, advice: str) -> None:
        """Wrap ``unpacked``, which reads the compressed ``file`` at ``path``.

        ``advice`` ends messages about its size.
        """
        self._unpacked = unpacked
        self._file = file
        self._path = path
        self._advice = advice
        self._most_bytes = most_content_bytes(os.fstat(file.fileno()).st_size)
        self._read_bytes = 0

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Unpack the next bytes.

        Raises:
            DataError: The content is larger than the limit of this file.
        """
        view = memoryview(buffer).cast("B")
        part = self._unpacked.read(len(view))
        self._read_bytes += len(part)
        if self._read_bytes > self._most_bytes:
            raise _too_long(self._path, self._most_bytes, self._advice)
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Close the compressed file."""
        self._unpacked.close()
        self._file.close()
        super().close()
