from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from datetime import datetime, timezone
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.journal.entries import RunRequested, UpdateAccepted, UpdateRefused, fact_of
from coordinator.journal.kinds import KINDS
from coordinator.journal.sqlite import SqliteJournal
from coordinator.journal.store import Entry
from coordinator.views.runs import Accepted, Rejection, RunRecord, replay, step
from edge_agent.core.errors import StateError, UnknownName
from edge_agent.core.storage import without_syncs

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def journal(tmp_path):
    with SqliteJournal(tmp_path / "journal.db", now=lambda: NOON) as opened:
        yield opened


def change(path, statement, *values):
    """Meddle with the file as somebody with a database tool would."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_entries_come_back_as_written_and_in_order(journal):
    journal.append(fact_of("coordinator_started", {"version": "0.1.0"}))
    run = journal.request_run(fact_of("run_requested", {"method": "fedavg"}))
    journal.append(fact_of("update_accepted", {"samples": 7}), run=run, round=1, agent="porch", digest="ab" * 32)
    first, second, third = journal.entries()
    assert (first.id, first.kind, first.body, first.run) == (1, "coordinator_started", {"version": "0.1.0"}, None)
    assert (second.kind, second.run, second.body["method"]) == ("run_requested", "run-0001", "fedavg")
    assert (third.round, third.agent, third.digest, third.body) == (1, "porch", "ab" * 32, {"samples": 7})
    assert third.at == "2026-03-01T12:00:00.000+00:00"
    assert journal.last_id() == 3


def test_hash_chain_is_what_the_module_says(journal):
    """The hash is worked out again with nothing but json and hashlib."""
    written = journal.append(UpdateRefused(reason="ä", boot="b"), run="run-0001")
    content = [
        1,
        written.at,
        "update_refused",
        "run-0001",
        None,
        None,
        None,
        '{"boot":"b","reason":"\\u00e4"}',
        "0" * 64,
    ]
    text = "[" + ",".join(json.dumps(item) for item in content) + "]"
    assert written.hash == hashlib.sha256(text.encode()).hexdigest()
    assert journal.append(fact_of("run_failed", {}), run="run-0002").previous_hash == written.hash


def test_entries_can_be_asked_for_by_run_kind_and_position(journal):
    for run in ("run-0001", "run-0002"):
        journal.append(fact_of("run_requested", {}), run=run)
        journal.append(fact_of("run_started", {}), run=run)
    assert [entry.id for entry in journal.entries("run-0002")] == [3, 4]
    assert [entry.id for entry in journal.entries(kinds=("run_requested",))] == [1, 3]
    assert [entry.id for entry in journal.entries(kinds=("run_requested",), after=1)] == [3]
    assert journal.entries(after=4) == []


def test_entries_can_be_asked_for_by_round_and_agent(journal):
    for round_, agent in ((1, "a"), (1, "b"), (2, "a")):
        journal.append(fact_of("update_accepted", {}), run="run-0001", round=round_, agent=agent)
    assert [entry.id for entry in journal.entries("run-0001", round=1)] == [1, 2]
    assert [entry.id for entry in journal.entries("run-0001", round=2, agent="a")] == [3]
    assert journal.entries("run-0002", round=1) == []


def test_checkpoints_are_those_that_replay_finds(journal):
    runs = [journal.request_run(fact_of("run_requested", {})) for _ in range(3)]
    journal.append(fact_of("run_started", {}), run=runs[0], digest="00" * 32)
    for number in (1, 2):
        journal.append(fact_of("round_opened", {}), run=runs[1], round=number)
        journal.append(fact_of("round_closed", {}), run=runs[1], round=number, digest=f"0{number}" * 32)
    journal.append(fact_of("release_made", {}), run=runs[1], digest="ff" * 32)
    assert journal.checkpoints() == {runs[0]: "00" * 32, runs[1]: "02" * 32}
    assert {run: replay(journal, run).checkpoint for run in runs} == {**journal.checkpoints(), runs[2]: None}


def test_unknown_kind_is_refused_with_the_nearest_and_nothing_is_written(journal):
    with pytest.raises(UnknownName, match="did you mean 'round_opened'"):
        journal.append(fact_of("round_opend", {}))
    assert journal.last_id() == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_fact_with_a_number_that_is_none_is_refused_and_nothing_is_written(journal, number):
    with pytest.raises(StateError, match="not JSON"):
        journal.append(UpdateAccepted(samples=1, metrics={"loss": number}))
    assert journal.last_id() == 0


def test_verify_counts_entries_of_a_sound_journal(journal):
    assert journal.verify() == 0
    needed = {"runs": ["run-0001"], "agents": ["a"], "stage": "paused", "release": 1}
    for kind in KINDS:
        journal.append(fact_of(kind, needed))
    assert journal.verify() == len(KINDS)


@pytest.mark.parametrize(
    "statement, values, entry, word",
    [
        ("UPDATE entries SET body = ? WHERE id = 2", ('{"samples":9000}',), 2, "content"),
        ("UPDATE entries SET agent = ? WHERE id = 3", ("attic",), 3, "content"),
        ("UPDATE entries SET hash = ? WHERE id = 2", ("0" * 64,), 2, "content"),
        ("DELETE FROM entries WHERE id = ?", (2,), 2, "missing"),
        ("DELETE FROM entries WHERE id = ?", (1,), 1, "missing"),
        ("DELETE FROM entries WHERE id > ?", (2,), 3, "2 newest entries are missing"),
        ("UPDATE entries SET previous_hash = ? WHERE id = 4", ("f" * 64,), 4, "does not follow"),
    ],
)
def test_verify_names_the_first_broken_link(journal, statement, values, entry, word):
    for agent in ("a", "b", "c", "d"):
        journal.append(
            fact_of("update_accepted", {"samples": 1}),
            run="run-0001",
            round=1,
            agent=agent,
            digest="ab" * 32,
        )
    change(journal.path, statement, *values)
    with pytest.raises(StateError, match=f"entry {entry} breaks the chain: .*{word}"):
        journal.verify()


def test_swapped_entries_are_found(journal):
    for number in range(3):
        journal.append(fact_of("run_failed", {}), run=f"run-000{number}")
    change(journal.path, "UPDATE entries SET id = 9 WHERE id = 2")
    change(journal.path, "UPDATE entries SET id = 2 WHERE id = 3")
    change(journal.path, "UPDATE entries SET id = 3 WHERE id = 9")
    with pytest.raises(StateError, match="entry 2 breaks the chain"):
        journal.verify()


def filled(path, entries=400):
    with SqliteJournal(path) as journal:
        for number in range(entries):
            journal.append(
                fact_of("update_refused", {"reason": "x" * 40}),
                run="run-0001",
                round=1,
                agent=f"agent-{number}",
            )
    assert path.stat().st_size > 16 * 4096, "several pages, so that cutting leaves a header that looks sound"


def test_truncated_file_is_an_error_and_never_a_fresh_start(tmp_path):
    path = tmp_path / "journal.db"
    filled(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(StateError, match="backup"), SqliteJournal(path) as journal:
        journal.verify()
    assert path.stat().st_size == size // 2, "the evidence was left alone"


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be one" * 100, b"SQLite format 3\x00" + b"\xff" * 9000]
)
def test_file_that_is_no_database_is_an_error_and_is_left_alone(tmp_path, content):
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(StateError, match="cannot be read or written"):
        SqliteJournal(path).open()
    assert path.read_bytes() == content


def test_flipped_bytes_never_pass_for_another_history(tmp_path):
    """Over flips across the whole file: StateError, or exactly the history that was written."""
    path = tmp_path / "journal.db"
    filled(path)
    sound = path.read_bytes()
    with SqliteJournal(path) as journal:
        history = journal.entries()
    found = 0
    for position in range(24, len(sound), len(sound) // 40):
        damaged = bytearray(sound)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            with SqliteJournal(path) as journal:
                journal.verify()
                assert journal.entries() == history
        except StateError:
            found += 1
    assert found > 20, "most bytes of the file matter"


def test_journal_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "journal.db"
    SqliteJournal(path).open().close()
    change(path, "PRAGMA user_version = 7")
    with pytest.raises(StateError, match=r"version 7, this program writes version 1"):
        SqliteJournal(path).open()


def test_missing_journal_is_only_made_where_that_is_allowed(tmp_path):
    with pytest.raises(StateError, match="no journal here"):
        SqliteJournal(tmp_path / "journal.db").open(create=False)
    assert list(tmp_path.iterdir()) == []


def test_closed_journal_says_so(tmp_path):
    with pytest.raises(StateError, match="not open"):
        SqliteJournal(tmp_path / "journal.db").entries()


def test_replay_follows_a_run_through_its_life(journal):
    run = journal.request_run(fact_of("run_requested", {"method": "fedper", "rounds": 2}))
    asked = replay(journal, run).request
    assert re.fullmatch(r"run-0001-[0-9a-f]{32}", asked.id)
    assert replay(journal, run) == RunRecord(run, RunRequested(method="fedper", rounds=2, id=asked.id))
    journal.append(fact_of("run_started", {}), run=run, digest="00" * 32)
    assert (replay(journal, run).status, replay(journal, run).checkpoint) == ("running", "00" * 32)
    journal.append(
        fact_of("round_opened", {"cohort": ["a", "b", "c"], "attempt": 1, "wanted": 2}),
        run=run,
        round=1,
    )
    journal.append(
        fact_of("update_accepted", {"samples": 5, "metrics": {"loss": 0.5}}),
        run=run,
        round=1,
        agent="b",
        digest="bb" * 32,
    )
    journal.append(fact_of("update_refused", {"reason": "not finite"}), run=run, round=1, agent="c")
    record = replay(journal, run)
    assert record.open_round is not None
    assert record.open_round.cohort == ("a", "b", "c")
    assert record.open_round.updates == {"b": Accepted("bb" * 32, 5.0, {"loss": 0.5})}
    assert record.open_round.rejected == {"c": Rejection("not finite")}
    assert record.open_round.fact.wanted == 2
    journal.append(fact_of("round_closed", {}), run=run, round=1, digest="11" * 32)
    record = replay(journal, run)
    assert (record.round, record.checkpoint, record.open_round) == (1, "11" * 32, None)
    journal.append(fact_of("run_finished", {"encoder_sha256": "e" * 64}), run=run, digest="11" * 32)
    record = replay(journal, run)
    assert (record.status, record.is_over, record.encoder_sha256) == ("finished", True, "e" * 64)


def test_second_update_of_an_agent_in_a_round_changes_nothing(journal):
    run = journal.request_run(fact_of("run_requested", {}))
    journal.append(fact_of("round_opened", {"cohort": ["a"]}), run=run, round=1)
    for digest in ("aa" * 32, "ab" * 32):
        journal.append(fact_of("update_accepted", {"samples": 1}), run=run, round=1, agent="a", digest=digest)
    assert replay(journal, run).open_round.updates["a"].digest == "aa" * 32


def test_new_attempt_keeps_the_updates_of_the_earlier_one(journal):
    run = journal.request_run(fact_of("run_requested", {}))
    journal.append(fact_of("round_opened", {"cohort": ["a", "b", "d", "e"], "attempt": 1}), run=run, round=1)
    journal.append(fact_of("update_accepted", {"samples": 1}), run=run, round=1, agent="a", digest="aa" * 32)
    for agent in ("d", "e"):
        journal.append(fact_of("update_refused", {"reason": "not finite"}), run=run, round=1, agent=agent)
    again = {"cohort": ["a", "b", "d", "e", "c"], "attempt": 2, "again": ["e"]}
    journal.append(fact_of("round_opened", again), run=run, round=1)
    open_round = replay(journal, run).open_round
    assert (open_round.attempt, open_round.cohort) == (2, ("a", "b", "d", "e", "c"))
    assert open_round.updates == {"a": Accepted("aa" * 32, 1.0, {})}
    assert open_round.rejected == {"d": Rejection("not finite")}


def test_update_of_a_round_that_is_not_open_changes_nothing(journal):
    run = journal.request_run(fact_of("run_requested", {}))
    journal.append(fact_of("round_opened", {"cohort": ["a"]}), run=run, round=1)
    journal.append(fact_of("round_closed", {}), run=run, round=1, digest="11" * 32)
    before = replay(journal, run)
    journal.append(fact_of("update_accepted", {"samples": 1}), run=run, round=1, agent="a", digest="aa" * 32)
    journal.append(fact_of("round_opened", {"cohort": ["a"]}), run=run, round=2)
    journal.append(fact_of("update_accepted", {"samples": 1}), run=run, round=1, agent="a", digest="aa" * 32)
    after = replay(journal, run)
    assert (after.round, after.checkpoint) == (before.round, before.checkpoint)
    assert after.open_round.updates == {}


@pytest.mark.parametrize(
    "kind, round_, digest",
    [("round_closed", 1, "aa" * 32), ("round_opened", 2, None), ("round_opened", None, None)],
)
def test_contradiction_is_an_error_that_names_the_entry(journal, kind, round_, digest):
    run = journal.request_run(fact_of("run_requested", {}))
    journal.append(fact_of(kind, {}), run=run, round=round_, digest=digest)
    with pytest.raises(StateError, match="journal entry 2 of run 'run-0001'"):
        replay(journal, run)


def test_unknown_run_is_named_with_its_nearest(journal):
    journal.request_run(fact_of("run_requested", {}))
    with pytest.raises(UnknownName, match="did you mean 'run-0001'"):
        replay(journal, "run-0002")


def test_replay_reads_each_entry_of_the_journal_once(journal):
    """A run that has ended long ago is not looked for in everything that was written since."""

    def steps():
        """Steps of the database's machine; reading a row takes some."""
        count = [0]
        journal._connection.set_progress_handler(lambda: count.__setitem__(0, count[0] + 1), 1)
        record = replay(journal, first)
        journal._connection.set_progress_handler(None, 1)
        assert record.status == "finished"
        return count[0]

    first = journal.request_run(fact_of("run_requested", {}))
    journal.append(fact_of("run_finished", {}), run=first)
    second = journal.request_run(fact_of("run_requested", {}))
    unchanged = [steps(), steps()][-1]
    for number in range(1, 301):
        journal.append(fact_of("update_accepted", {}), run=second, round=number, agent="a0", digest="0" * 64)
    once = steps()
    again = steps()
    assert once > 300
    assert again == unchanged < 50
    journal.append(fact_of("run_pruned", {}), run=first)
    assert replay(journal, first).is_pruned


def test_unfinished_runs_in_the_order_of_their_requests(journal):
    runs = [journal.request_run(fact_of("run_requested", {})) for _ in range(4)]
    assert runs == ["run-0001", "run-0002", "run-0003", "run-0004"]
    journal.append(fact_of("run_cancelled", {}), run=runs[1])
    journal.append(fact_of("run_finished", {}), run=runs[2])
    assert journal.unfinished() == ["run-0001", "run-0004"]


IN_A_ROUND = st.sampled_from(("round_opened", "update_accepted", "update_refused", "round_closed"))


@given(st.lists(st.tuples(IN_A_ROUND, st.integers(1, 3), st.sampled_from("abc")), max_size=30))
def test_replay_agrees_with_a_plain_list_of_what_happened(steps):
    """A twin that keeps sets: whatever the order of entries, each digest is in at most one place."""
    record = RunRecord("run-0001")
    open_round = None
    updates = set()
    closed = 0
    for number, (kind, round_, agent) in enumerate(steps, 1):
        entry = Entry(number, "", kind, "run-0001", round_, agent, "aa" * 32, {"cohort": ["a", "b", "c"]}, "", "")
        if kind == "round_opened" and round_ != closed + 1:
            continue
        if kind == "round_closed" and open_round != round_:
            continue
        record = step(record, entry)
        if kind == "round_opened":
            open_round, updates = round_, updates if open_round == round_ else set()
        elif kind == "round_closed":
            open_round = None
            closed = round_
        elif kind == "update_accepted" and round_ == open_round:
            updates.add(agent)
    assert record.round == closed
    assert (record.open_round.round if record.open_round else None) == open_round
    if record.open_round:
        assert set(record.open_round.updates) == updates


APPEND_FORTY = """
import sys
from pathlib import Path
from coordinator.journal.entries import UpdateAccepted
from coordinator.journal.sqlite import SqliteJournal
with SqliteJournal(Path(sys.argv[1])) as journal:
    for _ in range(40):
        journal.append(UpdateAccepted(), run="run-0001", round=1, agent=sys.argv[2], digest="aa" * 32)
"""


def test_two_processes_write_one_unbroken_chain(tmp_path):
    path = tmp_path / "journal.db"
    SqliteJournal(path).open().close()
    names = ("service", "command")
    writers = [subprocess.Popen([sys.executable, "-c", APPEND_FORTY, str(path), name]) for name in names]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    with SqliteJournal(path) as journal:
        assert journal.verify() == 80
        assert sorted({entry.agent for entry in journal.entries()}) == ["command", "service"]


class BusyAtFirst(sqlite3.Connection):
    """A connection to a file that another program is turning to a write-ahead log: SQLite does not wait there."""

    refusals = 3

    def execute(self, statement, *values):
        if "journal_mode" in statement and self.refusals:
            self.refusals -= 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = 5
            raise error
        return super().execute(statement, *values)


def test_a_journal_that_another_program_is_creating_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=BusyAtFirst))
    with SqliteJournal(tmp_path / "journal.db") as journal:
        assert journal._connection.refusals == 0
        assert journal._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_what_append_returned_survives_a_kill(tmp_path):
    """The child says a number only after append returned, then is killed: every said number is in the journal."""
    path = tmp_path / "journal.db"
    program = (
        "import sys; from pathlib import Path; from coordinator.journal.sqlite import SqliteJournal\n"
        "from coordinator.journal.entries import CoordinatorStarted\n"
        "with SqliteJournal(Path(sys.argv[1])) as journal:\n"
        "    while True: print(journal.append(CoordinatorStarted()).id, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as child:
        said = [int(child.stdout.readline()) for _ in range(25)]
        os.kill(child.pid, signal.SIGKILL)
    with SqliteJournal(path) as journal:
        assert journal.verify() >= said[-1] == 25


@pytest.mark.parametrize("is_simulated, level", [(False, 2), (True, 0)])
def test_a_journal_waits_for_the_disk_except_where_nothing_does(tmp_path, is_simulated, level):
    """SQLite's own word for it: 2 is FULL, 0 is OFF."""
    with (
        without_syncs() if is_simulated else contextlib.nullcontext(),
        SqliteJournal(tmp_path / "j.sqlite3") as journal,
    ):
        assert journal._connection.execute("PRAGMA synchronous").fetchone()[0] == level


@pytest.mark.parametrize("is_read_only", [False, True], ids=["full", "read-only"])
def test_a_journal_at_rest_is_read_on_a_disk_that_takes_nothing(small_disk, is_read_only):
    path = small_disk / "journal.db"
    with SqliteJournal(path) as journal:
        written = [journal.append(fact_of("device_retired", {}), agent=f"d{number}") for number in range(50)]
    if is_read_only:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    else:
        for size in (1 << 16, 1 << 6):
            with contextlib.suppress(OSError), (small_disk / f"fill-{size}").open("wb", buffering=0) as fill:
                while True:
                    fill.write(bytes(size))
    with contextlib.closing(SqliteJournal(path).open(create=False)) as journal:
        assert journal.entries() == written
        assert journal.version() == journal.version()
        with pytest.raises(StateError, match="Free disk space if it is full"):
            journal.append(fact_of("device_retired", {}), agent="late")
    if not is_read_only:
        with pytest.raises(StateError, match="Free disk space if it is full"):
            SqliteJournal(path).open()  # to serve
        (small_disk / f"fill-{1 << 16}").unlink()
        with SqliteJournal(path) as journal:
            assert journal.append(fact_of("device_retired", {}), agent="late").id == len(written) + 1
