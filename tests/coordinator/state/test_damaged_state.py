"""Damage of a state folder is refused with the file and the way back, and the run resumes once the file is put back."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3

import pytest
from federation_harness import Federation, undisturbed_hash

from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder
from edge_agent.core.errors import StateError


@contextlib.contextmanager
def fleet(folder):
    """One agent that trains for 1 s, one for 20 s; both are needed."""
    # Without a good state to go back to, whose checkpoint would stay.
    with Federation(folder, agents=(), cohort={"min_agents": 2}, aggregation={"max_loss": None}) as fed:
        fed.add("a0", seconds=1)
        fed.add("a1", seconds=20)
        yield fed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_hash(fleet, tmp_path_factory.mktemp("undisturbed"))


def stalled(fed):
    status = json.loads((fed.config.state / "status.json").read_bytes())
    return status["run"]["stalled"]["reason"]


@pytest.mark.parametrize("damage", ["missing", "one bit", "cut"])
def test_an_update_that_was_receipted_and_is_damaged_stalls_the_run_until_it_is_put_back(tmp_path, undisturbed, damage):
    """One flipped bit in the weights was aggregated unseen: only names, shapes and finiteness were looked at before."""
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.record.round == 1 and fed.record.open_round and fed.record.open_round.updates)
        (update,) = fed.record.open_round.updates.values()
        path = fed.state.blobs.path(update.digest)
        content = path.read_bytes()
        fed.kill_coordinator()
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        path.unlink() if damage == "missing" else path.write_bytes(flipped if damage == "one bit" else content[:50])
        fed.start_coordinator()
        fed.wait(60)
        assert update.digest in stalled(fed)
        assert "put it back from a backup" in stalled(fed)
        path.write_bytes(content)
        fed.finish()
        assert fed.encoder_sha256 == undisturbed


def test_a_journal_that_is_older_than_the_figures_is_not_resumed_until_the_newer_one_is_back(tmp_path, undisturbed):
    """Copied in round 1 and put back in round 3: its checkpoint is gone, and with one it would repeat rounds unseen."""
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.record.round == 1)
        fed.state.journal.copy_to(tmp_path / "older.db")
        first = fed.state.blobs.path(fed.record.checkpoint)
        shutil.copy(first, tmp_path / "checkpoint")
        fed.until(lambda: fed.record.round == 2)
        fed.state.journal.copy_to(tmp_path / "newer.db")
        fed.kill_coordinator()
        journal = fed.config.state / "journal.db"
        shutil.copy(tmp_path / "older.db", journal)
        fed.start_coordinator()
        fed.wait(30)
        assert first.name in stalled(fed), "the checkpoint of round 1"
        shutil.copy(tmp_path / "checkpoint", first)
        fed.wait(30)
        assert "metrics.jsonl has round 2, the last closed one" in stalled(fed)
        assert "journal.db-wal" in stalled(fed)
        fed.kill_coordinator()
        shutil.copy(tmp_path / "newer.db", journal)
        fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert [line["round"] for line in fed.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("damage", ["cut to nothing", "missing", "without its log", "a page of zeros"])
def test_a_damaged_journal_is_refused_and_the_run_resumes_with_its_copy(tmp_path, undisturbed, damage):
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.record.round == 2)
        journal = fed.config.state / "journal.db"
        fed.state.journal.copy_to(tmp_path / "copy.db")
        shutil.copy(journal, tmp_path / "without-log.db")  # while it is open: the log has the newest entries
        fed.kill_coordinator()
        whole = journal.read_bytes()
        if damage == "missing":
            journal.unlink()
        elif damage == "cut to nothing":
            journal.write_bytes(b"")
        elif damage == "without its log":
            shutil.copy(tmp_path / "without-log.db", journal)
        else:
            journal.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
        for use in (lambda: StateFolder(fed.config.state).open("me"), lambda: StateFolder(fed.config.state).look()):
            with pytest.raises(StateError, match=r"journal\.db.*(backup|start the coordinator once)"), use():
                pass
        for path in fed.config.state.glob("journal.db*"):
            path.unlink()
        shutil.copy(tmp_path / "copy.db", journal)
        fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == undisturbed


def test_a_copy_of_the_journal_is_one_whole_file(tmp_path):
    """SQLite's own integrity check, on the copy alone."""
    with StateFolder(tmp_path / "state").open("me") as state:
        for seed in range(50):
            state.journal.request_run(fact_of("run_requested", {"seed": seed}))
        state.journal.copy_to(tmp_path / "copy.db")
    with contextlib.closing(sqlite3.connect(f"file:{tmp_path / 'copy.db'}?mode=ro", uri=True)) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert copy.execute("SELECT count(*) FROM entries").fetchone() == (50,)
