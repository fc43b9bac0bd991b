"""Where a run stands: a fold over its entries that any store can feed, and that says the same however it is fed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.journal.entries import (
    GoodState,
    RoundClosed,
    RoundOpened,
    RunFinished,
    RunRequested,
    RunStarted,
    UpdateAccepted,
    UpdateRefused,
    fact_of,
)
from coordinator.journal.memory import MemoryJournal
from coordinator.journal.sqlite import SqliteJournal
from coordinator.views.runs import RunRecord, RunView, replay
from edge_agent.core.errors import StateError

RUN = "run-0001"
LIFE = (
    (RunRequested(method="fedavg", rounds=2), {}),
    (RunStarted(), {"digest": "0" * 64}),
    (RoundOpened(cohort=("a", "b")), {"round": 1}),
    (UpdateAccepted(samples=3), {"round": 1, "agent": "a", "digest": "a" * 64}),
    (UpdateRefused(reason="not finite", boot="b1"), {"round": 1, "agent": "b"}),
    (RoundOpened(cohort=("a", "b"), again=("b",), attempt=2), {"round": 1}),
    (RoundClosed(clients=1, good=GoodState(round=0, digest="0" * 64, loss=1)), {"round": 1, "digest": "1" * 64}),
    (RoundOpened(cohort=("a",), bases={1: "0" * 64}, asked={"a": 1}), {"round": 2}),
    (UpdateAccepted(samples=3), {"round": 1, "agent": "a", "digest": "b" * 64}),
    (RoundClosed(clients=1), {"round": 2, "digest": "2" * 64}),
    (RunFinished(encoder_sha256="e" * 64), {}),
)


def folded(entries):
    view = RunView(RunRecord(RUN))
    for entry in entries:
        view.add(entry)
    return view.record


def test_a_run_is_followed_through_its_life_from_any_store():
    journal = MemoryJournal()
    stands = []
    for fact, columns in LIFE:
        journal.append(fact, run=RUN, **columns)
        record = folded(journal.entries(RUN))
        open_round = record.open_round
        updates = None if open_round is None else (len(open_round.updates), len(open_round.rejected))
        stands.append((record.status, record.round, updates))
    assert stands == [
        ("requested", 0, None),
        ("running", 0, None),
        ("running", 0, (0, 0)),
        ("running", 0, (1, 0)),
        ("running", 0, (1, 1)),
        ("running", 0, (1, 0)),
        ("running", 1, None),
        ("running", 1, (0, 0)),
        ("running", 1, (1, 0)),
        ("running", 2, None),
        ("finished", 2, None),
    ]
    assert (record.encoder_sha256, record.reason, record.checkpoint) == ("e" * 64, None, "2" * 64)


def test_a_replay_that_reads_what_is_new_agrees_with_one_that_reads_all(tmp_path):
    with SqliteJournal(tmp_path / "journal.db") as journal:
        for fact, columns in LIFE:
            journal.append(fact, run=RUN, **columns)
            journal.append(RunRequested(), run="run-0002")
            assert replay(journal, RUN) == folded(journal.entries(RUN))


def test_what_was_derived_from_entries_that_are_lost_is_forgotten(tmp_path):
    journal = SqliteJournal(tmp_path / "journal.db").open()
    journal.append(RunRequested(), run=RUN)
    with journal.deferring():
        journal.append(RunStarted(), run=RUN, digest="0" * 64)
    assert replay(journal, RUN).status == "running"
    journal.close()
    assert replay(journal.open(), RUN).status == "requested"
    journal.close()


@pytest.mark.parametrize("entry", [{"round": 2}, {"round": 1, "digest": None}])
def test_entries_that_contradict_those_before_them_are_named(entry):
    journal = MemoryJournal()
    journal.append(RunRequested(), run=RUN)
    journal.append(RoundOpened(cohort=("a",)), run=RUN, round=1)
    journal.append(RoundClosed(), run=RUN, **{"digest": "1" * 64, **entry})
    with pytest.raises(StateError, match=f"journal entry 3 of run '{RUN}' closes round"):
        folded(journal.entries(RUN))


def test_runs_of_earlier_versions_are_read():
    """Entries without fields that later versions have written, as in the journal of the fixtures."""
    fixtures = Path(__file__).parents[1] / "journal" / "fixtures" / "every_kind.jsonl"
    written = [json.loads(line) for line in fixtures.read_text().splitlines()]
    opened = [one["body"] for one in written if one["fact"] == "RoundOpened"]
    assert opened
    for body in opened:
        journal = MemoryJournal()
        journal.append(fact_of("run_requested", {}), run=RUN)
        journal.append(fact_of("round_opened", body), run=RUN, round=1)
        record = folded(journal.entries(RUN))
        assert record.open_round.cohort == tuple(body["cohort"])
        assert record.open_round.attempt == body.get("attempt", 1)
        assert set(record.bases) == set(body.get("bases", {}).values())
