"""What an agent keeps on its disk is bounded by count, size and free space, and its status shows it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from federation_harness import Federation

from edge_agent.agent import local_state
from edge_agent.agent.local_state import disk_usage, make_room
from edge_agent.agent.tasks.task_queue import TaskQueue
from edge_agent.agent.transfers import Downloads
from edge_agent.cli.agent import status
from edge_agent.core.children import InlineWorker
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.storage import write_tensors
from edge_agent.core.task import ImageInput, Task
from edge_agent.personal.encoder import trim_features
from edge_agent.wire.blobs.chunks import BlobCache, Outgoing, decode_frame
from edge_agent.wire.messages.down import Job

MB = 1 << 20
LETTER = {"cache": 0, "features": len("features-"), "runs": len("run-")}
"""Where the letter is in the name of a file, or of a run's folder."""


def feature_file(encoder, rows=0):
    """Return the name of a file of cached features: of an encoder, and of rows that a hash names."""
    return f"features-{encoder}-0000-{rows:032x}.safetensors"


class FakeDisk:
    """A disk on which so many bytes are free beside what lies in the state folder."""

    def __init__(self, state, free):
        self.state, self.total = state, free + self.used(state)

    @staticmethod
    def used(state):
        return sum(path.stat().st_size for path in state.rglob("*") if path.is_file())

    def usage(self, _folder):
        return SimpleNamespace(free=self.total - self.used(self.state))


@pytest.fixture
def config(tmp_path):
    return AgentConfig(state=tmp_path, data=DataConfig(source="none:"), min_free_bytes=10 * MB, features_bytes=2 * MB)


def put(path, age, size=MB):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    os.utime(path, (10_000 - age, 10_000 - age))
    return path


@pytest.fixture
def filled(config):
    """1 MiB each: three downloads and an unfinished one, three files of features, client state of three runs."""
    state = config.state
    for number, letter in enumerate("abc"):
        put(state / "cache" / (letter * 64), age=300 - number)
        put(state / "features" / feature_file(letter * 32), age=200 - number)
        put(state / "runs" / f"run-{letter}" / "kept-0000001.safetensors", age=100 - number)
        os.utime(state / "runs" / f"run-{letter}", (9900 + number, 9900 + number))
    put(state / "cache" / "partial" / f"{'d' * 64}.part", age=400)
    return state


def cache_of(config):
    return BlobCache(config.state / "cache", config.cache_bytes)


def left(state):
    """The files as ``kind/letter``."""
    files = [path.relative_to(state) for path in state.rglob("*") if path.is_file()]
    names = [(path.parts[0], path.parts[1] if path.parts[0] == "runs" else path.name) for path in files]
    return sorted(f"{kind}/{name[LETTER[kind]]}" for kind, name in names)


@pytest.mark.parametrize(
    "free, goes",
    [
        (14, set()),
        (13, {"cache/d"}),
        (12, {"cache/d", "cache/a"}),
        (9, {"cache/d", "cache/a", "cache/c", "features/a", "features/b"}),
        (8, {"cache/d", "cache/a", "cache/c", "features/a", "features/b", "features/c"}),
        (0, {"cache/d", "cache/a", "cache/c", "features/a", "features/b", "features/c"}),
    ],
)
def test_what_can_be_had_again_goes_first_and_what_is_in_use_stays(config, filled, monkeypatch, free, goes):
    """4 MiB are needed, 10 have to stay free; blob b is wanted, and each of the runs may be paused."""
    disk = FakeDisk(filled, free * MB)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    before = {*left(filled)}
    assert make_room(config, cache_of(config), 4 * MB, {"b" * 64}) == len(goes) * MB
    assert before - {*left(filled)} == goes


def at_replace(monkeypatch, act):
    """Have ``act`` done when a file is written and is about to be moved to its place."""
    replace = Path.replace

    def raced(path, target):
        monkeypatch.setattr(Path, "replace", replace)
        act()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", raced)


def test_features_that_are_being_written_are_not_removed(config, filled, monkeypatch):
    """The worker writes features while the loop makes room, and while another process has just fitted a head."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=0))
    path = filled / "features" / feature_file("e" * 32)
    rows = {"features": np.zeros((1000, 1000), np.float32)}
    at_replace(monkeypatch, lambda: make_room(config, cache_of(config), MB, ()))
    write_tensors(path, rows)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    last = put(path.parent / feature_file("d" * 32), age=-(10**10))
    at_replace(monkeypatch, lambda: trim_features(path.parent, 2 * MB, "f" * 64))
    write_tensors(path, rows)
    assert sorted(file.name for file in path.parent.iterdir()) == [last.name, path.name]


def test_what_is_removed_of_the_downloads_are_idle_blobs(config, monkeypatch):
    """One download is under way; of one that was left, the notes go with it; files of others stay."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=0))
    cache = cache_of(config)
    left_alone, under_way = (Outgoing.of(os.urandom(MB)) for _ in range(2))
    for one in (left_alone, under_way):
        incoming = cache.receive(one.ref)
        incoming.add(decode_frame(one.frame(0)))
        incoming.save_notes()
        if one is left_alone:
            incoming.close()
    put(config.state / "cache" / ("a" * 64), age=0)
    stranger = put(config.state / "cache" / "notes.txt", age=0)
    make_room(config, cache, MB, ())
    files = {path for path in (config.state / "cache").rglob("*") if path.is_file()}
    assert files == {stranger, incoming.path, incoming.path.with_suffix(".chunks")}
    incoming.discard()


def test_features_of_the_head_in_use_stay_within_their_bound(config, filled):
    """Training and held-out samples of the head, 1 MiB each, are not those that were written last."""
    folder = filled / "features"
    used = "f" * 32
    other = "e" * 32
    for letter in "abc":
        (folder / feature_file(letter * 32)).unlink()
    older, train, test = (put(folder / feature_file(used, n), age=50 - n) for n in range(3))
    of_own_norm = put(folder / feature_file(f"{used}-own-{other}", 5), age=3)
    newest = put(folder / feature_file(other, 6), age=2)
    assert trim_features(folder, 3 * MB, used * 2) == 2
    assert {*folder.iterdir()} == {train, test, newest} - {older, of_own_norm}
    assert trim_features(folder, MB, used * 2) == 1
    assert trim_features(folder, MB, used * 2) == 0
    assert {*folder.iterdir()} == {train, test}


def test_an_agent_makes_room_before_it_downloads(tmp_path, monkeypatch):
    with Federation(tmp_path, agents=1) as fed:
        old = put(fed.agents["a0"].config.state / "cache" / ("a" * 64), age=0)
        disk = FakeDisk(fed.agents["a0"].config.state, 64 * MB - 1)
        monkeypatch.setattr(local_state.shutil, "disk_usage", disk.usage)
        fed.request(rounds=1)
        fed.finish()
        assert not old.exists()


@pytest.mark.parametrize("spare, stays", [(0, True), (-64 * 1024, False)])
def test_no_room_is_made_for_what_has_arrived_of_a_download(config, monkeypatch, spare, stays):
    """Of 4 MiB about 1 MiB is still to come after a restart: with room for that, the only old download stays."""
    blob = Outgoing.of(os.urandom(4 * MB))
    old = put(config.state / "cache" / ("a" * 64), age=0)
    part = cache_of(config).receive(blob.ref)
    arrived = 3 * MB // blob.ref.chunk_bytes
    for index in range(arrived):
        part.add(decode_frame(blob.frame(index)))
    part.close()
    to_come = 4 * MB - arrived * blob.ref.chunk_bytes
    disk = SimpleNamespace(free=config.min_free_bytes + to_come + spare)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: disk)
    downloads = Downloads(cache_of(config), Mock(), lambda: 0.0)
    uploads = Mock(holds=lambda _key: False)
    queue = TaskQueue(SimpleNamespace(config=config), downloads, uploads, InlineWorker(), Mock())
    queue.on_job(job_of(blob.ref))
    assert old.exists() is stays
    downloads.keep_only(())


def job_of(ref):
    task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="linear")
    return Job(run="run-0001", round=1, rounds=1, seed=0, method="fedavg", task=task, blobs=(ref,), deadline_s=60)


def test_many_runs_leave_a_bounded_folder(tmp_path):
    """Six runs: client state and receipts of the newest three."""
    from federation_duties import TinyDuties, quick_params

    with Federation(tmp_path, agents=1, tasks=TinyDuties) as fed:
        for seed in range(6):
            fed.request("fedper", rounds=1, seed=seed, params=quick_params("fedper"))
            fed.finish()
            assert fed.record.status == "finished"
        names = sorted(path.name[:8] for path in (tmp_path / "a0" / "runs").iterdir())
        assert names == ["run-0004", "run-0005", "run-0006"]


def test_status_shows_what_is_on_the_disk_and_the_bounds(config, filled, monkeypatch, capsys, tmp_path_factory):
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=123 * 10**6))
    assert disk_usage(config) == {
        "runs": 3,
        "keep_runs": 3,
        "runs_bytes": 3 * MB,
        "downloads_bytes": 4 * MB,
        "cache_bytes": 512 * MB,
        "features": 3 * MB,
        "features_bytes": 2 * MB,
        "free_bytes": 123 * 10**6,
        "min_free_bytes": 10 * MB,
    }
    file = tmp_path_factory.mktemp("config") / "agent.toml"
    file.write_text(
        f'id = "a0"\nstate = "{filled}"\nmin_free_bytes = {10 * MB}\nfeatures_bytes = {2 * MB}\n'
        '[data]\nsource = "none:"\n'
    )
    assert status(argparse.Namespace(config=file, state=None, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["disk"] == disk_usage(config)
    status(argparse.Namespace(config=file, state=None, json=False))
    said = capsys.readouterr().out
    assert "3 runs (at most 3) of 3.1 MB; downloads 4.2 of 537 MB; features 3.1 of 2 MB; 123 MB free" in said
