"""What happened, in order: one append-only, hash-chained table in SQLite that survives ``kill -9`` and power cuts.

An entry is durable when `Journal.append` returns (WAL, ``synchronous=FULL``), except where nothing waits for the disk
(`store.without_syncs`). Each entry's hash covers its content and the hash before it, so that an edited, removed or
reordered entry is found by `Journal.verify`. Several processes may write: appends are serialised by the database. What
a run is doing is never stored, only derived: see `Journal.replay`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from edge_agent.errors import StateError, UnknownName
from edge_agent.storage import is_synced

__all__ = ["FINAL", "KINDS", "Accepted", "Entry", "Journal", "Kind", "OpenRound", "RunRecord", "RunStatus"]

Kind = Literal[
    "coordinator_started",
    "run_requested",
    "cancel_requested",
    "run_started",
    "warm_started",
    "round_opened",
    "update_accepted",
    "update_refused",
    "round_closed",
    "state_kept",
    "norm_pooled",
    "proxy_evaluated",
    "proxy_failed",
    "run_finished",
    "run_failed",
    "run_cancelled",
    "release_made",
    "release_reported",
]
KINDS: tuple[str, ...] = get_args(Kind)

WHAT_TO_DO = (
    "Free disk space if it is full; otherwise put back a copy of the state folder from a backup, "
    "or start with a new state folder. Nothing was changed."
)


@dataclass(frozen=True)
class Entry:
    """One line of the journal; ``at`` is ISO 8601 UTC and only for people: order is ``id``."""

    id: int
    at: str
    kind: str
    run: str | None
    round: int | None
    agent: str | None
    digest: str | None
    body: dict[str, Any]
    previous_hash: str
    hash: str


def draft(kind: str, *, body: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """What an entry says, as the table keeps it, without place, time and hashes.

    Raises:
        UnknownName: no such kind.
        StateError: the body is not JSON.
    """
    if kind not in KINDS:
        raise UnknownName("journal entry kind", kind, KINDS)
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StateError(f"journal entry '{kind}': its body is not JSON ({error}); nothing was written") from error
    return {"kind": kind, "run": None, "round": None, "agent": None, "digest": None, **columns, "body": text}


_HASHED = ("id", "at", "kind", "run", "round", "agent", "digest", "body", "previous_hash")


def hash_of(row: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over an entry's content, its place, its time and the hash before it."""
    content = json.dumps([row[name] for name in _HASHED], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


RunStatus = Literal["requested", "running", "finished", "failed", "cancelled"]
FINAL: dict[str, RunStatus] = {"run_finished": "finished", "run_failed": "failed", "run_cancelled": "cancelled"}


@dataclass(frozen=True)
class Accepted:
    """An update that has its receipt: where its bytes are, and what the agent said about them."""

    digest: str
    samples: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class OpenRound:
    """A round that was opened and not closed. A later attempt at it keeps the updates of the earlier ones."""

    round: int
    attempt: int
    cohort: tuple[str, ...]
    body: dict[str, Any]
    updates: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    failed_boots: dict[str, str] = field(default_factory=dict)
    """The start of each agent that was rejected, when it failed; an agent that was restarted since has another."""

    def next_attempt(
        self,
        updates: Mapping[str, Accepted],
        rejected: Mapping[str, str],
        failed_boots: Mapping[str, str],
        *,
        new: Sequence[str] = (),
        again: Sequence[str] = (),
        overdue: int = 0,
    ) -> OpenRound:
        """Another attempt that keeps all updates: agents in ``new`` take part, too, those in ``again`` once more.

        ``overdue``: how many attempts have ended because agents that were there did not deliver in time.
        """
        body = {**self.body, "again": list(again), "overdue": overdue}
        still = {agent: why for agent, why in rejected.items() if agent not in again}
        return OpenRound(
            self.round, self.attempt + 1, (*self.cohort, *new), body, dict(updates), still, dict(failed_boots)
        )


@dataclass(frozen=True)
class RunRecord:
    """Where a run stands: ``round`` is the last closed one (0: none), ``checkpoint`` the state's digest after it."""

    run: str
    request: dict[str, Any]
    status: RunStatus = "requested"
    round: int = 0
    checkpoint: str | None = None
    open_round: OpenRound | None = None
    outcome: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in this run."""
        return self.status in FINAL.values()


def step(record: RunRecord, entry: Entry) -> RunRecord:
    """The record after one more entry; kinds that change nothing leave it as it is."""
    if entry.kind in {"run_started", "warm_started"}:
        return replace(record, status="running", checkpoint=entry.digest or record.checkpoint)
    if entry.kind == "round_opened":
        return replace(record, status="running", open_round=_opened(record, entry))
    if entry.kind == "round_closed":
        return _closed(record, entry)
    if entry.kind in {"update_accepted", "update_refused"}:
        return replace(record, open_round=_with_update(record.open_round, entry))
    if entry.kind in FINAL:
        return replace(record, status=FINAL[entry.kind], open_round=None, outcome=entry.body)
    return record


def _opened(record: RunRecord, entry: Entry) -> OpenRound:
    if entry.round != record.round + 1:
        raise _contradiction(entry, f"opens round {entry.round}, round {record.round} was closed last")
    body, cohort = entry.body, tuple(entry.body.get("cohort", ()))
    before = record.open_round
    if before is None or before.round != entry.round:
        return OpenRound(entry.round, int(body.get("attempt", 1)), cohort, body)
    known = set(before.cohort)
    new, again = [agent for agent in cohort if agent not in known], body.get("again", ())
    attempt = before.next_attempt(before.updates, before.rejected, before.failed_boots, new=new, again=again)
    return replace(attempt, attempt=int(body.get("attempt", 1)), body=body)


def _closed(record: RunRecord, entry: Entry) -> RunRecord:
    is_open = record.open_round is not None and record.open_round.round == entry.round
    if not is_open or entry.round is None or entry.digest is None:
        raise _contradiction(entry, f"closes round {entry.round} with state {entry.digest}, which is not open")
    return replace(record, round=entry.round, checkpoint=entry.digest, open_round=None)


def _with_update(open_round: OpenRound | None, entry: Entry) -> OpenRound | None:
    """The open round with one more update or refusal; what belongs to no open round changes nothing."""
    if open_round is None or entry.round != open_round.round or entry.agent is None:
        return open_round
    if entry.kind == "update_refused":
        rejected = {**open_round.rejected, entry.agent: str(entry.body.get("reason", ""))}
        boots = {**open_round.failed_boots, entry.agent: str(entry.body.get("boot", ""))}
        return replace(open_round, rejected=rejected, failed_boots=boots)
    if entry.agent in open_round.updates or entry.digest is None:
        return open_round  # the first one has the receipt
    update = Accepted(entry.digest, float(entry.body.get("samples", 0)), dict(entry.body.get("metrics", {})))
    return replace(open_round, updates={**open_round.updates, entry.agent: update})


def _contradiction(entry: Entry, what: str) -> StateError:
    return StateError(f"journal entry {entry.id} of run '{entry.run}' {what}. {WHAT_TO_DO}")


SCHEMA = 1
BUSY_TIMEOUT_S = 30
"""How long an append waits for another process; an append takes milliseconds, so this is patience with a slow disk."""

_GENESIS = "0" * 64
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
_NEWEST = "SELECT id, hash FROM entries ORDER BY id DESC LIMIT 1"
_COLUMNS = (*_HASHED, "hash")
_INSERT = f"INSERT INTO entries ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608 - constants


def utc_now() -> datetime:
    """The wall clock, in UTC."""
    return datetime.now(timezone.utc)


class Journal:
    """The journal in one file. Use as a context manager, or call `open` and `close`."""

    def __init__(self, path: Path, *, now: Callable[[], datetime] = utc_now) -> None:
        self.path, self._now = path, now
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.RLock()
        self._opened: os.stat_result | None = None

    def __enter__(self) -> Journal:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, *, create: bool = True, is_begun: bool = False) -> Journal:
        """This journal, ready; an empty one is made where there is no file and ``create`` allows it.

        ``is_begun``: there must be entries already, so that an empty file is a damaged one.

        Raises:
            StateError: the file is damaged, of a newer version, or missing without ``create``.
        """
        if not create and not self.path.exists():
            raise StateError(f"{self.path}: no journal here; start the coordinator once, or give its state folder")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = self._connected()
            self._check_or_make_schema(is_begun=is_begun)
            self._opened = self.path.stat()
        except BaseException:
            self.close()
            raise
        return self

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

    def check_in_place(self) -> None:
        """Return quietly while `is_in_place`.

        Raises:
            StateError: somebody has removed or replaced the folder.
        """
        if not self.is_in_place:
            raise StateError(
                f"{self.path.parent}: this state folder was removed or replaced while it was in use; nothing more is "
                "written to it. Put it back from a backup to resume its runs, or start the coordinator on a new one"
            )

    def close(self) -> None:
        """Let go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = self._opened = None

    def append(
        self,
        kind: Kind,
        *,
        run: str | None = None,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
        digest: str | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Entry:
        """The entry as written; it is on disk when this returns.

        Raises:
            UnknownName: no such kind.
            StateError: the disk is full or the database cannot be written.
        """
        row = draft(kind, run=run, round=round, agent=agent, digest=digest, body=dict(body or {}))
        with self._transaction(writes=True) as connection:
            return self._write(connection, row)

    def request_run(self, body: Mapping[str, Any]) -> str:
        """The name of a run that has just been asked for; a coordinator on this folder will find it.

        The entry's ``id`` is the name and a random part: no other run has it, also none of another state folder.
        """
        from edge_agent.wire.messages import new_id  # pydantic and all messages, which readers do not need

        with self._transaction(writes=True) as connection:
            requested = _value(connection, "SELECT count(*) FROM entries WHERE kind = 'run_requested'")
            run = f"run-{requested + 1:04d}"
            self._write(connection, draft("run_requested", run=run, body={**body, "id": f"{run}-{new_id()}"}))
            return run

    def entries(
        self,
        run: str | None = None,
        kinds: Sequence[str] | None = None,
        after: int = 0,
        *,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
    ) -> list[Entry]:
        """Entries with an id above ``after``, in order; only those of a run, round, agent or of some kinds if given."""
        conditions, values = ["id > ?"], list[Any]([after])
        for column, wanted in (("run", run), ("round", round), ("agent", agent)):
            if wanted is not None:
                conditions.append(f"{column} = ?")
                values.append(wanted)
        if kinds is not None:
            conditions.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values.extend(kinds)
        query = f"SELECT * FROM entries WHERE {' AND '.join(conditions)} ORDER BY id"  # noqa: S608 - values are bound
        with self._transaction() as connection:
            return [_entry(row) for row in connection.execute(query, values)]

    def last_id(self) -> int:
        """Id of the newest entry; 0 in an empty journal."""
        with self._transaction() as connection:
            return _value(connection, "SELECT max(id) FROM entries") or 0

    def verify(self) -> int:
        """Number of entries, after checking every link of the chain.

        Raises:
            StateError: an entry was changed, removed or put in; the first one is named.
        """
        count, previous = 0, _GENESIS
        with self._transaction() as connection:
            highest = _value(connection, "SELECT seq FROM sqlite_sequence WHERE name = 'entries'")
            with contextlib.closing(connection.execute("SELECT * FROM entries ORDER BY id")) as rows:
                for row in rows:
                    count += 1
                    previous = self._checked_link(row, count, previous)
        if count != (highest or 0):
            raise self._broken(count + 1, f"{(highest or 0) - count} newest entries are missing")
        return count

    def replay(self, run: str) -> RunRecord:
        """Where ``run`` stands, derived from its entries.

        Raises:
            UnknownName: no such run.
            StateError: the entries contradict each other.
        """
        entries = self.entries(run)
        if not entries or entries[0].kind != "run_requested":
            raise UnknownName("run", run, self.runs())
        record = RunRecord(run, entries[0].body)
        for entry in entries[1:]:
            record = step(record, entry)
        return record

    def runs(self) -> list[str]:
        """Ids of all runs in the order in which they were asked for."""
        return [entry.run for entry in self.entries(kinds=("run_requested",)) if entry.run is not None]

    def checkpoints(self) -> dict[str, str]:
        """Run -> digest of its newest checkpoint, for all runs; cheap, however long the journal is."""
        newest = (
            "SELECT max(id) FROM entries WHERE kind IN ('run_started', 'warm_started', 'round_closed') "
            "AND digest IS NOT NULL GROUP BY run"
        )
        with self._transaction() as connection:
            rows = connection.execute(f"SELECT run, digest FROM entries WHERE id IN ({newest})")  # noqa: S608 - constants
            return {run: digest for run, digest in rows if run is not None}

    def unfinished(self) -> list[str]:
        """Ids of the runs that are not over, in the order in which they were asked for."""
        over = {entry.run for entry in self.entries(kinds=tuple(FINAL))}
        return [run for run in self.runs() if run not in over]

    # --- inside ----------------------------------------------------------------------------------------------------

    def _connected(self) -> sqlite3.Connection:
        try:
            # No isolation level: sqlite3 would open transactions at moments of its own choice.
            connection = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            try:
                for pragma in ("journal_mode = WAL", f"synchronous = {'FULL' if is_synced() else 'OFF'}"):
                    connection.execute(f"PRAGMA {pragma}").close()
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return connection

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        if connection is None:
            raise StateError(f"{self.path}: the journal is not open; use it as a context manager")
        if writes:
            self.check_in_place()
        with self._lock:
            try:
                # A reader that becomes a writer fails at once when another process writes meanwhile; IMMEDIATE waits.
                connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                try:
                    yield connection
                    connection.commit()
                except BaseException:
                    connection.rollback()
                    raise
            except sqlite3.Error as error:
                raise self._failed(error) from error

    def _write(self, connection: sqlite3.Connection, content: dict[str, Any]) -> Entry:
        last = connection.execute(_NEWEST).fetchone()
        at = self._now().isoformat(timespec="milliseconds")
        row = {
            **content,
            "id": last["id"] + 1 if last else 1,
            "at": at,
            "previous_hash": last["hash"] if last else _GENESIS,
        }
        row["hash"] = hash_of(row)
        connection.execute(_INSERT, tuple(row[name] for name in _COLUMNS))
        return Entry(**{**row, "body": json.loads(row["body"])})

    def _check_or_make_schema(self, *, is_begun: bool) -> None:
        with self._transaction(writes=True) as connection:
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

    def _checked_link(self, row: sqlite3.Row, expected_id: int, previous: str) -> str:
        if row["id"] != expected_id:
            raise self._broken(expected_id, f"it is missing, the next one is {row['id']}")
        if row["previous_hash"] != previous:
            raise self._broken(expected_id, "it does not follow from the entry before it")
        try:
            result = hash_of(dict(row))
        except (TypeError, ValueError):  # a flipped bit has made bytes of what was text
            result = ""
        if row["hash"] != result:
            raise self._broken(expected_id, "its content is not what was written")
        return str(row["hash"])

    def _broken(self, entry: int, what: str) -> StateError:
        return StateError(f"{self.path}: entry {entry} breaks the chain: {what}. {WHAT_TO_DO}")

    def _failed(self, error: object) -> StateError:
        return StateError(f"{self.path}: the journal cannot be read or written ({error}). {WHAT_TO_DO}")


def _value(connection: sqlite3.Connection, query: str) -> Any:
    """The first column of the first row; None where there is no row."""
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]


def _entry(row: sqlite3.Row) -> Entry:
    columns = dict(row)
    try:
        return Entry(**{**columns, "body": json.loads(columns["body"])})
    except ValueError as error:
        raise StateError(f"journal entry {columns['id']}: its body is not JSON ({error}). {WHAT_TO_DO}") from error
