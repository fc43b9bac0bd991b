"""Detection of other coordinators of the same federation over the broker: only one of them serves.

A coordinator announces its start and serves when no answer comes for a while. An answer names the boot that it
answers, so that a late, duplicate or once forged message does not prove that another coordinator is running. Of two
that are, one stops: with the same federation id that with the lower epoch, because the other is its successor; with
different federation ids, or equal epochs, that which has been serving for less time.
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
"""How often a serving coordinator announces itself: a network that was split may have two, and be joined again."""

ANSWER_APART_S = 1.0
KNOWN_S = 60.0
"""How long the result of a query for other coordinators is valid."""

NOTED_S = 2 * REPEAT_S
"""How long another coordinator is reported after its last answer: a running one answers each announcement."""

SAME_TIME_S = 5.0
"""Two that began to serve within this time count as equal, because messages between them take time."""

MOST_ANSWERED = 100


class Peers:
    """What one coordinator knows of the others. `is_serving` is true once no other one has answered."""

    def __init__(
        self,
        name: str,
        boot: str,
        send: Callable[[Present], None],
        clock: Callable[[], float],
        probe_s: float = PROBE_S,
    ) -> None:
        """``name`` of the federation."""
        self._name, self._boot, self._send, self._clock, self._probe_s = name, boot, send, clock, probe_s
        self._host, self._process = socket.gethostname()[:255], os.getpid()
        self._federation, self._epoch = "", 0
        self._queried_at: float | None = None
        self._serves_since: float | None = None
        self._announced_at = float("-inf")
        self._answered: dict[str, float] = {}
        self._named: set[str] = set()
        self._standbys: dict[str, tuple[str, float]] = {}
        self._note, self._noted_at = "", float("-inf")

    @property
    def is_serving(self) -> bool:
        """Whether this coordinator may send messages to agents."""
        return self._serves_since is not None

    @property
    def note(self) -> str:
        """Another coordinator that has answered in the last `NOTED_S` seconds, as text; empty: none has."""
        return self._note if self._clock() - self._noted_at < NOTED_S else ""

    @property
    def standbys(self) -> list[str]:
        """Coordinators in reserve that were heard lately, as text."""
        known = sorted(self._standbys.values())
        return [f"{what}, heard {now - at:.0f} s ago" for what, at in known if (now := self._clock()) - at < KNOWN_S]

    def start(self, federation: str, epoch: int) -> None:
        """The federation id and epoch of this coordinator."""
        self._federation, self._epoch = federation, epoch

    def listening(self, can_receive: bool) -> None:
        """The broker has answered a subscription; ``can_receive``: messages of other coordinators arrive."""
        if not can_receive:
            log.warning("coordinators_unheard: the broker does not let us subscribe; a second one will not be noticed")
        self._query()

    def waiting(self) -> Waiting:
        """What keeps this coordinator from serving."""
        if self._queried_at is None:
            return Waiting("the broker's answer to our subscriptions", about="start")
        what = f"another coordinator of federation '{self._name}' may answer; serves when none does"
        return Waiting(what, until=self._queried_at + self._probe_s, about="start")

    def tick(self) -> bool:
        """Announce this coordinator from time to time; True at the moment when it begins to serve."""
        now = self._clock()
        if self._serves_since is None and self._queried_at is not None and now - self._queried_at >= self._probe_s:
            self._serves_since = now
            return True
        if self._serves_since is not None and now - self._announced_at >= REPEAT_S:
            self._announce()
        return False

    def is_alone(self) -> bool:
        """Whether no other coordinator has answered the latest query; makes a new query if that is long ago."""
        if self._queried_at is None or self._clock() - self._queried_at > KNOWN_S:
            self._query()
        return self._queried_at is not None and self._clock() - self._queried_at >= self._probe_s

    def heard(self, message: Present) -> None:
        """Another coordinator has sent a message, which is answered; if it answers ours, one of the two stops.

        Raises:
            DuplicateCoordinator: this is the one that stops.
        """
        if message.boot == self._boot:
            return
        now = self._clock()
        if message.standby:
            lately = {boot: known for boot, known in self._standbys.items() if now - known[1] < KNOWN_S}
            self._standbys = lately if len(lately) < MOST_ANSWERED else {}
            self._standbys[message.boot] = (f"host '{message.host}', process {message.process}", now)
        if now - self._answered.get(message.boot, float("-inf")) >= ANSWER_APART_S:
            if len(self._answered) >= MOST_ANSWERED:
                self._answered.clear()
            self._answered[message.boot] = now
            self._announce(message.boot)
        if message.standby or message.answers != self._boot:
            return
        serves = "is starting" if message.serving_s is None else f"has been serving for {message.serving_s:.0f} s"
        about = (
            f"another coordinator of federation '{self._name}' {serves}: host '{message.host}', process "
            f"{message.process}, start {message.boot}, federation id {message.federation[:12]}, epoch {message.epoch} "
            f"(this one: host '{self._host}', process {self._process}, start {self._boot}, federation id "
            f"{self._federation[:12]}, epoch {self._epoch})"
        )
        if self._yields_to(message):
            what_to_do = (
                "its state folder is the same or a copy, with a higher epoch, so this one stops; work with that one"
                if message.federation == self._federation and message.epoch > self._epoch
                else "this one stops. Stop the other first, or give one of them another 'federation' in its "
                "configuration"
            )
            raise DuplicateCoordinator(f"{about}; {what_to_do}")
        self._note, self._noted_at = f"{about}; it has to stop; this one continues", now
        if message.boot not in self._named and len(self._named) < MOST_ANSWERED:
            self._named.add(message.boot)
            log.warning("other_coordinator %s", self._note)

    def _query(self) -> None:
        self._queried_at = self._clock()
        self._announce()

    def _announce(self, answers: str = "") -> None:
        if not answers:
            self._announced_at = self._clock()
        self._send(Present(host=self._host, process=self._process, serving_s=self._serving_s(), answers=answers))

    def _serving_s(self) -> float | None:
        return None if self._serves_since is None else self._clock() - self._serves_since

    def _yields_to(self, other: Present) -> bool:
        if other.federation == self._federation and other.epoch != self._epoch:
            return other.epoch > self._epoch
        mine, its = self._serving_s(), other.serving_s
        if mine is None or its is None:
            return its is not None or (mine is None and other.boot < self._boot)
        return its > mine if abs(its - mine) > SAME_TIME_S else other.boot < self._boot
