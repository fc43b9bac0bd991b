"""Keeps the last answers with their inputs in memory, for the page and for corrections. Nothing is written to disk."""

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
"""Larger inputs, in bytes, are kept as a smaller picture. A correction then adds that picture as the sample."""

_SMALLER_SIDE = 640
"""The longer side of such a smaller picture, in pixels."""

_MOST_POINTS = 240
"""The picture of a window has fewer than twice as many points for each channel: of a long one, every k-th sample."""

_CHANNEL_COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#495057")
"""The colours of the channels in the picture of a window; further channels are not drawn."""


@dataclass(frozen=True)
class Entry:
    """A kept answer with its input.

    Attributes:
        number: The number of the answer; the first one since the start is 1.
        at: When it was answered, in seconds since 1970.
        source: Where the input came from, such as ``http`` or ``camera:0``.
        answer: The answer.
        inputs: The prepared input (n, *shape) float32.
        raw: The encoded bytes that were received, or a smaller picture of them; empty if the input was never encoded.
        content_type: The media type of ``raw``, read from its bytes, if it is an image that browsers show; else empty.
        corrected: The class that a person has given the input since; empty: none.
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
    """The last answers, oldest first, and those that are pinned."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: collections.deque[Entry] = collections.deque(maxlen=length)
        self._pinned: dict[int, Entry] = {}
        self._count = 0
        self._lock = threading.Lock()

    def on_answer(self, observation: Observation) -> None:
        """Keep an answer, and drop the oldest if there are too many; see `Observer`."""
        raw, content_type = _bytes_to_keep(observation)
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

    def on_switch(self, pair: Pair) -> None:
        """Do nothing: answers of the previous pair are kept, and name that pair."""

    def entries(self, after: int = 0) -> list[Entry]:
        """Return the kept answers with a larger number than ``after``, oldest first; pinned ones are not among them."""
        with self._lock:
            return [entry for entry in self._entries if entry.number > after]

    def newest(self) -> Entry | None:
        """Return the last answer; None before the first one."""
        with self._lock:
            return self._entries[-1] if self._entries else None

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep these answers until the next call, also when they are no longer among the last ones.

        Answers that were pinned before, and are not among ``entries``, are no longer pinned.
        """
        with self._lock:
            self._pinned = {entry.number: self._pinned.get(entry.number, entry) for entry in entries}

    def pinned(self) -> list[Entry]:
        """Return the pinned answers, in the order in which they were given to `pin`."""
        with self._lock:
            return [*self._pinned.values()]

    def find(self, number: int) -> Entry | None:
        """Return the answer with this number; None if it is no longer kept."""
        for entry in [*self.entries(), *self.pinned()]:
            if entry.number == number:
                return entry
        return None

    def correct(self, number: int, label: str) -> None:
        """Record the class that a person has given the input of an answer."""
        with self._lock:
            for position, entry in enumerate(self._entries):
                if entry.number == number:
                    self._entries[position] = dataclasses.replace(entry, corrected=label)
            if number in self._pinned:
                self._pinned[number] = dataclasses.replace(self._pinned[number], corrected=label)


def draw_input(entry: Entry, pair: Pair) -> tuple[bytes, str]:
    """Return a picture of an input, and its media type: the image itself, or a plot of the first window."""
    if entry.content_type:
        return entry.raw, entry.content_type
    spec = pair.input
    if isinstance(spec, ImageInput) and entry.inputs.shape[1:] == spec.shape:
        return png_of(restore_pixels(entry.inputs[0], spec)), "image/png"
    # An image from before a release with another task: the rows of its first channel are plotted as channels.
    window = entry.inputs[0]
    return _plot_window(window if window.ndim == 2 else window[0]).encode(), "image/svg+xml"


def _bytes_to_keep(observation: Observation) -> tuple[bytes, str]:
    """Return the encoded input to keep, and its media type.

    A large image is replaced by a smaller one. Other large inputs are not kept: both results are empty then. The media
    type is empty if the bytes are not an image that browsers show. The type that the client names does not count, so
    that the page never serves a client's text as a document. A table may begin like an image, with ``BM``.
    """
    raw = observation.raw
    media_type = image_type(raw) if isinstance(observation.pair.input, ImageInput) else ""
    if len(raw) <= _LARGEST_RAW:
        return raw, media_type
    if not media_type:
        return b"", ""
    smaller = smaller_image(raw, _SMALLER_SIDE)
    return smaller, image_type(smaller)


def _plot_window(window: np.ndarray) -> str:
    """Return an SVG plot of a prepared window (channels, length): one line for each of the first six channels."""
    # 1. Every k-th sample of the channels, and the range of their values; a flat window gets a range of 1.
    step = max(1, window.shape[1] // _MOST_POINTS)
    channels = window[: len(_CHANNEL_COLOURS), ::step]
    lowest = float(channels.min())
    value_range = float(channels.max()) - lowest or 1.0
    # 2. One polyline for each channel, all with the same scale, with a margin of 4 pixels.
    width = 320
    height = 160
    polylines = []
    for channel, colour in zip(channels, _CHANNEL_COLOURS, strict=False):
        xs = np.linspace(4, width - 4, len(channel))
        ys = height - 4 - (channel - lowest) / value_range * (height - 8)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        polylines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{escape(points)}"/>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{"".join(polylines)}</svg>'
