"""Yields the answers to the inputs of one source, for a Python program."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ..answer import Answer
from ..inputs import Decoder
from ..pair import Pair
from ..predictor import Observation, Predictor
from .choose import Subscriptions, create_camera_source, create_folder_source, create_sensor_source
from .feed import Feed
from .loop import SourceLoop
from .sensor_feed import SensorFeed

_WAIT_S = 0.1
"""The longest wait, in seconds, before it is checked again whether the source or its reader has ended."""


def stream_answers(pair: Pair, text: str, every_s: float = 1.0, rate: float | None = None) -> Iterator[Answer]:
    """Yield the answers to the inputs of a source, until it ends or the caller stops.

    A lost source is opened again, as by ``edge-agent serve``. The source waits until the caller has taken an answer.

    Args:
        pair: The encoder and the head that answer.
        text: ``camera:`` and a value of ``--camera``, ``watch:FOLDER``, ``sensor:-`` or ``sensor:FILE``.
        every_s: The least number of seconds between two answers to a camera.
        rate: Samples per second, for sensors whose stream has no time column; None: not known.

    Raises:
        UsageError: The text does not name a source.
    """
    predictor = Predictor()
    handover = _Handover()
    predictor.observe(handover)
    predictor.switch(pair)
    loop = _create_loop(text, predictor, every_s, rate)
    loop.start()
    try:
        while True:
            answer = handover.take()
            if answer is not None:
                yield answer
            elif loop.state.condition == "ended":
                return
    finally:
        handover.close()
        loop.close()


def _create_loop(text: str, predictor: Predictor, every_s: float, rate: float | None) -> SourceLoop[Any]:
    """Return the loop around the source that a text names.

    Raises:
        UsageError: The text does not name a source.
    """
    kind, _, rest = text.partition(":")
    if kind == "sensor":
        return SensorFeed(create_sensor_source(rest, rate, None, Subscriptions(None)), predictor, rate=rate)
    if kind not in {"camera", "watch"}:
        raise UsageError(
            f"'{text}' is not a source: expected camera:auto, camera:rtsp://host/stream, watch:FOLDER, sensor:- or "
            "sensor:FILE; files are given as a list"
        )
    source = create_camera_source(rest or "auto") if kind == "camera" else create_folder_source(Path(rest))
    return Feed(source, predictor, lambda pair: Decoder(pair.input, None), every_s)


class _Handover:
    """Passes answers one at a time from the thread of a source to the caller; the thread waits until one is taken."""

    def __init__(self) -> None:
        self._answers: queue.Queue[Answer] = queue.Queue(maxsize=1)
        self._closed = threading.Event()

    def on_answer(self, observation: Observation) -> None:
        """Wait until the answer before was taken, and hand over this one; see `Observer`."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._answers.put(observation.answer, timeout=_WAIT_S)
                return

    def on_switch(self, pair: Pair) -> None:
        """Do nothing: the pair never changes here; see `Observer`."""

    def take(self) -> Answer | None:
        """Return the next answer; None if there is none for `_WAIT_S` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=_WAIT_S)
        return None

    def close(self) -> None:
        """Let the thread of the source end, also while it waits in `on_answer`."""
        self._closed.set()
