from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.state.store import BlobStore, RunFolder, StateFolder
from edge_agent.core.errors import StateError, UsageError

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""SHA-256 of 'abc', from FIPS 180-2."""


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(tmp_path / "blobs")


def test_blob_is_named_by_its_sha256(blobs):
    assert blobs.put(b"abc") == ABC
    assert blobs.read(ABC) == b"abc"
    assert blobs.path(ABC).read_bytes() == b"abc"
    assert ABC in blobs
    assert "0" * 64 not in blobs


def test_same_content_is_kept_once(blobs):
    blobs.put(b"abc")
    first = blobs.path(ABC).stat()
    blobs.put(memoryview(b"abc"))
    assert blobs.path(ABC).stat().st_ino == first.st_ino, "not written again"


def test_damaged_blob_is_refused_when_read_and_healed_when_put_again(blobs):
    blobs.put(b"abc")
    blobs.path(ABC).write_bytes(b"abd")
    with pytest.raises(StateError, match="damaged"):
        blobs.read(ABC)
    blobs.put(b"abc")
    assert blobs.read(ABC) == b"abc"


def test_missing_blob_is_an_error_that_says_where_it_was_looked_for(blobs):
    with pytest.raises(StateError, match=ABC):
        blobs.read(ABC)


@pytest.mark.parametrize("name", ["", "abc", "../" + ABC, ABC.upper(), ABC + "\n", "é" * 64, "x" * 100_000])
def test_what_is_no_hash_is_never_a_path(blobs, name):
    with pytest.raises(StateError, match="not a SHA-256") as caught:
        blobs.path(name)
    assert len(str(caught.value)) < 300


def test_only_the_named_blobs_are_removed(blobs):
    kept = blobs.put(b"abc")
    others = {blobs.put(b"x" * 1000), blobs.put(b"y" * 10)}
    (blobs.folder / "partial").mkdir()
    assert blobs.names() == {kept, *others}
    blobs.remove({*others, "0" * 64})
    assert blobs.names() == {kept}
    assert BlobStore(blobs.folder / "nowhere").names() == set()


@given(st.binary(max_size=200))
def test_any_content_comes_back(tmp_path_factory, data):
    blobs = BlobStore(tmp_path_factory.getbasetemp() / "any-blobs")
    sha = blobs.put(data)
    assert sha == hashlib.sha256(data).hexdigest()
    assert blobs.read(sha) == data


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "runs" / "run-0001")


def test_metrics_come_back_in_order(run):
    assert run.metrics() == []
    run.append_metrics({"kind": "round", "round": 1})
    run.append_metrics({"kind": "round", "round": 2, "note": "zeile\nzwei"})
    assert run.metrics() == [{"kind": "round", "round": 1}, {"kind": "round", "round": 2, "note": "zeile\nzwei"}]


@pytest.mark.parametrize("torn", [b'{"kind":"rou', b"{", b"x" * 9000])
def test_line_torn_by_a_crash_is_dropped_and_the_next_one_is_whole(run, torn):
    run.append_metrics({"round": 1})
    with run.metrics_path.open("ab") as file:
        file.write(torn)
    assert run.metrics() == [{"round": 1}]
    run.append_metrics({"round": 2})
    assert run.metrics() == [{"round": 1}, {"round": 2}]
    assert run.metrics_path.read_bytes() == b'{"round":1}\n{"round":2}\n'


def test_torn_first_line_leaves_an_empty_file(run):
    run.folder.mkdir(parents=True)
    run.metrics_path.write_bytes(b'{"rou')
    assert run.metrics() == []
    run.append_metrics({"round": 1})
    assert run.metrics() == [{"round": 1}]


@pytest.mark.parametrize("line", [b"[1]", b"{", b"\xff", b"", b"1" * 10])
def test_damage_within_is_an_error_that_names_the_line(run, line):
    run.append_metrics({"round": 1})
    with run.metrics_path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(StateError, match="line 2"):
        run.metrics()


def test_record_with_nan_is_refused_and_nothing_is_written(run):
    with pytest.raises(StateError, match="not JSON"):
        run.append_metrics({"loss": float("nan")})
    assert not run.metrics_path.exists()


def test_summary_is_replaced_as_a_whole(run):
    assert run.summary() is None
    run.write_summary({"status": "running"})
    run.write_summary({"status": "finished"})
    assert run.summary() == {"status": "finished"}
    assert json.loads(run.summary_path.read_text()) == {"status": "finished"}


def test_state_folder_holds_journal_blobs_and_runs_for_one_owner(tmp_path):
    with StateFolder(tmp_path / "state").open("headwater serve") as state:
        run = state.journal.request_run(fact_of("run_requested", {"method": "fedavg"}))
        state.blobs.put(b"abc")
        state.run(run).append_metrics({"round": 1})
        with pytest.raises(StateError, match="in use by headwater serve"), StateFolder(state.path).open("another"):
            pass
    with StateFolder(tmp_path / "state").open("again") as state:
        assert state.journal.runs() == ["run-0001"]
        assert [folder.run for folder in state.runs()] == ["run-0001"]
        assert state.blobs.read(ABC) == b"abc"


def test_command_beside_a_coordinator_can_ask_for_a_run(tmp_path):
    with StateFolder(tmp_path).open("headwater serve") as service:
        seen = service.journal.last_id()
        with StateFolder(tmp_path).look() as command:
            command.journal.request_run(fact_of("run_requested", {"method": "fedper"}))
        asked = service.journal.entries(kinds=("run_requested",), after=seen)
    assert [entry.body["method"] for entry in asked] == ["fedper"]


def test_looking_at_nothing_makes_nothing(tmp_path):
    with pytest.raises(StateError, match="no journal here"), StateFolder(tmp_path / "state").look():
        pass
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("way", ["open", "look"])
def test_lost_journal_beside_blobs_is_no_fresh_start(tmp_path, way):
    state = StateFolder(tmp_path)
    state.blobs.put(b"abc")
    entered = state.open("me") if way == "open" else state.look(create=True)
    with pytest.raises(StateError, match=r"no journal\.db"), entered:
        pass
    assert not state.journal.path.exists()


def test_open_checks_the_whole_journal(tmp_path):
    import sqlite3

    with StateFolder(tmp_path).open("me") as state:
        state.journal.request_run(fact_of("run_requested", {"seed": 1}))
        state.journal.request_run(fact_of("run_requested", {"seed": 2}))
    connection = sqlite3.connect(tmp_path / "journal.db")
    with connection:
        connection.execute("""UPDATE entries SET body = '{"seed":3}' WHERE id = 1""")
    connection.close()
    with pytest.raises(StateError, match="entry 1 breaks the chain"), StateFolder(tmp_path).open("me"):
        pass


def test_open_sweeps_what_interrupted_writes_left(tmp_path):
    with StateFolder(tmp_path).open("me") as state:
        state.journal.request_run(fact_of("run_requested", {}))
        state.blobs.put(b"abc")
    (tmp_path / "blobs" / f".{ABC}.12345678.tmp").write_bytes(b"ab")
    with StateFolder(tmp_path).open("me") as state:
        assert [path.name for path in state.blobs.folder.iterdir()] == [ABC]


def test_open_sweeps_old_temporary_files_of_ours_and_nothing_else(tmp_path):
    import os

    with StateFolder(tmp_path).open("me") as state:
        state.journal.request_run(fact_of("run_requested", {}))
        state.run("run-0001").append_metrics({"round": 1})
    old = [tmp_path / ".status.json.0123abcd.tmp", tmp_path / "runs/run-0001/.report.html.0123abcd.tmp"]
    partial = tmp_path / "blobs/partial/a0/.x.chunks.0123abcd.tmp"
    partial.parent.mkdir(parents=True)
    kept = [tmp_path / ".mine.tmp", tmp_path / "runs/run-0001/notes.tmp"]
    for path in (*old, partial, *kept):
        path.touch()
        os.utime(path, (1000, 1000))
    being_written = tmp_path / "runs/run-0001/.report.html.deadbeef.tmp"
    being_written.touch()
    with StateFolder(tmp_path).open("me"):
        assert [path for path in (*old, partial, partial.parent) if path.exists()] == []
        assert [path for path in (*kept, being_written) if not path.exists()] == []


@pytest.mark.parametrize("name", ["../blobs", "a/b", "", ".", "Run", "run 1", "x" * 64])
def test_run_name_cannot_leave_its_folder(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be a run"):
        StateFolder(tmp_path).run(name)


def test_the_run_written_to_last_is_the_last(tmp_path):
    import os

    state = StateFolder(tmp_path)
    assert state.runs() == []
    for name, second in (("run-0002", 300), ("run-0001", 200)):
        folder = state.run(name)
        folder.append_metrics({"round": 1})
        for path in (folder.metrics_path, folder.folder):
            os.utime(path, (second, second))
    assert [folder.run for folder in state.runs()] == ["run-0001", "run-0002"]


@pytest.mark.parametrize("content", ["nothing", "no tables", "no rows"])
@pytest.mark.parametrize("beside", ["blobs", "runs"])
def test_an_empty_journal_beside_blobs_or_runs_is_damage_and_no_beginning(tmp_path, content, beside):
    """Cut to 0 bytes, or copied without its write-ahead log, which holds everything while a coordinator runs."""
    import sqlite3

    with StateFolder(tmp_path).open("me") as state:
        if beside == "blobs":
            state.blobs.put(b"abc")
        else:
            state.run("run-0001").append_metrics({"round": 1})
        state.journal.request_run(fact_of("run_requested", {"seed": 1}))
    for path in tmp_path.glob("journal.db*"):
        path.unlink()
    (tmp_path / "journal.db").touch()
    if content == "no tables":
        connection = sqlite3.connect(tmp_path / "journal.db")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
    if content == "no rows":
        with SqliteJournal(tmp_path / "journal.db"):
            pass
    for use in (lambda: StateFolder(tmp_path).open("me"), lambda: StateFolder(tmp_path).look(create=True)):
        with pytest.raises(StateError, match="the journal is empty, all of its entries are lost"), use():
            pass


def test_an_empty_journal_in_an_empty_folder_is_a_beginning(tmp_path):
    (tmp_path / "journal.db").touch()
    with StateFolder(tmp_path).open("me") as state:
        assert state.journal.request_run(fact_of("run_requested", {})) == "run-0001"
