"""``images:DIR``: one folder for each class, image files in it, of any size and mode.

Options: ``limit`` (at most that many of each class, first by name). Photos are rotated as their EXIF data require.
``edge-agent predict`` also takes a folder of images without sub-folders, which has no labels.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import Field

from ..core.errors import DataError, MissingCapability, cause
from ..core.storage import open_regular
from ._sound_files import SUFFIXES as SOUND_SUFFIXES
from .base import DataSource, FileItems, LeftOut, Options, Raw
from .expansion import SMALL_BYTES, memory_budget_bytes
from .preprocess import has_pillow

_log = logging.getLogger(__name__)
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""What Pillow reads here. Of its other forms one starts a program (EPS: Ghostscript), whatever the file is called."""

_PIXEL_BYTES = 4
"""The memory that Pillow takes for a pixel."""

_FOREIGN = {
    "images": ("save it as JPEG or PNG", ".heic .heif .avif .jxl .dng .cr2 .cr3 .nef .arw .raf .svg .pdf"),
    "wav": ("convert it to WAV, FLAC or Ogg", ".mp3 .m4a .aac .opus .wma .aif .aiff"),
    "csv": ("save it as CSV", ".xlsx .xls .ods .tsv .parquet"),
}
"""Kind of data -> what to do about files of other forms of it, and how their names end."""


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
    """Return the image in a file.

    Raises:
        DataError: The file cannot be read as an image, or its header declares more pixels than Pillow accepts.
    """
    try:
        with open_regular(path) as file:
            return decode_image(file, is_sound=path.suffix.lower() in SOUND_SUFFIXES)
    except OSError as error:
        raise DataError(f"cannot be read as an image: {cause(error)}") from error


def decode_image(file: BinaryIO, *, is_sound: bool = False) -> Any:
    """Return the image that an open file holds, as a Pillow image; whoever made it is not trusted.

    Args:
        file: The encoded image, from its first byte on.
        is_sound: Whether its name ends as that of a sound, which the error then says.

    Raises:
        DataError: It cannot be read as an image, or its header declares more pixels than Pillow accepts or the free
            memory allows.
    """
    import warnings

    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as image:
                # Threads share the filter of warnings, so that one may come through where two images are decoded.
                if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                    raise Image.DecompressionBombError
                _check_memory(image.width * image.height)
                image.load()
                return image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # before a pixel is decoded
        most = (Image.MAX_IMAGE_PIXELS or 0) // 10**6
        raise DataError(f"is too large to be decoded: above {most} million pixels; make it smaller first") from error
    except UnidentifiedImageError as error:
        if file.seek(0, os.SEEK_END) == 0:
            raise DataError("cannot be read as an image: the file is empty; take another copy of it") from error
        sound = "; sounds are given as --data 'wav:FILE?form=image'" if is_sound else ""
        raise DataError(f"cannot be read as an image: its form is not known; save it as JPEG or PNG{sound}") from error
    except DataError:
        raise
    # Pillow's plug-ins raise whatever their format's parser raises on damaged files.
    except Exception as error:
        raise DataError(f"cannot be read as an image: {cause(error)}") from error


def _check_memory(pixels: int) -> None:
    """Return quietly where an image of so many pixels may be decoded.

    Raises:
        DataError: There is too little memory for it and its copies: a file of 300 kB can hold an image of 350 MB.
    """
    if pixels * _PIXEL_BYTES <= SMALL_BYTES:
        return
    most = memory_budget_bytes() // _PIXEL_BYTES
    if pixels > most:
        raise DataError(
            f"is too large to be decoded: {pixels / 1e6:.0f} million pixels, and the free memory here is enough for "
            f"{most / 1e6:.0f}; make it smaller first"
        )


def read(where: str, options: ImagesOptions) -> Raw:
    """Return the images of all class folders in ``where``; without such folders those in it, without labels."""
    files = files_by_class(Path(where).expanduser(), "images", tuple(sorted(SUFFIXES)), options.limit)
    items = ImageFiles(files.paths)
    labels = files.labels
    reason = files.unlabelled
    return Raw("image", items, labels, files.class_names, names=files.names, unlabelled=reason, skipped=files.skipped)


@dataclass(frozen=True)
class ClassFiles:
    """Files by class: labels (n,) int64 and names from the sub-folders, or the reason why there are none.

    ``skipped``: files beside them that are not read.
    """

    paths: list[Path]
    labels: np.ndarray
    class_names: tuple[str, ...]
    names: tuple[str, ...]
    unlabelled: str = ""
    skipped: tuple[LeftOut, ...] = ()


def files_by_class(root: Path, kind: str, suffixes: tuple[str, ...], limit: int | None = None) -> ClassFiles:
    """Return the files ending in ``suffixes`` in the sub-folders of ``root``; without any, those in it, without labels.

    Raises:
        DataError: The folder does not exist, or holds no such files.
    """
    if not root.is_dir():
        problem = "is no folder" if root.exists() else "is not there"
        raise DataError(
            f"{kind}: '{root}' {problem}; expected a folder with one sub-folder of files for each class, check the path"
        )

    here = _Folder.of(root, kind, suffixes)
    folders = {name: _Folder.of(root / name, kind, suffixes) for name in here.folders}
    unread = sorted(_unread(root, here, folders, kind, suffixes))
    skipped = tuple(LeftOut(str(Path(*parts)), reason) for parts, reason in unread)
    files_of = {name: folder.files[:limit] for name, folder in folders.items() if folder.files}
    if files_of:
        _warn_of_empty(root, kind, [name for name in folders if name not in files_of])
        return _labelled_files(root, files_of, skipped)
    # Without folders of classes, the files themselves count, and have no labels.
    reason = (
        f"{kind}: no {'images' if kind == 'images' else 'files'} in the sub-folders of '{root}'; expected one "
        f"sub-folder for each class, with files ending in {', '.join(suffixes)}"
    )
    flat = tuple(here.files[:limit])
    if flat:
        return ClassFiles([root / name for name in flat], np.full(len(flat), -1), (), flat, reason, skipped)
    if skipped:
        raise DataError(f"{reason}; found {len(skipped)} other files, first {skipped[0]}")
    raise DataError(reason)


def _warn_of_empty(root: Path, kind: str, classes: Sequence[str]) -> None:
    """Log the classes whose folders hold no files."""
    if classes:
        _log.warning("class_without_samples source=%s:%s classes=%s: no files in them", kind, root, ", ".join(classes))


def _labelled_files(root: Path, files_of: Mapping[str, list[str]], skipped: tuple[LeftOut, ...]) -> ClassFiles:
    """Return the files of class folders, in the order of the folders, with the number of its folder as each label."""
    names: list[str] = []
    for folder, files in files_of.items():
        names += [f"{folder}{os.sep}{name}" for name in files]
    labels = np.repeat(np.arange(len(files_of)), [len(files) for files in files_of.values()])
    return ClassFiles([root / name for name in names], labels, tuple(files_of), tuple(names), skipped=skipped)


@dataclass(frozen=True)
class _Folder:
    """Names in one folder, sorted, without hidden ones: files of a kind, those of other forms of it, and folders."""

    files: list[str]
    foreign: list[str]
    folders: list[str]

    @classmethod
    def of(cls, folder: Path, kind: str, suffixes: tuple[str, ...]) -> _Folder:
        """Return the names in ``folder``; most files are not looked at one by one, as their folder tells their kind."""
        files = list[str]()
        folders = list[str]()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                # Of a link that leads to itself, an entry raises an error, and a path says that it is neither.
                target = Path(entry.path) if entry.is_symlink() else entry
                if target.is_file():
                    files.append(entry.name)
                elif target.is_dir():
                    folders.append(entry.name)
        files.sort()
        foreign_suffixes = tuple(_FOREIGN.get(kind, ("", ""))[1].split())
        usable = [name for name in files if name.lower().endswith(suffixes)]
        foreign = [name for name in files if name.lower().endswith(foreign_suffixes)]
        return cls(usable, foreign, sorted(folders))


def _unread(
    root: Path, here: _Folder, folders: Mapping[str, _Folder], kind: str, suffixes: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and reason of files up to two levels below ``root`` that look like data and are not read."""
    form = f"is of a form that is not read; {_FOREIGN.get(kind, ('', ''))[0]}"
    if any(folder.files for folder in folders.values()):
        beside = "is beside the folders of classes, so it has none; move it into one"
        yield from (((file,), beside) for file in here.files)
    yield from (((file,), form) for file in here.foreign)
    for name, folder in folders.items():
        yield from (((name, file), form) for file in folder.foreign)
        for inner in folder.folders:
            with contextlib.suppress(PermissionError):
                deeper = _Folder.of(root / name / inner, kind, suffixes)
                nested = "is in a folder inside that of a class; move it up"
                yield from (((name, inner, file), nested) for file in deeper.files)
                yield from (((name, inner, file), form) for file in deeper.foreign)


def domains(where: str, options: ImagesOptions) -> dict[str, tuple[str, dict[str, Any]]]:  # noqa: ARG001 - each folder's own
    """Return place and options of each domain, for a folder that holds a folder of class folders for each.

    Empty where the folders hold no folders: then they are those of classes; and where it holds pictures alone.

    Raises:
        DataError: The folder has no sub-folders and no pictures.
    """
    root = Path(where).expanduser()
    folders = _folders_in(root) if root.is_dir() else []
    # 1. Pictures alone are of one domain.
    if not folders:
        if root.is_dir() and images_in(root):
            return {}
        raise DataError(f"images: no folders in '{root}'; expected one for each domain, with one for each class in it")
    # 2. Folders of classes hold no folders; those of domains hold one for each class.
    if not any(map(_folders_in, folders)):
        return {}
    return {folder.name: (str(folder), {}) for folder in folders}


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders that lie in a folder itself, by name."""
    return [path for path in visible(folder) if path.is_dir()]


def visible(folder: Path) -> Iterable[Path]:
    """Return entries of a folder, sorted by name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """Return image files that lie in a folder itself, by name."""
    return [path for path in visible(folder) if path.suffix.lower() in SUFFIXES and path.is_file()]


SOURCE = DataSource(ImagesOptions, read, needs_path=True, inspect=read, domains=domains)
