"""``cifar:DIR?split=train``: CIFAR-10 and CIFAR-100 as their page offers them: the binary or the Python version.

DIR is ``cifar-10-batches-bin``, ``cifar-10-batches-py``, ``cifar-100-binary`` or ``cifar-100-python``, or a folder with
one of the sets in it. Python batches are pickles; they are read without executing anything, see `_batches`. Options:
``split=train|test|all`` (default: train), ``labels=fine|coarse`` (of CIFAR-100: 100 classes or 20), ``n`` (a random
part of that size), ``seed``.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. No licence is stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ..errors import DataError
from ..task import ImageInput
from ._batches import parse
from ._sets import Origin, lines_of, random_part
from .base import Options as BaseOptions
from .base import Raw, labels_by_name

NEEDS_PATH = True
"""The place is a file or folder, which `data.check` looks for before anything is read."""

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


def look(where: str, options: Options) -> None:
    """Return quietly when one of the versions is there; its batches are not read."""
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
    found = parse(path.read_bytes(), f"cifar: '{path}'")
    pixels, labels = found.get("data"), found.get(key)
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
