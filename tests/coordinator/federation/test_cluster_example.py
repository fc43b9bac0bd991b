"""The cluster of examples/cluster as a person starts it: a run in which one process of each kind is killed.

The result has the bits of a run in which none is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.broker]

ROOT = Path(__file__).parents[3]
SILENT_S = 150.0
"""A test fails where nothing was written for so long."""


class Running:
    """The cluster, and what it has written."""

    def __init__(self, root, folder, first_port):
        self.folder = folder
        self.config = folder / "coordinator.toml"
        self.output = (folder.parent / "output").open("w+b")
        script = root / "examples/cluster/local.py"
        command = [sys.executable, str(script), "--folder", str(folder), "--first-port", str(first_port)]
        self.process = subprocess.Popen(command, stdout=self.output, stderr=self.output, stdin=subprocess.DEVNULL)

    def said(self):
        return (self.folder.parent / "output").read_text()

    def pids(self):
        """Name -> process, as the script prints them."""
        lines = (line.split() for line in self.said().splitlines() if "  process " in line)
        return {name: int(pid) for name, _, pid in lines}

    def until(self, condition, what):
        """Return when the condition holds; fail where nothing is written for long."""
        pause = threading.Event()
        end = time.monotonic() + SILENT_S
        sizes = ()
        while not condition():
            paths = [*self.folder.glob("logs/*.log"), *self.folder.glob("state/*.jsonl")]
            if (now := tuple(path.stat().st_size for path in paths)) != sizes:
                sizes = now
                end = time.monotonic() + SILENT_S
            assert time.monotonic() < end, f"{what}: {self.said()[-2000:]}"
            assert self.process.poll() is None, self.said()
            pause.wait(0.1)

    def command(self, *words):
        done = subprocess.run(
            [sys.executable, "-m", "coordinator", *words, "--config", str(self.config), "--json"],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def status(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "state/status.json").read_text())
        return {}

    def serving(self):
        """The name of the coordinator that has taken the lease."""
        logs = self.folder / "logs"
        names = [name for name in self.pids() if name.startswith("coordinator")]
        (name,) = (name for name in names if "takes_over" in (logs / f"{name}.log").read_text())
        return name

    def end(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)
        self.output.close()


def ten_free_ports():
    """The first of ten ports that nobody uses, below those that systems give to outgoing connections."""
    for first in range(20_000, 30_000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + 10):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ten ports in a row are free")


@pytest.fixture(scope="module")
def running():
    if shutil.which("nats-server") is None or not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("nats-server or PostgreSQL is not installed")
    pytest.importorskip("psycopg")
    # PostgreSQL runs as another user, who may not enter the folders of tests.
    folder = Path(f"/tmp/headwater-cluster-{os.getpid()}")
    folder.mkdir(mode=0o711)
    cluster = Running(ROOT, folder / "cluster", ten_free_ports())
    try:
        cluster.until(lambda: "Ctrl-C ends all of it" in cluster.said(), "the cluster starts")
        cluster.until(lambda: cluster.status().get("fleet", {}).get("online") == 4, "four agents join")
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def plain(running):
    """The encoder of a run in which nothing happens."""
    return running.command("run", "--method", "fedavg", "--rounds", "4", "--set", "batch_size=8")["encoder_sha256"]


def test_each_partition_has_an_aggregator_of_its_own(running):
    running.until(
        lambda: len({row["aggregator"] for row in running.status().get("aggregators", [])} - {""}) == 4,
        "four aggregators serve",
    )


def test_one_process_of_each_kind_can_be_killed_in_a_run(running, plain):
    results = []

    def follow():
        results.append(running.command("run", "--method", "fedavg", "--rounds", "4", "--set", "batch_size=8"))

    following = threading.Thread(target=follow)
    following.start()
    running.until(lambda: (running.status().get("run") or {}).get("round") == 2, "round 2 opens")
    pids = running.pids()
    for name in ("broker-1", "aggregator-2", running.serving()):
        os.kill(pids[name], signal.SIGKILL)
    running.until(lambda: not following.is_alive(), "the run ends")
    (result,) = results
    assert result["encoder_sha256"] == plain
