"""Coordinators of one federation: only one of them serves. Found by what they say to each other over the broker.

A coordinator that starts says so and serves when nobody has answered for a while. An answer names the boot that it
answers, so that a message that is late, doubled or forged once is no proof that somebody is there. Of two that are,
one stops: of one federation id that with the lower epoch, for the other is its successor; of two federation ids that
which has been serving for less time.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from edge_agent.errors import DuplicateCoordinator
from edge_agent.wire.messages import Present

from ..runs.context import Waiting

log = logging.getLogger(__name__)

PROBE_S = 3.0
"""How long another coordinator may take to answer: its loop may be busy with an aggregation."""

REPEAT_S = 30.0
"""How often a coordinator that serves says so: two brokers may have been one before, and become one again."""

ANSWER_APART_S = 1.0
KNOWN_S = 60.0
"""How long it is known, after everybody was asked, that no other coordinator is there."""

NOTED_S = 2 * REPEAT_S
"""How long another coordinator is told of after its last answer: one that is there answers each time we speak."""

SAME_TIME_S = 5.0
"""Two that began to serve within this time count as equal: the message between them took a while, too."""

MOST_ANSWERED = 100


class Peers:
    """What one coordinator knows of the others. `is_serving` begins once nobody else is there."""

    def __init__(
        self,
        name: str,
        boot: str,
        tell: Callable[[Present], None],
        clock: Callable[[], float],
        probe_s: float = PROBE_S,
        *,
        host: str | None = None,
        process: int | None = None,
    ) -> None:
        """``name`` of the federation; ``host`` and ``process`` are those of this process by default."""
        self._name, self._boot, self._tell, self._clock, self._probe_s = name, boot, tell, clock, probe_s
        self._host = socket.gethostname()[:255] if host is None else host
        self._process = os.getpid() if process is None else process
        self._federation, self._epoch = "", 0
        self._asked_at: float | None = None
        self._serves_since: float | None = None
        self._said_at = float("-inf")
        self._answered: dict[str, float] = {}
        self._named: set[str] = set()
        self._note, self._noted_at = "", float("-inf")

    @property
    def is_serving(self) -> bool:
        """Whether this coordinator may speak to agents."""
        return self._serves_since is not None

    @property
    def note(self) -> str:
        """Another coordinator that has answered in the last `NOTED_S` seconds, for people; empty: none has."""
        return self._note if self._clock() - self._noted_at < NOTED_S else ""

    def start(self, federation: str, epoch: int) -> None:
        """The federation id and epoch of this coordinator."""
        self._federation, self._epoch = federation, epoch

    def listening(self, can_hear: bool) -> None:
        """The broker has answered to a subscription: whether messages of other coordinators come."""
        if not can_hear:
            log.warning("coordinators_unheard: the broker does not let us subscribe; a second one will not be noticed")
        self._ask()

    def waiting(self) -> Waiting:
        """What keeps this coordinator from serving."""
        if self._asked_at is None:
            return Waiting("the broker's answer to our subscriptions", about="start")
        what = f"another coordinator of federation '{self._name}' may answer; serves when none does"
        return Waiting(what, until=self._asked_at + self._probe_s, about="start")

    def tick(self) -> bool:
        """Say from time to time that we serve; True at the moment when serving begins."""
        now = self._clock()
        if self._serves_since is None and self._asked_at is not None and now - self._asked_at >= self._probe_s:
            self._serves_since = now
            return True
        if self._serves_since is not None and now - self._said_at >= REPEAT_S:
            self._say()
        return False

    def is_alone(self) -> bool:
        """Whether everybody has been asked lately and nobody has answered; asks if that is long ago."""
        if self._asked_at is None or self._clock() - self._asked_at > KNOWN_S:
            self._ask()
        return self._asked_at is not None and self._clock() - self._asked_at >= self._probe_s

    def heard(self, message: Present) -> None:
        """A coordinator has spoken; it gets an answer, and where it has answered us, one of the two stops.

        Raises:
            DuplicateCoordinator: this is the one that stops.
        """
        if message.boot == self._boot:
            return
        self._answer(message.boot)
        if message.answers != self._boot:
            return
        about = self._about(message)
        if self._yields_to(message):
            raise DuplicateCoordinator(about + self._what_to_do(message))
        self._note, self._noted_at = f"{about}; it has to stop; this one continues", self._clock()
        if message.boot not in self._named and len(self._named) < MOST_ANSWERED:
            self._named.add(message.boot)
            log.warning("other_coordinator %s", self._note)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._asked_at = self._clock()
        self._say()

    def _answer(self, boot: str) -> None:
        now = self._clock()
        if now - self._answered.get(boot, float("-inf")) < ANSWER_APART_S:
            return
        if len(self._answered) >= MOST_ANSWERED:
            self._answered.clear()
        self._answered[boot] = now
        self._say(boot)

    def _say(self, answers: str = "") -> None:
        now = self._clock()
        if not answers:
            self._said_at = now
        self._tell(Present(host=self._host, process=self._process, serving_s=self._serving_s(), answers=answers))

    def _serving_s(self) -> float | None:
        return None if self._serves_since is None else self._clock() - self._serves_since

    def _yields_to(self, other: Present) -> bool:
        if other.federation == self._federation:
            return (other.epoch, other.boot) > (self._epoch, self._boot)
        mine, its = self._serving_s(), other.serving_s
        if mine is None or its is None:
            return its is not None or (mine is None and other.boot < self._boot)
        return its > mine if abs(its - mine) > SAME_TIME_S else other.boot < self._boot

    def _about(self, other: Present) -> str:
        serves = "is starting" if other.serving_s is None else f"has been serving for {other.serving_s:.0f} s"
        return (
            f"another coordinator of federation '{self._name}' {serves}: host '{other.host}', process {other.process}, "
            f"start {other.boot}, federation id {other.federation[:12]}, epoch {other.epoch} (this one: host "
            f"'{self._host}', process {self._process}, start {self._boot}, federation id {self._federation[:12]}, "
            f"epoch {self._epoch})"
        )

    def _what_to_do(self, other: Present) -> str:
        if other.federation == self._federation:
            return (
                "; its state folder is the same or a copy, and it started later, so this one stops; work with that one"
            )
        return "; this one stops. Stop the other first, or give one of them another 'federation' in its configuration"
