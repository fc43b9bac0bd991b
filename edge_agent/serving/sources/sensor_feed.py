"""The loop around a stream of samples: it cuts the stream into windows of the task's length, and answers each of them.

No window is dropped: if other inputs are being answered, the window waits. A window never spans a gap in time or a line
that could not be read, because the samples in between are missing.
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
from .loop import BUSY_S, FeedState, SourceLoop
from .samples import LineReader, LineSource, Sample

log = logging.getLogger(__name__)

GAP_FACTOR = 2.5
"""A time step of more than this many usual steps is a gap."""

_WAIT_S = 0.5
"""The longest wait for a line, in seconds; after it the loop checks whether it has been closed."""

_LEAST_STEPS = 8
"""The number of time steps from which on their median counts as the usual step."""

_RECENT_STEPS = 64
"""The number of recent time steps that the median is taken of."""


@dataclass(frozen=True)
class SensorState(FeedState):
    """The state of a stream of samples.

    Attributes:
        samples: Number of samples so far.
        gaps: How often the stream was interrupted by a gap in time, by unreadable lines or by the loss of the source.
    """

    samples: int = 0
    gaps: int = 0

    def as_json(self, name: str) -> dict[str, Any]:
        """Return the state as JSON for the page; ``name``: that of the source."""
        content = super().as_json(name)
        if self.condition == "ended":
            content["text"] = f"ended after {self.samples} samples"
        return {**content, "samples": self.samples, "gaps": self.gaps}


class SensorFeed(SourceLoop[SensorState]):
    """A thread that answers the windows of one stream."""

    def __init__(
        self,
        lines: LineSource,
        predictor: Predictor,
        *,
        hop: int | None = None,
        rate: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create a loop; nothing is read before `start`.

        Args:
            lines: Where the samples come from.
            predictor: Answers the windows.
            hop: Samples between the starts of two windows; None: the stride of the task.
            rate: Samples per second, for streams without a time column; None: not known, and answers name the number of
                the last sample instead of its time.
            now: Returns seconds since 1970.
        """
        super().__init__(lines.name, SensorState("starting", now()), now)
        self._lines = lines
        self._predictor = predictor
        self._hop = hop
        self._rate = rate
        # One reader for all connections: the names of columns are sent only once.
        self._reader = LineReader()
        self._window: list[np.ndarray] = []
        """The samples (channels,) of the window that is being filled."""

        self._to_skip = 0
        """Samples that are still passed over, because the hop is longer than a window."""

        self._was_unreadable = False
        """Whether the last line could not be read."""

        self._last_at: float | None = None
        self._steps: list[float] = []
        """Recent time steps between two samples, in seconds."""

    def close(self) -> None:
        """Stop answering, and wait for the thread to end."""
        self._lines.close()
        super().close()

    def _answer_until_lost(self) -> None:
        """Read line after line until the source ends or is lost; see `SourceLoop`."""
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
                self._process_line(line)

    def _process_line(self, line: bytes) -> None:
        """Parse a line, and process its sample. An unreadable line interrupts the window."""
        try:
            sample = self._reader.read(line)
        except DataError as error:
            self._report_unreadable(str(error))
            return
        if sample is not None:
            self._process_sample(sample)

    def _report_unreadable(self, reason: str) -> None:
        """Count a line that is no sample of this encoder, and interrupt the window.

        Only the first of several such lines is logged: a stream of them would fill the log.
        """
        if not self._was_unreadable:
            log.warning("sample_not_read source=%s reason=%s", self.name, reason)
            self._interrupt(reason)
        self._was_unreadable = True
        self._state = replace(self._state, refused=self._state.refused + 1)

    def _process_sample(self, sample: Sample) -> None:
        """Add a sample to the window, and answer the window if it is complete."""
        spec = self._window_spec()
        if spec is not None and len(sample.values) != spec.channels:
            self._report_unreadable(
                f"line {sample.line}: {len(sample.values)} numbers, the encoder takes {spec.channels}"
            )
            return
        self._was_unreadable = False
        self._state = replace(self._state, samples=self._state.samples + 1)
        self._detect_gap(sample)
        if spec is None:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        self._window.append(sample.values)
        if len(self._window) < spec.length:
            return
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, and its window is refused
            window = np.stack(self._window[-spec.length :], axis=1).astype(np.float32)
        hop = spec.stride if self._hop is None else self._hop
        # The next window starts `hop` samples later. It keeps the overlap; if the hop is longer, samples are skipped.
        del self._window[:hop]
        self._to_skip = max(0, hop - spec.length)
        self._answer(window, sample)

    def _window_spec(self) -> WindowInput | None:
        """Return the form of the windows; None while no pair is in use.

        Raises:
            SourceLost: The encoder takes images.
        """
        try:
            spec = self._predictor.pair.input
        except NotReady:
            return None
        if not isinstance(spec, WindowInput):
            raise SourceLost("the encoder takes images, and this is a stream of samples")
        return spec

    def _answer(self, window: np.ndarray, sample: Sample) -> None:
        """Answer a window (channels, length) float32 in sensor units; wait while too many other inputs are waiting."""

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
                self._stop.wait(BUSY_S)
            except HeadwaterError as error:
                log.warning("window_not_answered source=%s reason=%s", source, error)
                self._note_refused(str(error))
                return
            else:
                self._note_answered()
                return

    def _time_of(self, sample: Sample) -> str:
        """Return the time of a window's last sample, or its number if the time is not known."""
        if sample.at is not None:
            return f"at {sample.at:.3f} s"
        if self._rate is not None:
            return f"at {self._state.samples / self._rate:.3f} s"
        return f"sample {self._state.samples}"

    def _detect_gap(self, sample: Sample) -> None:
        """Interrupt the window if the time has jumped ahead, stood still or gone back."""
        previous_at = self._last_at
        self._last_at = sample.at
        if sample.at is None or previous_at is None:
            return
        step = sample.at - previous_at
        usual_step = self._usual_step()
        if usual_step is not None and not 0 < step <= GAP_FACTOR * usual_step:
            self._interrupt(f"a gap of {step:.3f} s before line {sample.line}")
            return
        self._steps.append(step)
        del self._steps[:-_RECENT_STEPS]

    def _usual_step(self) -> float | None:
        """Return the usual time between two samples, in seconds; None until enough samples have come."""
        if self._rate is not None:
            return 1 / self._rate
        if len(self._steps) < _LEAST_STEPS:
            return None
        return median(self._steps)

    def _interrupt(self, reason: str) -> None:
        """Start a new window, because samples are missing between the last one and the next."""
        self._window.clear()
        self._to_skip = 0
        self._set_condition("ok", reason)
        self._state = replace(self._state, gaps=self._state.gaps + 1)
