"""What the loops around all sources share: a thread, the state that is shown, and pauses after the source was lost."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, TypeVar

from ...core.errors import HeadwaterError, SourceEnded

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Seconds before a source that was lost is opened again for the first time; the pauses double from then on."""

LONGEST_PAUSE_S = 60.0
"""The longest of these pauses."""

END_S = 5.0
"""Seconds that the end waits for a source: a camera that sends a byte now and then could hold it up for ever."""

_AS_IT_SHOULD = {"ok", "ended"}


@dataclass(frozen=True)
class FeedState:
    """How a source is.

    Attributes:
        condition: ``starting``, ``ok``, ``lost``, ``frozen`` or ``ended``.
        since: Seconds since 1970 at which the condition began.
        reason: Why it is so; empty where all is well.
        answered: Inputs that were answered since the start.
        refused: Inputs that could not be answered since the start.
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


State = TypeVar("State", bound=FeedState)


class SourceLoop(ABC, Generic[State]):
    """A thread that answers what one source gives, and opens the source again when it was lost."""

    def __init__(self, name: str, state: State, now: Callable[[], float]) -> None:
        """Prepare; nothing is asked before `start`.

        Args:
            name: The name of the source.
            state: How the source is before it was opened.
            now: Seconds since 1970.
        """
        self.name = name
        self._state = state
        self._now = now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"source {name}", daemon=True)

    @property
    def state(self) -> State:
        """How the source is."""
        return self._state

    def as_json(self) -> dict[str, Any]:
        """Return the state with the source's name, as the page reads it."""
        return self._state.as_json(self.name)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more; a source that does not come back is left to the end of the program."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    @abstractmethod
    def _answer_until_lost(self) -> None:
        """Open the source, and answer what it gives until it is lost or the loop is closed.

        Raises:
            SourceEnded: The source has given all that it had.
            HeadwaterError: The source is not there, or gives nothing any more.
        """

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            answered_before = self._state.answered
            try:
                self._answer_until_lost()
            except SourceEnded:
                self._become("ended")
                return
            except HeadwaterError as error:
                self._become("lost", str(error))
            except Exception:  # a bug must not end the thread without a word
                log.exception("source_broke source=%s", self.name)
                self._become("lost", "a bug; the log has its traceback")
            # What has worked for a while is tried again soon, what never works seldom.
            pause_s = FIRST_PAUSE_S if self._state.answered > answered_before else min(2 * pause_s, LONGEST_PAUSE_S)
            self._stop.wait(pause_s)

    def _note_answered(self) -> None:
        """Count an input that was answered."""
        self._become("ok")
        self._state = replace(self._state, answered=self._state.answered + 1)

    def _note_refused(self, reason: str) -> None:
        """Count an input that could not be answered: the source is fine."""
        self._become("ok", reason)
        self._state = replace(self._state, refused=self._state.refused + 1)

    def _become(self, condition: str, reason: str = "") -> None:
        """Note how the source is now, and log it where it was otherwise before."""
        if condition != self._state.condition:
            level = logging.INFO if condition in _AS_IT_SHOULD else logging.WARNING
            log.log(level, "source_%s source=%s reason=%s", condition, self.name, reason)
            self._state = replace(self._state, condition=condition, since=self._now())
        self._state = replace(self._state, reason=reason)
