"""A journal in memory: for tests, and for folds over entries that need no disk. It is lost with its process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_agent.core.errors import StateError, cause
from edge_agent.core.storage import read_regular_text

from .entries import Fact
from .store import Entry, Journal, make_row, read_row, utc_now, verify_chain


class MemoryJournal(Journal):
    """A `coordinator.journal.store.Journal` whose entries are as durable as its process."""

    def __init__(self, *, now: Callable[[], datetime] = utc_now) -> None:
        self._now = now
        self._rows: list[dict[str, Any]] = []
        self._deferred = 0
        """The newest rows, as many, that `flush` has not been called for."""

        self._defers = False
        self._highest = 0
        """The highest id that was ever given."""

        self._losses = 0

    @property
    def location(self) -> str:
        """What messages name as the journal."""
        return "the journal in memory"

    @property
    def losses(self) -> int:
        """Another number whenever deferred entries were lost."""
        return self._losses

    @classmethod
    def read(cls, path: Path) -> MemoryJournal:
        """Return the journal that `copy_to` has written, a row of JSON on each line.

        Raises:
            StateError: The file cannot be read.
        """
        journal = cls()
        try:
            journal._rows = [json.loads(line) for line in read_regular_text(path).splitlines()]
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: the journal cannot be read: {error}; give a copy of one") from error
        journal._highest = len(journal._rows)
        return journal

    def serve_from(self, start: int, is_held: Callable[[], bool] = lambda: True) -> None:
        """Do nothing: no other process writes here."""

    def check_newest(self) -> None:
        """Return quietly: no other coordinator starts here."""

    def check_ours(self) -> None:
        """Return quietly: this process is the only one that writes."""

    def append(
        self,
        fact: Fact,
        *,
        run: str | None = None,
        round: int | None = None,  # noqa: A002 - the word of the vocabulary
        agent: str | None = None,
        digest: str | None = None,
    ) -> Entry:
        """Return the entry as written, after all others."""
        columns = {"run": run, "round": round, "agent": agent, "digest": digest}
        last = self._rows[-1] if self._rows else None
        row = make_row(fact, columns, self._now(), last)
        if self._defers:
            self._deferred += 1
        else:
            self._deferred = 0
        self._rows.append(row)
        self._highest = row["id"]
        return read_row(row)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Inside, entries wait for `flush`."""
        before = self._defers
        self._defers = True
        try:
            yield
        finally:
            self._defers = before

    @property
    def has_deferred(self) -> bool:
        """Whether entries wait for `flush`."""
        return self._deferred > 0

    def flush(self) -> None:
        """Keep all deferred entries."""
        self._deferred = 0

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
        """Return the entries with an id above ``after`` in order, only those with what else is given."""
        wanted = {"run": run, "round": round, "agent": agent}
        given = {name: value for name, value in wanted.items() if value is not None}
        result: list[Entry] = []
        for row in self._rows:
            if 0 <= limit <= len(result):
                break
            has_kind = kinds is None or row["kind"] in kinds
            if row["id"] > after and has_kind and all(row[name] == value for name, value in given.items()):
                result.append(read_row(row))
        return result

    def entries_with(self, ids: Sequence[int]) -> list[Entry]:
        """Return the entries with these ids in order."""
        return [read_row(row) for row in self._rows if row["id"] in ids]

    def newest_of(self, *kinds: str) -> list[Entry]:
        """Return the newest entry of each agent and each of these kinds, in order."""
        newest = {(entry.agent, entry.kind): entry for entry in self.entries(kinds=kinds) if entry.agent is not None}
        return sorted(newest.values(), key=lambda entry: entry.id)

    def last_id(self) -> int:
        """Return the id of the newest entry; 0 in an empty journal."""
        return self._rows[-1]["id"] if self._rows else 0

    def version(self) -> object:
        """Return another value whenever entries were appended since it was asked for."""
        return self._highest

    def verify(self) -> int:
        """Return the number of entries, after checking every link of the chain.

        Raises:
            StateError: An entry was changed, removed or inserted; the first one is named.
        """
        return verify_chain(self.location, self._rows, self._highest)

    def copy_to(self, path: Path) -> None:
        """Write all entries that do not wait for `flush`, a row of JSON on each line; `read` reads them.

        Raises:
            StateError: ``path`` cannot be written.
        """
        durable = self._rows[: len(self._rows) - self._deferred]
        try:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in durable), encoding="utf-8")
        except OSError as error:
            raise StateError(f"{path}: cannot be written: {cause(error)}; name another file") from error

    def close(self) -> None:
        """Lose the deferred entries, as in a crash."""
        if self._deferred:
            del self._rows[len(self._rows) - self._deferred :]
            self._highest = self.last_id()
            self._losses += 1
        self._deferred = 0
