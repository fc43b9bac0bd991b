"""The loop around a source of frames: read a frame, answer it, wait.

A camera that delivers the same picture again and again has frozen, and its picture does not show what is in front of it
now. Such pictures are not answered, and the source is reported as frozen. Equal bytes are a safe sign: two pictures of
a real scene always differ, because every image sensor has noise.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

import numpy as np

from ...core.errors import Busy, HeadwaterError, SourceLost
from ...core.formats import printable
from ..inputs import Decoder
from ..pair import Pair
from ..predictor import Predictor
from .loop import BUSY_S, FeedState, SourceLoop
from .source import Frame, Source

log = logging.getLogger(__name__)

FROZEN_AFTER = 5
"""The number of equal frames in a row from which on a camera counts as frozen."""

_WAIT_S = 0.5
"""The longest wait for a frame, in seconds; after it the loop checks whether it has been closed."""


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
        """Create a loop; nothing is read before `start`.

        Args:
            source: Where frames come from.
            predictor: Answers the frames.
            decoder_of: Returns the decoder that turns frames into inputs of a pair.
            every_s: The least number of seconds between two answers, for sources of which only the newest frame counts.
                Frames in between are dropped.
            clock: Returns seconds of a monotonic clock.
            now: Returns seconds since 1970.
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
        """Answer frames, at most one every `every_s` seconds, until the source is lost; see `SourceLoop`."""
        try:
            self._source.open()
            due_at = self._clock()
            while not self._stop.is_set():
                # The wait comes before reading, so that the frame is the newest at the time of its answer.
                if not self._source.needs_every_frame:
                    self._stop.wait(max(0.0, due_at - self._clock()))
                frame = self._source.read(_WAIT_S)
                if frame is None:
                    continue
                if frame.dropped:
                    self._note_dropped(frame.dropped, "inputs came faster than they could be answered")
                if not self._is_frozen(frame):
                    self._answer(frame)
                    due_at = self._clock() + self._every_s
        finally:
            self._source.close()

    def _is_frozen(self, frame: Frame) -> bool:
        """Return whether this frame equals several before it; frames with a name, such as files, never count."""
        if frame.name:
            return False
        digest = hashlib.blake2b(frame.raw, digest_size=16).digest()
        self._equal = self._equal + 1 if digest == self._last_digest else 1
        self._last_digest = digest
        if self._equal < FROZEN_AFTER:
            return False
        reason = f"the last {FROZEN_AFTER} pictures are the same, byte for byte; restart the camera"
        self._set_condition("frozen", reason)
        return True

    def _answer(self, frame: Frame) -> None:
        """Answer a frame; one that cannot be answered is counted and logged."""

        def decode(pair: Pair) -> np.ndarray:
            return self._decoder_of(pair).decode(frame.raw)

        source = f"{self.name} {frame.name}".rstrip()
        while not self._stop.is_set():
            try:
                self._predictor.answer(decode, source, frame.raw)
            except Busy:  # too many inputs of others are waiting
                if not self._source.needs_every_frame:
                    return  # a newer frame will come
                self._stop.wait(BUSY_S)
            except SourceLost:
                raise
            except HeadwaterError as error:
                reason = printable(str(error))  # it may quote what somebody has sent
                log.warning("frame_not_answered source=%s reason=%s", source, reason)
                self._note_refused(reason)
                return
            else:
                self._note_answered()
                return
