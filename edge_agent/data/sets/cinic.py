"""``cinic:DIR?split=train``: CINIC-10, 270,000 pictures of 32 x 32 in ten classes, from CIFAR-10 and ImageNet.

DIR holds ``train/airplane/*.png``, ``valid`` and ``test``, 90,000 in each. Options: ``split=train|valid|test|all``
(default: train), ``n`` (a random part of that size), ``seed``.
Source: Darlow, Crowley, Antoniou, Storkey, "CINIC-10 is not ImageNet or CIFAR-10", 2018. Licence: CC BY 4.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from ...core.task import ImageInput
from ..base import DataSource, PartOptions, Raw, near
from ..images import ImageFiles, images_in, visible
from ._layouts import Origin, random_part

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS = ("train", "valid", "test")
ORIGIN = Origin(
    "cinic",
    "CINIC-10",
    f"folders train, valid and test, each with {', '.join(CLASSES)} full of PNG files",
    "https://datashare.ed.ac.uk/handle/10283/3192",
    "CC BY 4.0",
)


class CinicOptions(PartOptions):
    """The options of CINIC-10: which pictures to take."""

    split: Literal["train", "valid", "test", "all"] = "train"


def read(where: str, options: CinicOptions) -> Raw:
    """Return the pictures of one part, decoded on access: reading opens none, so it serves for inspecting, too."""
    root = Path(where).expanduser()
    root = next((path for path in (root, root / "CINIC-10") if (path / "train").is_dir()), root)
    parts = PARTS if options.split == "all" else (options.split,)
    paths = [path for part in parts for path in _pictures(root / part)]
    chosen = [paths[row] for row in random_part(len(paths), options.n, options.seed)]
    labels = np.array([CLASSES.index(path.parent.name) for path in chosen], np.int64)
    names = tuple(str(path.relative_to(root)) for path in chosen)
    return Raw("image", ImageFiles(chosen), labels, CLASSES, natural=ImageInput(), names=names)


def _pictures(part: Path) -> list[Path]:
    """Return the pictures of one part, class by class; each class must have some.

    Raises:
        DataError: The part is missing, has a folder that is not a class, or lacks pictures of a class.
    """
    folders: list[str] = []
    if part.is_dir():
        folders = [path.name for path in visible(part) if path.is_dir()]
    if not folders:
        raise ORIGIN.missing(part.parent, f"there is no '{part.name}' with folders in it")
    for name in folders:
        if name not in CLASSES:
            raise ORIGIN.missing(part, f"'{name}' is none of its classes{near(name, CLASSES)}")
    pictures: list[Path] = []
    empty: list[str] = []
    for name in CLASSES:
        paths = images_in(part / name) if name in folders else []
        if not paths:
            empty.append(name)
        pictures += paths
    if empty:
        raise ORIGIN.missing(part, f"no pictures of {', '.join(empty)}")
    return pictures


SOURCE = DataSource(CinicOptions, read, needs_path=True, inspect=read)
