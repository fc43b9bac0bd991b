"""Files that cannot be read or written hold a run up and never end it: it says so, and resumes by itself."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil

import pytest
from federation_disturbances import Stranger
from federation_harness import Federation, undisturbed_hash

from coordinator.cli.status import status as status_command
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.service import status
from coordinator.state import store
from coordinator.state.store import StateFolder
from coordinator.views.runs import replay
from edge_agent.core.errors import StateError
from edge_agent.wire.messages import down


def full(*_arguments, **_options):
    raise OSError(errno.ENOSPC, "No space left on device", "/srv/state/blobs/x")


@contextlib.contextmanager
def full_disk(monkeypatch):
    """No blob, and no status, can be written in a new file."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", full)
        patch.setattr(status, "write_atomic", full)
        yield


def status_file(fed):
    return json.loads((fed.config.state / "status.json").read_bytes())


@contextlib.contextmanager
def fleet(folder):
    """Three agents that train for 1 s; all of them are needed."""
    with Federation(folder, agents=(), cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=1)
        yield fed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_hash(fleet, tmp_path_factory.mktemp("undisturbed"))


def trained(fed):
    return {name: [number for _, number, what in tasks.done if what == "train"] for name, tasks in fed.tasks.items()}


def test_a_full_disk_at_a_checkpoint_stalls_the_run_until_there_is_room(tmp_path, monkeypatch, undisturbed, caplog):
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_closed", round=1))
        with full_disk(monkeypatch):
            fed.wait(300)
            assert not fed.record.is_over
            said = status_file(fed)
            assert said["run"]["id"] == fed.run
            assert "No space left on device: make room on that disk" in said["run"]["stalled"]["reason"]
            assert "/srv/state/blobs/x" in said["storage"]
            assert said["waiting"]["for"].startswith(f"{fed.run} is stalled: ")
            warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(warned) <= 2 * 6, "once a minute for each cause"
        assert fed.until(lambda: fed.entries("round_closed", round=2)) <= 16
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert trained(fed) == {name: [1, 2, 3] for name in fed.tasks}, "nothing was done twice"
        fed.wait(20)
        assert status_file(fed)["storage"] is None


def test_both_tables_of_the_status_command_tell_of_a_stalled_run(tmp_path, monkeypatch, capsys):
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_closed", round=1))
        with full_disk(monkeypatch):
            fed.wait(20)
            status_command(state=fed.config.state, as_json=True)
            found = json.loads(capsys.readouterr().out)
            assert (found["runs"][0]["status"], found["runs"][0]["round"]) == ("stalled", 1)
            status_command(state=fed.config.state)
            shown = capsys.readouterr().out
    assert "storage: /srv/state/blobs/x: No space left on device: make room on that disk." in shown
    assert "stalled" in shown.split("runs")[-1]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_checkpoint_that_is_not_sound_at_a_restart_stalls_the_run_until_it_is_put_back(tmp_path, undisturbed, damage):
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_closed", round=2))
        path = fed.state.blobs.path(fed.record.checkpoint)
        fed.kill_coordinator()
        content = path.read_bytes()
        path.unlink() if damage == "missing" else path.write_bytes(content[:-1] + b"x")
        for _ in range(2):
            fed.start_coordinator()
            fed.wait(120)
            assert not fed.record.is_over
            assert "put it back from a backup" in status_file(fed)["run"]["stalled"]["reason"]
            fed.kill_coordinator()
        fed.start_coordinator()
        fed.wait(30)
        path.write_bytes(content)
        assert fed.finish() < 60
        assert fed.encoder_sha256 == undisturbed


def test_an_update_that_is_offered_while_the_run_is_stalled_is_kept_by_its_agent(tmp_path):
    """Refused as late, it would be thrown away and trained again."""
    with Federation(tmp_path, agents=1, cohort={"min_agents": 2}) as fed:
        slow = Stranger(fed, "slow")
        slow.hello()
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("update_accepted"))
        path = fed.state.blobs.path(fed.record.checkpoint)
        content = path.read_bytes()
        start = fed.final
        fed.kill_coordinator()
        path.unlink()
        fed.start_coordinator()
        slow.hello()
        fed.wait(2)
        slow.heard()
        slow.offer(start)
        fed.settle()
        assert not slow.heard(down.Receipt, down.Grant)
        path.write_bytes(content)
        fed.wait(20)
        assert slow.deliver(start).accepted
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "slow"]


def test_a_summary_that_cannot_be_written_holds_the_end_up(tmp_path, monkeypatch, undisturbed):
    with fleet(tmp_path) as fed:
        with monkeypatch.context() as patch:
            patch.setattr(store, "write_json", full)
            fed.request(rounds=3)
            fed.wait(60)
            assert (fed.record.is_over, fed.record.round) == (False, 3)
            assert "No space left on device" in status_file(fed)["storage"]
            finished = [number for _, number, what in fed.tasks["a0"].done if what == "personalize"]
            assert len(finished) < 10, "tried again with growing pauses"
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert fed.state.run(fed.run).summary()["status"] == "finished"


def test_a_journal_that_cannot_be_written_ends_neither_process_nor_run(tmp_path, monkeypatch, undisturbed):
    """Every append fails for a minute: a round cannot be opened, an update not noted, a cancellation not done."""
    from edge_agent.core.errors import StateError

    def refuse(*_arguments, **_columns):
        raise StateError("journal.db: the journal cannot be read or written (database or disk is full)")

    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_closed", round=1))
        with monkeypatch.context() as patch:
            patch.setattr(SqliteJournal, "append", refuse)
            fed.wait(60)
            assert status_file(fed)["storage"].startswith("journal.db: the journal cannot be read")
        fed.finish()
        assert fed.encoder_sha256 == undisturbed


def test_a_stalled_run_can_be_cancelled_and_the_next_one_goes_on(tmp_path):
    with fleet(tmp_path) as fed:
        first = fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_closed", round=1))
        path = fed.state.blobs.path(fed.record.checkpoint)
        fed.kill_coordinator()
        path.unlink()
        fed.start_coordinator()
        fed.wait(10)
        second = fed.request(rounds=1)
        fed.wait(10)
        assert replay(fed.state.journal, second).status == "requested"
        fed.state.journal.append(fact_of("cancel_requested", {"reason": "the backup is lost, too"}), run=first)
        fed.finish()
        assert replay(fed.state.journal, first).status == "cancelled"
        assert replay(fed.state.journal, second).status == "finished"


@pytest.mark.parametrize("recreated", [False, True], ids=["removed", "recreated"])
def test_a_coordinator_whose_state_folder_is_removed_ends_and_leaves_no_half_state(tmp_path, recreated):
    """Before, it went on with a journal that no file system showed, and wrote blobs and figures into a new folder."""
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_closed", round=1))
        folder = fed.config.state
        began = fed.clock.now
        shutil.rmtree(folder)
        if recreated:
            with StateFolder(folder).open("another coordinator") as other:
                other.journal.append(fact_of("coordinator_started", {}))
        before = sorted(folder.rglob("*"))
        with pytest.raises(StateError, match="this state folder was removed or replaced while it was in use"):
            fed.wait(5)
        assert fed.clock.now - began < 1
        fed.coordinator.close()
        assert sorted(folder.rglob("*")) == before
        assert folder.exists() is recreated


def test_a_disk_that_was_full_is_in_the_status_no_longer_than_that(tmp_path, monkeypatch):
    with fleet(tmp_path) as fed:
        fed.request(rounds=3)
        with full_disk(monkeypatch):
            fed.until(lambda: fed.coordinator.storage.stall is not None)
            assert "make room on that disk" in fed.coordinator.status()["storage"]
        fed.finish()
        assert fed.coordinator.status()["storage"] is None, "the run is over, so there was room for its end"


def test_an_update_that_arrives_shows_that_a_full_disk_has_room_again(tmp_path):
    with fleet(tmp_path) as fed:
        fed.request(rounds=1)
        fed.coordinator.storage.note(OSError(errno.ENOSPC, "No space left on device", "/srv/state"), "a message of a0")
        assert "make room" in fed.coordinator.status()["storage"]
        fed.until(lambda: fed.entries("update_accepted"))
        assert fed.coordinator.status()["storage"] is None


def test_another_file_error_stays_in_the_status_for_a_while(tmp_path):
    with fleet(tmp_path) as fed:
        fed.coordinator.storage.note(OSError(errno.EIO, "Input/output error", "/srv/state"), "a message of a0")
        fed.coordinator.storage.wrote()
        assert "Input/output error" in fed.coordinator.status()["storage"]
