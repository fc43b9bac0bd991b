"""One follower keeps all folds of a process up to date, and gives each what it takes."""

from __future__ import annotations

import pytest

from coordinator.journal.entries import fact_of
from coordinator.journal.memory import MemoryJournal
from coordinator.journal.sqlite import SqliteJournal
from coordinator.views.follower import Follower, reopen
from edge_agent.core.errors import StateError


class Collected:
    """A fold that keeps the kinds that it was given, in a list which several may share."""

    def __init__(self, *kinds, name="", shared=None):
        self.kinds = kinds
        self.name = name
        self.given = [] if shared is None else shared

    def add(self, entry):
        self.given.append((self.name, entry.kind, entry.run) if self.name else (entry.kind, entry.run))


@pytest.fixture
def journal():
    journal = MemoryJournal()
    for run in ("run-0001", "run-0002"):
        for kind in ("run_requested", "run_started", "run_failed"):
            journal.append(fact_of(kind, {}), run=run)
    return journal


def test_each_fold_gets_the_kinds_that_it_takes_in_the_order_of_the_folds(journal):
    shared = []
    folds = [Collected("run_started", name="a", shared=shared), Collected("run_started", "run_failed", name="b")]
    folds[1].given = shared
    Follower(journal, *folds, run="run-0002").read()
    assert shared == [
        ("a", "run_started", "run-0002"),
        ("b", "run_started", "run-0002"),
        ("b", "run_failed", "run-0002"),
    ]


def test_no_entry_is_given_twice_however_it_is_read(journal):
    fold = Collected("run_requested", "run_failed")
    follower = Follower(journal, fold)
    assert [entry.kind for entry in follower.read(limit=1)] == ["run_requested"]
    fetched = follower.fetch(limit=1)
    assert follower.fetch(limit=1) == fetched, "what is not fed is fetched again"
    follower.feed(fetched)
    follower.catch_up(page=1)
    journal.append(fact_of("run_failed", {}), run="run-0003")
    follower.catch_up(page=1)
    assert fold.given == [
        ("run_requested", "run-0001"),
        ("run_failed", "run-0001"),
        ("run_requested", "run-0002"),
        ("run_failed", "run-0002"),
        ("run_failed", "run-0003"),
    ]
    assert follower.read() == []


def test_a_journal_is_opened_again_where_another_file_has_taken_its_place(tmp_path):
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    with pytest.raises(StateError, match="no journal here"):
        reopen(journal)
    SqliteJournal(path).open().close()
    assert reopen(journal)
    assert not reopen(journal), "it is open and in place"
    path.rename(tmp_path / "older.db")
    SqliteJournal(path).open().close()
    assert reopen(journal)
    journal.close()
