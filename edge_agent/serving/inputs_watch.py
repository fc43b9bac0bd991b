"""Detects that the answered inputs have changed since the head was fitted; see `edge_agent.personal.drift`.

A change is only reported; the head is never fitted because of it. The page then shows the inputs that are least like
the training samples, so that a person can label them.
"""

from __future__ import annotations

import heapq
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..core.storage import write_atomic
from ..heads.saved import SavedHead
from ..personal.drift import EVERY, WINDOW, Comparison, Reference, reference_of, why_not_watched
from .answer import ClassAnswer
from .history import Entry, History
from .inputs_state import InputsRecord, InputsState, InputsStatus, describe, read_record
from .pair import Pair
from .predictor import Observation

log = logging.getLogger(__name__)

STRANGEST = 10
"""How many inputs are offered for labelling: those with the largest residuals."""

_CALM_COMPARISONS = 2 * WINDOW // EVERY
"""Comparisons in a row without a change after which inputs count as fitted again: those of two whole windows."""


def start_thread(work: Callable[[], None]) -> None:
    """Run a function in a thread of its own."""
    threading.Thread(target=work, name="inputs", daemon=True).start()


class InputsWatch:
    """Keeps the last `WINDOW` answers, and compares them with the training samples after every `EVERY` answers."""

    def __init__(
        self,
        history: History,
        file: Path | None = None,
        *,
        on_change: Callable[[bool], None] | None = None,
        run_in_background: Callable[[Callable[[], None]], None] = start_thread,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create a watch; nothing is compared before the first pair, see `on_switch`.

        Args:
            history: Keeps the inputs offered for labelling. It has to receive every answer before this object does.
            file: Where the state is kept over a restart; None: nowhere.
            on_change: Receives True when inputs have changed, and False when they are as fitted.
            run_in_background: Runs the preparation of a new pair, which takes too long for an answer to wait for.
            now: Returns seconds since 1970.
        """
        self._history = history
        self._file = file
        self._on_change = on_change
        self._run_in_background = run_in_background
        self._now = now
        self._lock = threading.Lock()
        self._pair = ""
        self._reference: Reference | None = None
        self._why_not = "no head answers yet"
        self._clear()

    @property
    def status(self) -> InputsStatus:
        """The state of the inputs now."""
        with self._lock:
            text = self._why_not or describe(self._state, self._since, missing=max(0, WINDOW - self._count))
            return InputsStatus(self._state, self._since, text)

    def as_json(self) -> dict[str, Any]:
        """Return the status as JSON for the page, with the inputs offered for labelling, the strangest first."""
        return {**self.status.as_json(), "strangest": [entry.as_json() for entry in self._history.pinned()]}

    def on_switch(self, pair: Pair) -> None:
        """Compare with the training samples of another head from now on; see `Observer`.

        The training samples are prepared in the background. Answers until then are not compared.
        """
        name = str(pair.id)
        rule = pair.head.confidence.unknown if isinstance(pair.head, SavedHead) else None
        with self._lock:
            if name == self._pair:
                return
            self._pair = name
            self._reference = None
            self._clear()
            self._why_not = why_not_watched(rule)
            self._resume()
        self._history.pin(())
        if not self._why_not:
            self._run_in_background(lambda: self._use_reference(name, reference_of(rule)))

    def on_answer(self, observation: Observation) -> None:
        """Compare the features of an answer with the training samples; see `Observer`."""
        answer = observation.answer
        with self._lock:
            reference = self._reference
        if reference is None or not isinstance(answer, ClassAnswer):
            return
        # The windows of a recording count one by one.
        answers = answer.windows or (answer,)
        names = observation.pair.class_names
        labels = np.array([names.index(window.label) for window in answers])
        residuals = reference.residuals(observation.features, labels)
        with self._lock:
            self._keep_if_strange(float((residuals**2).sum(axis=1).max()))
            for residual, label, window in zip(residuals, labels, answers, strict=True):
                self._recent.append((residual, int(label), bool(window.is_unknown)))
                self._count += 1
                if self._count >= WINDOW and self._count % EVERY == 0:
                    self._compare(reference)

    # --- the methods below are called while the lock is held ---

    def _clear(self) -> None:
        """Forget all answers of another pair."""
        self._recent: deque[tuple[np.ndarray, int, bool]] = deque(maxlen=WINDOW)
        """The last answers: residual (d,), class, and whether the input was unknown."""

        self._count = 0
        """Answers since the pair came into use."""

        self._calm = 0
        """Comparisons in a row that found no change."""

        self._state = InputsState.NOT_ENOUGH
        self._since = 0.0
        self._strangest: list[tuple[float, int, Entry]] = []
        """A heap of the strangest inputs: squared length of the residual, number and entry."""

    def _use_reference(self, name: str, reference: Reference | None) -> None:
        """Compare with this reference from now on, unless another pair is in use by now. Takes the lock itself."""
        with self._lock:
            if self._pair == name:
                self._reference = reference

    def _keep_if_strange(self, strangeness: float) -> None:
        """Keep the newest input if it is among the strangest; ``strangeness``: squared length of its residual."""
        entry = self._history.newest()
        if entry is None:
            return
        candidate = (strangeness, entry.number, entry)
        if len(self._strangest) < STRANGEST:
            heapq.heappush(self._strangest, candidate)
        elif candidate > self._strangest[0]:
            heapq.heapreplace(self._strangest, candidate)
        else:
            return
        if self._state is InputsState.CHANGED:
            self._offer_strangest()

    def _offer_strangest(self) -> None:
        """Have the page offer the strangest inputs for labelling, the strangest first."""
        self._history.pin(entry for _, _, entry in sorted(self._strangest, reverse=True))

    def _compare(self, reference: Reference) -> None:
        """Compare the last answers with the training samples, and change the state if that is due."""
        residuals, labels, unknown = zip(*self._recent, strict=True)
        comparison = reference.compare(np.stack(residuals), np.array(labels), np.array(unknown))
        # One comparison is enough to report a change; it takes several in a row to withdraw it.
        if comparison.have_changed:
            self._calm = 0
            self._enter(InputsState.CHANGED, comparison)
            return
        self._calm += 1
        if self._state is InputsState.NOT_ENOUGH or self._calm >= _CALM_COMPARISONS:
            self._enter(InputsState.AS_FITTED, comparison)

    def _enter(self, state: InputsState, comparison: Comparison) -> None:
        """Change the state, save it and report it; do nothing if it is the current one."""
        if state is self._state:
            return
        self._state = state
        self._since = self._now()
        log.info(
            "inputs_%s pair=%s shift=%.2f unknown=%d answers=%d independent=%.0f",
            state.name.lower(),
            self._pair,
            comparison.shift,
            comparison.unknown,
            comparison.answers,
            comparison.independent,
        )
        if state is InputsState.CHANGED:
            self._offer_strangest()
        else:
            self._strangest.clear()
            self._history.pin(())
        self._store()
        if self._on_change is not None:
            self._on_change(state is InputsState.CHANGED)

    def _store(self) -> None:
        """Save the state; if the disk is full, that is logged and answers continue."""
        if self._file is None:
            return
        record = InputsRecord(pair=self._pair, state=self._state, since=self._since)
        try:
            self._file.parent.mkdir(exist_ok=True)
            write_atomic(self._file, json.dumps(record.model_dump(mode="json")).encode())
        except OSError as error:
            log.warning("inputs_not_stored reason=%s", error.strerror)

    def _resume(self) -> None:
        """Restore the state "changed" of the same pair from before a restart, until comparisons find no change."""
        record = None if self._file is None else read_record(self._file)
        if record is None or record.pair != self._pair or record.state is not InputsState.CHANGED:
            return
        self._state = record.state
        self._since = record.since
        if self._on_change is not None:
            self._on_change(True)
