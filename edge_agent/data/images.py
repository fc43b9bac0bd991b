"""``images:DIR``: one folder for each class, image files in it, of any size and mode.

Options: ``limit`` (at most that many of each class, first by name). Photos are rotated as their EXIF data require.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from pydantic import Field

from ..errors import DataError, MissingCapability, cause
from .base import DataSource, Options, Raw
from .preprocess import has_pillow

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


class ImagesOptions(Options):
    """Options of a folder of images."""

    limit: int | None = Field(None, ge=1, description="at most that many images of each class, first by name")


class ImageFiles(Sequence[Any]):
    """Images that are decoded on access, so that a folder of photos need not fit into memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if not has_pillow():
            raise MissingCapability.package("PIL", "agent", "reading image files")
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> ImageFiles: ...
    def __getitem__(self, index: int | slice) -> Any:
        """The decoded image; DataError where it cannot be read."""
        if isinstance(index, slice):
            return ImageFiles(self.paths[index])
        import warnings

        from PIL import Image

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(self.paths[index]) as image:
                    image.load()
                    return image
        # Pillow's plug-ins raise whatever their format's parser raises on damaged files.
        except Exception as error:
            raise DataError(f"cannot be read as an image: {cause(error)}") from error


def read(where: str, options: ImagesOptions) -> Raw:
    """The images of all class folders in ``where``."""
    root = Path(where).expanduser()
    if not root.is_dir():
        raise DataError(f"images: no folder '{where}'; expected a folder with one sub-folder of images for each class")
    result = {folder.name: images_in(folder)[: options.limit] for folder in visible(root) if folder.is_dir()}
    result = {name: paths for name, paths in result.items() if paths}
    if not result:
        raise DataError(
            f"images: no images in the sub-folders of '{where}'; expected one sub-folder for each class, "
            f"with files ending in {', '.join(sorted(SUFFIXES))}"
        )
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
