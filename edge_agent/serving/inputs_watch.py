"""Whether the inputs that are answered have changed since the head was fitted; see `edge_agent.personal.drift`.

It only tells: nothing is ever fitted because of it. What a person can do is on the page: the inputs that are least like
the training samples are kept there, to be given their classes.
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
"""Inputs that are offered for labelling."""

_CALM_LOOKS = 2 * WINDOW // EVERY
"""Looks in a row that find nothing, after which inputs are as fitted again: two windows without a common answer."""


def start_thread(work: Callable[[], None]) -> None:
    """Do some work in a thread of its own."""
    threading.Thread(target=work, name="inputs", daemon=True).start()


class InputsWatch:
    """Keeps the last answers, and compares them with the training samples after every `EVERY` of them."""

    def __init__(
        self,
        history: History,
        file: Path | None = None,
        *,
        tell: Callable[[bool], None] | None = None,
        begin: Callable[[Callable[[], None]], None] = start_thread,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Begin; without a pair there is nothing to compare with.

        Args:
            history: Keeps the strangest inputs; it sees every answer before this object does.
            file: Where the state is kept over a restart; None: nowhere.
            tell: Called with True when inputs have changed, and with False when they are as fitted.
            begin: Does the preparation of a new pair, for which no answer waits.
            now: Seconds since 1970.
        """
        self._history = history
        self._file = file
        self._tell = tell
        self._begin = begin
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
        """Return the status as the page reads it, with the strangest inputs, the strangest first."""
        return {**self.status.as_json(), "strangest": [entry.as_json() for entry in self._history.pinned()]}

    def see_switch(self, pair: Pair) -> None:
        """Compare with the training samples of another head from now on; see `Observer`."""
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
            self._begin(lambda: self._take(name, reference_of(rule)))

    def see(self, observation: Observation) -> None:
        """Compare an answer's features with the training samples; see `Observer`."""
        answer = observation.answer
        with self._lock:
            reference = self._reference
        if reference is None or not isinstance(answer, ClassAnswer):
            return
        # A recording has one answer for all of its windows, and each window its own.
        answers = answer.windows or (answer,)
        names = observation.pair.class_names
        labels = np.array([names.index(window.label) for window in answers])
        residuals = reference.residuals(observation.features, labels)
        with self._lock:
            self._keep_strange(float((residuals**2).sum(axis=1).max()))
            for residual, label, window in zip(residuals, labels, answers, strict=True):
                self._last.append((residual, int(label), bool(window.is_unknown)))
                self._count += 1
                if self._count >= WINDOW and self._count % EVERY == 0:
                    self._look(reference)

    # --- within the lock ---

    def _clear(self) -> None:
        """Forget everything about answers of another pair."""
        self._last: deque[tuple[np.ndarray, int, bool]] = deque(maxlen=WINDOW)
        """Residual, class and whether it was unknown, of the last answers."""

        self._count = 0
        self._calm = 0
        self._state = InputsState.NOT_ENOUGH
        self._since = 0.0
        self._strangest: list[tuple[float, int, Entry]] = []

    def _take(self, name: str, reference: Reference | None) -> None:
        """Compare with this reference from now on, unless another pair has come in."""
        with self._lock:
            if self._pair == name:
                self._reference = reference

    def _keep_strange(self, strangeness: float) -> None:
        """Keep the newest input if it is among the strangest."""
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
            self._offer()

    def _offer(self) -> None:
        """Keep the strangest inputs for people to label, the strangest first."""
        self._history.pin(entry for _, _, entry in sorted(self._strangest, reverse=True))

    def _look(self, reference: Reference) -> None:
        """Compare the last answers with the training samples, and change the state if that is due."""
        residuals, labels, unknown = zip(*self._last, strict=True)
        look = reference.look(np.stack(residuals), np.array(labels), np.array(unknown))
        if look.have_changed:
            self._calm = 0
            self._enter(InputsState.CHANGED, look)
            return
        self._calm += 1
        if self._state is InputsState.NOT_ENOUGH or self._calm >= _CALM_LOOKS:
            self._enter(InputsState.AS_FITTED, look)

    def _enter(self, state: InputsState, look: Comparison) -> None:
        """Change the state, keep it and tell it; nothing happens where it is the same."""
        if state is self._state:
            return
        self._state = state
        self._since = self._now()
        log.info(
            "inputs_%s pair=%s shift=%.2f unknown=%d answers=%d independent=%.0f",
            state.name.lower(), self._pair, look.shift, look.unknown, look.answers, look.independent,
        )  # fmt: skip
        if state is InputsState.CHANGED:
            self._offer()
        else:
            self._strangest.clear()
            self._history.pin(())
        self._store()
        if self._tell is not None:
            self._tell(state is InputsState.CHANGED)

    def _store(self) -> None:
        """Write the state; a disk that is full does not stop answers."""
        if self._file is None:
            return
        record = InputsRecord(pair=self._pair, state=self._state, since=self._since)
        try:
            self._file.parent.mkdir(exist_ok=True)
            write_atomic(self._file, json.dumps(record.model_dump(mode="json")).encode())
        except OSError as error:
            log.warning("inputs_not_stored reason=%s", error.strerror)

    def _resume(self) -> None:
        """Take over that inputs of the same pair had changed before a restart, until looks say otherwise."""
        record = None if self._file is None else read_record(self._file)
        if record is None or record.pair != self._pair or record.state is not InputsState.CHANGED:
            return
        self._state = record.state
        self._since = record.since
        if self._tell is not None:
            self._tell(True)
