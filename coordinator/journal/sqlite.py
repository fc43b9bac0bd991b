"""The journal of a state folder: one table of entries in SQLite that survives ``kill -9`` and power cuts.

An entry is durable when `SqliteJournal.append` returns (WAL, ``synchronous=FULL``), except within
`SqliteJournal.deferring`, where `SqliteJournal.flush` makes it so, and where nothing waits for the disk
(`store.without_syncs`). Several processes may write: appends are serialised by the database. What a run is doing is
never stored, only derived: see `coordinator.views`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_agent.core.disk import disk_failure
from edge_agent.core.errors import DuplicateCoordinator, StateError
from edge_agent.core.locks import private_files
from edge_agent.core.storage import is_synced

from .deferring import DeferredEntries
from .entries import Fact, RunRequested
from .kinds import CHECKPOINTS, FINAL
from .store import (
    COLUMNS,
    WHAT_TO_DO,
    Entry,
    Journal,
    Progress,
    identified,
    make_row,
    read_row,
    run_name,
    run_number,
    utc_now,
    verify_chain,
)

SCHEMA = 1
BUSY_TIMEOUT_S = 30
"""How long an append waits for another process; it takes milliseconds, so this is for slow disks."""

CREATION_S = 5.0
"""How long to wait while another program creates the same journal."""

_SQLITE_BUSY = 5

CACHE_KIB = 512
"""SQLite's own cache of pages. Its default of 2 MB takes a thousand rounds to fill, which looks like a leak."""

_TABLE = """
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    run TEXT,
    round INTEGER,
    agent TEXT,
    digest TEXT,
    body TEXT NOT NULL,
    previous_hash TEXT NOT NULL,
    hash TEXT NOT NULL
)"""  # AUTOINCREMENT remembers the highest id, which shows when the newest entries were removed
_INDEXES = (
    "CREATE INDEX ix_entries_kind ON entries (kind)",
    "CREATE INDEX ix_entries_run_round ON entries (run, round)",
)
_INTEGRITY = "PRAGMA integrity_check(1)"
_NEWEST = "SELECT id, hash FROM entries ORDER BY id DESC LIMIT 1"
_INSERT = f"INSERT INTO entries ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - constants


class SqliteJournal(DeferredEntries, Journal):
    """A `coordinator.journal.store.Journal` in one file. Use as a context manager, or call `open` and `close`."""

    def __init__(self, path: Path, *, now: Callable[[], datetime] = utc_now) -> None:
        DeferredEntries.__init__(self)
        self.path = path
        self._now = now
        self._connection: sqlite3.Connection | None = None
        self._opened: os.stat_result | None = None

        self._start: int | None = None
        """The entry of this coordinator's start, once it has one: `serve_from`."""

        self._is_held: Callable[[], bool] = lambda: True
        self._successor: DuplicateCoordinator | None = None
        self._appended = 0
        """Entries that were appended here."""

    def __enter__(self) -> SqliteJournal:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, *, create: bool = True, is_begun: bool = False) -> SqliteJournal:
        """This journal, opened; an empty one is created where there is no file and ``create`` allows it.

        ``is_begun``: there must be entries, so an empty file is damaged. Without ``create`` a journal at rest can be
        read on a disk that is full or mounted read-only, and not written.

        Raises:
            StateError: the file is damaged, of a newer version, or missing without ``create``.
        """
        if not create and not self.path.exists():
            raise StateError(f"{self.path}: no journal here; start the coordinator once, or give its state folder")
        with private_files():
            self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # No isolation level: sqlite3 would open transactions when it chooses.
            with private_files():
                self._connection = self._connected(str(self.path))
                _switch_to_write_ahead_log(self._connection)
                synced = "FULL" if is_synced() else "OFF"
                for pragma in (f"synchronous = {synced}", f"cache_size = -{CACHE_KIB}"):
                    self._connection.execute(f"PRAGMA {pragma}").close()
                self._check_or_make_schema(is_begun=is_begun)
            self._opened = self.path.stat()
        except sqlite3.Error as error:
            self.close()
            if create or not self._can_only_be_read():
                raise self._failed(error) from error
            self._open_to_read(is_begun=is_begun)
        except BaseException:
            self.close()
            raise
        return self

    @staticmethod
    def _connected(address: str, *, uri: bool = False) -> sqlite3.Connection:
        connection = sqlite3.connect(
            address, uri=uri, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        return connection

    def _can_only_be_read(self) -> bool:
        """Whether all entries are in the one file, and nobody can add one now, because the disk takes nothing."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return disk_failure(self.path.parent) is not None and not (log.exists() and log.stat().st_size)

    def _open_to_read(self, *, is_begun: bool) -> None:
        """Open without the file that SQLite makes beside a journal before it reads, and for which there is no room.

        Raises:
            StateError: as `open`.
        """
        try:
            self._connection = self._connected(f"{self.path.absolute().as_uri()}?immutable=1", uri=True)
            self._check_or_make_schema(is_begun=is_begun, writes=False)
            self._opened = self.path.stat()
        except sqlite3.Error as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise

    @property
    def location(self) -> str:
        """The path of the file."""
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Whether the file is there."""
        return self.path.exists()

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since."""
        return self._connection is not None

    @property
    def is_in_place(self) -> bool:
        """Whether the file that was opened is still at `path`: SQLite keeps writing to one that was removed."""
        if self._opened is None:
            return True
        try:
            return os.path.samestat(self._opened, self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that does not answer now
            return True

    def serve_from(self, start: int, is_held: Callable[[], bool] = lambda: True) -> None:
        """Write entries, from now on, only while ``start`` is the newest start of a coordinator.

        A coordinator that was suspended while another one took over its folder finds out before it writes a word.
        ``is_held``: whether the lock of the folder is still that of this process.
        """
        self._start = start
        self._is_held = is_held

    def check_newest(self) -> None:
        """Return quietly while no other coordinator has started on this journal.

        Raises:
            DuplicateCoordinator: one has.
        """
        with self._transaction() as connection:
            self._check_newest(connection)

    @property
    def is_ours(self) -> bool:
        """Whether this process may write: the file is in place, and no other coordinator has been found in it."""
        return self._successor is None and self.is_in_place and self._is_held()

    def check_ours(self) -> None:
        """Return quietly while `is_ours`.

        Raises:
            DuplicateCoordinator: another coordinator has taken over.
            StateError: the folder was removed or replaced.
        """
        if self._successor is None and self.is_in_place and not self._is_held():
            self._successor = DuplicateCoordinator(
                f"{self.path.parent}: another process has taken over this state folder, because this one did not "
                "answer; this one stops and writes nothing more"
            )
        if self._successor is not None:
            raise self._successor
        if not self.is_in_place:
            raise StateError(
                f"{self.path.parent}: this state folder was removed or replaced while it was in use; nothing more is "
                "written to it. Put it back from a backup to resume its runs, or start the coordinator on a new one"
            )

    def close(self) -> None:
        """Close the file; deferred entries are lost, as in a crash: `flush` them before."""
        self._forget_deferred()
        self._start = None
        self._is_held = lambda: True
        self._successor = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._opened = None

    def append(
        self,
        fact: Fact,
        *,
        run: str | None = None,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
        digest: str | None = None,
    ) -> Entry:
        """Return the entry as written; it is on disk when this returns.

        Raises:
            UnknownName: no such kind.
            StateError: the fact has a number that is none, the disk is full, or the database cannot be written.
        """
        columns = {"run": run, "round": round, "agent": agent, "digest": digest}
        with (
            self._deferred()
            if self._deferring == threading.get_ident()
            else self._transaction(writes=True) as connection
        ):
            return self._write(connection, fact, columns)

    def request_run(self, request: RunRequested) -> str:
        """Append the request of a run within one transaction, so that no two processes give the same name."""
        with self._transaction(writes=True) as connection:
            run = run_name(_newest_run(connection) + 1)
            columns = {"run": run, "round": None, "agent": None, "digest": None}
            self._write(connection, identified(request, run), columns)
            return run

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
        """Entries with an id above ``after``, in order; only those of a run, round, agent or of some kinds if given.

        At most ``limit``, the oldest; -1: all.
        """
        conditions = ["id > ?"]
        values = list[Any]([after])
        for column, wanted in (("run", run), ("round", round), ("agent", agent)):
            if wanted is not None:  # after an entry the newest ones are read, not all of the run
                conditions.append(f"+{column} = ?" if after else f"{column} = ?")
                values.append(wanted)
        if kinds is not None:
            conditions.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values.extend(kinds)
        wanted = f"{' AND '.join(conditions)} ORDER BY id LIMIT {int(limit)}"
        return self._selected(wanted, values)

    def entries_with(self, ids: Sequence[int]) -> list[Entry]:
        """Return the entries with these ids, in order; at most a few hundred."""
        return self._selected(f"id IN ({', '.join('?' * len(ids))}) ORDER BY id", ids)

    def _selected(self, wanted: str, values: Sequence[Any]) -> list[Entry]:
        with self._transaction() as connection:
            rows = [dict(row) for row in connection.execute(f"SELECT * FROM entries WHERE {wanted}", values)]  # noqa: S608 - values are bound
        return [read_row(row) for row in rows]

    def last_id(self) -> int:
        """Id of the newest entry; 0 in an empty journal."""
        with self._transaction() as connection:
            return _value(connection, "SELECT max(id) FROM entries") or 0

    def first_hash(self) -> str:
        """Hash of the first entry, which no other journal has but copies of this one; empty in an empty journal."""
        with self._transaction() as connection:
            return _value(connection, "SELECT hash FROM entries WHERE id = 1") or ""

    def progress(self) -> Progress:
        """Return how far this journal is now."""
        with self._transaction() as connection:
            newest = _value(connection, "SELECT max(id) FROM entries") or 0
            starts = _value(connection, "SELECT count(*) FROM entries WHERE kind = 'coordinator_started'")
            return Progress(int(newest - starts), _newest_run(connection))

    def newest_run(self) -> int:
        """Number of the newest run that is known, here or of another coordinator of the federation; 0: of none."""
        with self._transaction() as connection:
            return _newest_run(connection)

    def version(self) -> tuple[int, int]:
        """Another value whenever entries were appended since it was asked for, here or by another process."""
        with self._transaction() as connection:
            return self._appended, _value(connection, "PRAGMA data_version")

    def copy_to(self, path: Path) -> None:
        """Write all entries as of now to a new journal at ``path``; other processes may append meanwhile.

        Raises:
            StateError: the journal cannot be read, or ``path`` cannot be written.
        """
        try:
            # A connection of its own, which does not see entries that are deferred on the other one.
            with (
                contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)) as source,
                contextlib.closing(sqlite3.connect(path, isolation_level=None)) as copy,
            ):
                source.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE").close()  # all of it is in the one file
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def fill(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of another store into this journal, which is empty."""
        with self._transaction(writes=True) as connection:
            connection.executemany(_INSERT, (tuple(row[name] for name in COLUMNS) for row in rows))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of all entries in order, for another store; nobody may write meanwhile."""
        with (
            self._transaction() as connection,
            contextlib.closing(connection.execute("SELECT * FROM entries ORDER BY id")) as rows,
        ):
            yield from map(dict, rows)

    def verify(self) -> int:
        """Return the number of entries, after checking every link of the chain.

        Raises:
            StateError: an entry was changed, removed or inserted; the first one is named.
        """
        with self._transaction() as connection:
            highest = _value(connection, "SELECT seq FROM sqlite_sequence WHERE name = 'entries'")
            with contextlib.closing(connection.execute("SELECT * FROM entries ORDER BY id")) as rows:
                return verify_chain(self.path, map(dict, rows), highest or 0)

    def repair_indexes(self) -> bool:
        """Return whether an index did not agree with the entries, and was made again from them; call it after `verify`.

        A damaged index hides entries from queries without any error, and the chain does not cover it.

        Raises:
            StateError: the file is damaged elsewhere.
        """
        connection = self._usable(writes=True)
        with self._lock:
            try:
                self._commit_deferred()
                if _value(connection, _INTEGRITY) == "ok":
                    return False
                connection.execute("REINDEX")
                if (complaint := _value(connection, _INTEGRITY)) != "ok":
                    raise self._failed(complaint)
            except sqlite3.Error as error:
                raise self._failed(error) from error
        return True

    def checkpoints(self) -> dict[str, str]:
        """Run -> digest of its newest checkpoint, for all runs; cheap, however long the journal is."""
        newest = f"SELECT max(id) FROM entries WHERE kind IN {CHECKPOINTS} AND digest IS NOT NULL GROUP BY run"  # noqa: S608 - constants
        with self._transaction() as connection:
            rows = connection.execute(f"SELECT run, digest FROM entries WHERE id IN ({newest})")  # noqa: S608 - constants
            return {run: digest for run, digest in rows if run is not None}

    def digests(self, kinds: Sequence[str], run: str | None = None) -> set[tuple[str | None, str]]:
        """Run and digest of entries of these kinds that have a digest, of one run if given; no body is read."""
        of_run = "" if run is None else " AND run = ?"
        wanted = f"digest IS NOT NULL AND kind IN ({', '.join('?' * len(kinds))}){of_run}"
        with self._transaction() as connection:
            rows = connection.execute(
                f"SELECT DISTINCT run, digest FROM entries WHERE {wanted}",  # noqa: S608 - values are bound
                [*kinds, *([] if run is None else [run])],
            )
            return {(name, digest) for name, digest in rows}

    def newest_of(self, *kinds: str) -> list[Entry]:
        """Return the newest entry of each agent and each of these kinds, in order."""
        wanted = f"kind IN ({', '.join('?' * len(kinds))}) AND agent IS NOT NULL GROUP BY agent, kind"
        return self._selected(f"id IN (SELECT max(id) FROM entries WHERE {wanted}) ORDER BY id", kinds)  # noqa: S608 - constants

    def unfinished(self) -> list[str]:
        """Return the ids of the runs that have not ended, in the order of their requests."""
        later = "SELECT 1 FROM entries AS later WHERE later.run = ended.run AND later.id > ended.id"
        goes_on = f"EXISTS ({later} AND later.kind = 'run_extended')"
        ended = f"kind IN {(*FINAL,)} AND run IS NOT NULL"
        over = f"SELECT run FROM entries AS ended WHERE {ended} AND NOT {goes_on}"  # noqa: S608 - constants
        query = f"SELECT run FROM entries WHERE kind = 'run_requested' AND run NOT IN ({over}) ORDER BY id"  # noqa: S608 - constants
        with self._transaction() as connection:
            return [run for (run,) in connection.execute(query)]

    # --- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """Yield the connection within a transaction; one that writes comes after all entries that are deferred.

        Raises:
            StateError: The journal cannot be read or written.
            DuplicateCoordinator: It writes, and another coordinator has taken over.
        """
        connection = self._usable(writes=writes)
        with self._lock:
            if self._has_deferred and not writes:
                try:
                    yield connection
                except sqlite3.Error as error:
                    raise self._failed(error) from error
                return
            if writes:
                self._commit_deferred()
            try:
                # A reader that becomes a writer fails at once when another process writes meanwhile; IMMEDIATE waits.
                connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                try:
                    if writes:
                        self._check_newest(connection)
                    yield connection
                    connection.commit()
                except BaseException:
                    connection.rollback()
                    raise
            except sqlite3.Error as error:
                raise self._failed(error) from error

    @contextlib.contextmanager
    def _deferred(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection within the transaction that `flush` ends, which the first deferred entry begins."""
        connection = self._usable(writes=True)
        with self._lock:
            try:
                if not self._has_deferred:
                    connection.execute("BEGIN IMMEDIATE")
                    try:
                        self._check_newest(connection)
                    except BaseException:
                        connection.rollback()
                        raise
                    self._has_deferred = True
                yield connection
            except BaseException as error:
                lost = self._failed(error) if isinstance(error, sqlite3.Error) else None
                if lost is not None and self._has_deferred:  # SQLite may have ended the transaction
                    self._drop_deferred(lost)
                if lost is not None:
                    raise lost from error
                raise

    def _commit(self) -> None:
        """Commit the transaction of the deferred entries.

        Raises:
            StateError: They could not be written.
        """
        if self._connection is None:
            return
        try:
            self._connection.commit()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _roll_back(self) -> None:
        """End the transaction of the deferred entries without them; SQLite may have ended it itself."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()

    def _usable(self, *, writes: bool) -> sqlite3.Connection:
        if self._connection is None:
            raise StateError(f"{self.path}: the journal is not open; use it as a context manager")
        if writes:
            self.check_ours()
        return self._connection

    def _check_newest(self, connection: sqlite3.Connection) -> None:
        """Return quietly while no other coordinator has started on this journal; within a transaction that writes."""
        if self._start is None:
            return
        newest = "SELECT id, body FROM entries WHERE kind = 'coordinator_started' AND id > ? ORDER BY id DESC LIMIT 1"
        if (row := connection.execute(newest, (self._start,)).fetchone()) is None:
            return
        started = json.loads(row["body"])
        self._successor = DuplicateCoordinator(
            f"{self.path.parent}: another coordinator has taken over this state folder (epoch {started.get('epoch')}, "
            f"start {started.get('boot')}), because this one did not answer; this one stops and writes nothing more"
        )
        raise self._successor

    def _write(self, connection: sqlite3.Connection, fact: Fact, columns: Mapping[str, Any]) -> Entry:
        last = connection.execute(_NEWEST).fetchone()
        row = make_row(fact, columns, self._now(), last)
        connection.execute(_INSERT, tuple(row[name] for name in COLUMNS))
        self._appended += 1
        return read_row(row)

    def _check_or_make_schema(self, *, is_begun: bool, writes: bool = True) -> None:
        """Make the tables of a new file, or require that those of another one are of this version and undamaged.

        Raises:
            StateError: They are not, or there are no entries where some must be (``is_begun``).
        """
        with self._transaction(writes=writes) as connection:
            version = _value(connection, "PRAGMA user_version")
            tables = _value(connection, "SELECT count(*) FROM sqlite_master WHERE type = 'table'")
            is_new = version == 0 and not tables
            is_empty = is_new or (version == SCHEMA and connection.execute(_NEWEST).fetchone() is None)
            if is_empty and is_begun:
                raise StateError(f"{self.path}: the journal is empty, all of its entries are lost. {WHAT_TO_DO}")
            if is_new:
                for statement in (_TABLE, *_INDEXES, f"PRAGMA user_version = {SCHEMA}"):
                    connection.execute(statement)
            elif version != SCHEMA:
                raise StateError(
                    f"{self.path}: journal of version {version}, this program writes version {SCHEMA}; "
                    "use the headwater release that wrote it, or another state folder"
                )
            complaint = _value(connection, "PRAGMA quick_check(1)")
            if complaint != "ok":
                raise self._failed(complaint)

    def _failed(self, error: object) -> StateError:
        return StateError(f"{self.path}: the journal cannot be read or written ({error}). {WHAT_TO_DO}")


def write_copy(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of another store to a new journal at ``path``.

    Raises:
        StateError: ``path`` cannot be written.
    """
    with SqliteJournal(path) as journal:
        journal.fill(rows)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as copy:
        copy.execute("PRAGMA journal_mode = DELETE").close()  # all of it is in the one file


def can_write(path: Path) -> bool:
    """Return whether a journal takes an entry now: no process, not even one that is suspended, is writing one."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.Error:
        return False
    return True


def _switch_to_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch a journal to a write-ahead log, which its file keeps from then on.

    SQLite's busy timeout has no effect on this statement: where two programs create one journal, one of them gets the
    error "database is locked" at once. So the statement is repeated here.

    Raises:
        sqlite3.OperationalError: The file is still locked after `CREATION_S`, or cannot be written.
    """
    end = time.monotonic() + CREATION_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
        except sqlite3.OperationalError as error:
            # The lowest byte is the kind of error. Python 3.10 has no such number: there each error counts as a lock.
            kind = getattr(error, "sqlite_errorcode", _SQLITE_BUSY) & 0xFF
            if kind != _SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def _value(connection: sqlite3.Connection, query: str) -> Any:
    """Return the first column of the first row; None where there is no row."""
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]


def _newest_run(connection: sqlite3.Connection) -> int:
    """The highest number among the runs that were requested here, and those that were heard of elsewhere; 0: none."""
    requested = connection.execute("SELECT run FROM entries WHERE kind = 'run_requested'").fetchall()
    numbers = [run_number(run or "") for (run,) in requested]
    heard = connection.execute("SELECT body FROM entries WHERE kind IN ('coordinator_started', 'run_heard')")
    numbers += [json.loads(body).get("newest_run") for (body,) in heard]
    return max([len(requested), *(number for number in numbers if number is not None)])
