"""Answers inputs one at a time with the pair in use. A bounded number of inputs waits; further ones are rejected.

There are no batches. On the processor of a device two inputs in one batch take as long as two inputs in sequence, and
waiting for a batch to fill would only add latency.

An input is answered in a turn, which a lock serialises. The pair is read at the beginning of the turn and used to its
end, so that an encoder is never combined with the head of another encoder.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..core.errors import Busy, NotReady
from .answer import Answer, Stages
from .pair import AnswerWithFeatures, Pair

log = logging.getLogger(__name__)

WAITING = 8
"""The most inputs that may wait while one is answered. Further ones are rejected: their answers would be too late."""


@dataclass(frozen=True)
class Observation:
    """An answered input, as observers receive it: the page, the metrics, the watch over inputs, MQTT.

    Attributes:
        answer: The answer.
        features: The features (n, d) float32 that the answer comes from, as in `AnswerWithFeatures`.
        inputs: The prepared input (n, *shape) float32.
        pair: The pair that answered.
        source: Where the input comes from, such as ``http`` or ``camera:0``.
        raw: The encoded bytes that were received; empty if the input was never encoded, as the windows of a sensor.
        content_type: The media type of ``raw``, such as ``image/jpeg``; empty if it is not known.
        at: When it was answered, in seconds since 1970.
    """

    answer: Answer
    features: np.ndarray
    inputs: np.ndarray
    pair: Pair
    source: str
    raw: bytes
    content_type: str
    at: float


class Observer(Protocol):
    """Receives every answer of a predictor."""

    def on_answer(self, observation: Observation) -> None:
        """Receive an answer. Calls never overlap. The client waits until they return, so they have to be quick."""

    def on_switch(self, pair: Pair) -> None:
        """Receive the pair that answers from now on."""


class Predictor:
    """Answers inputs one at a time with the pair in use."""

    def __init__(
        self,
        *,
        waiting: int = WAITING,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create a predictor that has no pair yet; see `switch`.

        Args:
            waiting: How many inputs may wait while one is answered.
            clock: Returns seconds of a monotonic clock; measures the stages of answers.
            now: Returns seconds since 1970.
        """
        self._waiting_limit = waiting
        self._in_progress = 0
        """Inputs that wait or are being answered."""

        self._in_progress_lock = threading.Lock()
        self._turn_lock = threading.Lock()
        self._clock = clock
        self._now = now
        self._pair: Pair | None = None
        self._observers: list[Observer] = []
        self._last_answer_s = 0.0

    @property
    def pair(self) -> Pair:
        """The pair that answers now.

        Raises:
            NotReady: No pair is in use yet.
        """
        pair = self._pair  # read once: another thread may switch it
        if pair is None:
            raise NotReady("no head and no bundle are in use here yet; wait for a release, or import a bundle")
        return pair

    @property
    def is_ready(self) -> bool:
        """Whether a pair is in use."""
        return self._pair is not None

    @property
    def waiting(self) -> int:
        """How many inputs wait for the one that is being answered."""
        return max(0, self._in_progress - 1)

    def observe(self, observer: Observer) -> None:
        """Pass every answer to this observer from now on. Observers are called in the order of these calls."""
        self._observers.append(observer)

    def switch(self, pair: Pair) -> None:
        """Let another pair answer from the next turn on."""
        with self._turn_lock:
            before = self._pair
            self._pair = pair
            for observer in self._observers:
                observer.on_switch(pair)
        log.info("pair_in_use pair=%s before=%s", pair.id, None if before is None else before.id)

    def answer(
        self,
        decode: Callable[[Pair], np.ndarray],
        source: str,
        raw: bytes = b"",
        content_type: str = "",
    ) -> Answer:
        """Answer one input, after those that came before it.

        Args:
            decode: Returns the prepared input (n, *shape) float32 for the pair that will answer. It is called within
                the turn, so that only one decoded image is in memory at a time.
            source: Where the input comes from; see `Observation.source`.
            raw: The encoded bytes that were received, for observers.
            content_type: The media type of ``raw``, for observers.

        Raises:
            Busy: Too many inputs are waiting.
            NotReady: No pair is in use yet.
            HeadwaterError: ``decode`` or `Pair.answer` failed.
        """
        with self.turn() as pair:
            started_at = self._clock()
            inputs = decode(pair)
            decode_ms = 1000 * (self._clock() - started_at)
            result = self._answer_within_turn(pair, inputs, decode_ms)
            self._notify_observers(result, inputs, pair, source, raw, content_type)
        return result.answer

    def answer_rows(self, decode: Callable[[Pair], np.ndarray], source: str) -> tuple[Pair, list[AnswerWithFeatures]]:
        """Answer several inputs in one turn, all with the same pair.

        Args:
            decode: Returns the prepared inputs (n, *shape) float32; each row is an input of its own.
            source: Where they come from; see `Observation.source`.

        Returns:
            The pair, and its answers in the order of the inputs.

        Raises:
            HeadwaterError: The same as in `answer`.
        """
        results = []
        with self.turn() as pair:
            started_at = self._clock()
            rows = decode(pair)
            # The rows were decoded together, so each of them counts an equal part of that time.
            decode_ms = 1000 * (self._clock() - started_at) / max(1, len(rows))
            for row in rows:
                result = self._answer_within_turn(pair, row[None], decode_ms)
                self._notify_observers(result, row[None], pair, source, b"", "")
                results.append(result)
        return pair, results

    def _answer_within_turn(self, pair: Pair, inputs: np.ndarray, decode_ms: float) -> AnswerWithFeatures:
        """Return the answer to a prepared input; its stages include the time of decoding, ``decode_ms``."""
        result = pair.answer(inputs, self._clock)
        measured = result.answer.stages
        stages = Stages(decode_ms, measured.encode, measured.head)
        self._last_answer_s = (decode_ms + measured.encode + measured.head) / 1000
        return AnswerWithFeatures(result.answer.with_stages(stages), result.features)

    def _notify_observers(
        self, result: AnswerWithFeatures, inputs: np.ndarray, pair: Pair, source: str, raw: bytes, content_type: str
    ) -> None:
        """Pass an answer to all observers."""
        observation = Observation(result.answer, result.features, inputs, pair, source, raw, content_type, self._now())
        for observer in self._observers:
            observer.on_answer(observation)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Pair]:
        """Wait for a turn, and yield the pair that answers in it.

        Raises:
            Busy: Too many inputs are waiting.
            NotReady: No pair is in use yet.
        """
        with self._in_progress_lock:
            # One input is being answered, and up to the limit wait for it.
            if self._in_progress > self._waiting_limit:
                # The client should try again once those that wait now are answered, at the speed of the last answer.
                retry_s = max(1, round(self._waiting_limit * self._last_answer_s))
                raise Busy(self._waiting_limit, retry_s)
            self._in_progress += 1
        try:
            with self._turn_lock:
                yield self.pair
        finally:
            with self._in_progress_lock:
                self._in_progress -= 1
