"""What every store of entries promises, checked on those of the product and on one made for this test."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone

import pytest

from coordinator.journal.entries import DeviceReported, RoundClosed, RunRequested, UnknownEntry, UpdateAccepted
from coordinator.journal.memory import MemoryJournal
from coordinator.journal.sqlite import Journal
from coordinator.journal.store import JournalStore, follow, make_row, read_row, verify_chain
from edge_agent.core.errors import StateError, UnknownName

AT = datetime(2030, 1, 1, tzinfo=timezone.utc)


class LinesJournal:
    """A store in one file, a row of JSON on each line: as little as keeps the promises of one process."""

    def __init__(self, path):
        self.path = path
        self.waiting = []
        self.defers = False

    def rows(self):
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines()] + self.waiting

    def append(self, fact, *, run=None, round=None, agent=None, digest=None):  # noqa: A002 - the word of the vocabulary
        rows = self.rows()
        columns = {"run": run, "round": round, "agent": agent, "digest": digest}
        row = make_row(fact, columns, AT, rows[-1] if rows else None)
        self.waiting.append(row)
        if not self.defers:
            self.flush()
        return read_row(row)

    @contextlib.contextmanager
    def deferring(self):
        before = self.defers
        self.defers = True
        try:
            yield
        finally:
            self.defers = before

    @property
    def has_deferred(self):
        return bool(self.waiting)

    def flush(self):
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in self.waiting)
        self.waiting = []

    def entries(self, run=None, kinds=None, after=0, *, round=None, agent=None, limit=-1):  # noqa: A002 - as above
        given = {"run": run, "round": round, "agent": agent}
        found = [
            read_row(row)
            for row in self.rows()
            if row["id"] > after
            and (kinds is None or row["kind"] in kinds)
            and all(value is None or row[name] == value for name, value in given.items())
        ]
        return found if limit < 0 else found[:limit]

    def entries_with(self, ids):
        return [read_row(row) for row in self.rows() if row["id"] in ids]

    def newest_of(self, *kinds):
        newest = {(one.agent, one.kind): one for one in self.entries(kinds=kinds) if one.agent is not None}
        return sorted(newest.values(), key=lambda one: one.id)

    def last_id(self):
        return len(self.rows())

    def version(self):
        return len(self.rows())

    def verify(self):
        rows = self.rows()
        return verify_chain(self.path, rows, rows[-1]["id"] if rows else 0)

    def copy_to(self, path):
        path.write_text(self.path.read_text())

    def close(self):
        self.waiting = []


@pytest.fixture(params=["sqlite", "memory", "lines"])
def kind_of_store(request):
    return request.param


@pytest.fixture
def store(kind_of_store, tmp_path):
    made = {
        "sqlite": lambda: Journal(tmp_path / "journal.db").open(),
        "memory": MemoryJournal,
        "lines": lambda: LinesJournal(tmp_path / "journal.jsonl"),
    }[kind_of_store]()
    yield made
    made.close()


def reopened(kind_of_store, path):
    """The store that `copy_to` has written."""
    if kind_of_store == "sqlite":
        return Journal(path).open(create=False)
    return MemoryJournal.read(path) if kind_of_store == "memory" else LinesJournal(path)


def typed(store: JournalStore) -> JournalStore:
    return store


def ids(entries):
    return [entry.id for entry in entries]


def test_an_entry_has_the_next_number_and_says_what_was_written(store):
    typed(store)
    assert (store.last_id(), store.entries(), store.verify()) == (0, [], 0)
    first = store.append(RunRequested(method="fedavg", rounds=2), run="run-0001")
    fact = UpdateAccepted(samples=7, metrics={"loss": 0.5})
    second = store.append(fact, run="run-0001", round=1, agent="porch", digest="ab" * 32)
    assert (first.id, second.id, store.last_id()) == (1, 2, 2)
    assert (second.run, second.round, second.agent, second.digest) == ("run-0001", 1, "porch", "ab" * 32)
    assert second.fact == fact
    assert store.entries() == [first, second]
    assert second.previous_hash == first.hash


def test_the_chain_of_all_stores_is_the_same(tmp_path):
    stores = [Journal(tmp_path / "journal.db", now=lambda: AT).open(), MemoryJournal(now=lambda: AT)]
    stores.append(LinesJournal(tmp_path / "journal.jsonl"))
    for store in stores:
        store.append(RunRequested(method="fedavg"), run="run-0001")
        store.append(RoundClosed(clients=2, bases={10: "b", 9: "a"}), run="run-0001", round=1, digest="cd" * 32)
    assert len({store.entries()[-1].hash for store in stores}) == 1
    for store in stores:
        store.close()


def test_entries_are_found_by_what_is_asked_for_in_their_order(store):
    for run in ("run-0001", "run-0002"):
        store.append(RunRequested(), run=run)
        for number in (1, 2):
            for agent in ("a", "b"):
                store.append(UpdateAccepted(), run=run, round=number, agent=agent)
    assert ids(store.entries("run-0002")) == [6, 7, 8, 9, 10]
    assert ids(store.entries(kinds=("run_requested",))) == [1, 6]
    assert ids(store.entries("run-0001", ("update_accepted",), after=2)) == [3, 4, 5]
    assert ids(store.entries("run-0001", round=2, agent="b")) == [5]
    assert ids(store.entries(agent="a", limit=2)) == [2, 4]
    assert store.entries(kinds=()) == store.entries(after=10) == store.entries(limit=0) == []
    assert ids(store.entries_with([9, 3])) == [3, 9]
    assert ids(follow(store, kinds=("update_accepted",), after=2, page=2)) == [3, 4, 5, 7, 8, 9, 10]


def test_the_newest_of_each_agent_and_kind(store):
    for runs, agent in (("x", "a"), ("x", "b"), ("y", "a")):
        store.append(DeviceReported(runs=runs), agent=agent)
    store.append(UpdateAccepted(), agent="a")
    assert ids(store.newest_of("device_reported")) == [2, 3]
    assert ids(store.newest_of("device_reported", "update_accepted")) == [2, 3, 4]
    assert store.newest_of("run_failed") == []


def test_the_version_changes_with_every_entry(store):
    versions = [store.version()]
    for _ in range(3):
        store.append(RunRequested())
        versions.append(store.version())
    assert len(set(versions)) == 4
    assert store.version() == versions[-1]


@pytest.mark.parametrize("fact", [UpdateAccepted(samples=float("nan")), UpdateAccepted(metrics={"a": float("inf")})])
def test_a_number_that_is_none_is_refused_and_nothing_is_written(store, fact):
    with pytest.raises(StateError, match="not JSON"):
        store.append(fact)
    assert store.last_id() == 0


def test_a_kind_of_somebody_else_is_refused_and_nothing_is_written(store):
    with pytest.raises(UnknownName, match="did you mean 'round_opened'"):
        store.append(UnknownEntry(name="round_opend"))
    assert store.last_id() == 0


def test_deferred_entries_are_read_at_once_and_lost_together_before_the_flush(store):
    store.append(RunRequested(), run="run-0001")
    with store.deferring():
        store.append(UpdateAccepted(), agent="a")
        store.append(UpdateAccepted(), agent="b")
    assert store.has_deferred
    assert ids(store.entries()) == [1, 2, 3]
    store.flush()
    assert not store.has_deferred
    with store.deferring():
        store.append(UpdateAccepted(), agent="c")
    assert store.append(UpdateAccepted(), agent="d").id == 5
    assert not store.has_deferred, "any other entry takes the deferred ones along"
    assert store.verify() == 5


def test_a_copy_has_what_is_durable(store, kind_of_store, tmp_path):
    for agent in ("a", "b"):
        store.append(UpdateAccepted(samples=3), agent=agent, digest="ab" * 32)
    with store.deferring():
        store.append(UpdateAccepted(), agent="c")
    store.copy_to(tmp_path / "copy")
    store.append(UpdateAccepted(), agent="d")
    copy = reopened(kind_of_store, tmp_path / "copy")
    assert copy.verify() == 2
    assert copy.entries() == store.entries(limit=2)
    copy.close()
    assert store.verify() == 4


def test_what_was_deferred_is_lost_when_the_store_is_closed(kind_of_store, tmp_path):
    if kind_of_store == "memory":
        store = MemoryJournal()
    else:
        store = Journal(tmp_path / "j").open() if kind_of_store == "sqlite" else LinesJournal(tmp_path / "j")
    store.append(UpdateAccepted(), agent="a")
    with store.deferring():
        store.append(UpdateAccepted(), agent="b")
    store.close()
    if kind_of_store == "sqlite":
        store.open()
    assert ids(store.entries()) == [1]
    assert store.append(UpdateAccepted(), agent="c").id == 2
    assert store.verify() == 2
    store.close()
