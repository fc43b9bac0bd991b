"""``video:DIR?every_s=1``: frames of video files as images, one sub-folder of files for each class, or one file.

Options: ``every_s`` (seconds between two frames, default 1), ``limit`` (at most that many files of each class). The
frames of a file are held out as a whole or not at all, because neighbours hardly differ. Needs OpenCV, which the extra
``camera`` installs; a file without a stated rate counts as 25 frames per second.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from ..core.errors import DataError, MissingCapability
from .base import DataSource, FileItems, Options, Raw
from .images import ClassFiles, files_by_class

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpg", ".webm")
_USUAL_RATE = 25.0
_MOST_FRAMES = 100_000
"""Frames that are taken of one file."""


class VideoOptions(Options):
    """The options of a video: which frames to take."""

    every_s: float = Field(1.0, gt=0, le=86_400, description="seconds between two frames")
    limit: int | None = Field(None, ge=1, description="at most that many files of each class, first by name")


class Frames:
    """The chosen frames of a file, read one after another; an earlier one than the last makes it start again.

    Raises:
        DataError: OpenCV cannot read the file as a video.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        self.path = path
        self.every_s = every_s
        self._next = 0
        self._capture = opened(str(path))
        if not self._capture.isOpened():
            raise DataError("cannot be read as a video")
        rate = float(self._capture.get(opencv().CAP_PROP_FPS))
        self._step = max(round((rate if math.isfinite(rate) and 0 < rate <= 1000 else _USUAL_RATE) * every_s), 1)

    def count(self) -> int:
        """Return how many frames are chosen; the whole file is gone through, because headers are often wrong."""
        total = 0
        while total < _MOST_FRAMES * self._step and self._capture.grab():
            total += 1
        self._capture.release()
        return math.ceil(total / self._step)

    def read(self, number: int) -> np.ndarray:
        """Return pixels (height, width, 3) uint8 of a chosen frame."""
        position = number * self._step
        if position < self._next:
            self._capture = opened(str(self.path))
            self._next = 0
        while self._next <= position:
            if not self._capture.grab():
                raise DataError(f"ends before frame {position}")
            self._next += 1
        return pixels(self._capture.retrieve(), f"frame {position}")


def opencv() -> Any:
    """Import OpenCV and return its module.

    Raises:
        MissingCapability: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise MissingCapability.package("cv2", "camera", "reading videos and cameras") from error
    return cv2


def opened(where: str | int) -> Any:
    """Return a capture of a file, an address or the number of a camera; whether it works is not checked yet."""
    cv2 = opencv()
    cv2.setNumThreads(1)
    return cv2.VideoCapture(where)


def pixels(answer: tuple[bool, Any], what: str) -> np.ndarray:
    """Return RGB pixels (height, width, 3) uint8 of a picture that OpenCV has returned.

    Raises:
        DataError: OpenCV returned no picture.
    """
    is_there, picture = answer
    if not is_there or picture is None:
        raise DataError(f"{what} cannot be decoded")
    array = np.asarray(picture)
    if array.ndim == 2:
        return array
    return np.ascontiguousarray(array[:, :, 2::-1])  # OpenCV has blue first


def read(where: str, options: VideoOptions) -> Raw:
    """Return the chosen frames of all files; a file that cannot be read counts as one frame, which fails later."""
    opencv()
    root = Path(where).expanduser()
    files = ClassFiles([root], np.full(1, -1), (), (root.name,), f"video: '{where}' is one file, which has no label")
    if not root.is_file():
        files = files_by_class(root, "video", SUFFIXES, options.limit)
    counts = []
    for path in files.paths:
        try:
            counts.append(max(Frames(path, options.every_s).count(), 1))
        except DataError:
            counts.append(1)
    current: dict[Path, Frames] = {}

    def frame(key: tuple[Path, int]) -> np.ndarray:
        if key[0] not in current:
            current.clear()
            current[key[0]] = Frames(key[0], options.every_s)
        return current[key[0]].read(key[1])

    rows = np.repeat(np.arange(len(counts)), counts)
    numbers = [number for count in counts for number in range(count)]
    keys = [(files.paths[row], number) for row, number in zip(rows, numbers, strict=True)]
    names = tuple(
        f"{files.names[row]} {number * options.every_s:g} s" for row, number in zip(rows, numbers, strict=True)
    )
    labels = files.labels[rows]
    reason = files.unlabelled
    skipped = files.skipped
    items = FileItems(keys, frame)
    return Raw(
        "image", items, labels, files.class_names, rows, names=names, unlabelled=reason, are_whole=True, skipped=skipped
    )


def inspect(where: str, options: VideoOptions) -> None:
    """Check that there are such files, and OpenCV."""
    opencv()
    if not Path(where).expanduser().is_file():
        files_by_class(Path(where).expanduser(), "video", SUFFIXES, options.limit)


SOURCE = DataSource(VideoOptions, read, needs_path=True, inspect=inspect)
