"""``cifar:DIR?split=train``: CIFAR-10 and CIFAR-100 as their page offers them: the binary or the Python version.

DIR is ``cifar-10-batches-bin``, ``cifar-10-batches-py``, ``cifar-100-binary`` or ``cifar-100-python``, or a folder with
one of the sets in it. Python batches are pickles; they are read without executing anything, see `parse`. Options:
``split=train|test|all`` (default: train), ``labels=fine|coarse`` (of CIFAR-100: 100 classes or 20), ``n`` (a random
part of that size), ``seed``.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. No licence is stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ...errors import DataError
from ...task import ImageInput
from ..base import DataSource, Raw, labels_by_name
from ..base import Options as BaseOptions
from ._layouts import Origin, lines_of, random_part

_NAMES = ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")
_RECONSTRUCT, _NDARRAY, _DTYPE = (object() for _ in _NAMES)
_MARKS = dict(zip(_NAMES, (_RECONSTRUCT, _NDARRAY, _DTYPE), strict=True))
_BYTES = object()
"""An array's type when it is 'u1', the only one."""


class _Array:
    """An array that is announced, and filled in by a later instruction."""

    values: np.ndarray | None = None


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a batch: text, integers, lists of them, and arrays uint8 that share the memory of ``content``.

    Raises:
        DataError: any instruction or name that those files do not have, or bytes that end early or go on.
    """
    machine = _Machine(content)
    try:
        result = machine.run()
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{where} is not a Python batch of CIFAR: {error} at byte {machine.at}; nothing of it was executed. "
            "Download it again, or the binary version of the set"
        ) from error
    return {str(name): value.values if isinstance(value, _Array) else value for name, value in result.items()}


class _Machine:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = memoryview(content), 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> dict[Any, Any]:
        if bytes(self.take(2)) != b"\x80\x02":
            raise ValueError("it does not begin as protocol 2")
        while (code := self.number(1)) != ord("."):
            if code in _PUSH:
                self.stack.append(_PUSH[code](self))
            elif code in _CHANGE:
                _CHANGE[code](self)
            else:
                raise ValueError(f"instruction {code:#04x} is not one of theirs")
        if self.at != len(self.content) or len(self.stack) != 1 or not isinstance(self.stack[0], dict):
            raise ValueError("it is not one dictionary and nothing else")
        return self.stack[0]

    def take(self, count: int) -> memoryview:
        if count > len(self.content) - self.at:
            raise ValueError(f"{count} bytes are announced, {len(self.content) - self.at} are left")
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        end = bytes(self.content[self.at : self.at + 100]).index(b"\n")
        return bytes(self.take(end + 1)[:-1]).decode("ascii")

    def name(self) -> object:
        wanted = f"{self.line()}.{self.line()}"
        if wanted not in _MARKS:
            raise ValueError(f"it names '{wanted}'")
        return _MARKS[wanted]

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple([self.stack.pop() for _ in range(count)][::-1])

    def marked(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("items for what is no list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target, names = self.stack[-1], items[::2]
        if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(name, str) for name in names):
            raise TypeError("entries for what is no dictionary of named values")
        target.update(zip(names, items[1::2], strict=True))

    def make(self) -> object:
        function, given = self.last(2)
        if function is _RECONSTRUCT and given == (_NDARRAY, (0,), "b"):
            return _Array()
        if function is _DTYPE and given == ("u1", 0, 1):
            return _BYTES
        raise ValueError("it makes something that is no array of bytes")

    def fill(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Array):
            target.values = _array(*state)
        elif target is not _BYTES or state[:2] != (3, "|"):
            raise ValueError("it sets the state of something that is no array of bytes")


def _array(version: Any, shape: Any, kind: Any, by_column: Any, data: Any) -> np.ndarray:
    sides = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
    if version != 1 or kind is not _BYTES or not isinstance(data, memoryview) or not sides:
        raise ValueError("an array is not made of bytes")
    if math.prod(shape) != len(data):
        raise ValueError(f"an array of {shape} has {len(data)} bytes")
    return np.asarray(np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_column else "C"))


def _small_text(machine: _Machine) -> str:
    return bytes(machine.take(machine.number(1))).decode("latin-1")


_PUSH: dict[int, Callable[[_Machine], Any]] = {
    ord("}"): lambda _: {},
    ord("]"): lambda _: [],
    ord(")"): lambda _: (),
    ord("N"): lambda _: None,
    0x88: lambda _: True,
    0x89: lambda _: False,
    ord("K"): lambda machine: machine.number(1),
    ord("M"): lambda machine: machine.number(2),
    ord("J"): lambda machine: machine.number(4, signed=True),
    0x8A: lambda machine: machine.number(machine.number(1), signed=True),
    ord("U"): _small_text,
    ord("T"): lambda machine: machine.take(machine.number(4)),
    ord("X"): lambda machine: bytes(machine.take(machine.number(4))).decode("utf-8"),
    ord("h"): lambda machine: machine.memo[machine.number(1)],
    ord("j"): lambda machine: machine.memo[machine.number(4)],
    ord("c"): _Machine.name,
    ord("t"): lambda machine: tuple(machine.marked()),
    0x85: lambda machine: machine.last(1),
    0x86: lambda machine: machine.last(2),
    0x87: lambda machine: machine.last(3),
    ord("R"): _Machine.make,
}
_CHANGE: dict[int, Callable[[_Machine], None]] = {
    ord("("): lambda machine: machine.marks.append(len(machine.stack)),
    ord("q"): lambda machine: machine.put(machine.number(1)),
    ord("r"): lambda machine: machine.put(machine.number(4)),
    ord("a"): lambda machine: machine.extend([machine.stack.pop()]),
    ord("e"): lambda machine: machine.extend(machine.marked()),
    ord("s"): lambda machine: machine.update(list(machine.last(2))),
    ord("u"): lambda machine: machine.update(machine.marked()),
    ord("b"): _Machine.fill,
}


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


class Options(BaseOptions):
    """Which images of CIFAR."""

    split: Literal["train", "test", "all"] = "train"
    labels: Literal["fine", "coarse"] = Field("fine", description="CIFAR-100: its 100 classes, or its 20")
    n: int | None = Field(None, ge=1, description="a random part of that size")
    seed: int = Field(0, ge=0, description="which random part")


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


def read(where: str, options: Options) -> Raw:
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


def inspect(where: str, options: Options) -> None:
    """Check that one of the versions exists; its batches are not read."""
    folder, version = _found(Path(where).expanduser(), options)
    _names(folder, version, options.labels)


def _found(root: Path, options: Options) -> tuple[Path, Version]:
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


SOURCE = DataSource(Options, read, needs_path=True, inspect=inspect)
