"""SIGTERM to a whole process group, as systemd's KillMode=control-group sends it: all ends, nothing is started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coordinator.state.store import StateFolder
from coordinator.views.runs import replay

LIMIT_S = 120.0

SERVE = """
state = "state"
[embedded]
port = 0
[task]
class_names = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
encoder = "linear"
input = { kind = "image", channels = 1, height = 8, width = 8 }
[[hosted]]
id = "c0"
data = { source = "digits:optdigits?n=120" }
[[hosted]]
id = "c1"
data = { source = "digits:optdigits?n=120" }
"""


@contextlib.contextmanager
def group(folder, *command):
    """A command as the leader of its own process group; nothing of that group is left at the end."""
    with (folder / "out.log").open("wb") as log:
        leader = subprocess.Popen(
            [sys.executable, "-m", "coordinator", *command],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield leader
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


def until(folder, leader, condition):
    pause = threading.Event()
    end = time.monotonic() + LIMIT_S
    while not condition():
        words = (folder / "out.log").read_text()
        assert leader.poll() is None, words
        assert time.monotonic() < end, words
        pause.wait(0.05)


def members(leader):
    """Running processes of the group, its leader aside; zombies wait for the init of the machine, which may be slow."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != leader.pid:
            with contextlib.suppress(OSError):
                state, _, group_id = (process / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group_id) == leader.pid and state != "Z":
                    found.append(int(process.name))
    return found


def nothing_remains(leader):
    """Whether the group is empty; a process that an agent was preparing ends when it reads its closed pipe."""
    pause = threading.Event()
    end = time.monotonic() + LIMIT_S
    while members(leader) and time.monotonic() < end:
        pause.wait(0.05)
    return members(leader) == []


pytestmark = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks for processes in /proc")


@pytest.mark.broker
def test_a_coordinator_whose_group_is_ended_starts_no_new_process(tmp_path):
    (tmp_path / "coordinator.toml").write_text(SERVE)
    with group(tmp_path, "serve", "--config", "coordinator.toml") as leader:
        status = tmp_path / "state" / "status.json"
        until(tmp_path, leader, lambda: status.exists() and status.read_text().count('"present": true') == 2)
        children = members(leader)
        assert len(children) >= 2
        for child in children:  # the signal reaches them before their owner has heard it
            os.kill(child, signal.SIGTERM)
        threading.Event().wait(0.4)
        assert set(members(leader)) <= set(children), "no new process is started"
        os.kill(leader.pid, signal.SIGTERM)
        assert leader.wait(LIMIT_S) == 0
        assert nothing_remains(leader)
    words = (tmp_path / "out.log").read_text()
    assert "hosted_process_exited" not in words
    assert words.count("broker died") <= 1
    assert "Traceback" not in words
    assert "stopped; the next start resumes from here" in words


@pytest.mark.parametrize("engine", ["serial", pytest.param("pool", marks=pytest.mark.slow)])
def test_a_simulation_whose_group_is_ended_says_how_it_is_resumed(tmp_path, engine):
    command = (
        "simulate", "-m", "fedavg", "-d", "digits:optdigits?n=400", "--clients", "4", "--rounds", "100000",
        "--encoder", "linear", "--engine", engine, *(("--workers", "2") if engine == "pool" else ()),
        "--device", "cpu", "--out", "sim",
    )  # fmt: skip

    def closed():
        with contextlib.suppress(Exception), StateFolder(tmp_path / "sim").look() as state:
            return len(state.journal.entries(kinds=("round_closed",)))
        return 0

    with group(tmp_path, *command) as leader:
        until(tmp_path, leader, lambda: closed() >= 2)
        os.killpg(leader.pid, signal.SIGTERM)
        assert leader.wait(LIMIT_S) == 130
        assert nothing_remains(leader)
    words = (tmp_path / "out.log").read_text()
    assert "headwater simulate --resume --out sim" in words
    assert "Traceback" not in words
    with StateFolder(tmp_path / "sim").look() as state:
        assert not replay(state.journal, "run-0001").is_over
        assert json.loads((tmp_path / "sim" / "simulation.json").read_text())


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "-d", "digits", "--out"),
        ("analyze", "sim", "--out"),
        ("reproduce", "fedrir-t1-cifar10", "--out"),
        ("partition", "iid", "-d", "digits", "--out"),
    ],
    ids=lambda command: command[0],
)
def test_a_place_that_cannot_be_written_is_a_mistake_before_the_work(capsys, command):
    from coordinator.cli import main

    began = time.process_time()
    with pytest.raises(SystemExit) as end:
        main([*command, "/proc/headwater/results"])
    assert end.value.code == 2
    assert "no file can be written there" in capsys.readouterr().err
    assert time.process_time() - began < 10
