"""The loop around a stream of samples: windows of the task's length are cut from it and answered, one after the other.

No sample is lost: windows wait for each other, and for inputs of others. A window never spans a gap in time or a line
that is no sample, because what is in between is not known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from ...core.errors import Busy, DataError, HeadwaterError, NotReady, SourceEnded, SourceLost
from ...core.task import WindowInput
from ...data.preprocess import normalise_windows
from ..pair import Pair
from ..predictor import Predictor
from .loop import FeedState, SourceLoop
from .samples import LineReader, Lines, Sample

log = logging.getLogger(__name__)

GAP = 2.5
"""A step in time of more than so many usual ones is a gap."""

_WAIT_S = 0.5
_BUSY_S = 0.02
_LEAST_FOR_GAPS = 8
"""Steps from which on the usual one is known."""

_KEPT_STEPS = 64
"""Steps that the usual one is the median of."""


@dataclass(frozen=True)
class SensorState(FeedState):
    """How a stream is, beside what is known of any source.

    Attributes:
        samples: Samples so far.
        gaps: Times that the stream was interrupted, by a gap in time or by lines that are no samples.
    """

    samples: int = 0
    gaps: int = 0

    def as_json(self, name: str) -> dict[str, Any]:
        """Return the state as the page reads it."""
        content = super().as_json(name)
        if self.condition == "ended":
            content["text"] = f"ended after {self.samples} samples"
        elif self.condition == "ok" and self.reason:
            content["text"] = f"ok; {self.reason}"
        return {**content, "samples": self.samples, "gaps": self.gaps}


class SensorFeed(SourceLoop[SensorState]):
    """A thread that answers the windows of one stream."""

    def __init__(
        self,
        lines: Lines,
        predictor: Predictor,
        *,
        hop: int | None = None,
        rate: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is read before `start`.

        Args:
            lines: Where samples come from.
            predictor: What answers windows.
            hop: Samples between the starts of two windows; None: the task's.
            rate: Samples in a second, where the stream has no column for the time; None: windows are named by the
                number of their last sample.
            now: Seconds since 1970.
        """
        super().__init__(lines.name, SensorState("starting", now()), now)
        self._lines = lines
        self._predictor = predictor
        self._hop = hop
        self._rate = rate
        # Names of columns come once, whatever interrupts the stream later.
        self._reader = LineReader()
        self._window: list[np.ndarray] = []
        self._skip = 0
        self._is_broken = False
        self._last_at: float | None = None
        self._steps: list[float] = []

    def close(self) -> None:
        """Answer no more."""
        self._lines.close()
        super().close()

    def _answer_until_lost(self) -> None:
        """Take line after line until there are no more; see `SourceLoop`."""
        self._lines.open()
        while not self._stop.is_set():
            try:
                line = self._lines.read(_WAIT_S)
            except SourceEnded:
                raise
            except SourceLost as error:
                self._interrupt(str(error))
                raise
            if line is not None:
                self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        """Take the sample of a line; a line that is none ends the window."""
        try:
            sample = self._reader.read(line)
        except DataError as error:
            # A stream of such lines would fill the log: the first one is enough.
            if not self._is_broken:
                log.warning("sample_not_read source=%s reason=%s", self.name, error)
                self._interrupt(str(error))
            self._is_broken = True
            return
        if sample is not None:
            self._take(sample)

    def _take(self, sample: Sample) -> None:
        """Add a sample, and answer the window that it completes."""
        self._is_broken = False
        self._state = replace(self._state, samples=self._state.samples + 1)
        self._look_for_gap(sample)
        spec = self._spec()
        if spec is None:
            return
        if self._skip:
            self._skip -= 1
            return
        self._window.append(sample.values)
        if len(self._window) < spec.length:
            return
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, and its window is refused
            window = np.stack(self._window[-spec.length :], axis=1).astype(np.float32)
        hop = spec.stride if self._hop is None else self._hop
        # What the next window begins with stays; a hop of more than a window passes samples over.
        del self._window[:hop]
        self._skip = max(0, hop - spec.length)
        self._answer(window, sample)

    def _spec(self) -> WindowInput | None:
        """Return the form of windows; None while no pair is in use."""
        try:
            spec = self._predictor.pair.input
        except NotReady:
            return None
        if not isinstance(spec, WindowInput):
            raise SourceLost("the encoder takes images, and this is a stream of samples")
        return spec

    def _answer(self, window: np.ndarray, sample: Sample) -> None:
        """Answer a window (channels, length) in sensor units; inputs of others may come first."""

        def decode(pair: Pair) -> np.ndarray:
            spec = pair.input
            if not isinstance(spec, WindowInput) or window.shape != spec.shape:
                raise DataError(f"a window of {window.shape[0]} channels, the encoder takes {spec.shape[0]}")
            if not np.isfinite(window).all():
                raise DataError("a window holds values beyond float32")
            return normalise_windows(window[None].copy(), spec)

        source = f"{self.name} {self._time_of(sample)}"
        while not self._stop.is_set():
            try:
                self._predictor.answer(decode, source)
            except Busy:
                self._stop.wait(_BUSY_S)
            except HeadwaterError as error:
                log.warning("window_not_answered source=%s reason=%s", source, error)
                self._note_refused(str(error))
                return
            else:
                self._note_answered()
                return

    def _time_of(self, sample: Sample) -> str:
        """Return the time of the end of a window, or the number of its last sample."""
        if sample.at is not None:
            return f"at {sample.at:.3f} s"
        if self._rate is not None:
            return f"at {self._state.samples / self._rate:.3f} s"
        return f"sample {self._state.samples}"

    def _look_for_gap(self, sample: Sample) -> None:
        """Interrupt the window where time has made a jump, or gone back."""
        before = self._last_at
        self._last_at = sample.at
        if sample.at is None or before is None:
            return
        step = sample.at - before
        usual = self._usual_step()
        if usual is not None and not 0 < step <= GAP * usual:
            self._interrupt(f"a gap of {step:.3f} s before line {sample.line}")
            return
        self._steps.append(step)
        del self._steps[:-_KEPT_STEPS]

    def _usual_step(self) -> float | None:
        """Return the seconds between two samples; None as long as too few have come to know."""
        if self._rate is not None:
            return 1 / self._rate
        if len(self._steps) < _LEAST_FOR_GAPS:
            return None
        return median(self._steps)

    def _interrupt(self, reason: str) -> None:
        """Begin a new window: what was between these samples is not known."""
        self._window.clear()
        self._skip = 0
        self._become("ok", reason)
        self._state = replace(self._state, gaps=self._state.gaps + 1)
