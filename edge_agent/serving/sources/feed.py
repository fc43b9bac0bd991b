"""The loop around a source of frames: ask for a frame, answer it, wait.

A camera that gives the same picture again and again has frozen, and its picture says nothing of what is before it now:
it is told and not answered. Bytes of two pictures of a real scene are never equal, because no sensor is without noise.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

import numpy as np

from ...core.errors import Busy, HeadwaterError, SourceLost
from ...wire.messages.fields import printable
from ..inputs import Decoder
from ..pair import Pair
from ..predictor import Predictor
from .loop import FeedState, SourceLoop
from .source import Frame, Source

log = logging.getLogger(__name__)

FROZEN_AFTER = 5
"""Equal frames in a row after which a camera counts as frozen."""

_WAIT_S = 0.5
"""Seconds that a frame is waited for at once, between two looks whether to end."""


class Feed(SourceLoop[FeedState]):
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
        super().__init__(source.name, FeedState("starting", now()), now)
        self._source = source
        self._predictor = predictor
        self._decoder_of = decoder_of
        self._every_s = every_s
        self._clock = clock
        self._last_digest = b""
        self._equal = 0

    def _answer_until_lost(self) -> None:
        """Answer frames, one at each time that is due, until the source is lost; see `SourceLoop`."""
        try:
            self._source.open()
            due_at = self._clock()
            while not self._stop.is_set():
                if not self._source.are_all_wanted:
                    self._stop.wait(max(0.0, due_at - self._clock()))
                frame = self._source.read(_WAIT_S)
                if frame is not None and not self._is_frozen(frame):
                    self._answer(frame)
                    due_at = self._clock() + self._every_s
        finally:
            self._source.close()

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

        source = f"{self.name} {frame.name}".rstrip()
        try:
            self._predictor.answer(decode, source, frame.raw)
        except Busy:  # requests of others come first; the next frame is newer anyway
            return
        except SourceLost:
            raise
        except HeadwaterError as error:
            reason = printable(str(error))  # it may quote what somebody has sent
            log.warning("frame_not_answered source=%s reason=%s", source, reason)
            self._note_refused(reason)
            return
        self._note_answered()
