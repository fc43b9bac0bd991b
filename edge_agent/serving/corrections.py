"""A person says what an input was: it becomes a sample of the device, and the head is fitted again beside.

While the device's agent runs, that fits the head; otherwise a process of this program does. Whoever puts the new head
in use, the pair that answers is switched by `pair_source`, as after any fit.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..agent.head_tier import collection_of
from ..core.config import AgentConfig
from ..core.errors import DataError, HeadwaterError, StateError, UsageError, cause
from ..core.task import ImageInput
from ..data import Samples
from ..data.collected import labelled
from .history import Entry, History
from .inputs import Decoder
from .pair import Pair
from .refit import Refit, refit_beside

log = logging.getLogger(__name__)


class FitState(enum.Enum):
    """What the fits after corrections are doing."""

    IDLE = "idle"
    FITTING = "fitting"
    AGENT_FITS = "agent fits"
    FITTED = "fitted"
    FAILED = "failed"


@dataclass(frozen=True)
class FitStatus:
    """Where the last fit stands: its state, what it came to, and why it failed."""

    state: FitState = FitState.IDLE
    refit: Refit | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the status as the page reads it."""
        fitted = None if self.refit is None else {**vars(self.refit), "is_worse": self.refit.is_worse}
        return {"state": self.state.value, "refit": fitted, "reason": self.reason}


class Corrections:
    """Takes what people say of inputs, for a device with a state folder."""

    def __init__(
        self,
        config: AgentConfig | None,
        history: History,
        why_not: str = "",
        refit: Callable[[AgentConfig], Refit] = refit_beside,
    ) -> None:
        """Begin; nothing is fitted before the first correction.

        Args:
            config: The device's configuration; None: there is no state folder, and nothing can be corrected.
            history: The answers that may be corrected.
            why_not: Why corrections cannot be taken here, for people; empty: they can.
            refit: Fits the head of a state folder again.
        """
        self._config = config
        self._history = history
        self._refit = refit
        self.why_not = why_not
        self.status = FitStatus()
        self._lock = threading.Lock()
        self._is_wanted = False
        self._thread: threading.Thread | None = None

    def labels(self, pair: Pair) -> list[str]:
        """Return the classes that may be named: those of the head, then those of which samples were added."""
        names = list(pair.class_names)
        if self._config is not None:
            index = collection_of(self._config).index()
            names += [label for label in index.classes if label not in names]
        return names

    def correct(self, number: int, label: str, pair: Pair) -> dict[str, Any]:
        """Add an answered input as a sample of a class, which may be a new one, and begin a fit.

        Args:
            number: The number of the answer in the history.
            label: The right class.
            pair: The pair in use, whose task the sample is of.

        Returns:
            What was added, as the page reads it.

        Raises:
            UsageError: Corrections cannot be taken here, or the answer is not kept any more.
            DataError: The label is no name for a class, or the input cannot become a sample.
            OSError: The disk is full; nothing has changed.
        """
        config = self._config
        if config is None or self.why_not:
            raise UsageError(self.why_not)
        entry = self._history.find(number)
        if entry is None:
            raise UsageError(f"answer {number} is not kept any more; correct one of those that are shown")
        if not pair.class_names:
            raise UsageError("this head answers with numbers, which have no class to correct")
        samples = labelled(_sample_of(entry, pair), label)
        added = collection_of(config).add(samples, config.data.budget)
        self._history.correct(number, label)
        self._want_fit(config)
        return {"added": added.added, "known": added.known, "moved": added.moved, "class": label}

    def close(self) -> None:
        """Begin no more fits; one that runs ends with this process."""
        self._is_wanted = False

    def _want_fit(self, config: AgentConfig) -> None:
        """Begin a fit, or have another one follow the one that runs."""
        with self._lock:
            self._is_wanted = True
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._fit_while_wanted, args=(config,), name="fit", daemon=True)
            self._thread.start()

    def _fit_while_wanted(self, config: AgentConfig) -> None:
        """Fit until no correction has come since the last fit began."""
        while True:
            with self._lock:
                if not self._is_wanted:
                    self._thread = None
                    return
                self._is_wanted = False
            self.status = FitStatus(FitState.FITTING)
            self.status = self._fit(config)

    def _fit(self, config: AgentConfig) -> FitStatus:
        """Fit once, and return what came of it."""
        try:
            refit = self._refit(config)
        except HeadwaterError as error:
            if isinstance(error, StateError) and error.holder:
                return FitStatus(FitState.AGENT_FITS)
            log.warning("not_refitted reason=%s", error)
            return FitStatus(FitState.FAILED, reason=str(error))
        except OSError as error:
            log.warning("not_refitted reason=%s", cause(error))
            return FitStatus(FitState.FAILED, reason=cause(error))
        return FitStatus(FitState.FITTED, refit)


def _sample_of(entry: Entry, pair: Pair) -> Samples:
    """Return an answered input as a sample without a label, in the form in which 'edge-agent add' would have read it.

    Raises:
        DataError: The input does not fit the task any more, after a release with another one.
    """
    spec = pair.input
    inputs = entry.inputs
    if isinstance(spec, ImageInput) and entry.raw:
        inputs = Decoder(spec).pixels(entry.raw)
    if inputs.shape[1:] != spec.shape:
        raise DataError(f"the input has shape {inputs.shape[1:]}, and the encoder in use takes {spec.shape} now")
    return Samples(inputs, np.full(len(inputs), -1), (), spec, groups=_one_recording(inputs))


def _one_recording(inputs: np.ndarray) -> np.ndarray | None:
    """Return the numbers (n,) of the recordings of windows, which are one; None for a single input."""
    return np.zeros(len(inputs), np.int64) if len(inputs) > 1 else None
