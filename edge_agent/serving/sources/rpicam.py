"""Cameras on the ribbon cable of a Raspberry Pi, by its own program ``rpicam-vid`` as a child.

OpenCV does not reach these cameras, and their Python package is not found from within a virtual environment. The
program writes one JPEG image behind the other, without anything between them, so the stream is cut where an image ends.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading

from ...core.child_process import Child, Streams
from ...core.errors import MissingCapability, SourceLost
from .source import Frame, Newest

PROGRAMS = ("rpicam-vid", "libcamera-vid")
"""The program's name, and the one that it had until Raspberry Pi OS 12."""

_CHUNK_BYTES = 65536
_MOST_BYTES = 16 << 20
"""The largest image; a stream in which none ends for so long is no stream of images."""

_START = b"\xff\xd8"
_SCAN = 0xDA
_END = 0xD9
_FIRST_OF_ALONE = 0xD0
_LAST_OF_ALONE = 0xD9
"""Markers without a length behind them: restarts, and the end of the image."""


class JpegSplitter:
    """Cuts a stream of JPEG images into single ones.

    Before the scan each segment says its length, so that pictures within an image, such as thumbnails, are passed over;
    within the scan, the byte 0xFF is followed by zero where it is no marker.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._position = 0
        self._is_in_scan = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the images that have ended within ``data``, and keep what has begun.

        Raises:
            SourceLost: The stream holds something else than JPEG images, or one beyond the limit.
        """
        self._buffer += data
        images = []
        while True:
            end = self._find_end()
            if end is None:
                break
            images.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
            self._position = 0
            self._is_in_scan = False
        if len(self._buffer) > self._most_bytes:
            raise SourceLost(f"an image of more than {self._most_bytes >> 20} MB; lower the camera's resolution")
        return images

    def _find_end(self) -> int | None:
        """Return where the first image ends; None where its end has not come yet.

        Raises:
            SourceLost: The stream does not begin with an image.
        """
        buffer = self._buffer
        if not self._position:
            if len(buffer) < 2:
                return None
            if not buffer.startswith(_START):
                raise SourceLost("the camera's program writes something else than JPEG images")
            self._position = 2
        while True:
            if self._is_in_scan and not self._skip_scan():
                return None
            if len(buffer) < self._position + 4:
                is_end = bytes(buffer[self._position : self._position + 2]) == bytes((0xFF, _END))
                return self._position + 2 if is_end else None
            if buffer[self._position] != 0xFF:
                raise SourceLost("the camera's stream is damaged; it is opened again")
            marker = buffer[self._position + 1]
            if marker == _END:
                return self._position + 2
            if _FIRST_OF_ALONE <= marker <= _LAST_OF_ALONE or marker == 0xFF:
                self._position += 1 if marker == 0xFF else 2
                continue
            length = int.from_bytes(buffer[self._position + 2 : self._position + 4], "big")
            self._position += 2 + max(2, length)
            self._is_in_scan = marker == _SCAN

    def _skip_scan(self) -> bool:
        """Move to the marker behind the scan; returns whether it has come."""
        while True:
            at = self._buffer.find(0xFF, self._position)
            if at < 0 or at + 1 >= len(self._buffer):
                self._position = max(self._position, len(self._buffer) - 1)
                return False
            following = self._buffer[at + 1]
            is_marker = following != 0 and not _FIRST_OF_ALONE <= following < _END - 1
            if is_marker:
                self._position = at
                self._is_in_scan = False
                return True
            self._position = at + 2


class RpicamSource:
    """A camera of ``rpicam-vid``."""

    are_all_wanted = False

    def __init__(self, camera: int = 0, width: int = 640, height: int = 480, frames_per_s: int = 5) -> None:
        """Name a camera by its number, and the size and rate of its pictures."""
        self.name = f"rpicam:{camera}"
        size = ("--width", str(width), "--height", str(height))
        self._options = ("--camera", str(camera), *size, "--framerate", str(frames_per_s))
        self._child: Child | None = None
        self._newest = Newest()

    @staticmethod
    def is_there() -> bool:
        """Return whether this machine has the program."""
        return _program() is not None

    def open(self) -> None:
        """Start the program.

        Raises:
            MissingCapability: It is not installed.
            SourceLost: It cannot be started.
        """
        program = _program()
        if program is None:
            raise MissingCapability(
                f"{PROGRAMS[0]} is not installed; on Raspberry Pi OS 'sudo apt install rpicam-apps-lite' brings it, "
                "a USB camera needs none of it (--camera 0)"
            )
        command = (program, "--timeout", "0", "--nopreview", "--codec", "mjpeg", *self._options, "--output", "-")
        streams = Streams(input=subprocess.DEVNULL, errors=subprocess.DEVNULL)
        try:
            self._child = Child(command, streams=streams, has_own_session=True)
        except OSError as error:
            raise SourceLost(f"{program} cannot be started: {error}") from error
        self._newest = Newest()
        threading.Thread(target=_pump, args=(self._child, self._newest), name=self.name, daemon=True).start()

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest picture; see `Source.read`."""
        return self._newest.take(wait_s)

    def close(self) -> None:
        """End the program."""
        if self._child is not None:
            self._child.kill_session()
            self._child = None


def _program() -> str | None:
    """Return the path of the program; None where it is not installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def _pump(child: Child, newest: Newest) -> None:
    """Read all that the program writes, and put each image in the place of the one before."""
    splitter = JpegSplitter()
    reason = ""
    try:
        for data in child.read_chunks(_CHUNK_BYTES):
            for image in splitter.feed(data):
                newest.put(Frame(image))
    except SourceLost as error:
        reason = str(error)
    except (OSError, ValueError):  # closed meanwhile
        reason = "it was closed"
    if not reason:
        reason = f"the program has ended with code {child.wait()}; is the camera connected, and used by nobody else?"
    with contextlib.suppress(OSError, ValueError):
        child.close_output()
    newest.end(reason)
