"""From the text of an option to a source."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import UsageError
from .capture import CaptureSource
from .folder import FolderSource
from .rpicam import RpicamSource
from .snapshot import SnapshotSource
from .source import Source


def camera_of(text: str) -> Source:
    """Return the camera that ``--camera`` names.

    ``auto`` is the camera on the ribbon cable where the machine has its program, else the first USB camera; ``rpicam``
    or ``rpicam:1`` is one on the cable; a number or a device is a USB camera; an address of HTTP gives pictures, any
    other a stream.

    Raises:
        UsageError: The text names none of these.
    """
    kind, _, rest = text.partition(":")
    if text == "auto":
        return RpicamSource() if RpicamSource.is_there() else CaptureSource("0")
    if kind == "rpicam":
        if rest and not rest.isdecimal():
            raise UsageError(f"--camera {text}: expected rpicam, or rpicam:N with the number of a camera")
        return RpicamSource(int(rest or 0))
    if kind in {"http", "https"}:
        return SnapshotSource(text)
    is_stream = "://" in text
    if text.isdecimal() or text.startswith("/dev/") or is_stream:
        return CaptureSource(text)
    raise UsageError(
        f"--camera {text}: expected auto, rpicam, the number of a USB camera, /dev/videoN, http://host/picture.jpg or "
        "rtsp://host/stream"
    )


def folder_of(path: Path) -> Source:
    """Return the folder that ``--watch`` names.

    Raises:
        UsageError: It is no folder.
    """
    if not path.is_dir():
        raise UsageError(f"--watch {path}: is no folder; make it first")
    return FolderSource(path)
