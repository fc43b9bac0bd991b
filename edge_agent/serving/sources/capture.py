"""USB cameras and streams (RTSP and others), read with OpenCV, which the extra ``camera`` installs."""

from __future__ import annotations

import re
import threading
from typing import Any

from ...core.errors import DataError, SourceLost
from ...data.video import opencv, opened, pixels
from .source import Frame, NewestFrame

_QUALITY = 95
"""Quality of the JPEG files that frames are encoded as, 0..100."""


class CaptureSource:
    """A USB camera, or a stream."""

    needs_every_frame = False

    def __init__(self, where: str) -> None:
        """Create a source that is not open; ``where``: ``0``, ``/dev/video0`` or ``rtsp://host/path``."""
        self._where = where
        # The name is on the page and in logs, so it has no password. That may contain "@" and "/", and many cameras
        # take it behind a "?".
        without_password = re.sub(r"//\S*@", "//…@", where.partition("?")[0])
        self.name = f"camera:{without_password}"
        self._capture: Any = None
        self._newest = NewestFrame()
        self._stop = threading.Event()

    def open(self) -> None:
        """Open the camera, and start a thread that reads its pictures.

        Raises:
            MissingCapability: OpenCV is not installed.
            SourceLost: There is no such camera, or another program uses it.
        """
        capture = opened(int(self._where) if self._where.isdecimal() else self._where)
        if not capture.isOpened():
            capture.release()
            raise SourceLost(
                "it cannot be opened; is it connected, not used by another program, and readable (group 'video')?"
            )
        self._capture = capture
        self._newest = NewestFrame()
        self._stop = threading.Event()
        arguments = (capture, self._newest, self._stop)
        threading.Thread(target=_read_pictures, args=arguments, name=self.name, daemon=True).start()

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest picture; see `Source.read`."""
        return self._newest.take(wait_s)

    def close(self) -> None:
        """Release the camera."""
        self._stop.set()
        self._capture = None


def _read_pictures(capture: Any, newest: NewestFrame, stop: threading.Event) -> None:
    """Read pictures until the camera delivers none, or it is closed.

    All pictures are read, also those that are dropped later: a driver would return old ones from its buffer otherwise.
    """
    cv2 = opencv()
    reason = "it was closed"
    while not stop.is_set():
        try:
            picture = pixels(capture.read(), "picture")
        except DataError:
            reason = "it gives no pictures any more; is it connected?"
            break
        blue_first = picture if picture.ndim == 2 else picture[:, :, ::-1]
        is_encoded, encoded = cv2.imencode(".jpg", blue_first, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        if is_encoded:
            newest.put(Frame(encoded.tobytes()))
    capture.release()
    newest.end(reason)
