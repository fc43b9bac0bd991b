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
    """Which pictures of CINIC-10."""

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
    held = [path.name for path in visible(part) if path.is_dir()] if part.is_dir() else []
    if not held:
        raise ORIGIN.missing(part.parent, f"there is no '{part.name}' with folders in it")
    if unknown := [name for name in held if name not in CLASSES]:
        raise ORIGIN.missing(part, f"'{unknown[0]}' is none of its classes{near(unknown[0], CLASSES)}")
    result = {name: images_in(part / name) if name in held else [] for name in CLASSES}
    if empty := [name for name, paths in result.items() if not paths]:
        raise ORIGIN.missing(part, f"no pictures of {', '.join(empty)}")
    return [path for paths in result.values() for path in paths]


SOURCE = DataSource(CinicOptions, read, needs_path=True, inspect=read)
