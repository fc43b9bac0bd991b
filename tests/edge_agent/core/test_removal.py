"""What is removed with everything in it: folders that this program has made, and nothing else.

Every folder here is a decoy below the test's own temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from edge_agent.agent.tasks.resources import Resources
from edge_agent.bundle import installed
from edge_agent.core import locks, own_folders
from edge_agent.core import storage as storage_module
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.own_folders import MARK, FolderKind
from edge_agent.personal.encoder import remove_features
from edge_agent.run_folder.layout import RUN_FOLDER, remove_all_runs, remove_ended_runs

KIND = FolderKind("decoy")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"folder"
        for path in sorted(folder.rglob("*"))
    }


def make_decoy(folder: Path) -> dict[str, bytes]:
    """Somebody's own files; returns what is there."""
    (folder / "photos" / "deep").mkdir(parents=True)
    (folder / "photos" / "one.txt").write_text("one")
    (folder / "photos" / "deep" / "two.txt").write_text("two")
    return contents(folder)


def test_importing_a_bundle_removes_no_folder_of_somebody_else(make_bundle, tmp_path, caplog):
    root = tmp_path / "state" / "bundles"
    before = make_decoy(root)
    installed.install(make_bundle("a.hwb").path, root)
    after = contents(root)
    assert {name: after.get(name) for name in before} == before
    assert "photos" in caplog.text, "nobody is told which folder stays"


def test_installing_through_a_link_is_refused_and_leaves_the_other_folder_as_it_was(make_bundle, tmp_path):
    decoy = tmp_path / "somebody"
    before = make_decoy(decoy)
    root = tmp_path / "state" / "bundles"
    root.parent.mkdir()
    root.symlink_to(decoy)
    with pytest.raises(UsageError, match="a symbolic link, expected a folder"):
        installed.install(make_bundle("a.hwb").path, root)
    with pytest.raises(UsageError, match="a symbolic link, expected a folder"):
        installed.remove_unused(root)
    assert contents(decoy) == before


@pytest.mark.parametrize("link", ["state", "state/bundles"])
def test_the_command_refuses_a_linked_state_folder_with_exit_code_2(make_bundle, tmp_path, link):
    decoy = tmp_path / "somebody"
    before = make_decoy(decoy)
    place = tmp_path / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(decoy)
    made = make_bundle("a.hwb")
    command = [sys.executable, "-m", "edge_agent", "import", str(made.path), "--state", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "a symbolic link, expected a folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(decoy) == before


def test_bundles_that_are_not_kept_are_removed(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    folders = [installed.install(make_bundle(f"{n}.hwb", seed=n).path, root, keep=2).folder for n in range(3)]
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_a_bundle_that_an_earlier_version_unpacked_is_still_removed(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    folders = [installed.install(make_bundle(f"{n}.hwb", seed=n).path, root, keep=2).folder for n in range(2)]
    for folder in folders:
        (folder / MARK).unlink()
        (folder / ".made").mkdir()
    installed.install(make_bundle("3.hwb", seed=3).path, root, keep=1)
    assert [folder.exists() for folder in folders] == [False, False]


@pytest.mark.parametrize("change", ["renamed", "own_file", "linked_file", "damaged_manifest"])
def test_what_only_resembles_an_earlier_bundle_stays(make_bundle, tmp_path, change):
    root = tmp_path / "bundles"
    folder = installed.install(make_bundle("a.hwb").path, root).folder
    (folder / MARK).unlink()
    if change == "renamed":
        folder = folder.rename(root / "copy")
    elif change == "own_file":
        (folder / "notes.txt").write_text("mine")
    elif change == "linked_file":
        name = next(path.name for path in folder.glob("*.onnx"))
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    else:
        (folder / "manifest.json").write_text("{}")
    installed.install(make_bundle("b.hwb", seed=1).path, root, keep=1)
    assert folder.exists()


def test_a_folder_in_the_way_of_a_bundle_stays_and_the_bundle_goes_beside_it(make_bundle, tmp_path, caplog):
    made = make_bundle("a.hwb")
    root = tmp_path / "bundles"
    in_the_way = root / made.manifest.bundle_id[:24]
    before = make_decoy(in_the_way)
    bundle = installed.install(made.path, root)
    assert bundle.folder != in_the_way
    assert installed.current(root).id == made.manifest.bundle_id
    assert contents(in_the_way) == before
    assert in_the_way.name in caplog.text


def test_the_mark_of_one_folder_makes_no_other_one_ours(tmp_path):
    made = tmp_path / "made"
    own_folders.make_folder(made, KIND)
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    (copy / "own.txt").write_text("mine")
    assert not own_folders.remove_folder(copy, KIND)
    assert not own_folders.remove_folder(made, FolderKind("another kind"))
    assert (copy / "own.txt").read_text() == "mine"
    assert own_folders.remove_folder(made, KIND)
    assert not made.exists()


@pytest.mark.parametrize(
    "mark", ["", "{", "[]", "{}", '{"kind": "decoy", "folder": "made", "sha256": "0"}', "[" * 4000]
)
def test_a_damaged_or_forged_mark_removes_nothing(tmp_path, mark):
    folder = tmp_path / "made"
    before = make_decoy(folder)
    (folder / MARK).write_text(mark)
    assert not own_folders.remove_folder(folder, KIND)
    assert contents(folder) == {MARK: mark.encode(), **before}


def test_a_mark_that_is_a_link_counts_as_none(tmp_path):
    made = tmp_path / "made"
    other = tmp_path / "elsewhere"
    own_folders.make_folder(made, KIND)
    shutil.move(made / MARK, other)
    (made / MARK).symlink_to(other)
    assert not own_folders.remove_folder(made, KIND)


def test_links_inside_a_folder_are_removed_and_not_followed(tmp_path):
    decoy = tmp_path / "somebody"
    before = make_decoy(decoy)
    made = tmp_path / "made"
    own_folders.make_folder(made, KIND)
    (made / "below").mkdir()
    (made / "below" / "folder").symlink_to(decoy)
    (made / "file").symlink_to(decoy / "photos" / "one.txt")
    (made / "dangling").symlink_to(tmp_path / "nothing")
    assert own_folders.remove_folder(made, KIND)
    assert not made.exists()
    assert contents(decoy) == before


@pytest.mark.parametrize("depth", ["folder", "parent"])
def test_a_link_in_place_of_a_folder_or_of_its_parent_is_not_followed(tmp_path, depth, caplog):
    real = tmp_path / "real"
    own_folders.make_folder(real / "made", KIND)
    (real / "made" / "file").write_text("x")
    if depth == "parent":
        (tmp_path / "link").symlink_to(real)
        path = tmp_path / "link" / "made"
    else:
        path = tmp_path / "made"
        path.symlink_to(real / "made")
    assert not own_folders.remove_folder(path, KIND)
    assert (real / "made" / "file").read_text() == "x"
    assert "links are not followed" in caplog.text


def test_a_folder_that_is_swapped_for_a_link_during_the_removal_leads_nowhere(tmp_path, monkeypatch):
    """The check sees the folder; then somebody puts a link to another one into its place."""
    decoy = tmp_path / "somebody"
    before = make_decoy(decoy)
    made = tmp_path / "made"
    own_folders.make_folder(made, KIND)
    walk = os.fwalk

    def swap_then_walk(*arguments, **options):
        if not made.is_symlink():
            made.rename(tmp_path / "moved")
            made.symlink_to(decoy)
        return walk(*arguments, **options)

    monkeypatch.setattr(os, "fwalk", swap_then_walk)
    own_folders.remove_folder(made, KIND)
    assert contents(decoy) == before


def test_a_removal_that_was_interrupted_is_completed_by_the_next(tmp_path, monkeypatch):
    made = tmp_path / "made"
    own_folders.make_folder(made, KIND)
    (made / "file").write_text("x")
    real = os.rmdir
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert not own_folders.remove_folder(made, KIND)
    assert (made / MARK).exists(), "the mark has to go last"
    assert os.rmdir is real
    assert own_folders.remove_folder(made, KIND)
    assert own_folders.remove_folder(made, KIND), "what is gone is gone"


def test_runs_are_removed_and_folders_of_somebody_else_among_them_stay(tmp_path):
    runs = tmp_path / "runs"
    before = make_decoy(runs)
    (runs / "link").symlink_to(runs / "photos")
    for number in range(3):
        own_folders.make_folder(runs / f"run-{number}", RUN_FOLDER)
        os.utime(runs / f"run-{number}", (number, number))
    earlier = runs / "run-of-before"
    earlier.mkdir()
    (earlier / "kept-0000001.safetensors").write_text("x")
    os.utime(earlier, (9, 9))
    assert remove_ended_runs(runs, "run-new", 3) == ["run-0", "run-1"]
    assert remove_all_runs(runs) == 2
    (runs / "link").unlink()
    assert contents(runs) == before


def test_the_folder_of_a_run_whose_precision_was_timed_is_removed(tmp_path):
    """The file with the times is the first that such a run writes, and earlier versions marked no folder."""
    earlier = tmp_path / "runs" / "run-of-before"
    earlier.mkdir(parents=True)
    (earlier / "precision.json").write_text("{}")
    (earlier / "kept-0000001.safetensors").write_text("x")
    os.utime(earlier, (1, 1))
    config = AgentConfig(id="a", state=tmp_path, data=DataConfig(source="none"))
    session = mock.Mock()
    session.step_times.return_value.as_json.return_value = {"precision": "bfloat16"}
    resources = Resources(config)
    resources.precision("run-new", session)
    resources.state_files("run-new").write(1, {"head.weight": np.zeros(1, np.float32)}, {})
    assert remove_ended_runs(tmp_path / "runs", "run-newer", 1) == ["run-new", "run-of-before"]
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.skipif(os.name == "nt", reason="folders have no such bits there")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_a_state_folder_that_everybody_can_write_is_refused(tmp_path, mode):
    state = tmp_path / "state"
    (state / "bundles").mkdir(parents=True)
    state.chmod(mode)
    with pytest.raises(UsageError, match=r"others can write it.*chmod go-w"), locks.folder_lock(state, "test"):
        pass


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "chown") or os.getuid() != 0, reason="only root gives groups")
def test_a_state_folder_that_another_group_can_write_is_refused(tmp_path):
    state = tmp_path / "state"
    (state / "bundles").mkdir(parents=True)
    os.chown(state, -1, os.getegid() + 1)
    state.chmod(0o770)
    with pytest.raises(UsageError, match="others can write it"), locks.folder_lock(state, "test"):
        pass


@pytest.mark.skipif(os.name == "nt", reason="folders have no such bits there")
def test_an_empty_folder_that_everybody_can_write_is_closed_and_used(tmp_path):
    """A volume that was just mounted for a container looks so."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    with locks.folder_lock(state, "test"):
        assert state.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="the link has to belong to root")
def test_the_link_that_systemd_makes_for_a_state_folder_is_followed(make_bundle, tmp_path):
    """DynamicUser=yes, as in the unit files: /var/lib/NAME is a link to private/NAME."""
    real = tmp_path / "private" / "headwater-agent"
    real.mkdir(parents=True)
    state = tmp_path / "headwater-agent"
    state.symlink_to("private/headwater-agent")
    with locks.folder_lock(state, "test"):
        installed.install(make_bundle("a.hwb").path, state / "bundles")
        own_folders.make_folder(state / "candidate", KIND)
        assert own_folders.remove_folder(state / "candidate", KIND)
    assert json.loads((real / "bundles" / "current.json").read_text())["bundles"]


def test_only_temporary_files_of_ours_are_swept(tmp_path):
    ours = [".head.json.0123abcd.tmp", ".0123abcd.tmp", ".x.ort.4711.tmp", ".x.ort.4711.onnx.tmp"]
    theirs = [".notes.tmp", "a.tmp", ".draft.odt.tmp"]
    for name in (*ours, *theirs):
        (tmp_path / name).write_text("x")
    assert storage_module.sweep(tmp_path) == len(ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(theirs)


def test_a_folder_of_the_same_disk_that_is_mounted_below_stays_whole(tmp_path, monkeypatch, caplog):
    """``mount --bind`` gives a folder of the same device; its mount has another number."""
    made = tmp_path / "made"
    own_folders.make_folder(made, KIND)
    before = make_decoy(made / "mounted")
    mounted = (made / "mounted").stat().st_ino
    real = own_folders._mount_of

    def mount_of(descriptor):
        device, _ = real(descriptor)
        return device, 2 if os.fstat(descriptor).st_ino == mounted else 1

    monkeypatch.setattr(own_folders, "_mount_of", mount_of)
    assert not own_folders.remove_folder(made, KIND)
    assert contents(made / "mounted") == before
    assert "another file system is mounted below it" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="the system does not say it")
def test_the_mount_of_an_opened_folder_is_known(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        device, mount = own_folders._mount_of(descriptor)
    finally:
        os.close(descriptor)
    assert device == tmp_path.stat().st_dev
    assert mount is not None


def test_a_folder_of_an_earlier_version_is_marked_where_it_was_opened(tmp_path, monkeypatch):
    """Somebody puts a link to another folder into its place, after the check and before the mark is written."""
    decoy = tmp_path / "somebody"
    before = make_decoy(decoy)
    made = tmp_path / "made"
    made.mkdir()
    real = own_folders._read_mark

    def swap_then_read(folder, opened):
        result = real(folder, opened)
        if not made.is_symlink() and len(calls) == 1:
            made.rename(tmp_path / "moved")
            made.symlink_to(decoy)
        calls.append(folder)
        return result

    calls: list[Path] = []
    monkeypatch.setattr(own_folders, "_read_mark", swap_then_read)
    own_folders.remove_folder(made, FolderKind("decoy", lambda _: True))
    assert contents(decoy) == before


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("name", ["head", "runs", "cache", "features", "blobs"])
def test_a_state_folder_with_a_link_to_a_folder_in_it_is_refused(tmp_path, name):
    """Files in these folders are removed by their names, which files of other programs may have, too."""
    state = tmp_path / "state"
    other = tmp_path / "other"
    state.mkdir()
    before = make_decoy(other)
    (state / name).symlink_to(other)
    with pytest.raises(UsageError, match="a symbolic link, expected a folder"), locks.folder_lock(state, "test"):
        pass
    assert contents(other) == before


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_the_lock_empties_no_file_of_somebody_else(tmp_path, kind):
    state = tmp_path / "state"
    other = tmp_path / "other.txt"
    state.mkdir()
    other.write_text("mine")
    if kind == "link":
        (state / "lock").symlink_to(other)
    elif kind == "hard link":
        os.link(other, state / "lock")
    else:
        os.mkfifo(state / "lock")
    with pytest.raises(StateError, match="cannot be used as a state folder"), locks.folder_lock(state, "test"):
        pass
    assert other.read_text() == "mine"


def test_files_that_only_begin_like_cached_features_stay(tmp_path):
    ours = [f"features-{'a' * 32}-{'b' * 4}-{'c' * 32}", f"features-{'a' * 32}-own-{'d' * 32}-{'b' * 4}-{'c' * 32}"]
    theirs = ["features-train", "features-of-2024-photos"]
    for name in (*ours, *theirs):
        (tmp_path / f"{name}.safetensors").write_text("x")
    assert remove_features(tmp_path, ()) == len(ours)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(theirs)
