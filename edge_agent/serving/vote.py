"""The state of a device: an answer becomes the state after it has been given several times in a row.

Home Assistant and other consumers see the state, not each single answer, so that one misread picture triggers nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from .answer import Answer
from .pair import Pair
from .predictor import Observation


@dataclass(frozen=True)
class State:
    """The current state.

    Attributes:
        text: A class, ``unknown``, a number, ``normal`` or ``anomaly``; see `ClassAnswer.state`, `NumberAnswer.state`.
        answer: The last answer that agreed with the state.
        since: When the state began, in seconds since 1970.
    """

    text: str
    answer: Answer
    since: float


class StateObserver(Protocol):
    """Receives the state."""

    def on_state(self, state: State, *, is_change: bool) -> None:
        """Receive the state after each answer that agrees with it; ``is_change``: the state was another one before."""

    def on_pair(self, pair: Pair) -> None:
        """Receive the pair that answers from now on; its classes may be others."""


class Vote:
    """Changes the state only after ``count`` equal answers in a row.

    Answers are equal if their texts are. Predicted numbers have four digits there and seldom repeat, so for a head that
    predicts numbers ``count`` should be 1.
    """

    def __init__(self, count: int = 1) -> None:
        """Create a vote without a state; ``count``: how many equal answers change the state, at least 1."""
        self._count = count
        self._candidate = ""
        self._votes = 0
        self._state: State | None = None
        self._observers: list[StateObserver] = []
        self._lock = threading.Lock()

    @property
    def state(self) -> State | None:
        """The current state; None until there were enough equal answers."""
        return self._state

    def observe(self, observer: StateObserver) -> None:
        """Pass the state to this observer from now on."""
        self._observers.append(observer)

    def on_answer(self, observation: Observation) -> None:
        """Count an answer; see `edge_agent.serving.predictor.Observer`."""
        with self._lock:
            state, is_change = self._count_answer(observation)
        if state is None:
            return
        for observer in self._observers:
            observer.on_state(state, is_change=is_change)

    def on_switch(self, pair: Pair) -> None:
        """Start to count again: answers of the previous pair do not count for this one. The state stays."""
        with self._lock:
            self._candidate = ""
            self._votes = 0
        for observer in self._observers:
            observer.on_pair(pair)

    def _count_answer(self, observation: Observation) -> tuple[State | None, bool]:
        """Count an answer, and change the state if that is due.

        Returns:
            The state if this answer agrees with it, else None; and whether this answer has changed the state.
        """
        text = observation.answer.state
        if text == self._candidate:
            self._votes += 1
        else:
            self._candidate = text
            self._votes = 1
        current = self._state
        if current is not None and current.text == text:
            self._state = State(text, observation.answer, current.since)
            return self._state, False
        if self._votes < self._count:
            return None, False
        self._state = State(text, observation.answer, observation.at)
        return self._state, True
