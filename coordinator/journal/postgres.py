"""The journal in PostgreSQL, which coordinators on several machines reach; one of them serves, by a lease.

One row, the head, has the number and the hash of the newest entry. Whoever appends locks it, so that numbers and hashes
follow each other whichever process writes, and a transaction has all of its entries or none. An entry is durable when
`PostgresJournal.append` returns, because its transaction is committed; deferred ones share a transaction that
`PostgresJournal.flush` commits.

A lost connection is made again, and what was asked for is done again, for `AWAY_S` at most: a database that restarts
costs a pause. After that each call tries it once. Where the connection is lost within a commit, nobody knows whether
the entry is there. The next attempt locks the head, which waits for the end of that commit, and looks for the entry by
its hash: it is written once.

A coordinator appends only while its lease (`postgres_lease`) and its start are the newest: the head has the numbers of
both, and each transaction that writes compares them after locking the head. One that was suspended, or cut off from the
database, so finds out within the transaction that another has taken over, however late it comes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edge_agent.core.errors import DuplicateCoordinator, JournalAway, StateError
from edge_agent.core.locks import taken_lock

from .deferring import DeferredEntries
from .entries import CoordinatorStarted, Fact, RunRequested
from .kinds import CHECKPOINTS, FINAL
from .postgres_connection import Database, database_errors
from .postgres_lease import MIGRATION as LEASES
from .postgres_lease import HeldLease, read_lease, take_lease
from .postgres_standbys import MIGRATION as STANDBYS
from .postgres_standbys import note_standby, read_standbys
from .sqlite import write_copy
from .store import (
    COLUMNS,
    GENESIS,
    LEASE_S,
    WHAT_TO_DO,
    Entry,
    Hold,
    LeaseState,
    Progress,
    ServingOrder,
    SharedJournal,
    StoreReport,
    Verified,
    identified,
    make_row,
    read_row,
    run_name,
    run_number,
    utc_now,
    verify_chain,
)

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[dict[str, Any]]

AWAY_S = 30.0
"""Seconds for which a database that is away is waited for; a restart takes some seconds, a failover often more."""

PAUSE_S = 0.2
"""Seconds between two attempts to connect."""

PAGE = 5000
"""Rows that are read at once where all of them are read."""

MIGRATIONS = (
    (
        """CREATE TABLE headwater_journal (
            is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
            id text NOT NULL,
            schema integer NOT NULL,
            last_id bigint NOT NULL DEFAULT 0,
            last_hash text NOT NULL,
            newest_start bigint NOT NULL DEFAULT 0
        )""",
        """CREATE TABLE headwater_entries (
            id bigint PRIMARY KEY,
            at text NOT NULL,
            kind text NOT NULL,
            run text,
            round bigint,
            agent text,
            digest text,
            body text NOT NULL,
            previous_hash text NOT NULL,
            hash text NOT NULL
        )""",
        "CREATE INDEX headwater_entries_kind ON headwater_entries (kind, id)",
        "CREATE INDEX headwater_entries_run ON headwater_entries (run, round, id)",
        "CREATE INDEX headwater_entries_agent ON headwater_entries (agent, kind, id) WHERE agent IS NOT NULL",
    ),
    LEASES,
    STANDBYS,
)
"""The statements that lead from each version of the tables to the next; the first one makes them.

Each only adds: the coordinator of the version before may be serving while a standby of the next one begins.
"""

SCHEMA = len(MIGRATIONS)
_MIGRATION_LOCK = 0x4865616477617465
"""The key of the lock that two processes take which make the tables; it has no other meaning than to be ours."""

_NAMES = ", ".join(COLUMNS)
_INSERT = f"INSERT INTO headwater_entries ({_NAMES}, fence) VALUES ({', '.join(['%s'] * len(COLUMNS))}, %s)"  # noqa: S608 - constants

_HEAD = "SELECT last_id, last_hash, newest_start, fence FROM headwater_journal"

_LOCK_NOT_AVAILABLE = "55P03"
_RETRIED = frozenset({_LOCK_NOT_AVAILABLE, "40001", "40P01"})
"""Codes of PostgreSQL for a transaction that was in the way of another one, and may be tried again."""

_AWAY = ("08", "57P", "25P03")
"""Beginnings of its codes for connections that end, for a server that stops or starts, and for one that has ended the
transaction of a process that was suspended within it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """The row that each transaction locks which writes."""

    last_id: int
    last_hash: str
    newest_start: int
    """The id of the newest entry of a coordinator's start; 0: there is none."""

    fence: int
    """The number of the newest lease; 0: there was none."""

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The id and hash of the newest entry, as the row of the next one wants them; None: there is none."""
        return {"id": self.last_id, "hash": self.last_hash} if self.last_id else None


class PostgresJournal(DeferredEntries, SharedJournal):
    """A `coordinator.journal.store.SharedJournal` in a database of PostgreSQL. Call `open` and `close`.

    Args:
        url: The URL of the database, as libpq reads it, without a password.
        expected_id: The id that the journal has, or gets where there is none yet; empty: any.
        now: The wall clock.
        clock: Returns seconds that only grow, for limits.
        away_s: Seconds for which a database that is away is waited for.
    """

    def __init__(
        self,
        url: str,
        *,
        expected_id: str = "",
        now: Callable[[], datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
        away_s: float = AWAY_S,
    ) -> None:
        DeferredEntries.__init__(self)
        self._database = Database(url)
        self._expected_id = expected_id
        self._now = now
        self._clock = clock
        self._away_s = away_s
        self._session = f"headwater-{secrets.token_hex(8)}"
        """The name of this process in the database's list of sessions."""

        self._connection: Connection | None = None
        self._away_since: float | None = None
        """Since when the database has not done what was asked for; None: it did at last. It is waited for once."""

        self._is_open = False
        self._pause = threading.Event()
        """Never set: its wait is a pause."""

        self._id = ""
        self._start: int | None = None
        """The entry of this coordinator's start, once it has one: `serve_from`."""

        self._is_held: Callable[[], bool] = lambda: True
        self._successor: DuplicateCoordinator | None = None
        self._verified = Verified()
        """How far `verify_new` need not look again; `open` compares that the journal is the same."""

        self._lease: HeldLease | None = None
        """The lease of this process; None: it does not serve, and writes as commands do."""

    def __enter__(self) -> PostgresJournal:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- where it is, and whose ----------------------------------------------------------------------------------

    def open(self, *, create: bool = True, is_begun: bool = False) -> PostgresJournal:
        """Connect, and return this journal; its tables are made, or brought up to date, where ``create`` allows it.

        Args:
            create: Whether the tables may be made or changed; otherwise those of an older version are refused.
            is_begun: Whether there must be entries, so that an empty journal is a lost one.

        Raises:
            JournalAway: The database does not answer, or does not let this process in.
            StateError: Its tables are of a newer version or another journal, missing without ``create``, or without
                the entries that must be there.
            MissingCapability: psycopg is not installed.
        """
        with self._lock:
            self._connection = self._connect()
            self._is_open = True
            try:
                self._attempt(lambda connection: self._check_tables(connection, create=create))
                if is_begun and not self.last_id():
                    raise StateError(
                        f"{self.location}: the journal is empty, all of its entries are lost. {WHAT_TO_DO}"
                    )
            except BaseException:
                self.close()
                raise
        return self

    @property
    def location(self) -> str:
        """The URL of the database without its parameters, for messages."""
        return str(self._database)

    @property
    def id(self) -> str:
        """The id that the database got when its tables were made; empty before it was opened."""
        return self._id

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since; a lost connection is made again."""
        return self._is_open

    def serve_from(self, start: int, is_held: Callable[[], bool] = lambda: True) -> None:
        """Write entries, from now on, only while ``start`` is the newest start of a coordinator.

        ``is_held``: whether the lock of the state folder is still that of this process.
        """
        self._start = start
        self._is_held = is_held

    def check_newest(self) -> None:
        """Return quietly while no other coordinator has started on this journal.

        Raises:
            DuplicateCoordinator: One has.
        """
        with self._lock:
            head = self._attempt(_read_head)
            self._check_writer(head)

    @contextlib.contextmanager
    def hold(self, folder: Path, owner: str, is_begun: Callable[[], bool]) -> Iterator[Hold]:
        """Open the journal, and take the lease and with it the lock of the state folder, whoever has that.

        Raises:
            DuplicateCoordinator: Another coordinator has the lease, and renews it.
            JournalAway: The database does not answer.
            StateError: The folder cannot be used, or the journal cannot.
        """
        holder = f"{owner} ({_own_process()})"
        with contextlib.closing(self.open(is_begun=is_begun())):
            lease = HeldLease(self._database, self._session, self._take(holder), clock=self._clock)
            lease.start()
            self._lease = lease
            try:
                # The lock follows the lease: its former holder can write nothing any more.
                with taken_lock(folder, owner) as lock:
                    yield lock
            finally:
                lease.stop()
                self._lease = None

    def _take(self, holder: str) -> int:
        """Take the lease, after waiting whether that of a coordinator that has just ended is renewed.

        Raises:
            DuplicateCoordinator: Another coordinator has the lease, and renews it.
        """
        until = self._clock() + LEASE_S + PAUSE_S
        seen_at = ""
        while True:
            with self._lock:
                try:
                    return self._attempt(
                        lambda connection: take_lease(connection, self._session, holder, lock_head=_lock_head)
                    )
                except DuplicateCoordinator:
                    renewed_at = self._attempt(read_lease).renewed_at
                    is_renewed = bool(seen_at) and renewed_at != seen_at
                    if is_renewed or self._clock() > until:
                        raise
                    seen_at = renewed_at
            self._pause.wait(PAUSE_S)

    def read_lease(self) -> LeaseState:
        """Ask the database once who has the lease.

        Raises:
            JournalAway: It does not answer.
        """
        with self._lock:
            return self._attempt_once(read_lease)

    def note_standby(self) -> None:
        """Note once in the database that this process waits for the lease.

        Raises:
            JournalAway: It does not answer.
        """
        with self._lock:
            try:
                note_standby(self._connected(), self._session, _own_process())
            except database_errors() as error:
                self._discard_connection()
                raise self._translate(error) from error

    def read_order(self) -> ServingOrder:
        """Return who has the lease, and who waits for it."""

        def read(connection: Connection) -> ServingOrder:
            return ServingOrder(read_lease(connection), read_standbys(connection))

        return self._read(read)

    @property
    def is_ours(self) -> bool:
        """Whether this process may write: no other coordinator has been found in the journal, or can have come."""
        has_lease = self._lease is None or self._lease.is_certain
        return self._successor is None and has_lease and self._is_held()

    def check_ours(self) -> None:
        """Return quietly while `is_ours`.

        Raises:
            DuplicateCoordinator: Another coordinator has taken over.
            JournalAway: The lease was not renewed in time, and the database does not answer.
        """
        # A lease that was not renewed in time, because this process was suspended or the database was away, may be
        # lost: nothing is done until the database has said so, or has renewed it.
        lease = self._lease
        is_lost = lease is not None and not lease.is_certain and not self._confirm(lease)
        if self._successor is None and is_lost:
            self._successor = self._taken_over("the lease of this one has ended")
        if self._successor is None and not self._is_held():
            self._successor = self._taken_over("it holds the state folder")
        if self._successor is not None:
            raise self._successor

    def _confirm(self, lease: HeldLease) -> bool:
        """Return whether the lease is still ours, by the word of the database.

        Raises:
            JournalAway: The database does not answer.
        """
        is_ours = lease.confirm(self._away_s - self._away_for_s())
        self._away_since = None
        return is_ours

    def close(self) -> None:
        """Close the connection; deferred entries are lost, as in a crash: `flush` them before."""
        with self._lock:
            self._forget_deferred()
            self._discard_connection()
            self._is_open = False
            self._start = None
            self._is_held = lambda: True
            self._successor = None

    # --- writing ---------------------------------------------------------------------------------------------------

    def append(
        self,
        fact: Fact,
        *,
        run: str | None = None,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
        digest: str | None = None,
    ) -> Entry:
        """Return the entry as written, after all others; it is durable unless it is deferred.

        Raises:
            UnknownName: The kind of the fact is none of ours.
            DuplicateCoordinator: Another coordinator has taken over.
            JournalAway: The database does not answer.
            StateError: The fact has a number that is none, or the database refuses the entry.
        """
        columns = {"run": run, "round": round, "agent": agent, "digest": digest}
        with self._lock:
            self._check_usable()
            if self._deferring == threading.get_ident():
                return self._append_deferred(fact, columns)
            self._commit_deferred()
            return self._append_once(lambda _: (fact, columns))

    def request_run(self, request: RunRequested) -> str:
        """Append the request of a run within one transaction, so that no two processes give the same name."""

        def name_run(connection: Connection) -> tuple[Fact, Mapping[str, Any]]:
            run = run_name(_newest_run(connection) + 1)
            return identified(request, run), {"run": run, "round": None, "agent": None, "digest": None}

        with self._lock:
            self._check_usable()
            self._commit_deferred()
            entry = self._append_once(name_run)
        return str(entry.run)

    def fill(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Write the rows of another journal into this one, which is empty, and return their number.

        Raises:
            JournalAway: The connection was lost; the entries are there, or none of them is.
            StateError: There are entries, or a link of the rows' chain is broken; nothing was written.
        """

        def write(connection: Connection) -> int:
            with connection.transaction():
                if _lock_head(connection).last_id:
                    raise StateError(f"{self.location}: there are entries already; name an empty database")
                last: Mapping[str, Any] = {"id": 0, "hash": GENESIS}
                newest_start = 0
                with connection.cursor().copy(f"COPY headwater_entries ({_NAMES}) FROM STDIN") as copy:
                    for row in rows:
                        copy.write_row([row[name] for name in COLUMNS])
                        last = row
                        if row["kind"] == CoordinatorStarted.kind:
                            newest_start = row["id"]
                _write_head(connection, last, newest_start)
                self._verify_all(connection)
                return int(last["id"])

        with self._lock:
            self._check_usable()
            # The rows can be read once, so another attempt would write those that are left, or none.
            return self._attempt_once(write)

    # --- reading ---------------------------------------------------------------------------------------------------

    def entries(
        self,
        run: str | None = None,
        kinds: Sequence[str] | None = None,
        after: int = 0,
        *,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
        limit: int = -1,
    ) -> list[Entry]:
        """Return the entries with an id above ``after`` in order, only those with what else is given.

        At most ``limit``, the oldest; -1: all.
        """
        conditions = ["id > %s"]
        values: list[Any] = [after]
        for column, value in (("run", run), ("round", round), ("agent", agent)):
            if value is not None:
                conditions.append(f"{column} = %s")
                values.append(value)
        if kinds is not None:
            conditions.append("kind = ANY(%s::text[])")
            values.append(list(kinds))
        values.append(None if limit < 0 else limit)
        return self._select(f"{' AND '.join(conditions)} ORDER BY id LIMIT %s", values)

    def entries_with(self, ids: Sequence[int]) -> list[Entry]:
        """Return the entries with these ids, in order; at most a few hundred."""
        return self._select("id = ANY(%s::bigint[]) ORDER BY id", [list(ids)])

    def newest_of(self, *kinds: str) -> list[Entry]:
        """Return the newest entry of each agent and each of these kinds, in order."""
        newest = "SELECT max(id) FROM headwater_entries WHERE kind = ANY(%s::text[]) AND agent IS NOT NULL"
        return self._select(f"id IN ({newest} GROUP BY agent, kind) ORDER BY id", [list(kinds)])

    def last_id(self) -> int:
        """Return the id of the newest entry; 0 in an empty journal."""
        return self._read(_read_head).last_id

    def version(self) -> tuple[int, int]:
        """Return another value whenever entries were appended since it was asked for, by whichever process."""
        return self._losses, self.last_id()

    def first_hash(self) -> str:
        """Return the hash of the first entry, which no other journal has but copies of this one; empty without one."""
        rows = self._rows("SELECT hash FROM headwater_entries WHERE id = 1")
        return str(rows[0]["hash"]) if rows else ""

    def progress(self) -> Progress:
        """Return how far this journal is now."""
        starts = "SELECT count(*) FROM headwater_entries WHERE kind = 'coordinator_started'"
        [row] = self._rows(f"SELECT last_id - ({starts}) AS entries FROM headwater_journal")  # noqa: S608 - constants
        return Progress(int(row["entries"]), self.newest_run())

    def newest_run(self) -> int:
        """Return the number of the newest run that is known, here or of another coordinator; 0: of none."""
        return self._read(_newest_run)

    def runs(self) -> list[str]:
        """Return the names of all runs in the order of their requests."""
        requested = "SELECT run FROM headwater_entries WHERE kind = 'run_requested' AND run IS NOT NULL ORDER BY id"
        return [row["run"] for row in self._rows(requested)]

    def unfinished(self) -> list[str]:
        """Return the names of the runs that have not ended, in the order of their requests."""
        later = "SELECT 1 FROM headwater_entries AS later WHERE later.run = ended.run AND later.id > ended.id"
        goes_on = f"EXISTS ({later} AND later.kind = 'run_extended')"
        ended = "SELECT run FROM headwater_entries AS ended WHERE kind = ANY(%s::text[]) AND run IS NOT NULL"
        ended = f"{ended} AND NOT {goes_on}"
        query = f"SELECT run FROM headwater_entries WHERE kind = 'run_requested' AND run NOT IN ({ended}) ORDER BY id"  # noqa: S608 - constants
        return [row["run"] for row in self._rows(query, [list(FINAL)])]

    def checkpoints(self) -> dict[str, str]:
        """Return the digest of the newest checkpoint of each run that has one; no body is read."""
        of_runs = "kind = ANY(%s::text[]) AND digest IS NOT NULL AND run IS NOT NULL"
        query = f"SELECT DISTINCT ON (run) run, digest FROM headwater_entries WHERE {of_runs} ORDER BY run, id DESC"  # noqa: S608 - constants
        return {row["run"]: row["digest"] for row in self._rows(query, [list(CHECKPOINTS)])}

    def digests(self, kinds: Sequence[str], run: str | None = None) -> set[tuple[str | None, str]]:
        """Return run and digest of the entries of these kinds that have a digest, of one run if given."""
        query = "SELECT DISTINCT run, digest FROM headwater_entries WHERE digest IS NOT NULL AND kind = ANY(%s::text[])"
        values: list[Any] = [list(kinds)]
        if run is not None:
            query += " AND run = %s"
            values.append(run)
        return {(row["run"], row["digest"]) for row in self._rows(query, values)}

    def verify(self) -> int:
        """Return the number of entries, after checking every link of the chain.

        Raises:
            StateError: An entry was changed, removed or inserted; the first one is named.
        """
        return self._read(self._verify_all)

    def verify_new(self) -> int:
        """Return the number of entries, after checking the links that this object has not checked before.

        A standby checks them while it waits, so that a takeover does not take longer with each entry.

        Raises:
            StateError: An entry was changed, removed or inserted; the first one is named.
        """
        return self._read(lambda connection: self._verify_rows(connection, self._verified))

    def examine(self) -> StoreReport:
        """Look at the database without changing it; there may be no tables yet.

        Raises:
            JournalAway: It does not answer, or does not let this process in.
            StateError: Its tables are of another version or another journal, or may not be made.
        """
        with contextlib.closing(self._connect()) as connection:
            server = f"PostgreSQL {_setting(connection, 'server_version')} at {self.location}"
            # 1. The tables, or whether they may be made.
            if _version_of(connection):
                self._check_tables(connection, create=False)
                order = ServingOrder(read_lease(connection), read_standbys(connection))
                state = f"journal {self._id[:12]} with {_read_head(connection).last_id} entries; "
                state += f"{order.serving or 'nobody'} serves"
                if order.standbys:
                    state += f"; stands by: {', '.join(order.standbys)}"
            else:
                query = "SELECT has_schema_privilege(current_schema(), 'CREATE') AS is_allowed"
                row = connection.execute(query).fetchone()
                if row is None or not row["is_allowed"]:
                    raise self._database.failure("no tables yet, and the role may not create any")
                state = "no journal yet: 'headwater serve' makes it"
            # 2. Settings of the server by which what was committed may be lost.
            advice = [
                f"{self.location}: the server runs with {name} = off, so entries may be lost when its machine loses "
                f"power; turn it on"
                for name in ("fsync", "full_page_writes")
                if _setting(connection, name) == "off"
            ]
        return StoreReport(f"{server}: {state}", tuple(advice))

    def copy_to(self, path: Path) -> None:
        """Write all durable entries as of now to a new journal of SQLite at ``path``; others may append meanwhile.

        Raises:
            StateError: The journal cannot be read, or ``path`` cannot be written.
        """

        def copy(connection: Connection) -> None:
            highest = _read_head(connection).last_id
            write_copy(path, _pages(connection, highest))

        with contextlib.closing(self._connect()) as connection:  # one that does not see what is deferred on the other
            try:
                copy(connection)
            except database_errors() as error:
                raise self._translate(error) from error

    # --- inside ----------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Require that this process may write.

        Raises:
            StateError: The journal is not open.
            DuplicateCoordinator: Another coordinator has taken over.
        """
        if not self._is_open:
            raise StateError(f"{self.location}: the journal is not open; call open before")
        self.check_ours()

    def _connect(self) -> Connection:
        return self._database.connect(self._session)

    def _connected(self) -> Connection:
        """Return the connection, made again where it was lost.

        Raises:
            JournalAway: The database does not answer.
            StateError: The journal is not open, or another one is at its place.
        """
        if not self._is_open:
            raise StateError(f"{self.location}: the journal is not open; call open before")
        if self._connection is None:
            connection = self._connect()
            try:
                # The server may not know yet that the connection before is gone, which holds the lock of the head.
                _end_sessions(connection, self._session)
                self._check_id(_read_id(connection))
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _discard_connection(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):  # of a connection that is lost, nothing more is wanted
                self._connection.close()
        self._connection = None

    def _attempt(self, act: Callable[[Connection], T]) -> T:
        """Return the result of ``act``, which is done again on a new connection where the connection is lost.

        Within deferred entries nothing is done again: they are lost with their connection.

        Raises:
            JournalAway: The database did not answer within the limit.
            StateError: The database refuses what was asked for, or deferred entries were lost.
        """
        errors = database_errors()
        while True:
            try:
                result = act(self._connected())
            except JournalAway:
                if self._away_for_s() >= self._away_s:
                    raise
            except errors as error:
                failure = self._translate(error)
                if isinstance(failure, JournalAway):
                    self._discard_connection()
                if self._has_deferred:
                    self._drop_deferred(failure)
                    raise failure from error
                if not _may_be_retried(error) or self._away_for_s() >= self._away_s:
                    raise failure from error
            else:
                self._away_since = None
                return result
            self._pause.wait(PAUSE_S)

    def _attempt_once(self, act: Callable[[Connection], T]) -> T:
        """Return the result of ``act``, which is not done again where the connection is lost.

        Raises:
            JournalAway: The connection is lost.
            StateError: The database refuses what was asked for.
        """
        try:
            return act(self._connected())
        except database_errors() as error:
            self._discard_connection()
            raise self._translate(error) from error

    def _away_for_s(self) -> float:
        """Return since when nothing has succeeded, in seconds; the first failure begins to count."""
        if self._away_since is None:
            self._away_since = self._clock()
        return self._clock() - self._away_since

    def _read(self, act: Callable[[Connection], T]) -> T:
        with self._lock:
            return self._attempt(act)

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        return self._read(lambda connection: connection.execute(query.encode(), values).fetchall())

    def _select(self, condition: str, values: Sequence[Any]) -> list[Entry]:
        rows = self._rows(f"SELECT {_NAMES} FROM headwater_entries WHERE {condition}", values)  # noqa: S608 - constants
        return [read_row(row) for row in rows]

    def _verify_all(self, connection: Connection) -> int:
        return self._verify_rows(connection, Verified())

    def _verify_rows(self, connection: Connection, after: Verified) -> int:
        """Return the number of entries, after checking the links after an entry.

        Raises:
            StateError: An entry was changed, removed or inserted; the first one is named.
        """
        # 1. One statement reads the head and the highest id as they belong together.
        query = "SELECT last_id, last_hash, (SELECT max(id) FROM headwater_entries) AS highest FROM headwater_journal"
        row = connection.execute(query).fetchone()
        if row is None:
            raise StateError(f"{self.location}: the head of the journal is missing. {WHAT_TO_DO}")
        highest = row["highest"] or 0
        if highest > row["last_id"]:
            raise StateError(
                f"{self.location}: entry {highest} breaks the chain: by its head the journal ends with entry "
                f"{row['last_id']}. {WHAT_TO_DO}"
            )
        # 2. Entries that are appended meanwhile are not read. Where newer ones than were verified are missing, all are
        # read, to name the first.
        if row["last_id"] < after.id:
            after = Verified()
        last = after

        def noting(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            nonlocal last
            for entry in rows:
                last = Verified(entry["id"], entry["hash"])
                yield entry

        rows = noting(_pages(connection, highest, after.id))
        count = verify_chain(self.location, rows, row["last_id"], after=after)
        if last.hash != row["last_hash"]:
            raise StateError(f"{self.location}: the newest entry is not that of the head. {WHAT_TO_DO}")
        # 3. Deferred entries may be lost yet.
        if not self._has_deferred:
            self._verified = last
        return count

    def _check_writer(self, head: Head) -> None:
        """Require that no other coordinator has a newer lease or start than this one, by a head that is locked.

        Raises:
            DuplicateCoordinator: One has.
        """
        if self._lease is not None and head.fence != self._lease.fence:
            self._successor = self._taken_over(f"it has lease {head.fence}, this one had {self._lease.fence}")
            raise self._successor
        if self._start is not None and head.newest_start > self._start:
            self._successor = self._taken_over(f"its start is entry {head.newest_start}")
            raise self._successor

    def _taken_over(self, by: str) -> DuplicateCoordinator:
        """Return the error that another coordinator has taken over; ``by`` says, as a clause, how that was seen."""
        return DuplicateCoordinator(
            f"{self.location}: another coordinator has taken over this journal ({by}), because this one did not "
            "answer; this one stops and writes nothing more"
        )

    def _write_row(self, connection: Connection, head: Head, row: Mapping[str, Any]) -> None:
        """Write a row after a head that is locked."""
        newest_start = head.newest_start
        if row["kind"] == CoordinatorStarted.kind:
            newest_start = row["id"]
        fence = None if self._lease is None else self._lease.fence
        connection.execute(_INSERT, [*(row[name] for name in COLUMNS), fence])
        _write_head(connection, row, newest_start)

    def _append_once(self, make: Callable[[Connection], tuple[Fact, Mapping[str, Any]]]) -> Entry:
        """Write an entry once, however often the connection is lost meanwhile.

        Args:
            make: Returns what the entry says, and its columns, within the transaction that writes it.
        """
        tried: list[dict[str, Any]] = []

        def write(connection: Connection) -> Entry:
            with connection.transaction():
                head = _lock_head(connection)
                # The commit of the attempt before may have succeeded without an answer.
                if tried and _has_row(connection, tried[-1]):
                    return read_row(tried[-1])
                self._check_writer(head)
                fact, columns = make(connection)
                row = make_row(fact, columns, self._now(), head.last)
                tried.append(row)
                self._write_row(connection, head, row)
            return read_row(row)

        return self._attempt(write)

    def _append_deferred(self, fact: Fact, columns: Mapping[str, Any]) -> Entry:
        """Write an entry within the transaction that `flush` ends, which keeps the head locked."""

        def write(connection: Connection) -> Entry:
            if not self._has_deferred:
                connection.execute("BEGIN")
            try:
                head = _lock_head(connection)
                self._check_writer(head)
                # What is refused here leaves the entries before it as they are.
                row = make_row(fact, columns, self._now(), head.last)
            except BaseException:
                if not self._has_deferred:
                    _roll_back(connection)
                raise
            self._has_deferred = True
            self._write_row(connection, head, row)
            return read_row(row)

        return self._attempt(write)

    def _commit(self) -> None:
        """Commit the transaction of the deferred entries.

        Raises:
            StateError: They could not be written.
        """
        if self._connection is None:
            return
        try:
            self._connection.execute("COMMIT")
        except database_errors() as error:
            failure = self._translate(error)
            if isinstance(failure, JournalAway):
                self._discard_connection()
            raise failure from error

    def _roll_back(self) -> None:
        """End the transaction of the deferred entries without them; one whose connection is lost has ended."""
        if self._connection is not None:
            _roll_back(self._connection)

    def _translate(self, error: Exception) -> StateError:
        """Return the error of ours for one of psycopg."""
        code = getattr(error, "sqlstate", None)
        if _is_of_connection(error):
            return self._database.away(error)
        if code == _LOCK_NOT_AVAILABLE:
            return JournalAway(
                f"{self.location}: another process is writing into the journal and does not end; the database ends "
                "one that was suspended after some seconds. Try it again"
            )
        return self._database.failure(error)

    # --- tables ----------------------------------------------------------------------------------------------------

    def _check_tables(self, connection: Connection, *, create: bool) -> None:
        """Make the tables, or bring them up to date, or refuse them.

        Raises:
            StateError: They are of another version or another journal, or missing without ``create``.
        """
        with connection.transaction():
            # Two processes that start at once make them once.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MIGRATION_LOCK])
            version = _version_of(connection)
            self._check_version(version, create=create)
            if version == 0:
                self._check_encoding(connection)
            # Version by version, with what is there.
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    connection.execute(statement)
            if version == 0:
                connection.execute(
                    "INSERT INTO headwater_journal (id, schema, last_hash) VALUES (%s, %s, %s)",
                    [self._expected_id or secrets.token_hex(16), SCHEMA, GENESIS],
                )
            elif version < SCHEMA:
                connection.execute("UPDATE headwater_journal SET schema = %s", [SCHEMA])
            journal_id = _read_id(connection)
            self._check_id(journal_id)
            self._id = journal_id

    def _check_version(self, version: int, *, create: bool) -> None:
        """Require that tables of a version can be used, or made or brought up to date where ``create`` allows it.

        Args:
            version: The version of the tables; 0: there are none.
            create: Whether the tables may be made or changed.

        Raises:
            StateError: They cannot.
        """
        if version > SCHEMA:
            raise StateError(
                f"{self.location}: journal of version {version}, this program writes version {SCHEMA}; use the "
                "headwater release that wrote it, or another database"
            )
        if create or version == SCHEMA:
            return
        if version == 0:
            raise StateError(f"{self.location}: no journal here; start the coordinator once, or correct 'journal'")
        raise StateError(
            f"{self.location}: journal of version {version}, this program reads version {SCHEMA}; start the "
            "coordinator of this release once, which brings it up to date"
        )

    def _check_encoding(self, connection: Connection) -> None:
        """Require that the database keeps text as it is, whichever language it is in.

        Raises:
            StateError: It does not.
        """
        encoding = _setting(connection, "server_encoding")
        if encoding != "UTF8":
            raise StateError(
                f"{self.location}: the database keeps text as {encoding}, expected UTF8; make one with "
                "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
            )

    def _check_id(self, journal_id: str) -> None:
        """Require that the database is the one that is expected, or was opened before.

        Raises:
            StateError: It is another one.
        """
        expected_id = self._id or self._expected_id
        if expected_id and journal_id != expected_id:
            raise StateError(
                f"{self.location}: this database has the journal {journal_id[:12]} of another state folder, expected "
                f"{expected_id[:12]}; correct 'journal', or give the folder that belongs to it, which coordinators "
                "with one database share"
            )


def _own_process() -> str:
    """Return the host and the number of this process, for people."""
    return f"host {socket.gethostname()[:255]}, process {os.getpid()}"


def _is_of_connection(error: Exception) -> bool:
    """Return whether an error says that the connection is lost: it has a code for that, or none at all."""
    import psycopg

    code = getattr(error, "sqlstate", None)
    if code is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(code).startswith(_AWAY)


def _may_be_retried(error: Exception) -> bool:
    """Return whether a transaction may be tried again: its connection was lost, or another one was in its way."""
    return _is_of_connection(error) or getattr(error, "sqlstate", None) in _RETRIED


def _roll_back(connection: Connection) -> None:
    """End a transaction without its entries; one whose connection is lost has ended."""
    with contextlib.suppress(*database_errors()):
        connection.execute("ROLLBACK")


def _end_sessions(connection: Connection, name: str) -> None:
    """End the other sessions of this name, with the transactions that they have not committed."""
    query = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = %s AND pid <> pg_backend_pid()"
    )
    connection.execute(query, [name])


def _lock_head(connection: Connection) -> Head:
    """Lock the head until the transaction ends, and return it.

    Raises:
        StateError: It is missing.
    """
    return _head_of(connection.execute(f"{_HEAD} FOR UPDATE"))


def _read_head(connection: Connection) -> Head:
    """Return the head as it is now.

    Raises:
        StateError: It is missing.
    """
    return _head_of(connection.execute(_HEAD))


def _head_of(cursor: psycopg.Cursor[dict[str, Any]]) -> Head:
    """Return the head that a statement has read.

    Raises:
        StateError: It is missing.
    """
    row = cursor.fetchone()
    if row is None:
        raise StateError(f"the table headwater_journal of the database is empty. {WHAT_TO_DO}")
    return Head(**row)


def _write_head(connection: Connection, last: Mapping[str, Any], newest_start: int) -> None:
    """Note the newest entry and the newest start of a coordinator in the head, which is locked."""
    connection.execute(
        "UPDATE headwater_journal SET last_id = %s, last_hash = %s, newest_start = %s",
        [last["id"], last["hash"], newest_start],
    )


def _has_row(connection: Connection, row: Mapping[str, Any]) -> bool:
    """Return whether the journal has this entry: one of the same number with another hash is another entry."""
    cursor = connection.execute("SELECT hash FROM headwater_entries WHERE id = %s", [row["id"]])
    stored = cursor.fetchone()
    return stored is not None and bool(stored["hash"] == row["hash"])


def _pages(connection: Connection, highest: int, after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows after an id, up to another, in order; some thousand at a time: they may not fit memory."""
    query = f"SELECT {_NAMES} FROM headwater_entries WHERE id > %s AND id <= %s ORDER BY id LIMIT {PAGE}"  # noqa: S608 - constants
    while rows := connection.execute(query.encode(), [after, highest]).fetchall():
        yield from rows
        after = rows[-1]["id"]


def _read_id(connection: Connection) -> str:
    """Return the id of the journal; empty where the head is missing."""
    row = connection.execute("SELECT id FROM headwater_journal").fetchone()
    return "" if row is None else str(row["id"])


def _version_of(connection: Connection) -> int:
    """Return the version of the tables; 0: there are none."""
    row = connection.execute("SELECT to_regclass('headwater_journal') IS NOT NULL AS is_there").fetchone()
    if row is None or not row["is_there"]:
        return 0
    row = connection.execute("SELECT schema FROM headwater_journal").fetchone()
    return 0 if row is None else int(row["schema"])


def _setting(connection: Connection, name: str) -> str:
    """Return a setting of the server as it is in force for this connection."""
    row = connection.execute("SELECT current_setting(%s) AS value", [name]).fetchone()
    return "" if row is None else str(row["value"])


def _newest_run(connection: Connection) -> int:
    """Return the highest number among the runs that were requested here, and those heard of elsewhere; 0: none."""
    requested = connection.execute("SELECT run FROM headwater_entries WHERE kind = 'run_requested'").fetchall()
    numbers = [run_number(row["run"] or "") or 0 for row in requested]
    heard = connection.execute(
        "SELECT body::json ->> 'newest_run' AS number FROM headwater_entries "
        "WHERE kind = ANY('{coordinator_started,run_heard}'::text[])"
    )
    numbers += [int(row["number"] or 0) for row in heard.fetchall()]
    return max([len(requested), *numbers])
