"""What every store of entries promises, checked on those of the product and on one made for this test."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone

import pytest

from coordinator.journal.entries import (
    CoordinatorStarted,
    DeviceReported,
    RoundClosed,
    RunFinished,
    RunHeard,
    RunRequested,
    RunStarted,
    UnknownEntry,
    UpdateAccepted,
)
from coordinator.journal.memory import MemoryJournal
from coordinator.journal.postgres import PostgresJournal
from coordinator.journal.sqlite import SqliteJournal
from coordinator.journal.store import Journal, JournalStore, Progress, follow, make_row, read_row, verify_chain
from coordinator.views.runs import replay
from edge_agent.core.errors import StateError, UnknownName

AT = datetime(2030, 1, 1, tzinfo=timezone.utc)


class LinesJournal(Journal):
    """A store in one file, a row of JSON on each line: as little as keeps the promises of one process."""

    def __init__(self, path):
        self.path = path
        self.waiting = []
        self.defers = False
        self.lost = 0

    losses = property(lambda self: self.lost)

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
        self.lost += 1


@pytest.fixture(params=["sqlite", "memory", "lines", "postgres"])
def kind_of_store(request):
    return request.param


@pytest.fixture
def store(kind_of_store, tmp_path, request):
    made = {
        "sqlite": lambda: SqliteJournal(tmp_path / "journal.db").open(),
        "memory": MemoryJournal,
        "lines": lambda: LinesJournal(tmp_path / "journal.jsonl"),
        "postgres": lambda: PostgresJournal(request.getfixturevalue("postgres").database()).open(),
    }[kind_of_store]()
    yield made
    made.close()


def reopened(kind_of_store, path):
    """The store that `copy_to` has written."""
    if kind_of_store in {"sqlite", "postgres"}:
        return SqliteJournal(path).open(create=False)
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
    stores = [SqliteJournal(tmp_path / "journal.db", now=lambda: AT).open(), MemoryJournal(now=lambda: AT)]
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


def test_what_was_deferred_is_lost_when_the_store_is_closed(store):
    store.append(UpdateAccepted(), agent="a")
    with store.deferring():
        store.append(UpdateAccepted(), agent="b")
    store.close()
    store.open()
    assert ids(store.entries()) == [1]
    assert store.append(UpdateAccepted(), agent="c").id == 2
    assert store.verify() == 2


# --- the queries of a coordinator, which every store derived from the contract has ---


def requested(store, *methods):
    return [store.request_run(RunRequested(method=method, rounds=2)) for method in methods]


@pytest.fixture
def used(store):
    """A store with three runs: the first has ended, the second is in its second round, the third waits."""
    store.append(CoordinatorStarted(boot="b" * 16, epoch=1, newest_run=0))
    first, second, _ = requested(store, "fedavg", "fedper", "fedavg")
    for run, rounds in ((first, 2), (second, 1)):
        store.append(RunStarted(), run=run, digest=f"{run[-1]}0" * 32)
        for number in range(1, rounds + 1):
            store.append(RoundClosed(clients=2, bases={}), run=run, round=number, digest=f"{run[-1]}{number}" * 32)
    store.append(RunFinished(), run=first)
    return store


def test_runs_are_named_in_the_order_of_their_requests(used):
    assert used.runs() == ["run-0001", "run-0002", "run-0003"]
    assert used.unfinished() == ["run-0002", "run-0003"]
    ids = [entry.fact.id for entry in used.entries(kinds=("run_requested",))]
    assert [one.rpartition("-")[0] for one in ids] == used.runs()
    assert len(set(ids)) == 3


def test_a_run_that_was_heard_of_elsewhere_keeps_its_number(store):
    requested(store, "fedavg")
    store.append(RunHeard(newest_run=41))
    assert store.newest_run() == 41
    assert requested(store, "fedavg") == ["run-0042"]


def test_a_start_is_no_progress(used):
    before = used.progress()
    assert before == Progress(used.last_id() - 1, 3)
    used.append(CoordinatorStarted(boot="c" * 16, epoch=2, newest_run=3))
    assert used.progress() == before


def test_the_newest_checkpoint_of_each_run_is_found(used):
    assert used.checkpoints() == {"run-0001": "12" * 32, "run-0002": "21" * 32}


def test_digests_are_found_by_kind_and_run(used):
    assert used.digests(("round_closed",)) == {
        ("run-0001", "11" * 32),
        ("run-0001", "12" * 32),
        ("run-0002", "21" * 32),
    }
    assert used.digests(("run_started", "round_closed"), "run-0002") == {
        ("run-0002", "20" * 32),
        ("run-0002", "21" * 32),
    }


def test_the_first_hash_names_the_journal(store):
    assert store.first_hash() == ""
    first = store.append(RunRequested(method="fedavg"), run="run-0001")
    store.append(RunRequested(method="fedavg"), run="run-0002")
    assert store.first_hash() == first.hash


@pytest.mark.parametrize(
    "query", ["runs", "unfinished", "newest_run", "progress", "first_hash", "checkpoints", "digests"]
)
def test_what_a_store_answers_faster_is_what_the_contract_reads_from_entries(used, query):
    arguments = [("run_started", "round_closed")] if query == "digests" else []
    assert getattr(used, query)(*arguments) == getattr(Journal, query)(used, *arguments)


def test_where_a_run_stands_is_derived_again_when_entries_were_lost(store):
    [run] = requested(store, "fedavg")
    assert replay(store, run).status == "requested"
    with store.deferring():
        store.append(RunStarted(), run=run, digest="10" * 32)
    assert replay(store, run).status == "running"
    store.close()
    store.open()
    assert replay(store, run).status == "requested"
