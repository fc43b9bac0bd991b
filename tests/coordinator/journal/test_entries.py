"""Facts of the journal: those of earlier versions are read as they are, and written with the same bytes."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from coordinator.config import AggregationConfig
from coordinator.journal import entries
from coordinator.journal.entries import (
    FACTS,
    AggregationSettings,
    Fact,
    GoodState,
    ReleasePlan,
    RoundClosed,
    RoundOpened,
    RunFailed,
    RunRequested,
    UnknownEntry,
    UpdateAccepted,
    fact_of,
)
from coordinator.journal.kinds import KINDS
from coordinator.journal.sqlite import SqliteJournal
from coordinator.journal.store import hash_of
from coordinator.rounds.request import Request
from coordinator.views.releases import Book, Plan
from coordinator.views.runs import RunRecord, step
from edge_agent.core.errors import StateError

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = [json.loads(line) for line in (FIXTURES / "every_kind.jsonl").read_text().splitlines()]
"""Of each entry of the journal there: the name of its fact and its body, as the code before typed facts wrote them."""


@pytest.fixture
def older(tmp_path):
    """A journal of an earlier version, which has every kind of entry with every set of fields that it wrote."""
    shutil.copy(FIXTURES / "every_kind.sqlite", tmp_path / "journal.db")
    with SqliteJournal(tmp_path / "journal.db") as journal:
        yield journal


def changed(journal, body, kind=None):
    """The journal's last entry, with this body, and another kind if given."""
    newest = journal.entries(after=journal.last_id() - 1)[0]
    return replace(newest, body=body, kind=kind or newest.kind)


SINCE_THEN = {"RunExtended", "RunStopped"}
"""Facts of kinds that came after that journal was written."""


def test_there_is_one_fact_for_each_kind():
    assert FACTS.keys() == set(KINDS)
    assert all("".join(word.capitalize() for word in kind.split("_")) == FACTS[kind].__name__ for kind in FACTS)
    assert {one["fact"] for one in EXPECTED} | SINCE_THEN == {fact.__name__ for fact in FACTS.values()}


def test_facts_and_their_parts_are_frozen_and_described():
    models = [one for one in vars(entries).values() if isinstance(one, type) and issubclass(one, entries.Part)]
    assert len(models) > len(KINDS)
    for model in models:
        assert model.model_config["frozen"], model
        assert model.__doc__, model


def test_an_older_journal_is_read_as_it_is(older):
    assert older.verify() == len(EXPECTED)
    for entry, expected in zip(older.entries(), EXPECTED, strict=True):
        assert (entry.id, type(entry.fact).__name__) == (expected["id"], expected["fact"])
        assert entry.fact.to_body() == entry.body == expected["body"]


def test_facts_are_written_with_the_bytes_of_earlier_versions(older, tmp_path):
    with sqlite3.connect(older.path) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM entries ORDER BY id")]
    with SqliteJournal(tmp_path / "again.db") as again:
        for entry, row in zip(older.entries(), rows, strict=True):
            columns = {name: row[name] for name in ("run", "round", "agent", "digest")}
            again.append(entry.fact, **columns)
            assert entry.fact.to_json() == row["body"]
            assert hash_of(row) == entry.hash
        assert again.verify() == len(rows)


def test_every_value_survives_reading_and_writing(older):
    for entry in older.entries():
        fact = entry.fact
        assert fact_of(entry.kind, fact.to_body()) == fact
        assert fact.changed() == fact


def test_an_entry_of_an_unknown_kind_is_kept_and_passed_over(older):
    entry = changed(older, {"x": 1}, kind="round_paused")
    assert entry.fact == UnknownEntry(name="round_paused", content={"x": 1})
    record = RunRecord("run-0001")
    assert step(record, entry) is record
    book = Book()
    book.add(entry)
    assert (book.releases, book.devices) == ([], {})


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda one: f"{one['id']}-{one['fact']}")
def test_fields_of_a_newer_version_are_ignored(older, expected):
    (entry,) = older.entries_with([expected["id"]])
    newer = fact_of(entry.kind, {**deepened(expected["body"]), "new_field": {"a": [1]}})
    assert newer == entry.fact
    assert newer.to_body() == expected["body"]


def deepened(body):
    """The body with a field more in each value that is a model's."""
    models = {"aggregation", "good", "restored", "running", "candidate", "result", "plan", "privacy", "simulation"}
    result = {}
    for name, value in body.items():
        is_model = name in models and isinstance(value, dict) and not (name == "plan" and "clients" in value)
        result[name] = {**deepened(value), "new_part": 1} if is_model else value
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_of_an_entry_without_a_field_all_others_are_read_or_it_is_named(older, kind):
    for entry in older.entries(kinds=(kind,)):
        for name in entry.body:
            without = {key: value for key, value in entry.body.items() if key != name}
            one = replace(entry, body=without)
            if FACTS[kind].model_fields[name].is_required():
                with pytest.raises(StateError, match=rf"journal entry {entry.id} \({kind}\).*'{name}'"):
                    _ = one.fact
            else:
                assert one.fact == entry.fact.without(name)


@pytest.mark.parametrize("other", [None, "text", -1, [], {"a": None}, float("nan")])
def test_an_optional_value_of_another_form_counts_as_absent(older, other):
    for entry in older.entries():
        for name in entry.body:
            one = replace(entry, body={**entry.body, name: other})
            try:
                fact = one.fact
            except StateError:
                assert FACTS[entry.kind].model_fields[name].is_required()
                continue
            others = fact.model_fields_set - {name}
            assert others == entry.fact.model_fields_set - {name}


def test_a_value_within_a_value_counts_as_absent_alone():
    body = {"runs": "a", "result": {"outcome": "ok", "acc": "high", "support": 3}, "release": 2}
    assert fact_of("device_reported", body).to_body() == {**body, "result": {"outcome": "ok", "support": 3}}
    body = {"acc": {"local": 0.5, "personal": "high"}, "samples": True}
    assert fact_of("release_reported", body).to_body() == {"acc": {"local": 0.5}}
    assert fact_of("round_closed", {"late": [{"agent": "a", "round": 1}, 7], "clients": 2}).to_body() == {"clients": 2}


def test_what_is_not_given_is_not_written():
    assert RoundClosed().to_json() == "{}"
    assert RoundClosed(good=GoodState(round=1, digest="d", loss=1)).to_body() == {
        "good": {"round": 1, "digest": "d", "loss": 1}
    }
    assert RunRequested(method="a").changed(rounds=2).to_body() == {"method": "a", "rounds": 2}
    assert RunRequested(method="a", rounds=2).without("rounds").to_body() == {"method": "a"}
    assert UpdateAccepted(samples=7).to_json() == '{"samples":7}', "an integer stays one"
    assert UpdateAccepted(samples=7.0).to_json() == '{"samples":7.0}'


def test_an_object_that_is_passed_on_whole_may_have_tuples():
    fact = RunRequested(params={"decay_at": (1, 2), "of": {"a": (3,)}})
    assert fact.to_body() == {"params": {"decay_at": [1, 2], "of": {"a": [3]}}}
    assert fact_of("run_requested", fact.to_body()) == fact


def test_rounds_are_sorted_as_text_where_they_are_names():
    opened = RoundOpened(bases={9: "a", 10: "b"})
    assert opened.to_json() == '{"bases":{"10":"b","9":"a"}}'
    assert fact_of("round_opened", opened.to_body()) == opened


def test_a_mistake_of_the_writer_is_no_entry():
    with pytest.raises(ValidationError):
        RoundClosed(client=2)
    with pytest.raises(ValidationError):
        RoundClosed(clients=-1)
    with pytest.raises(ValidationError):
        RoundClosed(clients=1).changed(clients="two")


def test_a_reason_may_name_a_path_that_cannot_be_encoded():
    fact = RunFailed(reason="/data/\udcff: no such file")
    assert fact_of("run_failed", json.loads(fact.to_json())) == fact


@pytest.mark.parametrize(
    "part, whole",
    [(AggregationSettings, set(AggregationConfig.model_fields)), (ReleasePlan, set(Plan.__dataclass_fields__))],
)
def test_a_part_has_all_fields_of_what_it_is_of(part: type[BaseModel], whole):
    assert set(part.model_fields) == whole


def test_a_request_has_all_fields_of_what_follows_from_it():
    assert set(Request.__dataclass_fields__) == set(RunRequested.model_fields) - {"id", "simulation"}


def test_a_plan_without_fields_is_that_of_a_release_at_once():
    assert Plan.from_fact(ReleasePlan()) == Plan()


@pytest.mark.parametrize("left", range(0, len(EXPECTED), 7))
def test_a_journal_without_its_newest_entries_is_named(older, left):
    with sqlite3.connect(older.path) as connection:
        connection.execute("DELETE FROM entries WHERE id > ?", (left,))
    connection.close()
    with pytest.raises(StateError, match=f"entry {left + 1} breaks the chain: .*newest entries are missing"):
        older.verify()
    assert [type(entry.fact).__name__ for entry in older.entries()] == [one["fact"] for one in EXPECTED[:left]]


@pytest.mark.parametrize("share", [step / 16 for step in range(17)])
def test_a_file_that_was_cut_is_named_or_read(tmp_path, share):
    content = (FIXTURES / "every_kind.sqlite").read_bytes()
    path = tmp_path / "journal.db"
    path.write_bytes(content[: int(share * len(content))])
    if share == 0:  # an empty file is a new journal, unless there must be entries
        with pytest.raises(StateError, match="all of its entries are lost"):
            SqliteJournal(path).open(create=False, is_begun=True)
        return
    if share == 1:
        with SqliteJournal(path).open(create=False) as journal:
            assert journal.verify() == len(EXPECTED)
        return
    with pytest.raises(StateError, match=re.escape(str(path))), SqliteJournal(path).open(create=False) as journal:
        journal.verify()


def test_a_fact_is_worked_out_once(older):
    entry = older.entries(limit=1)[0]
    assert entry.fact is entry.fact
    assert isinstance(entry.fact, Fact)
