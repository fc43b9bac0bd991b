"""What the loops around all sources share: a thread, the state for the page, and pauses after a source was lost."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, TypeVar

from ...core.errors import HeadwaterError, SourceEnded
from ..announcement import SourceRecord

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Seconds before a lost source is opened again; each further pause is twice as long."""

LONGEST_PAUSE_S = 60.0
"""The longest of these pauses, in seconds."""

END_S = 5.0
"""The longest wait for the thread to end, in seconds: a camera that sends a byte now and then could block it."""

BUSY_S = 0.02
"""Seconds until an input is tried again if too many others are waiting."""

_HEALTHY_CONDITIONS = {"ok", "ended"}


@dataclass(frozen=True)
class FeedState:
    """The state of a source.

    Attributes:
        condition: ``starting``, ``ok``, ``lost``, ``frozen`` or ``ended``.
        since: When the condition began, in seconds since 1970.
        reason: The cause of the condition, or the last problem, for people; empty if there is none.
        answered: Number of inputs that were answered since the start.
        refused: Number of inputs that could not be answered since the start.
        dropped: Number of inputs that were dropped since the start, because they came too fast.
        lost: How often the source was lost since the start.
    """

    condition: str
    since: float
    reason: str = ""
    answered: int = 0
    refused: int = 0
    dropped: int = 0
    lost: int = 0

    def as_json(self, name: str) -> dict[str, Any]:
        """Return the state as JSON for the page; ``name``: that of the source."""
        return {
            "name": name,
            "condition": self.condition,
            "text": self._describe(),
            "answered": self.answered,
            "refused": self.refused,
            "dropped": self.dropped,
            "lost": self.lost,
        }

    def _describe(self) -> str:
        """Return the state for people, with what went wrong since the start."""
        if self.condition in {"lost", "frozen"}:
            return f"{self.condition} since {_clock_text(self.since)}: {self.reason}"
        parts = [self.condition]
        if self.refused:
            parts.append(f"{self.refused} of {self.answered + self.refused} could not be answered")
        if self.dropped:
            parts.append(f"{self.dropped} dropped")
        if self.reason:
            parts.append(self.reason)
        return "; ".join(parts)


def _clock_text(at: float) -> str:
    """Return a time in seconds since 1970 as local time, such as ``14:03:59``."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


State = TypeVar("State", bound=FeedState)


class SourceLoop(ABC, Generic[State]):
    """A thread that answers the inputs of one source, and opens the source again after it was lost."""

    def __init__(self, name: str, state: State, now: Callable[[], float]) -> None:
        """Create a loop; nothing is read before `start`.

        Args:
            name: The name of the source.
            state: The state before the source is opened.
            now: Returns seconds since 1970.
        """
        self.name = name
        self._state = state
        self._now = now
        self._tell_change: Callable[[], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"source {name}", daemon=True)

    @property
    def state(self) -> State:
        """The state of the source."""
        return self._state

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON for the page, with the name of the source."""
        return self._state.as_json(self.name)

    def record(self) -> SourceRecord:
        """Return the state as it is recorded for `edge-agent status`."""
        state = self._state
        return SourceRecord(name=self.name, condition=state.condition, since=state.since, reason=state.reason[:1000])

    def on_change(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, in the thread of the source, whenever the condition changes."""
        self._tell_change = tell

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and wait for the thread to end; after `END_S` it is left to end with the program."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    @abstractmethod
    def _answer_until_lost(self) -> None:
        """Open the source, and answer its inputs until it is lost or the loop is closed.

        Raises:
            SourceEnded: The source has no more inputs, and is not opened again.
            HeadwaterError: The source is not there, or delivers nothing any more.
        """

    def _run(self) -> None:
        """Answer the inputs of the source, and open it again after a pause, until it ends or the loop is closed."""
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            answered_before = self._state.answered
            try:
                self._answer_until_lost()
            except SourceEnded:
                self._set_condition("ended")
                return
            except HeadwaterError as error:
                self._set_condition("lost", str(error))
            except Exception:  # a bug must not end the thread unnoticed
                log.exception("source_broke source=%s", self.name)
                self._set_condition("lost", "a bug; the log has its traceback")
            # A source that has answered since it was opened is retried soon; one that never works, ever less often.
            pause_s = FIRST_PAUSE_S if self._state.answered > answered_before else min(2 * pause_s, LONGEST_PAUSE_S)
            self._stop.wait(pause_s)

    def _note_answered(self) -> None:
        """Count an input that was answered."""
        self._set_condition("ok")
        self._state = replace(self._state, answered=self._state.answered + 1)

    def _note_refused(self, reason: str) -> None:
        """Count an input that could not be answered. The source itself works."""
        self._set_condition("ok", reason)
        self._state = replace(self._state, refused=self._state.refused + 1)

    def _note_dropped(self, count: int, reason: str) -> None:
        """Count inputs that were dropped, and log the first time."""
        if not self._state.dropped:
            log.warning("inputs_dropped source=%s reason=%s", self.name, reason)
        self._state = replace(self._state, dropped=self._state.dropped + count)

    def _set_condition(self, condition: str, reason: str = "") -> None:
        """Set the condition and its reason, and log the condition if it has changed."""
        is_change = condition != self._state.condition
        if is_change:
            level = logging.INFO if condition in _HEALTHY_CONDITIONS else logging.WARNING
            log.log(level, "source_%s source=%s reason=%s", condition, self.name, reason)
            self._state = replace(self._state, condition=condition, since=self._now())
            if condition == "lost":
                self._state = replace(self._state, lost=self._state.lost + 1)
        self._state = replace(self._state, reason=reason)
        if is_change and self._tell_change is not None:
            self._tell_change()
