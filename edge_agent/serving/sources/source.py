"""The contract of sources: the newest frame, or the news that there is none any more."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import SourceLost


@dataclass(frozen=True)
class Frame:
    """An input as it came.

    Attributes:
        raw: The encoded bytes: of an image or a recording.
        name: What it is called, such as the name of a file; empty where frames have no names.
    """

    raw: bytes
    name: str = ""


class Source(Protocol):
    """Something that gives frames."""

    name: str
    """What it is called on the page, in metrics and in answers; without passwords."""

    are_all_wanted: bool
    """Whether each frame counts, as those of a folder do; otherwise the newest counts, and older ones are dropped."""

    def open(self) -> None:
        """Begin to take frames.

        Raises:
            SourceLost: It is not there, or another program uses it.
            MissingCapability: A package or program that it needs is not installed.
        """

    def read(self, wait_s: float) -> Frame | None:
        """Return the newest frame that was not returned before; None where none has come within ``wait_s``.

        Raises:
            SourceLost: There will be no more, until it is opened again.
        """

    def close(self) -> None:
        """Take no more frames; one that is not open stays so."""


class Newest:
    """A place for the newest frame of a source that gives them faster than they are answered."""

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._lost = ""
        self._condition = threading.Condition()
        self.dropped = 0
        """Frames that were replaced by newer ones before somebody took them."""

    def put(self, frame: Frame) -> None:
        """Put a frame in the place of the one there."""
        with self._condition:
            if self._frame is not None:
                self.dropped += 1
            self._frame = frame
            self._condition.notify()

    def end(self, reason: str) -> None:
        """Say that no more frames come, and why."""
        with self._condition:
            self._lost = reason
            self._condition.notify()

    def take(self, wait_s: float) -> Frame | None:
        """Return the frame and leave the place empty; None where none comes within ``wait_s``.

        Raises:
            SourceLost: No more frames come.
        """
        with self._condition:
            if self._frame is None and not self._lost:
                self._condition.wait(wait_s)
            frame = self._frame
            self._frame = None
            if frame is None and self._lost:
                raise SourceLost(self._lost)
            return frame
