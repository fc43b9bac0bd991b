"""The lease by which one of several coordinators serves: a row in the journal's database, with a number that grows.

Each lease is a row with the next number. Its holder renews it every `RENEW_S` seconds, by a thread and a connection of
its own, so that neither an aggregation nor a slow statement delays that. One that was not renewed for `LEASE_S` seconds
by the clock of the database has expired; another coordinator ends it and takes the next number, in one transaction.

The number fences: it is in the head of the journal, and a transaction that writes compares it after locking the head
(`postgres`). A holder that was suspended or cut off therefore writes nothing, whenever it comes back. No two clocks are
compared, and a wrong one costs a takeover too early or too late, never an entry.

Why a row, and no lock of a session (advisory lock): that is held for as long as the session is. A suspended process
keeps its session, and a restart of the database ends all sessions at once, that of a healthy holder, too. So a time
would be needed in either case, and a lock has no number that a late write could be compared with. After a failover to
another server its locks are gone, and the rows are there.

The rows stay, as the record of who served when: `taken_at`, `renewed_at` and `ended_at` of two leases never overlap,
because a renewal changes a row that has not ended, and a takeover ends the row before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import DuplicateCoordinator, JournalAway, StateError

from .postgres_connection import Database, database_errors
from .store import LEASE_S, LeaseState

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[dict[str, Any]]

RENEW_S = 0.5
"""Seconds between two renewals: a lease survives that some are late."""

ANSWER_S = 2.0
"""Seconds in which the database answers a renewal; otherwise it is tried on another connection."""

AGAIN_S = 0.2
"""Seconds between two attempts while it is not known whether a lease was lost."""

MIGRATION = (
    """CREATE TABLE headwater_leases (
        fence bigint PRIMARY KEY,
        holder text NOT NULL,
        session text NOT NULL,
        taken_at timestamptz NOT NULL,
        renewed_at timestamptz NOT NULL,
        ended_at timestamptz
    )""",
    "ALTER TABLE headwater_journal ADD COLUMN fence bigint NOT NULL DEFAULT 0",
    "ALTER TABLE headwater_entries ADD COLUMN fence bigint",
)
"""The statements that add leases to the tables; `fence` of an entry is that of its writer, NULL of a command's."""

_NEWEST = f"""
SELECT fence, holder, session, ended_at IS NOT NULL AS has_ended,
    ended_at IS NULL AND renewed_at < clock_timestamp() - interval '{LEASE_S} seconds' AS has_expired,
    renewed_at::text AS renewed_at
FROM headwater_leases ORDER BY fence DESC LIMIT 1"""  # noqa: S608 - constants

_RENEW = """
UPDATE headwater_leases SET renewed_at = clock_timestamp()
WHERE fence = %s AND session = %s AND ended_at IS NULL RETURNING fence"""

_END = "UPDATE headwater_leases SET ended_at = clock_timestamp() WHERE fence = %s AND ended_at IS NULL"

_TAKE = """
INSERT INTO headwater_leases (fence, holder, session, taken_at, renewed_at)
VALUES (%s, %s, %s, clock_timestamp(), clock_timestamp())"""


@dataclass(frozen=True)
class _Row:
    """The newest lease, and the session of its holder."""

    state: LeaseState
    session: str


def read_lease(connection: Connection) -> LeaseState:
    """Return who has the newest lease, by the clock of the database."""
    return _newest(connection).state


def _newest(connection: Connection) -> _Row:
    """Return the newest lease with its session; number 0 and free where there was none."""
    row = connection.execute(_NEWEST.encode()).fetchone()
    if row is None:
        return _Row(LeaseState(0, "", is_free=True, has_expired=False, renewed_at=""), "")
    state = LeaseState(row["fence"], row["holder"], row["has_ended"], row["has_expired"], row["renewed_at"])
    return _Row(state, row["session"])


def take_lease(connection: Connection, session: str, holder: str, lock_head: Callable[[Connection], object]) -> int:
    """Take the next lease for a session, and return its number.

    Args:
        connection: A connection outside of any transaction.
        session: The name of this process in the database's list of sessions.
        holder: Who takes it, as text for people.
        lock_head: Locks the head of the journal within a transaction.

    Raises:
        DuplicateCoordinator: Another coordinator has one, and renews it.
    """
    before = _newest(connection)
    # 1. Where the answer to an attempt of this process was lost, it has the lease already.
    if before.session == session and not before.state.is_free:
        return before.state.fence
    # 2. The holder before is cut off: suspended within a transaction, it would keep the head locked. The server ends
    #    its sessions.
    _check_available(before.state)
    if before.session:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND starts_with(application_name, %s) AND pid <> pg_backend_pid()",
            [before.session],
        )
    # 3. The next lease. The row of the one before is locked and then looked at again: it may just have been renewed, or
    #    a third coordinator may have taken the next one.
    with connection.transaction():
        lock_head(connection)
        connection.execute("SELECT fence FROM headwater_leases WHERE fence = %s FOR UPDATE", [before.state.fence])
        newest = _newest(connection)
        _check_available(newest.state)
        fence = newest.state.fence + 1
        connection.execute(_END, [newest.state.fence])
        connection.execute(_TAKE, [fence, holder, session])
        connection.execute("UPDATE headwater_journal SET fence = %s", [fence])
    return fence


def _check_available(lease: LeaseState) -> None:
    """Require that a lease may be followed by the next one.

    Raises:
        DuplicateCoordinator: Its holder renews it.
    """
    if not lease.is_free and not lease.has_expired:
        raise DuplicateCoordinator(
            f"a coordinator serves already: {lease.holder} (lease {lease.fence} of the journal's database), so this "
            "one does not start; stop the other first, or wait for its end with 'headwater serve --standby'"
        )


class HeldLease:
    """A lease of this process, which is renewed by a thread until `stop`."""

    def __init__(
        self, database: Database, session: str, fence: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fence = fence
        self._database = database
        self._session = session
        self._clock = clock
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        """Held while the lease is renewed: by the thread, or by a caller of `confirm`."""

        self._stop = threading.Event()
        self._renewed_at = clock()
        """When the newest renewal that succeeded was sent."""

        self.is_lost = False
        """Whether the database has said that the lease has ended."""

        self._thread = threading.Thread(target=self._renew_until_stopped, name="lease", daemon=True)

    def start(self) -> None:
        """Renew the lease from now on, in a thread, until `stop`."""
        self._thread.start()

    @property
    def is_certain(self) -> bool:
        """Whether nobody can have taken over yet: the lease was renewed in time, by the clock of this process."""
        return not self.is_lost and self._clock() - self._renewed_at < LEASE_S

    def confirm(self, limit_s: float) -> bool:
        """Ask the database whether this process still has the lease.

        Raises:
            JournalAway: The database has not answered within ``limit_s`` seconds.
        """
        until = self._clock() + limit_s
        while not self.is_lost:
            try:
                return self._renew()
            except JournalAway:
                if self._clock() >= until:
                    raise
            self._stop.wait(AGAIN_S)
        return False

    def stop(self) -> None:
        """Stop renewing, and end the lease, so that another coordinator takes over at once; close the connection."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            if not self.is_lost:
                with contextlib.suppress(StateError, *database_errors()):  # it expires by itself
                    self._connected().execute(_END, [self.fence])
            self._discard()

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(RENEW_S) and not self.is_lost:
            with contextlib.suppress(JournalAway):  # the next renewal tries it again
                self._renew()

    def _renew(self) -> bool:
        """Renew the lease, and return whether this process still has it.

        Raises:
            JournalAway: The database does not answer.
        """
        with self._lock:
            sent_at = self._clock()
            try:
                renewed = self._connected().execute(_RENEW, [self.fence, self._session]).fetchone()
            except database_errors() as error:
                self._discard()
                raise self._database.away(error) from error
            if renewed is None:
                self.is_lost = True
                return False
            self._renewed_at = sent_at
            return True

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._database.connect(f"{self._session}-lease", answer_s=ANSWER_S)
        return self._connection

    def _discard(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(*database_errors()):
                self._connection.close()
        self._connection = None
