"""A backup is consistent while a coordinator serves, and a coordinator that starts on it ends in the same bits."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation

from coordinator.cli import backup as cli_backup
from coordinator.cli.backup import backup
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.runs.audit import audit
from coordinator.state import backup as backups
from coordinator.state.backup import MARKER, back_up
from coordinator.state.store import StateFolder, blobs_needed
from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.storage import sha256_file

ROUNDS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with Federation(tmp_path_factory.mktemp("undisturbed"), task=WIDE_TASK) as fed:
        fed.request(rounds=ROUNDS)
        fed.finish()
        return fed.encoder_sha256


@contextlib.contextmanager
def slow_fleet(folder, **options):
    """Agents that train for one second, so that the clock can stop between rounds."""
    with Federation(folder, agents=(), cohort={"min_agents": 3}, **options) as fed:
        for name, seconds in (("a0", 1), ("a1", 2), ("a2", 3)):
            fed.add(name, seconds=seconds)
        yield fed


def assert_whole(folder):
    """The journal's chain is unbroken, and exactly the blobs that it needs are there, with their hashes."""
    with StateFolder(folder).open("a restored coordinator") as state:
        needed = blobs_needed(state)
        on_disk = {path.name for path in state.blobs.folder.glob("*") if path.is_file()}
        assert on_disk == needed
        assert all(sha256_file(state.blobs.path(sha)) == sha for sha in needed)


def restored(fed, copy, folder):
    """The coordinator is lost with its state folder; another one starts on a copy of the backup."""
    shutil.rmtree(fed.config.state)
    fed.kill_coordinator()
    shutil.copytree(copy, folder)
    fed.config = fed.config.model_copy(update={"state": folder})
    fed.start_coordinator()


@pytest.mark.parametrize("steps", [3, 40, 90, 160, 230, 300, 370])
def test_a_run_resumes_from_a_backup_and_ends_in_the_same_bits(tmp_path, undisturbed, steps):
    """Taken after so many steps of everybody, in any phase of a round; lost two rounds, or none, later."""
    with Federation(tmp_path, task=WIDE_TASK) as fed:
        fed.request(rounds=ROUNDS)
        fed.run_id  # noqa: B018 - known before the journal is closed
        for _ in range(steps):
            if not fed.step():
                fed.clock.now += 0.1
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
        closed = fed.record.round
        fed.until(lambda: fed.record.round >= min(ROUNDS, closed + 2))
        assert_whole(tmp_path / "backup")
        restored(fed, tmp_path / "backup", tmp_path / "elsewhere")
        assert fed.record.round == closed
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert [line["round"] for line in fed.metrics()] == list(range(1, ROUNDS + 1))
        assert [entry.round for entry in fed.entries("round_closed")] == list(range(1, ROUNDS + 1))


def test_a_run_that_an_earlier_version_began_is_copied_without_the_state_it_began_with(tmp_path):
    """Earlier versions removed that state after the second round; without it nothing is damaged."""
    with slow_fleet(tmp_path) as fed:
        fed.request(rounds=ROUNDS)
        fed.until(lambda: fed.record.round == 2)
        assert fed.record.status == "running"
        fed.state.blobs.path(fed.record.start).unlink()
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
            assert audit(state, fed.run).breaks == []
        assert_whole(tmp_path / "backup")
        restored(fed, tmp_path / "backup", tmp_path / "elsewhere")
        fed.finish()
        assert fed.record.status == "finished"


def test_backups_beside_a_coordinator_under_load_are_all_whole(tmp_path, undisturbed):
    """A thread makes one after another while rounds are opened, closed and their updates removed."""
    made = []
    stop = threading.Event()
    failures = []

    def make(state_path):
        while not stop.is_set():
            target = tmp_path / f"backup-{len(made)}"
            try:
                with StateFolder(state_path).look() as state:
                    back_up(state, target)
            except Exception as error:  # noqa: BLE001 - the main thread compares
                failures.append(error)
                return
            made.append(target)

    with Federation(tmp_path, task=WIDE_TASK) as fed:
        fed.request(rounds=ROUNDS)
        thread = threading.Thread(target=make, args=(fed.config.state,))
        thread.start()
        try:
            while len(made) < 8 and not failures:
                fed.request(rounds=ROUNDS)
                fed.finish()
        finally:
            stop.set()
            thread.join()
        assert failures == []
        assert fed.encoder_sha256 == undisturbed
        restored(fed, made[-1], tmp_path / "elsewhere")
        for run in fed.state.journal.runs():
            fed.run = run
            fed._looked_at = -1
            fed.finish()
            assert fed.encoder_sha256 == undisturbed
    for target in made:
        assert_whole(target)


def test_a_blob_that_goes_between_snapshot_and_copy_is_of_no_later_snapshot(tmp_path, monkeypatch):
    """The round closes just after the journal was read: its updates are gone, so another snapshot is taken."""
    with slow_fleet(tmp_path) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.entries("update_accepted"))
        real = SqliteJournal.copy_to
        taken = []

        def copy_to(journal, path):
            real(journal, path)
            taken.append(path)
            if len(taken) == 1:
                number = fed.record.round
                fed.until(lambda: fed.record.round > number)

        monkeypatch.setattr(SqliteJournal, "copy_to", copy_to)
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
        assert len(taken) == 2
    assert_whole(tmp_path / "backup")


def test_a_second_backup_copies_only_what_is_new_and_removes_what_is_not_needed(tmp_path):
    with slow_fleet(tmp_path, task=WIDE_TASK) as fed:
        fed.request(rounds=2)
        fed.until(lambda: fed.record.round == 1)
        with StateFolder(fed.config.state).look() as state:
            first = back_up(state, tmp_path / "backup")
            again = back_up(state, tmp_path / "backup")
        assert again.copied_bytes == 0
        fed.finish()
        with StateFolder(fed.config.state).look() as state:
            last = back_up(state, tmp_path / "backup")
        assert 0 < last.copied_bytes <= last.size_bytes
        assert last.entries > first.entries
        left = [path.name for path in (fed.config.state / "backup").iterdir()]
        assert left == ["lock"], "nothing is left in the state folder"
    assert_whole(tmp_path / "backup")
    assert json.loads((tmp_path / "backup" / MARKER).read_bytes())["blobs"] == 1


def test_a_backup_shares_no_file_with_the_state_folder(tmp_path):
    """Damage of the disk in one of them is no damage of the other."""
    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        fed.finish()
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
        inodes = {path.stat().st_ino for path in fed.config.state.rglob("*") if path.is_file()}
        assert not inodes & {path.stat().st_ino for path in (tmp_path / "backup").rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_folder_with_a_lost_blob_has_no_new_backup_and_the_one_before_stays(tmp_path, damage):
    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        fed.finish()
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
            path = state.blobs.path(fed.record.checkpoint)
            path.unlink() if damage == "missing" else path.write_bytes(b"x")
            with pytest.raises(StateError, match="put it back from an earlier backup"):
                back_up(state, tmp_path / "backup")
        assert_whole(tmp_path / "backup")
        shutil.copy(tmp_path / "backup" / "blobs" / path.name, path)
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")


def test_a_backup_never_replaces_what_is_no_backup_of_this_folder(tmp_path):
    with Federation(tmp_path / "one") as one, Federation(tmp_path / "two") as two:
        one.request(rounds=1)
        two.request(rounds=1)
        with StateFolder(one.config.state).look() as state:
            with pytest.raises(UsageError, match="journal of another state folder"):
                back_up(state, two.config.state)
            with pytest.raises(UsageError, match="is inside the state folder"):
                back_up(state, one.config.state / "backups" / "today")
            (tmp_path / "photos").mkdir()
            (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
            with pytest.raises(UsageError, match="neither empty nor a backup"):
                back_up(state, tmp_path / "photos")
            back_up(state, tmp_path / "backup")
            with StateFolder(tmp_path / "backup").open("a coordinator that continues it") as other:
                other.journal.append(fact_of("coordinator_started", {}))
            with pytest.raises(UsageError, match="was continued since"):
                back_up(state, tmp_path / "backup")


@pytest.mark.parametrize("name", ["runs/resnet/events", "blobs/photos.zip", "hosted/page.html", "lock", "backup.json"])
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_is(tmp_path, name):
    """With names as in a backup, but no marker of one."""
    target = tmp_path / "experiments"
    (target / name).parent.mkdir(parents=True)
    (target / name).write_text("weeks of work")
    with StateFolder(tmp_path / "state").open("a coordinator") as state:
        state.journal.append(fact_of("coordinator_started", {}))
        with pytest.raises(UsageError, match="neither empty nor a backup of this state folder"):
            back_up(state, target)
    assert [(path, path.read_text()) for path in target.rglob("*") if path.is_file()] == [
        (target / name, "weeks of work")
    ]


def test_an_incomplete_backup_of_another_state_folder_is_refused(tmp_path, monkeypatch):
    with StateFolder(tmp_path / "one").open("one") as one, StateFolder(tmp_path / "two").open("two") as two:
        one.journal.append(fact_of("coordinator_started", {"boot": "one"}))
        two.journal.append(fact_of("coordinator_started", {"boot": "two"}))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(backups, "write_atomic", mock.Mock(side_effect=KeyboardInterrupt))
            back_up(one, tmp_path / "backup")
        with pytest.raises(UsageError, match="neither empty nor a backup of this state folder"):
            back_up(two, tmp_path / "backup")
        assert back_up(one, tmp_path / "backup").entries == 1


def test_a_folder_around_the_state_folder_is_refused(tmp_path):
    """Called 'runs', it would be taken for files of an earlier backup and removed."""
    with StateFolder(tmp_path / "project" / "runs").open("a coordinator") as state:
        state.journal.append(fact_of("coordinator_started", {}))
        with pytest.raises(UsageError, match="is above the state folder"):
            back_up(state, tmp_path / "project")
        assert state.journal.is_in_place


def test_a_backup_that_was_killed_is_completed_by_the_next_one(tmp_path, monkeypatch):
    """At each of its first writes: the marker, the blob, the journal, the results."""

    class Gone(BaseException):
        pass

    with slow_fleet(tmp_path) as fed:
        fed.request(rounds=2)
        fed.until(lambda: fed.record.round == 1)
        count = [0]

        def dying(write):
            def or_die(*arguments, **options):
                count[0] += 1
                if count[0] == dies_at:
                    raise Gone
                write(*arguments, **options)

            return or_die

        for dies_at in range(1, 5):
            count[0] = 0
            target = tmp_path / f"backup-{dies_at}"
            with StateFolder(fed.config.state).look() as state:
                with monkeypatch.context() as patch, pytest.raises(Gone):
                    for name in ("write_atomic", "write_json"):
                        patch.setattr(backups, name, dying(getattr(backups, name)))
                    back_up(state, target)
                assert dies_at == 1 or json.loads((target / MARKER).read_bytes())["is_complete"] is False
                back_up(state, target)
            assert json.loads((target / MARKER).read_bytes())["is_complete"] is True
            assert_whole(target)


def test_client_state_of_hosted_clients_is_copied_and_their_caches_are_not(tmp_path):
    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        hosted = fed.config.state / "hosted"
        kept = "h0/runs/run-0001/kept-0000001.safetensors"
        left_out = ("compute.log", "h0/lock", f"h0/cache/{64 * 'a'}")
        for name in (kept, *left_out):
            (hosted / name).parent.mkdir(parents=True, exist_ok=True)
            (hosted / name).write_bytes(b"x")
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
    files = [path for path in (tmp_path / "backup" / "hosted").rglob("*") if path.is_file()]
    assert [path.relative_to(tmp_path / "backup" / "hosted") for path in files] == [Path(kept)]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_where_there_are_no_hard_links_blobs_are_copied(tmp_path, monkeypatch, code):
    def no_link(*_paths):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        fed.finish()
        with StateFolder(fed.config.state).look() as state:
            back_up(state, tmp_path / "backup")
    assert_whole(tmp_path / "backup")


def test_the_command_says_how_to_restore(tmp_path, capsys):
    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        fed.finish()
        backup(tmp_path / "backup", state=fed.config.state)
        said = capsys.readouterr().out
        assert "1 run, 1 blob" in said
        assert "to restore, stop the coordinator" in said
        backup(tmp_path / "backup", state=fed.config.state, as_json=True)
        result = json.loads(capsys.readouterr().out)
        assert (result["runs"], result["blobs"], result["copied_bytes"]) == (1, 1, 0)


def test_repeated_backups_follow_the_coordinator_and_report_what_fails(tmp_path, capsys, monkeypatch):
    """The target's disk is away once; the next one is made all the same."""
    with Federation(tmp_path, task=WIDE_TASK) as fed:
        pauses = []
        made = []

        class Stop(threading.Event):
            signal = None

            def wait(self, seconds):
                pauses.append(seconds)
                fed.request(rounds=1)
                fed.finish()
                return len(pauses) == 4

        real = cli_backup.back_up

        def back_up_once_broken(state, target):
            if len(pauses) == 2:
                raise OSError(errno.EIO, "Input/output error", str(target))
            made.append(real(state, target))
            return made[-1]

        monkeypatch.setattr(cli_backup, "back_up", back_up_once_broken)
        monkeypatch.setattr(cli_backup, "stop_on_signals", lambda: contextlib.nullcontext(Stop()))
        backup(tmp_path / "backup", state=fed.config.state, every=60)
        assert pauses == [60] * 4
        assert [one.runs for one in made] == [0, 1, 3]
        assert "no backup was made, the one before stays: " in capsys.readouterr().err
