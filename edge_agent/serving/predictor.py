"""One input after the other, by the pair in use; others wait their turn, and too many are turned away.

There are no batches: an encoder on a device's processor answers two inputs at once no faster than one after the other,
and whoever waits for a batch to fill waits for nothing. The pair is taken at the beginning of a turn and kept to its
end, so that no answer comes from an encoder and the head of another one.
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
from .pair import Answered, Pair

log = logging.getLogger(__name__)

WAITING = 8
"""Inputs that wait while one is answered; more are turned away, because their answers would come too late."""


@dataclass(frozen=True)
class Observation:
    """An input that was answered, for those who look on: the page, the metrics, drift, MQTT.

    Attributes:
        answer: What was said.
        features: The features (n, d) float32 that it was said for.
        inputs: The prepared input (n, *shape) float32.
        pair: What has said it.
        source: Where the input comes from, such as ``http`` or ``camera:0``.
        raw: The input as it came, encoded; empty where it was never encoded.
        content_type: The form of ``raw``, such as ``image/jpeg``; empty where it is not known.
        at: Seconds since 1970.
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
    """Somebody who looks at every answer."""

    def see(self, observation: Observation) -> None:
        """Take note of an answer. It is called one at a time, and whoever asked waits for it: be quick."""

    def see_switch(self, pair: Pair) -> None:
        """Take note of another pair that answers from now on."""


class Predictor:
    """Answers inputs one at a time, by the pair in use."""

    def __init__(
        self,
        *,
        waiting: int = WAITING,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Begin without a pair.

        Args:
            waiting: How many inputs may wait while one is answered.
            clock: Seconds, for the times in answers.
            now: Seconds since 1970.
        """
        self._most_waiting = waiting
        self._present = 0
        self._counting = threading.Lock()
        self._turn = threading.Lock()
        self._clock = clock
        self._now = now
        self._pair: Pair | None = None
        self._observers: list[Observer] = []
        self._last_s = 0.0

    @property
    def pair(self) -> Pair:
        """The pair that answers now.

        Raises:
            NotReady: There is none yet.
        """
        pair = self._pair
        if pair is None:
            raise NotReady("no head and no bundle are in use here yet; wait for a release, or import a bundle")
        return pair

    @property
    def is_ready(self) -> bool:
        """Whether there is a pair that answers."""
        return self._pair is not None

    @property
    def waiting(self) -> int:
        """How many inputs wait for the one that is being answered."""
        return max(0, self._present - 1)

    def observe(self, observer: Observer) -> None:
        """Let somebody look at every answer from now on."""
        self._observers.append(observer)

    def switch(self, pair: Pair) -> None:
        """Let another pair answer from the next turn on."""
        with self._turn:
            before = self._pair
            self._pair = pair
            for observer in self._observers:
                observer.see_switch(pair)
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
            decode: Returns the prepared input (n, *shape) float32 for the pair that will answer. It is called in
                turn, too, so that one image at a time is in memory.
            source: Where the input comes from.
            raw: The input as it came, for those who look on.
            content_type: The form of ``raw``.

        Raises:
            Busy: Too many inputs are waiting.
            NotReady: No pair is in use yet.
            HeadwaterError: What ``decode`` and `Pair.answer` raise.
        """
        with self.turn() as pair:
            started_at = self._clock()
            inputs = decode(pair)
            decode_ms = 1000 * (self._clock() - started_at)
            answered = self._answer_now(pair, inputs, decode_ms)
            self._show(answered, inputs, pair, source, raw, content_type)
        return answered.answer

    def answer_rows(self, decode: Callable[[Pair], np.ndarray], source: str) -> tuple[Pair, list[Answered]]:
        """Answer several inputs in one turn, by one pair.

        Args:
            decode: Returns the prepared inputs (n, *shape) float32, each of which is answered by itself.
            source: Where they come from.

        Returns:
            The pair, and its answers in the order of the inputs.

        Raises:
            HeadwaterError: As `answer`.
        """
        answers = []
        with self.turn() as pair:
            started_at = self._clock()
            rows = decode(pair)
            decode_ms = 1000 * (self._clock() - started_at) / max(1, len(rows))
            for row in rows:
                answered = self._answer_now(pair, row[None], decode_ms)
                self._show(answered, row[None], pair, source, b"", "")
                answers.append(answered)
        return pair, answers

    def _answer_now(self, pair: Pair, inputs: np.ndarray, decode_ms: float) -> Answered:
        """Return the answer to a prepared input, with the time that decoding it took."""
        answered = pair.answer(inputs, self._clock)
        timed = answered.answer.stages
        stages = Stages(decode_ms, timed.encode, timed.head)
        self._last_s = (decode_ms + timed.encode + timed.head) / 1000
        return Answered(answered.answer.with_stages(stages), answered.features)

    def _show(
        self, answered: Answered, inputs: np.ndarray, pair: Pair, source: str, raw: bytes, content_type: str
    ) -> None:
        """Let everybody who looks on see an answer."""
        observation = Observation(
            answered.answer, answered.features, inputs, pair, source, raw, content_type, self._now()
        )
        for observer in self._observers:
            observer.see(observation)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Pair]:
        """Wait for a turn, and give the pair that answers in it.

        Raises:
            Busy: Too many are waiting.
            NotReady: No pair is in use yet.
        """
        with self._counting:
            if self._present > self._most_waiting:
                raise Busy(self._most_waiting, max(1, round(self._most_waiting * self._last_s)))
            self._present += 1
        try:
            with self._turn:
                yield self.pair
        finally:
            with self._counting:
                self._present -= 1
