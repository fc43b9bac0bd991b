"""The file that W&B writes in its offline mode, read again: a full disk makes its writer stop without an error.

The file is a log in LevelDB's format: seven bytes, then blocks of 32 KiB with the pieces of records. A piece has a
CRC-32 of its kind and its bytes, its length and its kind, and then its bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from edge_agent.core.errors import StateError
from edge_agent.core.storage import read_regular

MAGIC = b":W&B"
HEADER_BYTES = 7
BLOCK_BYTES = 1 << 15

_PIECE = struct.Struct("<IHB")
"""What stands before the bytes of a piece."""

_FULL = 1
_FIRST = 2
_MIDDLE = 3
_LAST = 4
"""Kinds of pieces: a whole record, or the place of the piece in its record."""


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, each a ``Record`` of W&B's protocol as bytes.

    Raises:
        OSError: The file cannot be read.
        StateError: It is no such file, or it is damaged or cut off at this place.
    """
    content = read_regular(path)
    if content[: len(MAGIC)] != MAGIC:
        raise StateError(f"{path}: the file does not begin with {MAGIC.decode()}; expected an offline run of W&B")
    record = b""
    position = HEADER_BYTES
    while position < len(content):
        # No piece begins in the last bytes of a block that are too few for one.
        room = BLOCK_BYTES - position % BLOCK_BYTES
        if room < _PIECE.size:
            position += room
            continue
        kind, data = _piece_at(content, position, path)
        position += _PIECE.size + len(data)
        record += data
        if kind in {_FULL, _LAST}:
            yield record
            record = b""
    if record:
        raise StateError(f"{path}: the file ends within a record")


def _piece_at(content: bytes, position: int, path: Path) -> tuple[int, bytes]:
    """Return the kind and the bytes of a piece.

    Raises:
        StateError: It is damaged or cut off.
    """
    begin = position + _PIECE.size
    if begin > len(content):
        raise StateError(f"{path}: the file ends within a record")
    checksum, length, kind = _PIECE.unpack_from(content, position)
    data = content[begin : begin + length]
    is_whole = len(data) == length and kind in {_FULL, _FIRST, _MIDDLE, _LAST}
    if not is_whole or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
        raise StateError(f"{path}: the file is damaged or cut off at byte {position} of {len(content)}")
    return kind, data
