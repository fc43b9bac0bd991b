"""Containers of tensors in fewer bytes, without loss: for sums, whose numbers have many bytes in common.

The first bytes of all eight-byte words come first, then the second ones and so on, which deflate takes well: the exact
sum of some updates has 16 bytes for each weight, and 6 when it is packed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from ..core.errors import TensorsError

_LENGTH_BYTES = 8
"""The bytes before the packed ones, which hold the length of what was packed."""

_WORD = 8
"""Bytes of a word."""

_LEVEL = 1
"""Deflate's level; higher ones take several times as long for a few percent."""


def pack(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the bytes of these parts in fewer bytes."""
    data = b"".join(parts)
    whole_bytes = len(data) // _WORD * _WORD
    planes = np.frombuffer(data, np.uint8, whole_bytes).reshape(-1, _WORD).T
    packer = zlib.compressobj(_LEVEL)
    packed = [len(data).to_bytes(_LENGTH_BYTES, "little")]
    packed += [packer.compress(plane.tobytes()) for plane in planes]
    packed += [packer.compress(data[whole_bytes:]), packer.flush()]
    return b"".join(packed)


def unpack(packed: bytes | memoryview, most_bytes: int) -> bytearray:
    """Return what `pack` has packed.

    Args:
        packed: The packed bytes.
        most_bytes: The most bytes that they may stand for; nothing is allocated for more.

    Raises:
        TensorsError: They stand for more, or are damaged.
    """
    view = memoryview(packed)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if len(view) < _LENGTH_BYTES or length > most_bytes:
        raise TensorsError(f"packed bytes that stand for {length} bytes; expected at most {most_bytes}")
    unpacker = zlib.decompressobj()
    try:
        flat = unpacker.decompress(view[_LENGTH_BYTES:], max(1, length))
        is_whole = len(flat) == length and not unpacker.decompress(unpacker.unconsumed_tail, 1) and unpacker.eof
    except zlib.error as error:
        raise TensorsError(f"packed bytes that are damaged: {error}") from error
    if not is_whole:
        raise TensorsError(f"packed bytes that do not stand for {length} bytes, as they say")
    whole_bytes = length // _WORD * _WORD
    data = bytearray(length)
    np.frombuffer(data, np.uint8, whole_bytes).reshape(-1, _WORD)[:] = (
        np.frombuffer(flat, np.uint8, whole_bytes).reshape(_WORD, -1).T
    )
    data[whole_bytes:] = flat[whole_bytes:]
    return data
