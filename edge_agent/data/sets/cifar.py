"""``cifar:DIR?split=train``: CIFAR-10 and CIFAR-100 as their page offers them: the binary or the Python version.

DIR is ``cifar-10-batches-bin``, ``cifar-10-batches-py``, ``cifar-100-binary`` or ``cifar-100-python``, or a folder with
one of the sets in it. Python batches are pickles; nothing in them is executed or imported, see `parse`. Options:
``split=train|test|all`` (default: train), ``labels=fine|coarse`` (of CIFAR-100: 100 classes or 20), ``n`` (a random
part of that size), ``seed``.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. No licence is stated.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import Field

from ...errors import DataError
from ...task import ImageInput
from ..base import DataSource, PartOptions, Raw, labels_by_name
from ._layouts import Origin, lines_of, random_part

_PYTHON_ERRORS = (AttributeError, EOFError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What Python's reader raises on damaged bytes, besides its own error."""


_PYTHON_READER = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001 - the one written in Python, whose instructions can be restricted
_USED = b"\x80}])N\x88\x89KMJ\x8aUTXhjct\x85\x86\x87R(qraesub."


class _Instructions(dict[int, Any]):
    """The instructions that these files have, as Python's own reader carries them out."""

    def __missing__(self, code: int) -> NoReturn:
        raise ValueError(f"instruction {code:#04x} is not used in these files")


class _Named(dict[Any, Any]):
    """A dictionary of named values; the hash of another key, such as a deeply nested tuple, could end this process."""

    __slots__ = ()

    def __setitem__(self, name: object, value: object) -> None:
        if not isinstance(name, bytes | str):
            raise TypeError("it has entries that are not named values")
        super().__setitem__(name, value)


class _Reader(_PYTHON_READER):  # type: ignore[name-defined,misc,valid-type,unused-ignore]
    """Python's reader, restricted to those instructions and to names that stand for parts of an array of bytes."""

    dispatch = _Instructions({code: _PYTHON_READER.dispatch[code] for code in _USED})
    dispatch[ord("}")] = lambda reader: reader.append(_Named())

    def find_class(self, module: str, name: str) -> object:
        """The part of an array that is named; nothing is imported."""
        named = f"{module}.{name}"
        parts = {"numpy.core.multiarray._reconstruct": _Array, "numpy.ndarray": "ndarray", "numpy.dtype": _Bytes}
        if named not in parts:
            raise ValueError(f"it names {named[:80]!r}")
        return parts[named]


class _Array:
    """Stands for an array: announced by one instruction, filled in by a later one."""

    def __init__(self, *given: object) -> None:
        if given != ("ndarray", (0,), b"b"):
            raise ValueError("it makes something that is no array of bytes")
        self.values: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, kind, by_column, data = state
        sides = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if version != 1 or not isinstance(kind, _Bytes) or not isinstance(data, bytes) or not sides:
            raise ValueError("an array is not made of bytes")
        if math.prod(shape) != len(data):
            raise ValueError(f"an array of {shape} has {len(data)} bytes")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_column else "C")


class _Bytes:
    """Stands for an array's type, which is 'u1' in all of them."""

    def __init__(self, *given: object) -> None:
        if given != (b"u1", 0, 1):
            raise ValueError("it makes something that is no array of bytes")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[:2] != (3, b"|"):
            raise ValueError("it sets the state of something that is no array of bytes")


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a batch: text, integers, lists of them, and arrays uint8.

    Raises:
        DataError: any instruction or name that those files do not have, or bytes that end early or go on.
    """
    file = io.BytesIO(content)
    try:
        if content[:2] != b"\x80\x02":
            raise ValueError("it does not begin as protocol 2")
        result = _Reader(file, encoding="bytes").load()
        if not isinstance(result, _Named):
            raise TypeError("it is not one dictionary of named values")
        if file.read(1):
            raise ValueError("it goes on after the dictionary")
    except (*_PYTHON_ERRORS, pickle.UnpicklingError, struct.error) as error:
        reason = str(error) or "it ends early"
        raise DataError(
            f"{where} is not a Python batch of CIFAR: {reason} at byte {file.tell()}; nothing of it was executed. "
            "Download it again, or the binary version of the set"
        ) from error
    return {_text(name): _values(value) for name, value in result.items()}


def _values(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(one) for one in value]
    return value.values if isinstance(value, _Array) else _text(value)


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value


PIXELS = 3 * 32 * 32
IMAGES = {"cifar-10": {"train": 10_000, "test": 10_000}, "cifar-100": {"train": 50_000, "test": 10_000}}
"""Images in one file."""

ORIGIN = Origin(
    "cifar",
    "CIFAR-10 or CIFAR-100",
    "a folder cifar-10-batches-bin, cifar-10-batches-py, cifar-100-binary or cifar-100-python, as the archive holds it",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    "none stated; cite the report",
)


class CifarOptions(PartOptions):
    """Which images of CIFAR."""

    split: Literal["train", "test", "all"] = "train"
    labels: Literal["fine", "coarse"] = Field("fine", description="CIFAR-100: its 100 classes, or its 20")


@dataclass(frozen=True)
class Version:
    """One of the four archives.

    ``labels``: kind -> byte of a record, or key of a batch. ``names``: kind -> file of their names, or key in ``meta``,
    which is the Python version's file of names.
    """

    folder: str
    files: Mapping[str, tuple[str, ...]]
    labels: Mapping[str, Any]
    names: Mapping[str, str]
    meta: str = ""

    @property
    def dataset(self) -> str:
        """``cifar-10`` or ``cifar-100``."""
        return self.folder.rpartition("-")[0].removesuffix("-batches")


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
VERSIONS = (
    Version(
        "cifar-10-batches-bin",
        {"train": tuple(f"{name}.bin" for name in _BATCHES), "test": ("test_batch.bin",)},
        {"fine": 0},
        {"fine": "batches.meta.txt"},
    ),
    Version(
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        {"coarse": 0, "fine": 1},
        {"coarse": "coarse_label_names.txt", "fine": "fine_label_names.txt"},
    ),
    Version(
        "cifar-10-batches-py",
        {"train": _BATCHES, "test": ("test_batch",)},
        {"fine": "labels"},
        {"fine": "label_names"},
        meta="batches.meta",
    ),
    Version(
        "cifar-100-python",
        {"train": ("train",), "test": ("test",)},
        {"coarse": "coarse_labels", "fine": "fine_labels"},
        {"coarse": "coarse_label_names", "fine": "fine_label_names"},
        meta="meta",
    ),
)


def read(where: str, options: CifarOptions) -> Raw:
    """The images and labels of one split."""
    folder, version = _found(Path(where).expanduser(), options)
    splits = ("train", "test") if options.split == "all" else (options.split,)
    files = [(folder / name, IMAGES[version.dataset][split]) for split in splits for name in version.files[split]]
    if missing := [path.name for path, _ in files if not path.is_file()]:
        raise ORIGIN.missing(folder, f"it lacks {', '.join(missing)}")
    parts = [_batch(path, images, version, options.labels) for path, images in files]
    pixels, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    labels, names = labels_by_name(values, _names(folder, version, options.labels), f"cifar: {folder}")
    rows = random_part(len(labels), options.n, options.seed)
    images = pixels[rows].reshape(-1, 3, 32, 32)
    return Raw("image", images, labels[rows], names, natural=ImageInput())


def inspect(where: str, options: CifarOptions) -> None:
    """Check that one of the versions exists; its batches are not read."""
    folder, version = _found(Path(where).expanduser(), options)
    _names(folder, version, options.labels)


def _found(root: Path, options: CifarOptions) -> tuple[Path, Version]:
    """The folder of the batches and what it is: the binary version where both are there."""
    held = [(root, version) for version in VERSIONS if (root / version.files["test"][0]).is_file()]
    held += [(root / version.folder, version) for version in VERSIONS if (root / version.folder).is_dir()]
    if not held:
        raise ORIGIN.missing(root)
    if len(sets := sorted({version.dataset for _, version in held})) > 1:
        raise DataError(f"cifar: '{root}' holds {' and '.join(sets)}; name the folder of one of them")
    folder, version = held[0]
    if options.labels not in version.labels:
        raise DataError(f"cifar: '{folder}' is {version.dataset}, which has no coarse labels; they are CIFAR-100's")
    return folder, version


def _batch(path: Path, images: int, version: Version, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (images, 3072) uint8 and labels (images,) of one file."""
    if version.meta:
        return _python_batch(path, images, version.labels[labels])
    size, width = path.stat().st_size, len(version.labels) + PIXELS
    if size != images * width:
        raise ORIGIN.damaged(path, f"has {size} bytes", f"{images * width} ({images} images of {width})")
    records = np.fromfile(path, np.uint8).reshape(images, width)
    return records[:, len(version.labels) :], records[:, version.labels[labels]]


def _python_batch(path: Path, images: int, key: str) -> tuple[np.ndarray, np.ndarray]:
    """As `_batch`. Beside its pixels a batch has less than 128 bytes for each image: labels and a file name."""
    size, least, most = path.stat().st_size, images * PIXELS, images * (PIXELS + 128) + 4096
    if not least <= size <= most:
        raise ORIGIN.damaged(path, f"has {size} bytes", f"{least}..{most}")
    result = parse(path.read_bytes(), f"cifar: '{path}'")
    pixels, labels = result.get("data"), result.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.shape != (images, PIXELS):
        shape = "no array" if not isinstance(pixels, np.ndarray) else f"an array of {pixels.shape}"
        raise ORIGIN.damaged(path, f"has {shape} named 'data'", f"({images}, {PIXELS})")
    if not isinstance(labels, list) or len(labels) != images or not all(type(label) is int for label in labels):
        raise ORIGIN.damaged(path, f"has no list named '{key}' of one integer for each image", f"{images} of them")
    return pixels, np.array(labels)


def _names(folder: Path, version: Version, labels: str) -> tuple[str, ...]:
    if not version.meta:
        return tuple(lines_of(folder / version.names[labels], ORIGIN))
    path = folder / version.meta
    if not path.is_file():
        raise ORIGIN.missing(folder, f"it lacks {version.meta}")
    if (size := path.stat().st_size) > 1 << 16:
        raise ORIGIN.damaged(path, f"has {size} bytes", "the names of some classes")
    names = parse(path.read_bytes(), f"cifar: '{path}'").get(version.names[labels])
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ORIGIN.damaged(path, f"has no list of text named '{version.names[labels]}'", "the names of the classes")
    return tuple(names)


SOURCE = DataSource(CifarOptions, read, needs_path=True, inspect=inspect)
