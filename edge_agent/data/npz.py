"""``npz:FILE?inputs=x&labels=y``: arrays in a NumPy archive, never unpickled.

Images: (n, h, w), (n, h, w, c) or (n, c, h, w), integers 0..255 or floats 0..1. Windows: (n, channels, length) together
with ``kind=window``. Options: ``inputs``, ``labels``, ``groups`` (names of arrays), ``class_names`` (name of an array
of text), ``kind=image|window``. ``edge-agent predict`` needs no array of labels;
one of decimal numbers holds targets of a numeric head. Large arrays that ``numpy.savez`` has written are mapped, not
read into memory; those of ``numpy.savez_compressed`` are read.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO, Literal

import numpy as np
from pydantic import Field

from ..core.errors import DataError, cause
from ..core.large_arrays import LARGE_BYTES, map_array, release
from ..core.reading import each
from ..core.storage import open_regular
from .base import DataSource, Options, Raw, labels_by_name
from .expansion import check_expansion

_BLOCK_BYTES = 16 << 20
"""Bytes of a mapped array that are looked at at once."""

_MOST_ARRAYS = 1000
"""Arrays of one archive: each one takes a quarter of a millisecond, whatever is in it."""


class NpzOptions(Options):
    """Names of the arrays to take."""

    inputs: str = Field("inputs", description="array with one input in each row")
    labels: str = Field("labels", description="array of integers or text")
    groups: str | None = Field(None, description="array of integers: samples taken together, in time order")
    class_names: str | None = Field(None, description="array of text; default: 'class_names' where there is one")
    kind: Literal["image", "window"] | None = Field(None, description="default: image for 8-bit or 4-D arrays")


def read(where: str, options: NpzOptions) -> Raw:
    """Return the arrays of one archive."""
    arrays = load_arrays(Path(where).expanduser())
    reason = _missing_labels(arrays, options, where)
    inputs = arrays[options.inputs]
    groups = arrays[options.groups] if options.groups else None
    class_names: tuple[str, ...] = ()
    labels = np.full(inputs.shape[:1], -1)
    targets = None
    values = arrays.get(options.labels)
    # Labels are classes, or numbers to predict; without any, the samples still serve for what needs none.
    if values is not None and values.dtype.kind == "f":
        reason = f"npz: '{where}' has numbers for labels ({values.dtype}), expected integers or text"
        if values.shape != labels.shape:
            raise DataError(
                f"npz: '{where}': targets of shape {list(values.shape)} for {len(labels)} inputs; expected one for each"
            )
        targets = [*values]
    elif values is not None:
        names = [str(name) for name in arrays.get(options.class_names or "class_names", ())]
        labels, class_names = labels_by_name(values, names, f"npz: {where}")
    raw = from_arrays(inputs, labels, class_names=class_names, groups=groups, kind=options.kind, where=f"npz: {where}")
    return replace(raw, unlabelled=reason, targets=targets)


def _missing_labels(arrays: Mapping[str, np.ndarray], options: NpzOptions, where: str) -> str:
    """Return why there are no labels, where an archive lacks the default array of these; empty where it has them.

    Raises:
        DataError: The archive lacks an array that was named, or that of the inputs.
    """
    needed = [options.inputs, options.labels, *filter(None, [options.groups, options.class_names])]
    missing = [name for name in needed if name not in arrays]
    if not missing:
        return ""
    reason = f"npz: '{where}' has no array {', '.join(missing)}; it has {', '.join(sorted(arrays))}"
    if missing == [options.labels] and "labels" not in options.model_fields_set:
        return reason
    settings = "&".join(f"{name}=ARRAY" for name in ("inputs", "labels") if getattr(options, name) in missing)
    if settings:
        raise DataError(f"{reason}; name those to take ({settings})")
    raise DataError(f"{reason}; name those to take")


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an archive.

    Raises:
        DataError: The file does not exist, is not an archive, holds pickled objects, or would take too much memory.
    """
    try:
        with open_regular(path) as file:
            _check_sizes(file, path)
            file.seek(0)
            mapped = _mapped_arrays(file, path)
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {
                    name: mapped[name] if name in mapped else archive[name] for name in each(archive.files, "arrays")
                }
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"npz: no file '{path}'; expected a NumPy archive written by numpy.savez") from error
    # zipfile, zlib and numpy each have their own ways of saying that an archive is damaged.
    except Exception as error:
        raise DataError(
            f"npz: '{path}' cannot be read: {cause(error)}; expected arrays of numbers or text, no objects"
        ) from error


def _mapped_arrays(file: BinaryIO, path: Path) -> dict[str, np.ndarray]:
    """Return the large arrays of an archive that are stored as they are, mapped; each is read once, to compare its sum.

    The archive's sizes have been checked.

    Raises:
        DataError: An array is damaged.
    """
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not _may_be_mapped(member):
                continue
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as stored:
                shape, is_fortran, dtype = _read_header(stored)
                head_bytes = stored.tell()
            # What is of another order or size than its header says, NumPy reads or refuses itself.
            is_whole = head_bytes + math.prod(shape) * dtype.itemsize == member.file_size
            if dtype.hasobject or is_fortran or not is_whole:
                continue
            # Behind the fixed part of a member's own header are its name and what programs add.
            file.seek(member.header_offset + 26)
            lengths = file.read(4)
            name_bytes = int.from_bytes(lengths[:2], "little")
            more_bytes = int.from_bytes(lengths[2:], "little")
            begin = member.header_offset + 30 + name_bytes + more_bytes
            content = map_array(file, np.dtype(np.uint8), (member.file_size,), begin)
            if _checksum(content) != member.CRC:
                raise DataError(
                    f"npz: '{path}': the array '{name}' is damaged: its checksum differs; copy or save it again"
                )
            arrays[name] = map_array(file, dtype, shape, begin + head_bytes)
    return arrays


def _may_be_mapped(member: zipfile.ZipInfo) -> bool:
    """Return whether a member of an archive is large, and is in the file as it is."""
    return member.compress_type == zipfile.ZIP_STORED and member.file_size >= LARGE_BYTES


def _checksum(content: np.ndarray) -> int:
    """Return the CRC-32 of bytes (n,) uint8 that may be on disk, some at once."""
    checksum = 0
    for begin in range(0, len(content), _BLOCK_BYTES):
        checksum = zlib.crc32(content[begin : begin + _BLOCK_BYTES].data, checksum)
        release(content)
    return checksum


def _check_sizes(file: BinaryIO, path: Path) -> None:
    """Look at the sizes of all arrays before one of them is read: NumPy takes memory for what a header promises.

    Raises:
        DataError: The arrays would take too much memory, or a header declares more than the file holds.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > _MOST_ARRAYS:
            raise DataError(
                f"npz: '{path}' has {len(members)} arrays, expected at most {_MOST_ARRAYS}: one with all inputs, and "
                "one with their labels; save it again"
            )
        # What is mapped takes no memory.
        content_bytes = sum(member.file_size for member in members if not _may_be_mapped(member))
        advice = "if it is meant so, save it by numpy.savez, which does not compress"
        check_expansion(path, os.fstat(file.fileno()).st_size, content_bytes, advice)
        for member in members:
            with archive.open(member) as unpacked:
                promised = _promised_bytes(unpacked)
            if promised > member.file_size:
                raise DataError(
                    f"npz: '{path}': the array '{member.filename}' promises {promised} bytes and has "
                    f"{member.file_size}; it is damaged, save it again"
                )


def _promised_bytes(file: IO[bytes]) -> int:
    """Return the bytes of the array that the header of a .npy file promises; 0 where it is no array of numbers."""
    shape, _, dtype = _read_header(file)
    return 0 if dtype.hasobject else math.prod(shape) * int(dtype.itemsize)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is Fortran's, and type of the array that follows the header of a .npy file."""
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call,unused-ignore]
    if version == (1, 0):
        header = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call,unused-ignore]
    else:
        header = np.lib.format.read_array_header_2_0(file)  # type: ignore[no-untyped-call,unused-ignore]
    shape, is_fortran, dtype = header
    return shape, is_fortran, dtype


def load_array(path: Path) -> np.ndarray:
    """Return the array in a ``.npy`` file.

    Raises:
        DataError: The file does not exist, is not a ``.npy`` file, or holds pickled objects.
    """
    try:
        with open_regular(path) as file:
            # NumPy takes memory for what a header promises, so that is compared with what is there.
            promised = _promised_bytes(file)
            if promised > os.fstat(file.fileno()).st_size:
                raise DataError(f"its header promises {promised} bytes, more than it has; it is damaged, save it again")
            file.seek(0)
            result = np.load(file, allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # as in `load_arrays`
        raise DataError(f"cannot be read: {cause(error)}; expected an array of numbers, no objects") from error
    if not isinstance(result, np.ndarray) or result.dtype.kind not in "iufb":
        raise DataError("holds no array of numbers")
    return result


def from_arrays(
    inputs: np.ndarray,
    labels: np.ndarray,
    *,
    class_names: tuple[str, ...],
    groups: np.ndarray | None,
    kind: Literal["image", "window"] | None,
    where: str,
) -> Raw:
    """Return raw samples from arrays: images (n, h, w) or (n, h, w, c), windows (n, channels, length), labels (n,).

    Raises:
        DataError: The arrays differ in length, or the inputs are neither images nor windows.
    """
    if inputs.ndim not in {3, 4} or inputs.dtype.kind not in "iufb":
        raise DataError(
            f"{where}: inputs are {inputs.dtype}{list(inputs.shape)}, expected numbers: images [n, height, width], "
            "[n, height, width, channels] or [n, channels, height, width], or windows [n, channels, length]; a single "
            "input is an array with n = 1"
        )
    if not len(inputs):
        raise DataError(f"{where}: no samples, expected at least one")
    if len(inputs) != len(labels) or (groups is not None and groups.shape != labels.shape):
        sizes = f"{len(inputs)} inputs, {len(labels)} labels" + ("" if groups is None else f", {len(groups)} groups")
        raise DataError(f"{where}: {sizes}; expected one label (and group) for each input")
    if kind is None:
        kind = "image" if inputs.ndim == 4 or inputs.dtype.kind != "f" else None
    if kind is None:
        raise DataError(
            f"{where}: floats {list(inputs.shape)} may be grey images or windows; say kind=image or kind=window"
        )
    # Of an array on disk the pages that were read are dropped now and then.
    return Raw(kind, inputs, labels, class_names, groups, release=lambda: release(inputs))  # type: ignore[arg-type]


SOURCE = DataSource(NpzOptions, read, needs_path=True)
