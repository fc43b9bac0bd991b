"""``idx:DIR?split=train``: MNIST, Fashion-MNIST and others in their four idx files, packed or not.

Options: ``split=train|test|all``, ``n`` (a random part of that size), ``seed``, ``class_names=a,b,c`` (default: the
digits of the labels). Large files that are not packed are mapped, not read into memory.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
from pydantic import Field

from ..core.errors import DataError, cause
from ..core.large_arrays import LARGE_BYTES, map_array, release
from ..core.storage import open_regular
from .base import DataSource, PartOptions, Raw, Strings, labels_by_name

MAX_BYTES = 1 << 30
_STEMS = {"train": ("train",), "test": ("t10k", "test"), "all": ("train", "t10k", "test")}


class IdxOptions(PartOptions):
    """Options of a folder of idx files."""

    split: Literal["train", "test", "all"] = "train"
    class_names: Strings = Field((), description="names of the labels 0, 1, 2 …")


def read(where: str, options: IdxOptions) -> Raw:
    """Return the images and labels of one split."""
    folder = Path(where).expanduser()
    parts = []
    for stem in _STEMS[options.split]:
        paths = _find(folder, f"{stem}-images", 3), _find(folder, f"{stem}-labels", 1)
        if paths[0] is not None and paths[1] is not None:
            pixels = read_idx(paths[0], 3)
            digits = read_idx(paths[1], 1)
            if len(pixels) != len(digits):
                counts = f"{len(pixels)} images in '{paths[0].name}', {len(digits)} labels in '{paths[1].name}'"
                raise DataError(f"idx: {counts}")
            parts.append((pixels, digits))
    if not parts:
        raise DataError(
            f"idx: no {options.split} files in '{where}'; expected {_STEMS[options.split][0]}-images-idx3-ubyte and "
            f"{_STEMS[options.split][0]}-labels-idx1-ubyte, with or without .gz"
        )
    images, values = parts[0]
    if len(parts) > 1:
        images, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if options.n is not None and options.n < len(values):
        rows = np.random.default_rng(options.seed).permutation(len(values))[: options.n]
        images = images[rows]
        values = values[rows]
    labels, names = labels_by_name(values, options.class_names, f"idx: {where}")
    return Raw("image", images, labels, names, release=lambda: release(images))  # type: ignore[arg-type]


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the uint8 array of one idx file; never more memory than its header declares and `MAX_BYTES` allows.

    Raises:
        DataError: The file is not an idx file of bytes with that many dimensions, is truncated, or is too large.
    """
    try:
        with open_regular(path) as file:
            if path.suffix != ".gz":
                return _parse(file, dimensions, path)
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _parse(cast("BinaryIO", unpacked), dimensions, path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"idx: '{path}' cannot be read: {cause(error)}") from error


def _find(folder: Path, stem: str, dimensions: int) -> Path | None:
    names = [f"{stem}{dash}idx{dimensions}-ubyte{packed}" for dash in "-." for packed in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _parse(file: BinaryIO, dimensions: int, path: Path) -> np.ndarray:
    """Return the array uint8 in an idx file that has so many dimensions.

    Raises:
        DataError: The file has another form, declares too much, or holds another number of bytes than it declares.
    """
    header = file.read(4 + 4 * dimensions)
    if len(header) != 4 + 4 * dimensions or header[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"idx: '{path}' does not begin as an idx file of bytes in {dimensions} dimensions")
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
    size = math.prod(shape)
    # A file that is not packed holds what it declares, or it is damaged: a large one is mapped.
    is_plain = path.suffix != ".gz"
    if is_plain and size >= LARGE_BYTES and path.stat().st_size == len(header) + size:
        return map_array(file, np.dtype(np.uint8), shape, len(header))
    if size > MAX_BYTES:
        raise DataError(f"idx: '{path}' declares {size} bytes, at most {MAX_BYTES} are read")
    blocks: list[bytes] = []  # memory grows with what is really there, not with what a header promises
    missing_bytes = size
    while missing_bytes:
        block = file.read(min(missing_bytes, 1 << 20))
        if not block:
            break
        blocks.append(block)
        missing_bytes -= len(block)
    data = b"".join(blocks)
    if len(data) != size or file.read(1):
        held = "more" if len(data) == size else len(data)
        raise DataError(f"idx: '{path}' declares {shape}, which are {size} bytes; it holds {held}")
    return np.frombuffer(data, np.uint8).reshape(shape)


SOURCE = DataSource(IdxOptions, read, needs_path=True)
