"""The last answers with their inputs, for people who look, and for corrections. Nothing of it is written to disk."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from ..core.task import ImageInput
from ..data.pictures import image_type, png_of, smaller_image
from ..data.preprocess import restore_pixels
from .answer import Answer
from .pair import Pair
from .predictor import Observation

LENGTH = 20
"""How many answers are kept."""

_LARGEST_RAW = 512 << 10
"""Inputs of more bytes are kept as a smaller picture; that is what a correction learns from, too."""

_SMALLER_SIDE = 640
"""The longer side of such a picture, pixels."""

_MOST_POINTS = 240
"""The most points of a line in the picture of a window."""


@dataclass(frozen=True)
class Entry:
    """An answer that is kept.

    Attributes:
        number: Counts all answers since the start.
        at: Seconds since 1970.
        source: Where the input came from.
        answer: What was said.
        inputs: The prepared input (n, *shape) float32.
        raw: The input as it came, or a smaller picture of it; empty where it was never encoded.
        content_type: The form of ``raw`` where it is an image that browsers show, read from its bytes; else empty.
        corrected: The class that a person gave it since; empty: none.
    """

    number: int
    at: float
    source: str
    answer: Answer
    inputs: np.ndarray
    raw: bytes
    content_type: str
    corrected: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the entry as the page reads it."""
        fields = {"number": self.number, "at": self.at, "source": self.source}
        return {**fields, "state": self.answer.state, "corrected": self.corrected, **self.answer.as_json()}


class History:
    """Keeps the last answers."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: collections.deque[Entry] = collections.deque(maxlen=length)
        self._pinned: dict[int, Entry] = {}
        self._count = 0
        self._lock = threading.Lock()

    def see(self, observation: Observation) -> None:
        """Keep an answer; see `Observer`."""
        raw, content_type = _kept_form(observation)
        with self._lock:
            self._count += 1
            entry = Entry(
                self._count,
                observation.at,
                observation.source,
                observation.answer,
                observation.inputs,
                raw,
                content_type,
            )
            self._entries.append(entry)

    def see_switch(self, pair: Pair) -> None:
        """Do nothing: answers of the pair before stay, and name it."""

    def entries(self, after: int = 0) -> list[Entry]:
        """Return the answers that are kept and came after the one with this number, oldest first."""
        with self._lock:
            return [entry for entry in self._entries if entry.number > after]

    def newest(self) -> Entry | None:
        """Return the last answer; None before the first."""
        with self._lock:
            return self._entries[-1] if self._entries else None

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep these answers, and no others, beyond the time when they are among the last."""
        with self._lock:
            self._pinned = {entry.number: self._pinned.get(entry.number, entry) for entry in entries}

    def pinned(self) -> list[Entry]:
        """Return the answers that were pinned, in the order in which they were given to `pin`."""
        with self._lock:
            return [*self._pinned.values()]

    def find(self, number: int) -> Entry | None:
        """Return one answer; None where it is not kept any more."""
        for entry in [*self.entries(), *self.pinned()]:
            if entry.number == number:
                return entry
        return None

    def correct(self, number: int, label: str) -> None:
        """Note the class that a person has given to an input."""
        with self._lock:
            for position, entry in enumerate(self._entries):
                if entry.number == number:
                    self._entries[position] = dataclasses.replace(entry, corrected=label)
            if number in self._pinned:
                self._pinned[number] = dataclasses.replace(self._pinned[number], corrected=label)


def picture_of(entry: Entry, pair: Pair) -> tuple[bytes, str]:
    """Return a picture of an input, and its media type: the image itself, or the lines of a window."""
    if entry.content_type:
        return entry.raw, entry.content_type
    spec = pair.input
    if isinstance(spec, ImageInput) and entry.inputs.shape[1:] == spec.shape:
        return png_of(restore_pixels(entry.inputs[0], spec)), "image/png"
    # Of pictures that were answered before a release with another task, the rows of the first channel are lines.
    window = entry.inputs[0]
    return _lines(window if window.ndim == 2 else window[0]).encode(), "image/svg+xml"


def _kept_form(observation: Observation) -> tuple[bytes, str]:
    """Return the bytes of an input that are kept, and their media type; of a large image those of a smaller one.

    The media type is empty where browsers show no such image. What the sender calls it does not count: the page would
    hand on text of its sender as a document. A table may begin as an image does, with ``BM``.
    """
    raw = observation.raw
    kind = image_type(raw) if isinstance(observation.pair.input, ImageInput) else ""
    if len(raw) <= _LARGEST_RAW:
        return raw, kind
    if not kind:
        return b"", ""
    smaller = smaller_image(raw, _SMALLER_SIDE)
    return smaller, image_type(smaller)


def _lines(window: np.ndarray) -> str:
    """Return the channels of a prepared window (channels, length) as lines in an SVG picture."""
    step = max(1, window.shape[1] // _MOST_POINTS)
    values = window[:6, ::step]
    low = float(values.min())
    spread = float(values.max()) - low or 1.0
    width = 320
    height = 160
    colours = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#495057")
    drawn = []
    for channel, colour in zip(values, colours, strict=False):
        across = np.linspace(4, width - 4, len(channel))
        down = height - 4 - (channel - low) / spread * (height - 8)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{escape(points)}"/>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{"".join(drawn)}</svg>'
