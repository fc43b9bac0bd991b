"""``images:DIR``: one folder for each class, image files in it, of any size and mode.

Options: ``limit`` (at most that many of each class, first by name). Photos are rotated as their EXIF data require.
``edge-agent predict`` also takes a folder of images without sub-folders, which has no labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from ..errors import DataError, MissingCapability, cause
from .base import DataSource, FileItems, Options, Raw
from .preprocess import has_pillow

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


class ImagesOptions(Options):
    """Options of a folder of images."""

    limit: int | None = Field(None, ge=1, description="at most that many images of each class, first by name")


class ImageFiles(FileItems):
    """Images that are decoded on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if not has_pillow():
            raise MissingCapability.package("PIL", "agent", "reading image files")
        super().__init__(paths, decoded)


def decoded(path: Path) -> Any:
    """The image in a file.

    Raises:
        DataError: it cannot be read as an image, or its header declares more pixels than Pillow takes from strangers.
    """
    import warnings

    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()
                return image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # before a pixel is decoded
        raise DataError(f"is too large to be decoded: {cause(error)}; make it smaller first") from error
    # Pillow's plug-ins raise whatever their format's parser raises on damaged files.
    except Exception as error:
        raise DataError(f"cannot be read as an image: {cause(error)}") from error


def read(where: str, options: ImagesOptions) -> Raw:
    """The images of all class folders in ``where``, or those in it, without labels, where there are no folders."""
    root = Path(where).expanduser()
    if not root.is_dir():
        raise DataError(f"images: no folder '{where}'; expected a folder with one sub-folder of images for each class")
    result = {folder.name: images_in(folder)[: options.limit] for folder in visible(root) if folder.is_dir()}
    result = {name: paths for name, paths in result.items() if paths}
    if not result:
        reason = (
            f"images: no images in the sub-folders of '{where}'; expected one sub-folder for each class, "
            f"with files ending in {', '.join(sorted(SUFFIXES))}"
        )
        paths = images_in(root)[: options.limit]
        if not paths:
            raise DataError(reason)
        names, unknown = tuple(path.name for path in paths), np.full(len(paths), -1)
        return Raw("image", ImageFiles(paths), unknown, (), names=names, unlabelled=reason)
    paths = [path for group in result.values() for path in group]
    labels = np.repeat(np.arange(len(result)), [len(group) for group in result.values()])
    names = tuple(str(path.relative_to(root)) for path in paths)
    return Raw("image", ImageFiles(paths), labels, tuple(result), names=names)


def domains(where: str, options: ImagesOptions) -> dict[str, tuple[str, dict[str, Any]]]:  # noqa: ARG001 - each folder's own
    """For a folder that holds one of class folders for each domain: domain -> place and options.

    Raises:
        DataError: no folders there.
    """
    root = Path(where).expanduser()
    folders = [path for path in visible(root) if path.is_dir()] if root.is_dir() else []
    if not folders:
        raise DataError(f"images: no folders in '{root}'; expected one for each domain, with one for each class in it")
    return {folder.name: (str(folder), {}) for folder in folders}


def visible(folder: Path) -> Iterable[Path]:
    """Entries of a folder, sorted by name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """Image files that lie in a folder itself, by name."""
    return [path for path in visible(folder) if path.suffix.lower() in SUFFIXES and path.is_file()]


SOURCE = DataSource(ImagesOptions, read, needs_path=True, inspect=read, domains=domains)
