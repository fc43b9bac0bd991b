"""Answers to what a source gives, for a program that asks for one after the other."""

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
"""Seconds between two looks whether the source or its reader has ended."""


def answers_of(pair: Pair, text: str, every_s: float = 1.0, rate: float | None = None) -> Iterator[Answer]:
    """Yield the answers to what a source gives, until it ends or the caller stops.

    A source that is lost is opened again, as by ``edge-agent serve``. Nothing is answered ahead: the next input is
    taken when the caller asks for it.

    Args:
        pair: What answers.
        text: ``camera:auto`` and the other cameras of ``--camera``, ``watch:FOLDER``, or ``sensor:-``,
            ``sensor:FILE``.
        every_s: Seconds between two answers to a camera, at least.
        rate: Samples of a sensor in a second, where its stream has no column for the time.

    Raises:
        UsageError: The text names no source.
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
    """Return the loop around the source that a text names."""
    kind, _, rest = text.partition(":")
    if kind == "sensor":
        return SensorFeed(create_sensor_source(rest, rate, None, Subscriptions(None)), predictor, rate=rate)
    if kind not in {"camera", "watch"}:
        raise UsageError(
            f"'{text}' is no source: expected camera:auto, camera:rtsp://host/stream, watch:FOLDER, sensor:- or "
            "sensor:FILE; files are given as a list"
        )
    source = create_camera_source(rest or "auto") if kind == "camera" else create_folder_source(Path(rest))
    return Feed(source, predictor, lambda pair: Decoder(pair.input, None), every_s)


class _Handover:
    """Passes one answer at a time from the thread of a source to the caller; the source waits until it is taken."""

    def __init__(self) -> None:
        self._answers: queue.Queue[Answer] = queue.Queue(maxsize=1)
        self._closed = threading.Event()

    def on_answer(self, observation: Observation) -> None:
        """Hand over an answer; see `Observer`."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._answers.put(observation.answer, timeout=_WAIT_S)
                return

    def on_switch(self, pair: Pair) -> None:
        """Do nothing: one pair answers all; see `Observer`."""

    def take(self) -> Answer | None:
        """Return the next answer; None where there is none for a moment."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=_WAIT_S)
        return None

    def close(self) -> None:
        """Let the source end, also while it waits."""
        self._closed.set()
