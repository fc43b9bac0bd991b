"""``idx:DIR?split=train``: MNIST, Fashion-MNIST and others in their four idx files, packed or not.

Options: ``split=train|test|all``, ``n`` (a random part of that size), ``seed``, ``class_names=a,b,c`` (default: the
digits of the labels).
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
from pydantic import Field

from ..errors import DataError, cause
from .base import DataSource, Raw, Strings, labels_by_name
from .base import Options as BaseOptions

MAX_BYTES = 1 << 30
_STEMS = {"train": ("train",), "test": ("t10k", "test"), "all": ("train", "t10k", "test")}


class Options(BaseOptions):
    """Options of a folder of idx files."""

    split: Literal["train", "test", "all"] = "train"
    n: int | None = Field(None, ge=1, description="a random part of that size")
    seed: int = Field(0, ge=0, description="which random part")
    class_names: Strings = Field((), description="names of the labels 0, 1, 2 …")


def read(where: str, options: Options) -> Raw:
    """The images and labels of one split."""
    folder = Path(where).expanduser()
    parts = [part for stem in _STEMS[options.split] if (part := _pair(folder, stem)) is not None]
    if not parts:
        raise DataError(
            f"idx: no {options.split} files in '{where}'; expected {_STEMS[options.split][0]}-images-idx3-ubyte and "
            f"{_STEMS[options.split][0]}-labels-idx1-ubyte, with or without .gz"
        )
    images, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if options.n is not None and options.n < len(values):
        rows = np.random.default_rng(options.seed).permutation(len(values))[: options.n]
        images, values = images[rows], values[rows]
    labels, names = labels_by_name(values, options.class_names, f"idx: {where}")
    return Raw("image", images, labels, names)  # type: ignore[arg-type]


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array of one idx file; never more memory than its header declares and `MAX_BYTES` allows.

    Raises:
        DataError: not an idx file of bytes with that many dimensions, cut short, or too large.
    """
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz":
                return _parse(file, dimensions, path)
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _parse(cast("BinaryIO", unpacked), dimensions, path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"idx: '{path}' cannot be read: {cause(error)}") from error


def _pair(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray] | None:
    images, labels = _find(folder, f"{stem}-images", 3), _find(folder, f"{stem}-labels", 1)
    if images is None or labels is None:
        return None
    pixels, values = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(values):
        raise DataError(f"idx: {len(pixels)} images in '{images.name}', {len(values)} labels in '{labels.name}'")
    return pixels, values


def _find(folder: Path, stem: str, dimensions: int) -> Path | None:
    names = [f"{stem}{dash}idx{dimensions}-ubyte{packed}" for dash in "-." for packed in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _parse(file: BinaryIO, dimensions: int, path: Path) -> np.ndarray:
    header = file.read(4 + 4 * dimensions)
    if len(header) != 4 + 4 * dimensions or header[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"idx: '{path}' does not begin as an idx file of bytes in {dimensions} dimensions")
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
    size = 1
    for side in shape:
        size *= side
    if size > MAX_BYTES:
        raise DataError(f"idx: '{path}' declares {size} bytes, at most {MAX_BYTES} are read")
    data = _read_bounded(file, size)
    if len(data) != size or file.read(1):
        held = "more" if len(data) == size else len(data)
        raise DataError(f"idx: '{path}' declares {shape}, which are {size} bytes; it holds {held}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _read_bounded(file: BinaryIO, size: int, block: int = 1 << 20) -> bytes:
    """At most ``size`` bytes; memory grows with what is really there, not with what a header promises."""
    blocks: list[bytes] = []
    while size and (data := file.read(min(size, block))):
        blocks.append(data)
        size -= len(data)
    return b"".join(blocks)


SOURCE = DataSource(Options, read, needs_path=True)
