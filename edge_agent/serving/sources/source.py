"""The contract of sources: they return the newest frame, or raise `SourceLost` when no more frames come."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import SourceLost


@dataclass(frozen=True)
class Frame:
    """An encoded input.

    Attributes:
        raw: The encoded bytes of an image or a recording.
        name: Its name, such as that of a file; empty if frames of this source have no names.
        dropped: How many inputs were dropped between this frame and the one before, because too many were waiting.
    """

    raw: bytes
    name: str = ""
    dropped: int = 0


class Source(Protocol):
    """A source of frames."""

    name: str
    """Its name on the page, in metrics and in answers; without passwords."""

    needs_every_frame: bool
    """Whether every frame has to be answered, as for a folder or a topic. Otherwise only the newest one counts."""

    def open(self) -> None:
        """Start to receive frames.

        Raises:
            SourceLost: The source is not there, or another program uses it.
            MissingCapability: A package or program that it needs is not installed.
        """

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest frame that was not returned before; None if none has come within ``wait_s`` seconds.

        Raises:
            SourceLost: No more frames come until the source is opened again.
        """

    def close(self) -> None:
        """Stop receiving frames; do nothing if the source is not open."""


class NewestFrame:
    """Holds the newest frame of a source that delivers frames faster than they are answered.

    A thread of the source puts frames in, and the loop takes them out.
    """

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._lost = ""
        self._condition = threading.Condition()
        self.dropped = 0
        """How many frames were replaced by newer ones before they were taken."""

    def put(self, frame: Frame) -> None:
        """Replace the frame that is held by a newer one."""
        with self._condition:
            if self._frame is not None:
                self.dropped += 1
            self._frame = frame
            self._condition.notify()

    def end(self, reason: str) -> None:
        """Let `take` raise `SourceLost` with this reason, after the last frame has been taken."""
        with self._condition:
            self._lost = reason
            self._condition.notify()

    def take(self, wait_s: float) -> Frame | None:
        """Remove and return the frame; None if none comes within ``wait_s`` seconds.

        Raises:
            SourceLost: No more frames come; see `end`.
        """
        with self._condition:
            if self._frame is None and not self._lost:
                self._condition.wait(wait_s)
            frame = self._frame
            self._frame = None
            if frame is None and self._lost:
                raise SourceLost(self._lost)
            return frame
