"""What an entry is, and what every store of entries promises.

Writers of several processes append to one store; each entry gets the next number, so the order of numbers is the order
in which things happened. The time of an entry is only for people. An entry is durable when `JournalStore.append`
returns: a process that is killed, or a machine that loses its power, right afterwards has not lost it. Only within
`JournalStore.deferring` it may be lost until `JournalStore.flush` returns, and then all of the deferred ones are lost
together, never one in their midst.

Each entry's hash covers its content and the hash before it, so that an edited, removed or reordered entry is found by
`JournalStore.verify`. Entries are never changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edge_agent.core.errors import StateError, UnknownName
from edge_agent.core.locks import folder_lock

from .entries import Fact, RunRequested, UnknownEntry, fact_of
from .kinds import CHECKPOINTS, FINAL, KINDS

WHAT_TO_DO = (
    "Free disk space if it is full; otherwise put back the state folder from a backup ('headwater backup'), "
    "or start with a new state folder. Nothing was changed."
)

GENESIS = "0" * 64
"""What the first entry has for the hash before it."""

AnyFact = TypeVar("AnyFact", bound=Fact)

PAGE = 5000
"""Entries that `follow` reads at once."""


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
    body: Mapping[str, Any]
    """The JSON object that is stored; only stores and `coordinator.views` read it, all others read `fact`."""

    previous_hash: str
    hash: str

    @functools.cached_property
    def fact(self) -> Fact | UnknownEntry:
        """What the entry says beside its columns.

        Raises:
            StateError: A field is missing that every version has written.
        """
        try:
            return fact_of(self.kind, self.body)
        except StateError as error:
            raise StateError(f"journal entry {self.id} ({self.kind}): {error}. {WHAT_TO_DO}") from error


@dataclass(frozen=True)
class Progress:
    """How far a journal is; of two journals with one beginning, the newer has more entries."""

    entries: int
    """Its entries, without those of starts: a restart is no progress."""

    newest_run: int
    """Number of the newest run that it knows; 0: of none."""


class JournalStore(Protocol):
    """An append-only table of entries. Every method but `append` and `flush` leaves the store as it is."""

    def append(
        self,
        fact: Fact,
        *,
        run: str | None = None,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
        digest: str | None = None,
    ) -> Entry:
        """Return the entry as written, after all others. It is durable when this returns, unless it is deferred.

        Raises:
            UnknownName: The kind of the fact is none of ours.
            StateError: It has a number that is none, the disk is full, or the store cannot be written.
        """

    def deferring(self) -> AbstractContextManager[None]:
        """Inside, entries of this thread are durable after `flush` only.

        They can be read here at once, in their order. Other processes see them after `flush`, which any other entry
        implies.
        """

    @property
    def has_deferred(self) -> bool:
        """Whether entries wait for `flush`."""

    def flush(self) -> None:
        """Make all deferred entries durable, together.

        Raises:
            StateError: They could not be written, at any time since the last call; none of them is there.
            OSError: A file that they are about could not be written, with the same result.
        """

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

    def entries_with(self, ids: Sequence[int]) -> list[Entry]:
        """Return the entries with these ids in order; at most a few hundred."""

    def newest_of(self, *kinds: str) -> list[Entry]:
        """Return the newest entry of each agent and each of these kinds, in order."""

    def last_id(self) -> int:
        """Return the id of the newest entry; 0 in an empty store."""

    def version(self) -> object:
        """Return another value whenever entries were appended since it was asked for, by whichever process."""

    def verify(self) -> int:
        """Return the number of entries, after checking every link of the chain.

        Raises:
            StateError: An entry was changed, removed or inserted; the first one is named.
        """

    def copy_to(self, path: Path) -> None:
        """Write all entries as of now to a new store at ``path``; other processes may append meanwhile.

        Raises:
            StateError: The store cannot be read, or ``path`` cannot be written.
        """

    def close(self) -> None:
        """Close the store; deferred entries are lost, as in a crash: `flush` them before."""


class Hold(Protocol):
    """The right of one process to serve a state folder."""

    def is_held(self) -> bool:
        """Return whether it is still that of this process."""


class Journal(JournalStore, Protocol):
    """A store as a coordinator uses it: with queries about runs, and with rules about who may write it.

    A store that is derived from this class has all of it. The queries read entries; a store that finds the answer
    faster overrides them. The rules are those of a store which this process alone writes: one that several processes
    write overrides `request_run`, and, if one of them may take over from another, `serve_from` and `check_ours`.
    """

    # --- queries -------------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Return the names of all runs in the order of their requests."""
        return [entry.run for entry in self.entries(kinds=("run_requested",)) if entry.run is not None]

    def unfinished(self) -> list[str]:
        """Return the names of the runs that have not ended, in the order of their requests."""
        ended = set()
        for entry in self.entries(kinds=(*FINAL, "run_extended")):
            if entry.kind in FINAL:
                ended.add(entry.run)
            else:
                ended.discard(entry.run)
        return [run for run in self.runs() if run not in ended]

    def newest_run(self) -> int:
        """Return the number of the newest run that is known, here or of another coordinator; 0: of none."""
        requested = self.runs()
        heard = self.entries(kinds=("coordinator_started", "run_heard"))
        numbers = [run_number(run) or 0 for run in requested]
        numbers += [getattr(entry.fact, "newest_run", None) or 0 for entry in heard]
        return max([len(requested), *numbers])

    def progress(self) -> Progress:
        """Return how far this journal is."""
        starts = len(self.entries(kinds=("coordinator_started",)))
        return Progress(self.last_id() - starts, self.newest_run())

    def first_hash(self) -> str:
        """Return the hash of the first entry, which no other journal has but copies of this one; empty without one."""
        first = self.entries(limit=1)
        return first[0].hash if first else ""

    def checkpoints(self) -> dict[str, str]:
        """Return the digest of the newest checkpoint of each run that has one."""
        newest: dict[str, str] = {}
        for entry in self.entries(kinds=CHECKPOINTS):
            if entry.run is not None and entry.digest is not None:
                newest[entry.run] = entry.digest
        return newest

    def digests(self, kinds: Sequence[str], run: str | None = None) -> set[tuple[str | None, str]]:
        """Return run and digest of the entries of these kinds that have a digest, of one run if given."""
        entries = self.entries(run=run, kinds=kinds)
        return {(entry.run, entry.digest) for entry in entries if entry.digest is not None}

    def request_run(self, request: RunRequested) -> str:
        """Append the request of a run, and return the run's name; a coordinator of this store will execute it.

        The field ``id`` of the entry is the name and a random part, which makes it unique among all stores.
        """
        run = run_name(self.newest_run() + 1)
        self.append(identified(request, run), run=run)
        return run

    # --- where it is, and whose ----------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """Where the journal is, for messages."""
        return "the journal"

    @property
    def exists(self) -> bool:
        """Whether there is a journal to open."""
        return True

    def open(self, *, create: bool = True, is_begun: bool = False) -> Journal:  # noqa: ARG002 - for those that need it
        """Open the store and return it; see the stores for what may go wrong.

        Args:
            create: Whether an empty one may be made where there is none.
            is_begun: Whether there must be entries, so that an empty one is damaged.
        """
        return self

    @contextlib.contextmanager
    def hold(self, folder: Path, owner: str, is_begun: Callable[[], bool]) -> Iterator[Hold]:
        """Open the store for the one process that may serve a state folder, until the context ends.

        Args:
            folder: The state folder, whose lock decides which process that is.
            owner: The name of the process, for people.
            is_begun: Returns whether there must be entries; asked once nobody else serves.

        Raises:
            StateError: Another process holds the folder, or the store cannot be used.
        """
        with folder_lock(folder, owner) as lock, contextlib.closing(self.open(is_begun=is_begun())):
            yield lock

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since."""
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether what was opened is still the journal at its place."""
        return True

    @property
    def losses(self) -> int:
        """A number that changes whenever deferred entries were lost after they could be read here."""
        return 0

    def serve_from(self, start: int, is_held: Callable[[], bool] = lambda: True) -> None:
        """Write entries only while ``start`` is the newest start of a coordinator, and while ``is_held``."""

    def check_newest(self) -> None:
        """Return quietly while no other coordinator has started on this journal.

        Raises:
            DuplicateCoordinator: One has.
        """

    @property
    def is_ours(self) -> bool:
        """Whether this process may write."""
        return True

    def check_ours(self) -> None:
        """Return quietly while `is_ours`.

        Raises:
            DuplicateCoordinator: Another coordinator has taken over.
            StateError: The journal was removed or replaced.
        """

    def verify_new(self) -> int:
        """Return the number of entries, after checking the links that this object has not checked before.

        Raises:
            StateError: An entry was changed, removed or inserted; the first one is named.
        """
        return self.verify()

    def repair_indexes(self) -> bool:
        """Return whether what finds entries did not agree with them, and was made again; call it after `verify`."""
        return False

    def read_order(self) -> ServingOrder | None:
        """Return who serves and who waits to do so; None: one process alone may use the store, by a lock of files."""
        return None


LEASE_S = 3.0
"""Seconds after which a lease that is not renewed has expired: the store of several coordinators is for one of them."""


@dataclass(frozen=True)
class LeaseState:
    """The newest lease of a store that several coordinators reach."""

    fence: int
    """Its number, which only grows; 0: there was none."""

    holder: str
    """Who has or had it, as text for people."""

    is_free: bool
    """Whether it was given back, or there was none."""

    has_expired: bool
    """Whether its holder has not renewed it in time, by the clock of the store."""

    renewed_at: str
    """Another text after each renewal."""


@dataclass(frozen=True)
class ServingOrder:
    """The coordinators of a store that several reach: the one that serves, and those that would take over."""

    lease: LeaseState
    standbys: tuple[str, ...] = ()
    """Those that have waited for the lease within the last seconds, as text for people."""

    @property
    def serving(self) -> str:
        """Who serves, as text; empty: nobody does."""
        return "" if self.lease.is_free or self.lease.has_expired else self.lease.holder


@dataclass(frozen=True)
class StoreReport:
    """The result of a look at a store, for an operator."""

    description: str
    """What it is, as a clause."""

    advice: tuple[str, ...] = ()
    """What an operator should change, each as a sentence."""


class SharedJournal(Journal, Protocol):
    """A store that coordinators on several machines reach, and that is not in the state folder."""

    @property
    def id(self) -> str:
        """An id that no other journal has; empty before `open`."""

    def fill(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Write the rows of another journal into this one, which is empty, and return their number.

        Raises:
            JournalAway: The store did not answer to the end; the entries are there, or none of them is.
            StateError: There are entries, or a link of the rows' chain is broken; nothing was written.
        """

    def read_lease(self) -> LeaseState:
        """Ask the store once, without waiting for it, which coordinator serves; the store is open.

        Raises:
            JournalAway: It does not answer.
        """

    def note_standby(self) -> None:
        """Note once, without waiting for the store, that this process waits for the lease; the store is open.

        Raises:
            JournalAway: It does not answer.
        """

    def examine(self) -> StoreReport:
        """Look at the place of the store without changing it; the store need not be open, nor there yet.

        Raises:
            StateError: It cannot be reached, or cannot be used.
        """


def run_name(number: int) -> str:
    """Return the name of a run with this number."""
    return f"run-{number:04d}"


def identified(request: RunRequested, run: str) -> RunRequested:
    """Return the request with an id that is unique among all stores: the run's name and a random part."""
    from edge_agent.wire.messages.fields import new_id  # all messages, which readers do not need

    return request.changed(id=f"{run}-{new_id()}")


def follow(
    store: JournalStore,
    run: str | None = None,
    kinds: Sequence[str] | None = None,
    after: int = 0,
    *,
    round: int | None = None,  # noqa: A002 - the word of the vocabulary
    page: int = PAGE,
) -> Iterator[Entry]:
    """Yield entries with an id above ``after`` in order, a page at a time: a journal may be larger than the memory."""
    while entries := store.entries(run=run, kinds=kinds, after=after, round=round, limit=page):
        yield from entries
        after = entries[-1].id


def facts_of(entries: Iterable[Entry], wanted: type[AnyFact]) -> list[AnyFact]:
    """Return the facts of one class among entries, in their order."""
    return [entry.fact for entry in entries if entry.kind == wanted.kind and isinstance(entry.fact, wanted)]


# --- what stores have in common --------------------------------------------------------------------------------------

HASHED = ("id", "at", "kind", "run", "round", "agent", "digest", "body", "previous_hash")
"""Columns that the hash of an entry covers, in its order."""

COLUMNS = (*HASHED, "hash")


def hash_of(row: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) over an entry's content, id, time and the hash before it."""
    content = json.dumps([row[name] for name in HASHED], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def make_row(
    fact: Fact | UnknownEntry, columns: Mapping[str, str | int | None], at: datetime, last: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the row of a new entry, with its body as text.

    Args:
        fact: What the entry says.
        columns: Its run, round, agent and digest.
        at: The time now.
        last: The row of the entry before it; None: it is the first.

    Raises:
        UnknownName: The kind of the fact is none of ours.
        StateError: It has a number that is none.
    """
    kind: str = fact.name if isinstance(fact, UnknownEntry) else fact.kind
    if kind not in KINDS:
        raise UnknownName("journal entry kind", kind, KINDS)
    try:
        text = fact.to_json()
    except (TypeError, ValueError) as error:
        raise StateError(f"journal entry '{kind}': its body is not JSON ({error}); nothing was written") from error
    row = {
        "id": last["id"] + 1 if last else 1,
        "at": at.isoformat(timespec="milliseconds"),
        "kind": kind,
        **columns,
        "body": text,
        "previous_hash": last["hash"] if last else GENESIS,
    }
    row["hash"] = hash_of(row)
    return row


def read_row(row: Mapping[str, Any]) -> Entry:
    """Return the entry that a row holds.

    Raises:
        StateError: Its body is not JSON.
    """
    try:
        return Entry(**{**row, "body": json.loads(row["body"])})
    except ValueError as error:
        raise StateError(f"journal entry {row['id']}: its body is not JSON ({error}). {WHAT_TO_DO}") from error


@dataclass(frozen=True)
class Verified:
    """How far the links of a journal were checked: up to the entry with this id, which has this hash."""

    id: int = 0
    hash: str = GENESIS


def verify_chain(
    path: object, rows: Iterable[Mapping[str, Any]], highest: int, *, after: Verified | None = None
) -> int:
    """Return the number of entries, after checking every link.

    Args:
        path: What messages name as the journal.
        rows: All rows in order, or those after ``after``.
        highest: The highest id that was ever given.
        after: The entry up to which the links were checked before; None: none were.

    Raises:
        StateError: An entry was changed, removed or inserted; the first one is named.
    """
    begin = after or Verified()
    count = begin.id
    previous = begin.hash
    for row in rows:
        count += 1
        if row["id"] != count:
            raise _broken(path, count, f"it is missing, the next one is {row['id']}")
        if row["previous_hash"] != previous:
            raise _broken(path, count, "it does not follow from the entry before it")
        try:
            previous = hash_of(row)
        except (TypeError, ValueError):  # a flipped bit has turned text into bytes
            previous = ""
        if row["hash"] != previous:
            raise _broken(path, count, "its content was changed")
    if count != highest:
        raise _broken(path, count + 1, f"{highest - count} newest entries are missing")
    return count


def _broken(path: object, entry: int, what: str) -> StateError:
    return StateError(f"{path}: entry {entry} breaks the chain: {what}. {WHAT_TO_DO}")


# --- names and times -------------------------------------------------------------------------------------------------

_RUN_NAME = re.compile(r"run-([0-9]{4,9})")


def run_number(name: str) -> int | None:
    """Return the number in the name of a run, such as ``run-0001``; None for a name of another form."""
    match = _RUN_NAME.fullmatch(name)
    return int(match[1]) if match else None


def utc_now() -> datetime:
    """Return the wall clock, in UTC."""
    return datetime.now(timezone.utc)
