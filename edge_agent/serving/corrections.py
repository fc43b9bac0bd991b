"""Corrections: a person labels an answered input. It is added to the device's samples, and the head is fitted again.

If the device's agent is running, the agent fits the head; otherwise a child process of this program does. In both cases
`pair_source` notices the new head and switches to it, as after any fit.
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
from ..core.errors import DataError, HeadwaterError, SamplesBusy, StateError, UsageError, cause
from ..core.task import ImageInput
from ..data import Samples
from ..data.collected import labelled
from .history import Entry, History
from .inputs import Decoder
from .pair import Pair
from .refit import Refit, refit_in_child

log = logging.getLogger(__name__)


WAIT_S = 10.0
"""Seconds for which a correction waits for another program that changes the samples, such as ``edge-agent add``."""

_RETRY_S = 5
"""Seconds after which a correction may be tried again that has waited in vain."""


class FitState(enum.Enum):
    """The state of the fit that follows corrections."""

    IDLE = "idle"
    FITTING = "fitting"
    AGENT_FITS = "agent fits"
    FITTED = "fitted"
    FAILED = "failed"


@dataclass(frozen=True)
class FitStatus:
    """The state of the last fit, and its outcome.

    Attributes:
        state: What the fit is doing.
        refit: The outcome of a fit that has ended well; None otherwise.
        reason: Why the fit has failed, for people; empty otherwise.
    """

    state: FitState = FitState.IDLE
    refit: Refit | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the status as the page reads it."""
        outcome = None if self.refit is None else {**vars(self.refit), "is_worse": self.refit.is_worse}
        return {"state": self.state.value, "refit": outcome, "reason": self.reason}


class Corrections:
    """Adds corrected inputs to the samples of a device, and has its head fitted again."""

    def __init__(
        self,
        config: AgentConfig | None,
        history: History,
        why_not: str = "",
        refit: Callable[[AgentConfig], Refit] = refit_in_child,
        wait_s: float = WAIT_S,
    ) -> None:
        """Create the object; nothing is fitted before the first correction.

        Args:
            config: The device's configuration; None: there is no state folder, and corrections are rejected.
            history: The answers that may be corrected.
            why_not: Why corrections are rejected here, for people; empty: they are accepted.
            refit: Fits the head of a device again; a parameter for tests.
            wait_s: Seconds for which a correction waits for another program that changes the samples.
        """
        self._config = config
        self._history = history
        self._refit = refit
        self._wait_s = wait_s
        self.why_not = why_not
        self.status = FitStatus()
        self._lock = threading.Lock()
        self._is_fit_requested = False
        self._thread: threading.Thread | None = None

    def labels(self, pair: Pair) -> list[str]:
        """Return the classes that the page offers: those of the head, then those that only added samples have."""
        names = list(pair.class_names)
        if self._config is not None:
            index = collection_of(self._config).index()
            names += [label for label in index.classes if label not in names]
        return names

    def correct(self, number: int, label: str, pair: Pair) -> dict[str, Any]:
        """Add an answered input as a sample of a class, which may be a new one, and request a fit.

        Args:
            number: The number of the answer in the history.
            label: The right class.
            pair: The pair in use; the sample has to fit its task.

        Returns:
            JSON for the page: how many samples were added, were known already, and were moved to this class.

        Raises:
            UsageError: Corrections are not accepted here, or the answer is no longer kept.
            DataError: The label is not a valid class name, or the input cannot become a sample.
            SamplesBusy: Another program has been changing the samples for too long; nothing has changed.
            OSError: The disk is full; nothing has changed.
        """
        config = self._config
        if config is None or self.why_not:
            raise UsageError(self.why_not)
        entry = self._history.find(number)
        if entry is None:
            raise UsageError(f"answer {number} is no longer kept; correct one of those that are shown")
        if not pair.class_names:
            raise UsageError("this head answers with numbers, which have no class to correct")
        samples = labelled(_to_sample(entry, pair), label)
        try:
            added = collection_of(config).add(samples, config.data.budget, self._wait_s)
        except TimeoutError as error:
            raise SamplesBusy(_RETRY_S) from error
        self._history.correct(number, label)
        self._request_fit(config)
        return {"added": added.added, "known": added.known, "moved": added.moved, "class": label}

    def close(self) -> None:
        """Start no more fits. A running one ends with this process."""
        self._is_fit_requested = False

    def _request_fit(self, config: AgentConfig) -> None:
        """Start a fit; if one is running, another one follows it. From now on the status says so."""
        with self._lock:
            self._is_fit_requested = True
            self.status = FitStatus(FitState.FITTING)
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._fit_while_requested, args=(config,), name="fit", daemon=True)
            self._thread.start()

    def _fit_while_requested(self, config: AgentConfig) -> None:
        """Fit again and again, until no correction has come since the last fit began."""
        while True:
            with self._lock:
                self._is_fit_requested = False
            outcome = self._fit(config)
            with self._lock:
                # If another fit follows, its outcome counts; the status still says that the head is being fitted.
                if not self._is_fit_requested:
                    self.status = outcome
                    self._thread = None
                    return

    def _fit(self, config: AgentConfig) -> FitStatus:
        """Fit once, and return the outcome."""
        try:
            refit = self._refit(config)
        except HeadwaterError as error:
            # The agent holds the state folder: it notices the new sample, and fits the head itself.
            if isinstance(error, StateError) and error.holder:
                return FitStatus(FitState.AGENT_FITS)
            log.warning("not_refitted reason=%s", error)
            return FitStatus(FitState.FAILED, reason=str(error))
        except OSError as error:
            log.warning("not_refitted reason=%s", cause(error))
            return FitStatus(FitState.FAILED, reason=cause(error))
        return FitStatus(FitState.FITTED, refit)


def _to_sample(entry: Entry, pair: Pair) -> Samples:
    """Return an answered input as a sample without a label, in the form in which 'edge-agent add' would have read it.

    Raises:
        DataError: The input does not fit the task of the pair, because a release has changed it since.
    """
    spec = pair.input
    inputs = entry.inputs
    # Samples of images are stored as pixels, not normalised.
    if isinstance(spec, ImageInput) and entry.raw:
        inputs = Decoder(spec).pixels(entry.raw)
    if inputs.shape[1:] != spec.shape:
        raise DataError(f"the input has shape {inputs.shape[1:]}, and the encoder in use takes {spec.shape} now")
    # Several windows are one recording, so that cross-validation never divides them.
    recordings = np.zeros(len(inputs), np.int64) if len(inputs) > 1 else None
    return Samples(inputs, np.full(len(inputs), -1), (), spec, groups=recordings)
