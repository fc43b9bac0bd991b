"""Cameras on the ribbon cable of a Raspberry Pi, read from the program ``rpicam-vid`` as a child process.

OpenCV does not support these cameras, and their Python package cannot be imported in a virtual environment. The program
writes JPEG images one after the other, with nothing in between, so the end of each image has to be found in its data.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading

from ...core.child_process import Child, Streams
from ...core.errors import MissingCapability, SourceLost
from .source import Frame, NewestFrame

PROGRAMS = ("rpicam-vid", "libcamera-vid")
"""The name of the program, and the older name that it had until Raspberry Pi OS 12."""

_CHUNK_BYTES = 65536
_MOST_BYTES = 16 << 20
"""The largest image. If no image ends within so many bytes, the stream is not one of images."""

# Markers of JPEG (ITU-T T.81, table B.1) are two bytes: the prefix, and one of these.
_PREFIX = 0xFF
_FIRST_RESTART = 0xD0
_LAST_RESTART = 0xD7
_END = 0xD9
_SCAN = 0xDA
_START = b"\xff\xd8"
"""The marker that begins an image, with its prefix. The markers from `_FIRST_RESTART` to `_END` have no length."""


class JpegSplitter:
    """Cuts a stream of JPEG images into single images.

    Before the scan, an image consists of segments that state their length. They are skipped as a whole, so the end of a
    thumbnail within a segment is not mistaken for the end of the image. Within the scan, which has no length, a byte
    0xFF that is not the prefix of a marker is followed by a zero byte.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        """The image that has begun, and what follows it."""

        self._position = 0
        """Up to where the buffer has been searched for the end of the image."""

        self._is_in_scan = False

    def feed(self, data: bytes) -> list[bytes]:
        """Append ``data`` to the stream, and return the images that are complete now.

        Raises:
            SourceLost: The stream is not one of JPEG images, or an image is too large.
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
        """Return the position behind the first image; None if its end has not arrived yet.

        The search continues where the last call has stopped.

        Raises:
            SourceLost: The stream does not begin with an image, or is damaged.
        """
        buffer = self._buffer
        if not self._position and not self._skip_start():
            return None
        # From marker to marker: the position is that of the next marker, or within a scan.
        while True:
            if self._is_in_scan and not self._skip_scan():
                return None
            # The end marker is the last one, so that no length has to follow it.
            if len(buffer) < self._position + 4:
                is_end = bytes(buffer[self._position : self._position + 2]) == bytes((_PREFIX, _END))
                return self._position + 2 if is_end else None
            if buffer[self._position] != _PREFIX:
                raise SourceLost("the camera's stream is damaged; it is opened again")
            marker = buffer[self._position + 1]
            if marker == _END:
                return self._position + 2
            if marker == _PREFIX:  # a fill byte before a marker
                self._position += 1
            elif _FIRST_RESTART <= marker <= _END:  # a marker without a segment
                self._position += 2
            else:
                # The length counts its own two bytes. A scan begins behind the segment that announces it.
                length = int.from_bytes(buffer[self._position + 2 : self._position + 4], "big")
                self._position += 2 + max(2, length)
                self._is_in_scan = marker == _SCAN

    def _skip_start(self) -> bool:
        """Move the position behind the marker that begins an image; return whether that marker has arrived.

        Raises:
            SourceLost: Something else has arrived.
        """
        if len(self._buffer) < len(_START):
            return False
        if not self._buffer.startswith(_START):
            raise SourceLost("the camera's program writes something else than JPEG images")
        self._position = len(_START)
        return True

    def _skip_scan(self) -> bool:
        """Move the position to the marker that ends the scan; return whether that marker has arrived."""
        while True:
            at = self._buffer.find(_PREFIX, self._position)
            if at < 0 or at + 1 >= len(self._buffer):
                self._position = max(self._position, len(self._buffer) - 1)
                return False
            following = self._buffer[at + 1]
            is_restart = _FIRST_RESTART <= following <= _LAST_RESTART
            # A zero byte means that the prefix is image data. Restarts are a part of the scan.
            if following != 0 and not is_restart:
                self._position = at
                self._is_in_scan = False
                return True
            self._position = at + 2


class RpicamSource:
    """A camera that ``rpicam-vid`` reads."""

    needs_every_frame = False

    def __init__(self, camera: int = 0, width: int = 640, height: int = 480, frames_per_s: int = 5) -> None:
        """Create a source that is not open.

        Args:
            camera: The number of the camera, from 0.
            width: Width of the pictures, in pixels.
            height: Height of the pictures, in pixels.
            frames_per_s: Pictures per second.
        """
        self.name = f"rpicam:{camera}"
        size = ("--width", str(width), "--height", str(height))
        self._options = ("--camera", str(camera), *size, "--framerate", str(frames_per_s))
        self._child: Child | None = None
        self._newest = NewestFrame()

    @staticmethod
    def is_installed() -> bool:
        """Return whether the program is installed."""
        return _program() is not None

    def open(self) -> None:
        """Start the program.

        Raises:
            MissingCapability: The program is not installed.
            SourceLost: The program cannot be started.
        """
        program = _program()
        if program is None:
            raise MissingCapability(
                f"{PROGRAMS[0]} is not installed; on Raspberry Pi OS 'sudo apt install rpicam-apps-lite' installs it. "
                "A USB camera does not need it (--camera 0)"
            )
        command = (program, "--timeout", "0", "--nopreview", "--codec", "mjpeg", *self._options, "--output", "-")
        streams = Streams(input=subprocess.DEVNULL, errors=subprocess.DEVNULL)
        try:
            self._child = Child(command, streams=streams, has_own_session=True)
        except OSError as error:
            raise SourceLost(f"{program} cannot be started: {error}") from error
        self._newest = NewestFrame()
        threading.Thread(target=_read_pictures, args=(self._child, self._newest), name=self.name, daemon=True).start()

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest picture; see `Source.read`."""
        return self._newest.take(wait_s)

    def close(self) -> None:
        """End the program."""
        if self._child is not None:
            self._child.kill_session()
            self._child = None


def _program() -> str | None:
    """Return the path of the program; None if it is not installed."""
    for program in PROGRAMS:
        path = shutil.which(program)
        if path is not None:
            return path
    return None


def _read_pictures(child: Child, newest: NewestFrame) -> None:
    """Read the output of the program until it ends, and keep the newest picture."""
    splitter = JpegSplitter()
    reason = ""
    try:
        for data in child.read_chunks(_CHUNK_BYTES):
            for image in splitter.feed(data):
                newest.put(Frame(image))
    except SourceLost as error:
        reason = str(error)
    except (OSError, ValueError):  # `close` has closed the output
        reason = "it was closed"
    if not reason:
        code = child.wait()
        reason = f"the program has ended with code {code}; is the camera connected, and not used by another program?"
    with contextlib.suppress(OSError, ValueError):
        child.close_output()
    newest.end(reason)
