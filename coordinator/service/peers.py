"""Detection of other coordinators of the same federation over the broker: only one of them serves.

A coordinator announces its start and serves when no answer comes for a while. An answer names the boot that it
answers, so that a late, duplicate or once forged message does not prove that another coordinator is running. Of two
that are, one stops. Their state folders have one beginning where the federation id is the same; then, in this order:

1. The later takeover stays (`coordinator.state.starts`): a standby, or an operator by ``--take-over``, decided that.
2. One that starts ends none that serves. But where a backup is served that nobody told to take over, and the one that
   starts has the newer journal and is no copy, the backup was served too early, and stops.
3. The newer journal stays, as after a network that was split. The work that only the other one has done is lost to
   the federation; it stays in the folder of that one.

With different federation ids, or where all of this is equal, that stays which has been serving longer.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
from collections.abc import Callable

from edge_agent.core.errors import DuplicateCoordinator
from edge_agent.wire.messages.down import Present

from ..journal.store import Progress
from ..rounds.context import Waiting
from ..state.starts import Start

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


class Reason(enum.Enum):
    """Why one of two coordinators stops, and the other stays."""

    TAKEOVER = "its state folder is the same or a copy, and it has taken over"
    SERVES = "it serves already"
    BACKUP = "it has the newer journal, and this one serves a backup that nobody told to take over"
    NEWER = "it has the newer journal"
    LONGER = "it has been serving longer"


class Peers:
    """The knowledge of one coordinator about the others; it serves once none of them has answered."""

    def __init__(
        self,
        name: str,
        boot: str,
        send: Callable[[Present], None],
        clock: Callable[[], float],
        probe_s: float = PROBE_S,
    ) -> None:
        """``name`` of the federation."""
        self._name = name
        self._boot = boot
        self._send = send
        self._clock = clock
        self._probe_s = probe_s
        self._host = socket.gethostname()[:255]
        self._process = os.getpid()
        self._start = Start(federation="", epoch=0, takeover=0, is_copy=False)
        self._progress: Callable[[], Progress] = lambda: Progress(0, 0)
        self._queried_at: float | None = None
        self._has_answer = False
        """Whether the broker of this session has answered the subscriptions."""

        self._serves_since: float | None = None
        self._announced_at = float("-inf")
        self._answered: dict[str, float] = {}
        self._named: set[str] = set()
        self._standbys: dict[str, tuple[str, float]] = {}
        self._note = ""
        self._noted_at = float("-inf")

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
        now = self._clock()
        lines = []
        for name, heard_at in sorted(self._standbys.values()):
            silent_s = now - heard_at
            if silent_s < KNOWN_S:
                lines.append(f"{name}, heard {silent_s:.0f} s ago")
        return lines

    def start(self, start: Start, progress: Callable[[], Progress]) -> None:
        """Set what the journal says of this start; ``progress`` returns how far the journal is at any moment."""
        self._start = start
        self._progress = progress

    def connected(self) -> None:
        """Note that a session with a broker has begun, which has yet to answer the subscriptions."""
        self._has_answer = False

    def listening(self, can_receive: bool) -> None:
        """Ask for other coordinators, after the broker has answered a subscription.

        Filters that it has refused are answered again later, without those that it has granted before.

        Args:
            can_receive: Whether the answer lets messages of other coordinators through.
        """
        if self._has_answer and not can_receive:
            return
        self._has_answer = True
        if not can_receive:
            log.warning("coordinators_unheard: the broker does not let us subscribe; a second one will not be noticed")
        self._query()

    def waiting(self) -> Waiting:
        """Return what keeps this coordinator from serving."""
        if self._queried_at is None:
            return Waiting("the broker's answer to our subscriptions", about="start")
        awaited = f"another coordinator of federation '{self._name}' may answer; serves when none does"
        return Waiting(awaited, until=self._queried_at + self._probe_s, about="start")

    def tick(self) -> bool:
        """Announce this coordinator from time to time; return True at the moment when it begins to serve."""
        now = self._clock()
        if self._serves_since is None:
            if self._queried_at is None or now - self._queried_at < self._probe_s:
                return False
            self._serves_since = now
            return True
        if now - self._announced_at >= REPEAT_S:
            self._announce()
        return False

    def is_alone(self) -> bool:
        """Return whether no other coordinator has answered the latest query; ask again if that is long ago."""
        if self._queried_at is None or self._clock() - self._queried_at > KNOWN_S:
            self._query()
        return self._queried_at is not None and self._clock() - self._queried_at >= self._probe_s

    def heard(self, message: Present) -> None:
        """Answer a message of another coordinator; if it answers ours, one of the two stops.

        Raises:
            DuplicateCoordinator: This is the one that stops.
        """
        if message.boot == self._boot:
            return
        now = self._clock()
        if message.standby:
            self._note_standby(message, now)
        self._answer(message, now)
        # Only an answer to this start proves that another coordinator is running; a standby never serves.
        if message.standby or message.answers != self._boot:
            return
        own_entries = self._progress().entries
        about = self._describe(message, own_entries)
        reason = self._yields_to(message, own_entries)
        if reason is not None:
            raise DuplicateCoordinator(f"{about}; {_advice(reason, is_same=self._is_same_federation(message))}")
        self._note = f"{about}; it has to stop; this one continues"
        self._noted_at = now
        if message.boot not in self._named and len(self._named) < MOST_ANSWERED:
            self._named.add(message.boot)
            log.warning("other_coordinator %s", self._note)

    def _note_standby(self, message: Present, now: float) -> None:
        """Note a coordinator in reserve, and forget those that were not heard lately."""
        recent = {boot: (name, at) for boot, (name, at) in self._standbys.items() if now - at < KNOWN_S}
        self._standbys = recent if len(recent) < MOST_ANSWERED else {}
        self._standbys[message.boot] = (f"host '{message.host}', process {message.process}", now)

    def _answer(self, message: Present, now: float) -> None:
        """Answer another coordinator, but not each of many messages that come within a second."""
        answered_at = self._answered.get(message.boot, float("-inf"))
        if now - answered_at < ANSWER_APART_S:
            return
        if len(self._answered) >= MOST_ANSWERED:
            self._answered.clear()
        self._answered[message.boot] = now
        self._announce(message.boot)

    def _query(self) -> None:
        """Ask who else is there; the time for answers begins now."""
        self._queried_at = self._clock()
        self._announce()

    def _announce(self, answers: str = "") -> None:
        """Send what this coordinator is and how far its journal is; ``answers`` names the start that it answers."""
        if not answers:
            self._announced_at = self._clock()
        progress = self._progress()
        message = Present(
            host=self._host,
            process=self._process,
            serving_s=self._serving_s(),
            answers=answers,
            takeover=self._start.takeover,
            is_copy=self._start.is_copy,
            entries=progress.entries,
            newest_run=progress.newest_run,
        )
        self._send(message)

    def _serving_s(self) -> float | None:
        """Return for how many seconds this coordinator has been serving; None before it serves."""
        return None if self._serves_since is None else self._clock() - self._serves_since

    def _is_same_federation(self, other: Present) -> bool:
        return other.federation == self._start.federation

    def _describe(self, other: Present, own_entries: int) -> str:
        """Say who the other coordinator is, and who this one is."""
        serves = "is starting" if other.serving_s is None else f"has been serving for {other.serving_s:.0f} s"
        start = self._start
        return (
            f"another coordinator of federation '{self._name}' {serves}: host '{other.host}', process {other.process}, "
            f"start {other.boot}, federation id {other.federation[:12]}, epoch {other.epoch}, {other.entries} journal "
            f"entries (this one: host '{self._host}', process {self._process}, start {self._boot}, federation id "
            f"{start.federation[:12]}, epoch {start.epoch}, {own_entries} journal entries)"
        )

    def _yields_to(self, other: Present, own_entries: int) -> Reason | None:
        """Decide by the rules of the module which of the two stops; None: the other one does."""
        if not self._is_same_federation(other):
            return self._serves_less(other)
        # 1. A takeover was decided by a standby or an operator.
        if other.takeover != self._start.takeover:
            return Reason.TAKEOVER if other.takeover > self._start.takeover else None
        # 2. A start ends none that serves, but for a backup that was served too early.
        other_serves = other.serving_s is not None
        if self.is_serving != other_serves:
            return self._yields_at_start(other, own_entries)
        # 3. Both serve, because a network was split, or both start: the newer journal has done more work.
        if other.entries != own_entries:
            return Reason.NEWER if other.entries > own_entries else None
        return self._serves_less(other)

    def _yields_at_start(self, other: Present, own_entries: int) -> Reason | None:
        """Decide between one that starts and one that serves."""
        if self.is_serving:
            is_early_backup = self._start.is_copy and not other.is_copy and other.entries > own_entries
            return Reason.BACKUP if is_early_backup else None
        replaces_backup = other.is_copy and not self._start.is_copy and own_entries > other.entries
        return None if replaces_backup else Reason.SERVES

    def _serves_less(self, other: Present) -> Reason | None:
        """Decide by who has been serving longer, and by the boot where that is no difference."""
        own_s = self._serving_s()
        other_s = other.serving_s
        if own_s is None:
            if other_s is not None:
                return Reason.SERVES
            return self._has_larger_boot(other)
        if other_s is None:
            return None
        if abs(other_s - own_s) <= SAME_TIME_S:
            return self._has_larger_boot(other)
        return Reason.LONGER if other_s > own_s else None

    def _has_larger_boot(self, other: Present) -> Reason | None:
        """Decide by the ids of the two starts, which each side compares with the same result."""
        return Reason.LONGER if other.boot < self._boot else None


def _advice(reason: Reason, *, is_same: bool) -> str:
    """Say why this coordinator stops and what an operator can do about it."""
    if not is_same:
        return "this one stops. Stop the other first, or give one of them another 'federation' in its configuration"
    if reason is Reason.SERVES:
        return (
            f"{reason.value}, so this one does not start, and no agent has heard of it. Stop the other first, watch it "
            "with 'headwater serve --standby', or replace it with 'headwater serve --take-over'"
        )
    return (
        f"{reason.value}, so this one stops; work with that one. What only this one has done stays in its state folder"
    )
