"""USB cameras and streams (RTSP and others), by OpenCV, which the extra ``camera`` installs."""

from __future__ import annotations

import re
import threading
from typing import Any

from ...core.errors import DataError, SourceLost
from ...data.video import opencv, opened, pixels
from .source import Frame, Newest

_QUALITY = 95
"""Quality of the JPEG form in which pictures are handed on, 0..100."""


class CaptureSource:
    """A camera by its number or device, or the address of a stream."""

    are_all_wanted = False

    def __init__(self, where: str) -> None:
        """Name a camera: ``0``, ``/dev/video0`` or ``rtsp://host/path``."""
        self._where = where
        # No password on a page or in a log. It may hold "@" and "/", and many cameras want it behind a "?".
        shown = re.sub(r"//\S*@", "//…@", where.partition("?")[0])
        self.name = f"camera:{shown}"
        self._capture: Any = None
        self._newest = Newest()
        self._stop = threading.Event()

    def open(self) -> None:
        """Open the camera, and begin to take pictures.

        Raises:
            MissingCapability: OpenCV is not installed.
            SourceLost: There is no such camera, or another program uses it.
        """
        capture = opened(int(self._where) if self._where.isdecimal() else self._where)
        if not capture.isOpened():
            capture.release()
            raise SourceLost("it cannot be opened; is it connected, used by nobody else, and readable (group 'video')?")
        self._capture = capture
        self._newest = Newest()
        self._stop = threading.Event()
        arguments = (capture, self._newest, self._stop)
        threading.Thread(target=_pump, args=arguments, name=self.name, daemon=True).start()

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest picture; see `Source.read`."""
        return self._newest.take(wait_s)

    def close(self) -> None:
        """Release the camera."""
        self._stop.set()
        self._capture = None


def _pump(capture: Any, newest: Newest, stop: threading.Event) -> None:
    """Take pictures until the camera gives none, or it is closed; a driver keeps old ones where nobody takes them."""
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
