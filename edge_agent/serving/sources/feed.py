"""The loop around a source: ask for a frame, answer it, wait; open the source again when it was lost.

A camera that gives the same picture again and again has frozen, and its picture says nothing of what is before it now:
it is told and not answered. Bytes of two pictures of a real scene are never equal, because no sensor is without noise.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from ...core.errors import Busy, HeadwaterError, SourceLost
from ..inputs import Decoder
from ..pair import Pair
from ..predictor import Predictor
from .source import Frame, Source

log = logging.getLogger(__name__)

FROZEN_AFTER = 5
"""Equal frames in a row after which a camera counts as frozen."""

FIRST_PAUSE_S = 1.0
"""Seconds before a source that was lost is opened again for the first time; the pauses double from then on."""

LONGEST_PAUSE_S = 60.0
"""The longest of these pauses."""

_WAIT_S = 0.5
"""Seconds that a frame is waited for at once, between two looks whether to end."""


@dataclass(frozen=True)
class FeedState:
    """How a source is.

    Attributes:
        condition: ``starting``, ``ok``, ``lost`` or ``frozen``.
        since: Seconds since 1970 at which the condition began.
        reason: Why it is so; empty where all is well.
        answered: Frames that were answered since the start.
        refused: Frames that could not be answered since the start.
    """

    condition: str
    since: float
    reason: str = ""
    answered: int = 0
    refused: int = 0

    def as_json(self, name: str) -> dict[str, Any]:
        """Return the state as the page reads it."""
        text = self.condition
        if self.condition in {"lost", "frozen"}:
            text = f"{self.condition} since {_clock_text(self.since)}: {self.reason}"
        return {"name": name, "condition": self.condition, "text": text, "answered": self.answered}


def _clock_text(at: float) -> str:
    """Return a time, seconds since 1970, as the device's clock shows it."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


class Feed:
    """A thread that answers the frames of one source."""

    def __init__(
        self,
        source: Source,
        predictor: Predictor,
        decoder_of: Callable[[Pair], Decoder],
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is asked before `start`.

        Args:
            source: Where frames come from.
            predictor: What answers them.
            decoder_of: Returns how frames become inputs of a pair.
            every_s: Seconds between two answers, at least; frames between them are dropped where the newest counts.
            clock: Seconds that go on.
            now: Seconds since 1970.
        """
        self._source = source
        self._predictor = predictor
        self._decoder_of = decoder_of
        self._every_s = every_s
        self._clock = clock
        self._state = FeedState("starting", now())
        self._now = now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"source {source.name}", daemon=True)
        self._last_digest = b""
        self._equal = 0

    @property
    def name(self) -> str:
        """The name of the source."""
        return self._source.name

    @property
    def state(self) -> FeedState:
        """How the source is."""
        return self._state

    def as_json(self) -> dict[str, Any]:
        """Return the state with the source's name, as the page reads it."""
        return self._state.as_json(self._source.name)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            answered_before = self._state.answered
            try:
                self._source.open()
                self._answer_until_lost()
            except HeadwaterError as error:
                self._become("lost", str(error))
            except Exception:  # a bug must not end the thread without a word
                log.exception("source_broke source=%s", self._source.name)
                self._become("lost", "a bug; the log has its traceback")
            finally:
                self._source.close()
            # What has worked for a while is tried again soon, what never works seldom.
            pause_s = FIRST_PAUSE_S if self._state.answered > answered_before else min(2 * pause_s, LONGEST_PAUSE_S)
            self._stop.wait(pause_s)

    def _answer_until_lost(self) -> None:
        """Answer frames, one at each time that is due, until the source is lost.

        Raises:
            SourceLost: It is.
        """
        due_at = self._clock()
        while not self._stop.is_set():
            if not self._source.are_all_wanted:
                self._stop.wait(max(0.0, due_at - self._clock()))
            frame = self._source.read(_WAIT_S)
            if frame is not None and not self._is_frozen(frame):
                self._answer(frame)
                due_at = self._clock() + self._every_s

    def _is_frozen(self, frame: Frame) -> bool:
        """Return whether this frame is one more of many equal ones, of a source that has no names for them."""
        if frame.name:
            return False
        digest = hashlib.blake2b(frame.raw, digest_size=16).digest()
        self._equal = self._equal + 1 if digest == self._last_digest else 1
        self._last_digest = digest
        if self._equal < FROZEN_AFTER:
            return False
        self._become("frozen", f"the last {FROZEN_AFTER} pictures are the same, byte for byte; restart the camera")
        return True

    def _answer(self, frame: Frame) -> None:
        """Answer a frame; one that cannot be answered is counted and logged."""

        def decode(pair: Pair) -> np.ndarray:
            return self._decoder_of(pair).decode(frame.raw)

        source = f"{self._source.name} {frame.name}".rstrip()
        try:
            self._predictor.answer(decode, source, frame.raw)
        except Busy:  # requests of others come first; the next frame is newer anyway
            return
        except SourceLost:
            raise
        except HeadwaterError as error:
            log.warning("frame_not_answered source=%s reason=%s", source, error)
            self._become("ok")
            self._state = replace(self._state, refused=self._state.refused + 1, reason=str(error))
            return
        self._become("ok")
        self._state = replace(self._state, answered=self._state.answered + 1, reason="")

    def _become(self, condition: str, reason: str = "") -> None:
        """Note how the source is now, and log it where it was otherwise before."""
        if condition == self._state.condition:
            self._state = replace(self._state, reason=reason)
            return
        self._state = replace(self._state, condition=condition, since=self._now(), reason=reason)
        level = logging.INFO if condition == "ok" else logging.WARNING
        log.log(level, "source_%s source=%s reason=%s", condition, self._source.name, reason)
