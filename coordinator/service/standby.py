"""A standby: it asks the coordinator that serves every two seconds, and takes over when there is no answer.

Silence counts only while the broker returns the standby's own messages, so that a broker that is away is not taken for
a coordinator that is. Only answers to its own questions are signs of the other one, as in `peers`.

Where both have one state folder, on one machine, a free lock is a second sign, and `QUIET_S` of silence are enough. A
lock that a silent process still holds, because it was suspended, is removed: the journal takes no entry of that process
any more (`serve_from` of `coordinator.journal.sqlite`), so it can accept nothing, and ends when it is back. That needs
SQLite's shared memory, so a folder on a disk of two machines is refused; they use a copy.

A coordinator that starts its own broker takes that along: its standby works on the same folder, and goes by the lock.

Where the journal is in a database that both reach, nobody is asked over the broker: the lease in the database says who
serves, and fences whoever had it before (`coordinator.journal.postgres_lease`). The state folder is shared then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edge_agent.core.errors import HeadwaterError, JournalAway, StateError, UsageError, cause
from edge_agent.core.locks import LockHolder, lock_holder, remove_lock
from edge_agent.wire.messages import codec
from edge_agent.wire.messages.down import Present
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed, Transport

from ..journal.sqlite import can_write
from ..journal.store import LEASE_S, LeaseState, SharedJournal
from ..state.backup import MARKER
from ..state.starts import Takeover, check_name, federation_of
from ..state.store import StateFolder
from .listening import Listening

log = logging.getLogger(__name__)

TAKEOVER_S = 30.0
"""Silence after which a coordinator is replaced. One that is busy with an aggregation answers only after it."""

QUIET_S = 10.0
"""Silence that is enough where the state folder's lock is free: a restart takes less."""

QUERY_S = 2.0
LOOK_S = 0.5
VERIFY_S = 10.0
"""Seconds between two times that a standby verifies what was added to a journal."""

LEASE_LOOK_S = 0.2
"""Seconds between two looks at the lease."""

NOTE_S = 1.0
"""Seconds between two notes of a standby in the journal's database that it waits, for 'headwater status'."""

WRONG_ANSWERS = 3
"""Answers in a row that do not fit the state folder: their coordinator works on another one."""


def wait_for_folder(
    state: Path,
    stop: threading.Event,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] | None = None,
) -> bool:
    """Wait until nobody has held the state folder for `QUIET_S`; return False when ``stop`` is set before.

    This is for a coordinator that starts its own broker: the two end together, so that nobody can be asked. One that is
    suspended holds the folder, and goes on when it wakes.

    Raises:
        StateError: the folder has no journal, or its file system does not answer.
    """
    # A folder without a journal is refused now, not when its coordinator has ended.
    with StateFolder(state).look():
        pass
    free_since = None
    said = ""
    wait = pause or stop.wait
    while not stop.is_set():
        holder = _lock_holder(state)
        now = clock()
        if holder is not None:
            free_since = None
            if holder.name != said:
                log.info("standing_by holder=%s folder=%s", holder.name, state)
                said = holder.name
        elif free_since is None:
            free_since = now
        elif now - free_since >= QUIET_S:
            log.warning("takes_over folder=%s free_s=%.0f", state, now - free_since)
            return True
        wait(LOOK_S)
    return False


def wait_for_lease(
    journal: SharedJournal,
    federation: str,
    stop: threading.Event,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] | None = None,
) -> bool:
    """Wait until no coordinator has the lease of a journal; return False when ``stop`` is set before.

    A lease that has expired counts only after `LEASE_S` seconds in which this process saw the database answer and the
    lease not renewed: when a database has restarted, its holder gets as long to renew it.

    Args:
        journal: The journal, closed.
        federation: The name of the federation, which has to be that of the journal.
        stop: Ends the wait.
        clock: Returns seconds that only grow.
        pause: Waits for so many seconds; None: until ``stop`` is set.

    Raises:
        StateError: The database answers, and does not have the journal that is expected, or a damaged one.
        UsageError: The journal is of another federation.
    """
    wait = pause or stop.wait
    seen: LeaseState | None = None
    seen_since = 0.0
    watch = _JournalWatch(journal, federation, clock)
    logged_holder = ""
    is_away = False
    with contextlib.closing(journal):
        while not stop.is_set():
            # 1. The lease as it is now. Without the database its holder cannot renew it, so what was seen before does
            #    not count.
            try:
                lease = watch.read_lease()
            except JournalAway as error:
                if not is_away:
                    log.warning("journal_away reason=%s: until it is back, nothing is taken over", error)
                is_away = True
                logged_holder = ""
                seen = None
                wait(LOOK_S)
                continue
            is_away = False
            now = clock()
            # 2. One that was given back is taken at once.
            if lease.is_free:
                if lease.fence:
                    log.info("takes_over lease=%d from=%s: it was given back", lease.fence, lease.holder)
                else:
                    log.info("takes_over: nobody has served from this journal yet")
                return True
            if lease.holder != logged_holder:
                log.info("standing_by holder=%s lease=%d", lease.holder, lease.fence)
                logged_holder = lease.holder
            # 3. One that has expired is taken when it was seen long enough without a renewal.
            if seen is None or lease.renewed_at != seen.renewed_at:
                seen = lease
                seen_since = now
            elif lease.has_expired and now - seen_since >= LEASE_S:
                log.warning("takes_over lease=%d from=%s silent_s=%.1f", lease.fence, lease.holder, now - seen_since)
                return True
            wait(LEASE_LOOK_S)
    return False


class _JournalWatch:
    """A journal whose lease a standby reads again and again, and what else it does there now and then."""

    def __init__(self, journal: SharedJournal, federation: str, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._federation = federation
        self._clock = clock
        self._verified_at = float("-inf")
        self._noted_at = float("-inf")

    def read_lease(self) -> LeaseState:
        """Return the lease as it is now.

        Raises:
            JournalAway: The database does not answer.
            StateError: It does not have the journal that is expected, or a damaged one.
            UsageError: The journal is of another federation.
        """
        if not self._journal.is_open:
            self._journal.open()
            check_name(self._journal, self._federation)
        # The entries are verified before they are needed, so that the takeover has only the newest to verify.
        if self._clock() - self._verified_at >= VERIFY_S:
            self._journal.verify_new()
            self._verified_at = self._clock()
        # For 'headwater status', which names the coordinators that would take over.
        if self._clock() - self._noted_at >= NOTE_S:
            self._journal.note_standby()
            self._noted_at = self._clock()
        return self._journal.read_lease()


def _lock_holder(state: Path) -> LockHolder | None:
    try:
        return lock_holder(state)
    except OSError as error:
        raise StateError(f"{state}: who holds it cannot be read: {cause(error)}") from error


class Standby:
    """Watches the coordinator of a federation until this process may take over its state folder, or a copy of it.

    ``takeover_s``: silence, in seconds, after which a coordinator counts as lost.

    Raises:
        StateError: the folder has no journal, so there is nothing to take over.
        UsageError: its journal is of another federation.
    """

    def __init__(
        self,
        federation: str,
        state: Path,
        transport: Transport,
        *,
        takeover_s: float = TAKEOVER_S,
        clock: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        self._name = federation
        self._state = state
        self._transport = transport
        self._clock = clock
        self._takeover_s = takeover_s
        self._boot = boot or secrets.token_hex(8)
        self._topics = Topics(federation)
        self._listening = Listening(self._topics.coordinators)
        self._host = socket.gethostname()[:255]
        self._process = os.getpid()
        self._seq = 0
        self._asked_at = float("-inf")
        self._returned_at: float | None = None
        """When the broker last returned a query of this process; None: it is not connected."""

        self._heard_at = float("-inf")
        """The last answer of another coordinator, or the moment since when there could have been one."""

        self._wrong_answers = 0
        self._lock: tuple[LockHolder | None, float] = (None, float("-inf"))
        """Who holds the state folder, and since when that is known."""

        self._said = ""
        """What it waits for although the coordinator is silent, as logged last."""

        with StateFolder(state).look() as folder:
            check_name(folder.journal, federation)
            starts = folder.journal.entries(kinds=("coordinator_started",))
        self._federation = federation_of(starts)
        self.serving = ""
        """The coordinator that serves, as text; empty until it was heard."""

        self.replaced = Takeover()
        """What is known of the coordinator that serves: its successor begins with a higher epoch."""

    def wait(self, stop: threading.Event) -> bool:
        """Wait until this process is to take over; return False when ``stop`` is set before.

        Raises:
            UsageError: the coordinator that serves works on another state, or the broker keeps its answers from us.
        """
        self._transport.subscribe(self._topics.coordinators)
        self._transport.start()
        while not stop.is_set():
            if self.step(LOOK_S):
                return True
        return False

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event; return True once this process is to take over.

        Raises:
            UsageError: the broker does not let it hear coordinators, for longer than an election takes.
        """
        event = self._transport.receive(timeout_s)
        now = self._clock()
        if isinstance(event, Connected):
            log.info("connected federation=%s standby=%s", self._name, self._boot)
        elif isinstance(event, Subscribed):
            # Without the topic nothing comes back, and silence does not count: it is asked for again.
            if self._listening.is_granted(event, now):
                self._returned_at = None
                self._asked_at = float("-inf")
        elif isinstance(event, Disconnected):
            log.warning("broker_away reason=%s: until it is back, nothing is taken over", event.reason)
            self._returned_at = None
            self._listening.disconnected()
        elif isinstance(event, Message) and event.topic == self._topics.coordinators and not event.retained:
            self._on_coordinator(event.payload)
        self._listening.check(now)
        if now - self._asked_at >= QUERY_S:
            self._asked_at = now
            self._ask()
        return self._may_take_over(now)

    def _ask(self) -> None:
        self._seq += 1
        query = Present(boot=self._boot, seq=self._seq, host=self._host, process=self._process, standby=True)
        self._transport.publish(self._topics.coordinators, codec.encode(query))

    def _on_coordinator(self, payload: bytes) -> None:
        """Note a message of a coordinator: an own query that the broker has returned, or an answer to one.

        Raises:
            UsageError: Several answers in a row were of a coordinator that works on another state folder.
        """
        try:
            message = codec.parse_between_coordinators(payload)
        except HeadwaterError as error:
            log.warning("message_refused from=coordinators reason=%s", error)
            return
        now = self._clock()
        if message.boot == self._boot:
            # After a gap, answers that were sent meanwhile have not reached this process: silence counts from now on.
            if not self._is_connected(now):
                self._heard_at = now
            self._returned_at = now
        elif not message.standby and message.answers == self._boot:
            self._on_answer(message, now)

    def _on_answer(self, message: Present, now: float) -> None:
        """Note an answer of the coordinator that serves.

        Raises:
            UsageError: Several answers in a row were of a coordinator that works on another state folder.
        """
        about = f"host '{message.host}', process {message.process}, epoch {message.epoch}"
        mismatch = self._mismatch(message)
        if mismatch:
            self._wrong_answers += 1
            if self._wrong_answers >= WRONG_ANSWERS:
                raise UsageError(f"federation '{self._name}' is served by {about}, and {mismatch}")
            return
        self._heard_at = now
        self._wrong_answers = 0
        self._said = ""
        if about != self.serving:
            log.info("standing_by serving=%s takeover_s=%.0f", about, self._takeover_s)
        self.serving = about
        self.replaced = Takeover(message.epoch, message.newest_run)

    def _mismatch(self, message: Present) -> str:
        """Return why the state folder is neither that of the coordinator that answers nor a copy; empty where it is."""
        advice = "make a copy of its state folder with 'headwater backup DIR --every 60', and give that"
        if message.federation != self._federation:
            ids = f"id {self._federation[:12]}, the other has {message.federation[:12]}"
            return f"{self._state} is of another one ({ids}); {advice}"
        if self._is_copy():
            return ""
        if message.host != self._host:
            return f"{self._state} is no copy; two machines cannot work on one folder: {advice}"
        if _lock_holder(self._state) is None:
            return f"nobody holds {self._state}, which is no copy; {advice}"
        return ""

    def _is_copy(self) -> bool:
        return (self._state / MARKER).exists()

    def _is_connected(self, now: float) -> bool:
        """Return whether the broker has returned one of the last three queries of this process."""
        return self._returned_at is not None and now - self._returned_at <= 3 * QUERY_S

    def _may_take_over(self, now: float) -> bool:
        """Return whether the coordinator has been silent for so long that this process takes its place now."""
        # Silence says nothing while the broker does not bring this process's own messages back.
        if not self._is_connected(now):
            return False
        silent_s = now - self._heard_at
        try:
            holder = self._read_lock(now)
            is_copy = self._is_copy()
            if silent_s < self._enough_silence_s(holder, is_copy=is_copy):
                return False
            if holder is not None:
                self._release_lock(holder, now, is_copy=is_copy)
        except StateError as error:
            # It is tried again each time, and logged when the reason is another one.
            if str(error) != self._said:
                log.warning("takeover_waits reason=%s", error)
            self._said = str(error)
            return False
        name = "free" if holder is None else holder.name
        log.warning("takes_over from=%s silent_s=%.0f lock=%s", self.serving or "nobody heard", silent_s, name)
        return True

    def _read_lock(self, now: float) -> LockHolder | None:
        """Return who holds the state folder, and note since when; None: nobody does.

        Raises:
            StateError: the folder's file system does not answer.
        """
        holder = _lock_holder(self._state)
        known_holder, _ = self._lock
        if holder != known_holder:
            self._lock = (holder, now)
        return holder

    def _enough_silence_s(self, holder: LockHolder | None, *, is_copy: bool) -> float:
        """Return after how many seconds of silence the coordinator counts as lost."""
        # A free lock is a second sign that the other process has ended; a copy has a lock of its own.
        is_ended = holder is None and not is_copy
        return QUIET_S if is_ended else self._takeover_s

    def _release_lock(self, holder: LockHolder, now: float, *, is_copy: bool) -> None:
        """Remove the lock of a process that does not answer.

        Raises:
            StateError: It must not be removed yet, or cannot be.
        """
        objection = self._objection(holder, now, is_copy=is_copy)
        if objection:
            raise StateError(f"{self._state}: {objection}")
        try:
            is_removed = remove_lock(self._state, holder)
        except OSError as error:
            raise StateError(
                f"{self._state}: the lock of {holder.name}, which does not answer, cannot be removed: {cause(error)}"
            ) from error
        if not is_removed:
            raise StateError(f"{self._state}: {holder.name} has just ended, or another process holds it")

    def _objection(self, holder: LockHolder, now: float, *, is_copy: bool) -> str:
        """Return why the lock of a process that does not answer must not be removed; empty where it may be."""
        if is_copy:
            return f"{holder.name} holds this copy; it is taken over when that has ended"
        if now - self._lock[1] < self._takeover_s:
            return f"{holder.name} has begun to work here {now - self._lock[1]:.0f} s ago"
        if not self.serving:
            return f"{holder.name} holds it and has never answered; end that process"
        if not can_write(self._state / "journal.db"):
            return f"{holder.name} does not answer, and is in the middle of a write; end that process ('kill -9')"
        return ""
