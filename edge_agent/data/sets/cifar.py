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
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ...core.errors import DataError
from ...core.reading import each
from ...core.storage import read_regular
from ...core.task import ImageInput
from ..base import DataSource, PartOptions, Raw, labels_by_name
from ._layouts import Origin, lines_of, random_part

_ARRAY_PARTS = ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype")
"""The names that a batch may refer to; nothing is imported for them."""


class _Name(str):
    """The name of a part of numpy."""

    __slots__ = ()


class _Array:
    """An array: announced by one instruction, filled in by a later one."""

    values: np.ndarray | None = None


class _Bytes:
    """The type of an array's elements, which is 'u1' in all of these files."""


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Return the dictionary in a batch: text, integers, lists of them, and arrays uint8.

    A pickle is a program for a machine with a stack. Those instructions that the files of CIFAR have are carried out
    by `_Machine`; none of them imports or calls anything.

    Raises:
        DataError: The bytes hold an instruction or name that those files do not have, end early, or continue after the
            end.
    """
    file = io.BytesIO(content)
    try:
        if content[:2] != b"\x80\x02":
            raise ValueError("it does not begin as protocol 2")
        machine = _Machine()
        for instruction, value, _ in pickletools.genops(file):
            machine.step(instruction.name, value)
        stack = machine.stack
        if len(stack) != 1 or not isinstance(stack[0], dict):
            raise TypeError("it is not one dictionary of named values")
        result = stack[0]
        if file.read(1):
            raise ValueError("it goes on after the dictionary")
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{where} is not a Python batch of CIFAR: {str(error)[:120]} at byte {file.tell()}; nothing of it was "
            "executed. Download it again, or the binary version of the set"
        ) from error
    return {name: value.values if isinstance(value, _Array) else value for name, value in result.items()}


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memory: dict[int, Any] = {}

    def step(self, name: str, value: Any) -> None:
        """Carry out one instruction, by its name in `pickletools`."""
        if name in _PUSHES:
            self.stack.append(_PUSHES[name](self, value))
        elif name in _CHANGES:
            _CHANGES[name](self, value)
        else:
            raise ValueError(f"instruction {name} is not used in these files")

    def last(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def marked(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("it has items for what is no list")
        target.extend(items)

    def fill(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Array):
            target.values = _array(*state)
        elif not isinstance(target, _Bytes) or state[:2] != (3, "|"):
            raise ValueError("it sets the state of something that is no array of bytes")

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        names = items[::2]
        if not isinstance(target, dict) or len(items) % 2 or not all(type(name) is str for name in names):
            raise TypeError("it has entries that are not named values")
        target.update(zip(names, items[1::2], strict=True))


def _named(value: str) -> _Name:
    if value not in _ARRAY_PARTS:
        raise ValueError(f"it names {value[:80]!r}")
    return _Name(value)


def _made(function: object, given: object) -> object:
    reconstruct, array, dtype = (_Name(name) for name in _ARRAY_PARTS)
    if isinstance(function, _Name):
        if function == reconstruct and given == (array, (0,), "b"):
            return _Array()
        if function == dtype and given == ("u1", 0, 1):
            return _Bytes()
    raise ValueError("it makes something that is no array of bytes")


def _array(version: Any, shape: Any, kind: Any, by_column: Any, data: Any) -> np.ndarray:
    sides = isinstance(shape, tuple) and len(shape) <= 4 and all(type(side) is int and side >= 0 for side in shape)
    if version != 1 or not isinstance(kind, _Bytes) or type(data) is not str or not sides:
        raise ValueError("an array is not made of bytes")
    if math.prod(shape) != len(data):
        raise ValueError(f"an array of {shape} has {len(data)} bytes")
    return np.asarray(np.frombuffer(data.encode("latin-1"), np.uint8).reshape(shape, order="F" if by_column else "C"))


_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE")
_PUSHES: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(_VALUES, lambda _, value: value),
    "NONE": lambda *_: None,
    "NEWTRUE": lambda *_: True,
    "NEWFALSE": lambda *_: False,
    "EMPTY_LIST": lambda *_: [],
    "EMPTY_DICT": lambda *_: {},
    "EMPTY_TUPLE": lambda *_: (),
    "TUPLE1": lambda machine, _: tuple(machine.last(1)),
    "TUPLE2": lambda machine, _: tuple(machine.last(2)),
    "TUPLE3": lambda machine, _: tuple(machine.last(3)),
    "TUPLE": lambda machine, _: tuple(machine.marked()),
    "BINGET": lambda machine, index: machine.memory[index],
    "LONG_BINGET": lambda machine, index: machine.memory[index],
    "GLOBAL": lambda _, value: _named(value),
    "REDUCE": lambda machine, _: _made(*machine.last(2)),
}
_CHANGES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda *_: None,
    "STOP": lambda *_: None,
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "BINPUT": lambda machine, index: machine.memory.update({index: machine.stack[-1]}),
    "LONG_BINPUT": lambda machine, index: machine.memory.update({index: machine.stack[-1]}),
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.marked()),
    "SETITEM": lambda machine, _: machine.update(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.marked()),
    "BUILD": lambda machine, _: machine.fill(),
}

PIXELS = 3 * 32 * 32
IMAGES = {"cifar-10": {"train": 10_000, "test": 10_000}, "cifar-100": {"train": 50_000, "test": 10_000}}
"""The number of images in one file."""

ORIGIN = Origin(
    "cifar",
    "CIFAR-10 or CIFAR-100",
    "a folder cifar-10-batches-bin, cifar-10-batches-py, cifar-100-binary or cifar-100-python, as the archive holds it",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    "none stated; cite the report",
)


class CifarOptions(PartOptions):
    """The options of CIFAR: which images to take."""

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
    """Return the images and labels of one split."""
    folder, version = _found(Path(where).expanduser(), options)
    splits = ("train", "test") if options.split == "all" else (options.split,)
    files = [(folder / name, IMAGES[version.dataset][split]) for split in splits for name in version.files[split]]
    missing = [path.name for path, _ in files if not path.is_file()]
    if missing:
        raise ORIGIN.missing(folder, f"it lacks {', '.join(missing)}")
    parts = [_batch(path, images, version, options.labels) for path, images in each(files, "files")]
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
    """Return the folder of the batches and what it is: the binary version where both are there."""
    held = [(root, version) for version in VERSIONS if (root / version.files["test"][0]).is_file()]
    held += [(root / version.folder, version) for version in VERSIONS if (root / version.folder).is_dir()]
    if not held:
        raise ORIGIN.missing(root)
    sets = sorted({version.dataset for _, version in held})
    if len(sets) > 1:
        raise DataError(f"cifar: '{root}' holds {' and '.join(sets)}; name the folder of one of them")
    folder, version = held[0]
    if options.labels not in version.labels:
        raise DataError(f"cifar: '{folder}' is {version.dataset}, which has no coarse labels; they are CIFAR-100's")
    return folder, version


def _batch(path: Path, images: int, version: Version, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (images, 3072) uint8 and labels (images,) of one file."""
    if version.meta:
        return _python_batch(path, images, version.labels[labels])
    size = path.stat().st_size
    width = len(version.labels) + PIXELS
    if size != images * width:
        raise ORIGIN.damaged(path, f"has {size} bytes", f"{images * width} ({images} images of {width})")
    records = np.fromfile(path, np.uint8).reshape(images, width)
    return records[:, len(version.labels) :], records[:, version.labels[labels]]


def _python_batch(path: Path, images: int, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a batch of the Python version, of which each image has less than 128 bytes beside its pixels."""
    size = path.stat().st_size
    least = images * PIXELS
    most = images * (PIXELS + 128) + 4096
    if not least <= size <= most:
        raise ORIGIN.damaged(path, f"has {size} bytes", f"{least}..{most}")
    result = parse(read_regular(path), f"cifar: '{path}'")
    pixels = result.get("data")
    labels = result.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.shape != (images, PIXELS):
        shape = "no array" if not isinstance(pixels, np.ndarray) else f"an array of {pixels.shape}"
        raise ORIGIN.damaged(path, f"has {shape} named 'data'", f"({images}, {PIXELS})")
    if not isinstance(labels, list) or len(labels) != images or not all(type(label) is int for label in labels):
        raise ORIGIN.damaged(path, f"has no list named '{key}' of one integer for each image", f"{images} of them")
    return pixels, np.array(labels)


def _names(folder: Path, version: Version, labels: str) -> tuple[str, ...]:
    """Return the names of the classes, from the file that a version has for them.

    Raises:
        DataError: The file is missing or damaged.
    """
    if not version.meta:
        return tuple(lines_of(folder / version.names[labels], ORIGIN))
    path = folder / version.meta
    if not path.is_file():
        raise ORIGIN.missing(folder, f"it lacks {version.meta}")
    size = path.stat().st_size
    if size > 1 << 16:
        raise ORIGIN.damaged(path, f"has {size} bytes", "the names of some classes")
    names = parse(read_regular(path), f"cifar: '{path}'").get(version.names[labels])
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ORIGIN.damaged(path, f"has no list of text named '{version.names[labels]}'", "the names of the classes")
    return tuple(names)


SOURCE = DataSource(CifarOptions, read, needs_path=True, inspect=inspect)
