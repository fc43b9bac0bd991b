"""Which broker of a list a client connects to, when it gives one up, and when it returns to its first one.

Each client has its own order of the list, from a hash of its id: the clients of a federation spread evenly over the
brokers, and those of a broker that is lost spread evenly over the others. A client goes to the next broker of its order
when its own one refuses or resets the connection, or falls silent; only after the whole list has failed it pauses
longer. Nothing that was under way is carried over: each side sends again what the other has not confirmed.

`Failover` decides where to, `Vigil` when a connection is silent. Nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .transport import LeftBroker

FIRST_BACKOFF_S = 0.5
"""The longest pause in seconds before the first new attempt to connect; it doubles with each failure of all brokers."""

LAST_BACKOFF_S = 30.0
"""The longest pause in seconds before any attempt to connect."""

LEAST_PAUSE_S = 0.05
"""The shortest pause in seconds before a new attempt."""

SILENCE_SHARE = 0.7
"""The share of `failover_s` after which a silent broker is given up; the rest is for the pause and the next broker."""

ASK_SHARE = 0.35
"""The share of `failover_s` after which a silent broker is asked for a sign of life: it has as long to answer."""

CALM_S = 600.0
"""Seconds that a connection has to last before silence is judged as strictly again as at the start."""

QUEUED_SEGMENTS = 4
"""Segments in flight above which data are queued on the link; a sign of life and a heartbeat take one each."""


def order_for(client: str, urls: Sequence[str]) -> tuple[str, ...]:
    """Return the brokers in the order in which a client tries them.

    The order depends on the id and the URLs alone, not on their order in the configuration: clients whose files list
    the brokers in another order agree, and a broker that is added or removed moves only its own share of the clients.
    """

    def rank(url: str) -> bytes:
        return hashlib.sha256(f"{client}\n{url}".encode()).digest()

    return tuple(sorted(urls, key=rank))


def longest_pause_s(failures: int) -> float:
    """Return the longest pause in seconds after so many failed attempts in a row; the pause itself is random."""
    return min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 10))  # an unbounded power overflows in hours


class Failover:
    """The broker of now for one client, of a list that may have a single entry."""

    def __init__(
        self,
        order: Sequence[str],
        rng: random.Random,
        clock: Callable[[], float],
        *,
        return_after_s: float = 0.0,
    ) -> None:
        """Make the choice of brokers for one client, which begins with the first one.

        Args:
            order: The brokers in the order of `order_for`, at least one.
            rng: The source of random pauses, so that clients of a lost broker do not all come at the same moment.
            clock: The time in seconds, which never goes back.
            return_after_s: Seconds at another broker after which the first one is tried again; 0: never.
        """
        self._order = tuple(order)
        self._rng = rng
        self._clock = clock
        self._return_after_s = return_after_s
        self._index = 0
        self._failures = 0
        """The failed attempts in a row, over all brokers."""

        self._return_at = float("inf")
        self._reasons: dict[str, str] = {}
        """URL -> why the connection to it ended or was not made, for brokers that were not reached since."""

    @property
    def url(self) -> str:
        """The broker to connect to, or that is connected."""
        return self._order[self._index]

    @property
    def first(self) -> str:
        """The broker that this client prefers."""
        return self._order[0]

    @property
    def is_list(self) -> bool:
        """Whether there is another broker to go to."""
        return len(self._order) > 1

    @property
    def is_patient(self) -> bool:
        """Whether all brokers have failed in a row: then each one gets more time, for links on which that is needed."""
        return self._failures >= len(self._order)

    @property
    def left(self) -> tuple[LeftBroker, ...]:
        """The other brokers that were lost or not reached at the last try, in the order of this client."""
        return tuple(LeftBroker(url, self._reasons[url]) for url in self._order if url in self._reasons)

    def describe_left(self) -> str:
        """Return those brokers with their reasons as text: what is wrong with one says nothing of the others."""
        return "; ".join(f"{left.url}: {left.reason}" for left in self.left)

    def connected(self) -> None:
        """Note that the broker of now has let this client in."""
        self._reasons.pop(self.url, None)
        self._plan_return()

    def failed(self, reason: str, *, was_up: bool) -> float:
        """Note that the connection ended or was not made, and choose the next broker.

        Args:
            reason: Why.
            was_up: Whether there was a session.

        Returns:
            The pause in seconds before the next attempt: short until the whole list has failed.
        """
        self._reasons[self.url] = reason
        self._failures = 0 if was_up else self._failures + 1
        limit_s = FIRST_BACKOFF_S
        if self._failures % len(self._order) == 0:
            limit_s = longest_pause_s(self._failures // len(self._order))
        self._index = (self._index + 1) % len(self._order)
        return self._rng.uniform(LEAST_PAUSE_S, limit_s)

    def is_return_due(self) -> bool:
        """Return whether to try the first broker now, while another one is connected."""
        return self._clock() >= self._return_at

    def return_in_s(self) -> float:
        """Return the seconds until the first broker is to be tried; infinite where it is not to be tried at all."""
        return self._return_at - self._clock()

    def not_returned(self, reason: str) -> None:
        """Note that the first broker does not let this client in yet: it is tried again after as long."""
        self._reasons[self.first] = reason
        self._plan_return()

    def return_to_first(self) -> float:
        """Go to the first broker with the next attempt; return the pause in seconds before it."""
        self._index = 0
        self._failures = 0
        return self._rng.uniform(LEAST_PAUSE_S, FIRST_BACKOFF_S)

    def _plan_return(self) -> None:
        """Choose the time of the next try of the first broker: random, because a whole fleet returns."""
        self._return_at = float("inf")
        if self._return_after_s and self._index:
            self._return_at = self._clock() + self._return_after_s * self._rng.uniform(1.0, 1.5)


@dataclass(frozen=True)
class LinkState:
    """The state of a connection, as far as the operating system knows it."""

    received_bytes: int
    """Bytes that have arrived since its begin."""

    confirmed_bytes: int
    """Bytes that the other machine has confirmed, which says nothing about the program there."""

    is_queued: bool
    """Whether data wait for the link, so that an answer cannot be expected yet."""


class Vigil:
    """The watch over one connection: when to ask for a sign of life, and when the other side counts as lost.

    Any byte that arrives is a sign of life, also a part of a message: a chunk takes long on a slow link. While data
    wait for the link, the link itself is watched: a question would wait behind them. A program that was stopped does
    not read: its machine confirms what fits into its buffers, then nothing moves, or the question stays unanswered.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """Begin to watch a connection that has just let this client in.

        Args:
            limit_s: Seconds of silence after which the other side counts as lost.
            clock: The time in seconds, which never goes back.
        """
        self._ask_s = limit_s * ASK_SHARE / SILENCE_SHARE
        self._answer_s = limit_s - self._ask_s
        self._clock = clock
        self._state: LinkState | None = None
        self._alive_at = clock()
        self._asked_at: float | None = None
        """When it was asked; None: not since the last sign of life."""

    def observe(self, state: LinkState | None) -> None:
        """Note the state of the connection after each wait for the network; None: the system does not tell it.

        What cannot be seen counts as alive: the keep-alive of MQTT finds out, which takes longer.
        """
        before = self._state
        self._state = state
        if state is None:
            self._alive_at = self._clock()
            return
        if before is None:
            return
        has_arrived = state.received_bytes != before.received_bytes
        is_draining = before.is_queued and state.confirmed_bytes != before.confirmed_bytes
        if has_arrived or is_draining:
            self._alive_at = self._clock()
            self._asked_at = None

    @property
    def silence_s(self) -> float:
        """The seconds since the last sign of life."""
        return self._clock() - self._alive_at

    @property
    def is_lost(self) -> bool:
        """Whether the other side has left the question unanswered for too long.

        It is asked in any case: this program itself may have stood still.
        """
        return self._asked_at is not None and self._clock() - self._asked_at >= self._answer_s

    @property
    def is_question_due(self) -> bool:
        """Whether to ask for a sign of life now: the other side is silent, and has not been asked since."""
        return self._asked_at is None and self.silence_s >= self._ask_s

    def note_question(self) -> None:
        """Note that the other side is asked for a sign of life: from now on its answer is waited for."""
        self._asked_at = self._clock()

    def due_in_s(self) -> float:
        """Return the seconds until the other side is to be asked, or counts as lost."""
        due_at = self._alive_at + self._ask_s
        if self._asked_at is not None:
            due_at = self._asked_at + self._answer_s
        return max(0.0, due_at - self._clock())


class Strictness:
    """How long a client puts up with silence: twice as long after each broker that it has left for that reason.

    On a link whose answers take seconds, every broker would seem lost, and the client would never settle.
    """

    def __init__(self, failover_s: float, longest_s: float, clock: Callable[[], float]) -> None:
        """Begin with the share of ``failover_s`` that is meant for silence; ``longest_s`` bounds what it grows to."""
        self._first_s = failover_s * SILENCE_SHARE
        self._longest_s = max(longest_s, self._first_s)
        self._clock = clock
        self._doublings = 0
        self._lost_at = float("-inf")

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which a broker counts as lost."""
        if self._clock() - self._lost_at >= CALM_S:
            self._doublings = 0
        return min(self._first_s * 2.0**self._doublings, self._longest_s)

    def lost(self) -> None:
        """Note that a broker was left because it was silent."""
        if self.limit_s < self._longest_s:
            self._doublings += 1
        self._lost_at = self._clock()
