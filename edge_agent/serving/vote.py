"""From answers to a state: what holds after several equal answers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from .answer import Answer
from .pair import Pair
from .predictor import Observation


@dataclass(frozen=True)
class State:
    """What holds now.

    Attributes:
        text: A class, ``unknown``, a number, or ``normal`` and ``anomaly``.
        answer: The answer that has made it so.
        since: Seconds since 1970 at which it began to hold.
    """

    text: str
    answer: Answer
    since: float


class StateObserver(Protocol):
    """Somebody who wants to know what holds."""

    def see_state(self, state: State, *, is_change: bool) -> None:
        """Take note of an answer that agrees with what holds; ``is_change``: something else held before."""

    def see_pair(self, pair: Pair) -> None:
        """Take note of another pair, which may know other classes."""


class Vote:
    """Changes the state only after ``count`` equal answers in a row, so that one odd picture changes nothing.

    A number that a head predicts has no equal: it changes the state each time.
    """

    def __init__(self, count: int = 1) -> None:
        """Begin without a state; ``count``: how many equal answers it takes, at least 1."""
        self._count = count
        self._candidate = ""
        self._votes = 0
        self._state: State | None = None
        self._observers: list[StateObserver] = []
        self._lock = threading.Lock()

    @property
    def state(self) -> State | None:
        """What holds now; None before there were enough equal answers."""
        return self._state

    def observe(self, observer: StateObserver) -> None:
        """Let somebody see the state from now on."""
        self._observers.append(observer)

    def see(self, observation: Observation) -> None:
        """Count an answer; see `edge_agent.serving.predictor.Observer`."""
        with self._lock:
            state, is_change = self._counted(observation)
        if state is None:
            return
        for observer in self._observers:
            observer.see_state(state, is_change=is_change)

    def see_switch(self, pair: Pair) -> None:
        """Begin again: what the pair before has said does not count for this one."""
        with self._lock:
            self._candidate = ""
            self._votes = 0
        for observer in self._observers:
            observer.see_pair(pair)

    def _counted(self, observation: Observation) -> tuple[State | None, bool]:
        """Return the state if this answer agrees with it, and whether it has made it the state."""
        text = observation.answer.state
        if text == self._candidate:
            self._votes += 1
        else:
            self._candidate = text
            self._votes = 1
        held = self._state
        if held is not None and held.text == text:
            self._state = State(text, observation.answer, held.since)
            return self._state, False
        if self._votes < self._count:
            return None, False
        self._state = State(text, observation.answer, observation.at)
        return self._state, True
