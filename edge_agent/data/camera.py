"""``camera:0?n=10&label=cat``: pictures that a camera takes now: its number, or the address of a stream.

Options: ``n`` (pictures, default 1), ``every_s`` (seconds between two, default 0.5), ``label`` (what all of them show;
without it only ``edge-agent predict`` uses them), ``skip`` (first pictures to leave out while the camera finds its
exposure, default 5). Needs OpenCV, which the extra ``camera`` installs.
"""

from __future__ import annotations

import re
import time

import numpy as np
from pydantic import Field

from ..core.errors import DataError
from .base import DataSource, Options, Raw
from .video import opencv, opened, pixels


class CameraOptions(Options):
    """The options of a camera: how many pictures to take, and of what."""

    n: int = Field(1, ge=1, le=1000, description="pictures")
    every_s: float = Field(0.5, ge=0, le=3600, description="seconds between two pictures")
    label: str | None = Field(None, min_length=1, description="class of all pictures")
    skip: int = Field(5, ge=0, le=1000, description="first pictures to leave out")


def read(where: str, options: CameraOptions) -> Raw:
    """Return pictures that the camera takes now.

    Raises:
        DataError: The camera does not exist, or has stopped.
        MissingCapability: OpenCV is not installed.
    """
    shown = re.sub(r"//[^/@\s]*@", "//…@", where)  # no password into a log
    capture = opened(int(where) if where.isdecimal() else where)
    try:
        if not where or not capture.isOpened():
            raise DataError(
                f"camera: '{shown}' cannot be opened; expected the number of a camera (0 is the first), which no other "
                "program uses, or the address of a stream"
            )
        for _ in range(options.skip):
            capture.grab()
        pictures = []
        for number in range(options.n):
            if number:
                time.sleep(options.every_s)
                capture.grab()  # the picture that waited meanwhile
            pictures.append(pixels(capture.read(), f"camera: '{shown}': picture {number}"))
    finally:
        capture.release()
    labels = np.full(len(pictures), 0 if options.label else -1)
    reason = "" if options.label else f"camera: '{shown}': say what its pictures show (label=NAME)"
    names = tuple(f"picture {number}" for number in range(len(pictures)))
    return Raw("image", pictures, labels, (options.label,) if options.label else (), names=names, unlabelled=reason)


def inspect(where: str, options: CameraOptions) -> None:  # noqa: ARG001 - no picture is taken
    """Check that OpenCV is there."""
    opencv()


SOURCE = DataSource(CameraOptions, read, inspect=inspect)
