"""Files that a coordinator has open: few for many uploads, and as many as the system allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.fleet.collection import Collection
from coordinator.fleet.uploads import MOST_OPEN_UPLOADS, Collector
from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder
from edge_agent.core import storage
from edge_agent.core.storage import PendingSyncs, sync, syncs_into
from edge_agent.wire.blobs import chunks
from edge_agent.wire.messages import down, up
from edge_agent.wire.tensors import encode, specs_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")

AGENTS = 100
OTHER_FILES = 8
"""Files that may be opened beside the uploads: by the journal, for example."""


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_hundred_uploads_at_once_take_few_open_files_and_all_arrive(tmp_path):
    tensors = {"w": np.arange(4096, dtype=np.float32)}
    blob = chunks.Outgoing.of(encode(tensors))
    frames = [blob.frame(index) for index in range(blob.count)]
    assert len(frames) > 1
    agents = tuple(f"a{number:03}" for number in range(AGENTS))
    receipts = []

    def note(agent, message):
        if isinstance(message, down.Receipt) and message.accepted:
            receipts.append(agent)

    with StateFolder(tmp_path).open("test") as state:
        collector = Collector(state.blobs, state.journal, note, lambda: 0.0)
        run = state.journal.request_run(fact_of("run_requested", {}))
        collector.open(Collection(run, 1, agents, specs_of(tensors)))
        before = open_files()
        for agent in agents:
            collector.manifest(agent, up.UpdateManifest(run=run, round=1, blob=blob.ref, samples=1))
        most = open_files()
        for frame in frames:
            for agent in agents:
                collector.chunk(agent, chunks.decode_frame(frame))
                most = max(most, open_files())
    assert receipts == list(agents)
    assert most - before <= MOST_OPEN_UPLOADS + OTHER_FILES


def test_files_that_wait_for_the_disk_together_are_few_and_a_failure_of_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MOST_PENDING_FILES", 3)
    pending = PendingSyncs()
    before = open_files()
    refused = tmp_path / "1"

    def fsync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == refused:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with syncs_into(pending):
        for number in range(6):
            with (tmp_path / str(number)).open("wb") as file:
                sync(file.fileno())
    assert open_files() - before == 3
    with pytest.raises(OSError, match="Input/output"):
        pending.finish()
    assert open_files() == before
    pending.finish()  # it is told once


SERVING = """
import resource, sys
from coordinator.config import CoordinatorConfig
from coordinator.service.app import coordinator

resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
broker = {"url": "mqtt://127.0.0.1:9"}
config = {"state": sys.argv[1], "task": {"class_names": ["a"]}, "broker": broker}
with coordinator(CoordinatorConfig.model_validate(config)):
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_coordinator_that_starts_raises_its_limit_of_open_files(tmp_path):
    code = [sys.executable, "-c", SERVING, str(tmp_path / "state")]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "(1000, 1000)", done.stderr
