"""The trial of the guide "Your own broker", as processes, with a broker that is already there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.broker import EmbeddedBroker, MosquittoBroker, find_mosquitto

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def program(*words: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program beside the test; told to stop at the end, and expected to obey."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *map(str, words)], stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    assert code == 0, log.read_text()


def until(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a program has said something."""
    pause = threading.Event()
    for _ in range(600):
        if words in log.read_text(errors="replace"):
            return
        assert process.poll() is None, log.read_text()
        pause.wait(0.1)
    raise AssertionError(f"{words!r} was not said: {log.read_text()}")


@pytest.fixture
def broker():
    """A broker that is not the coordinator's."""
    with (
        MosquittoBroker(federation="trial") if find_mosquitto() else EmbeddedBroker(port=0, federation="trial") as made
    ):
        yield made


@pytest.mark.slow
@pytest.mark.broker
def test_trial_of_the_readme_with_a_broker_of_ones_own(broker, tmp_path):
    """The README's commands: serve, agents in any order and one of them late, run, status, report, export."""
    configs = tmp_path / "configs" / "trial"
    configs.mkdir(parents=True)
    for path in (ROOT / "configs" / "trial").glob("*.toml"):
        text = path.read_text(encoding="utf-8").replace("mqtt://127.0.0.1:1883", broker.url)
        (configs / path.name).write_text(text, encoding="utf-8")
    coordinator = ("--config", configs / "coordinator.toml")

    def agent(name: str) -> None:
        words = ("-m", "edge_agent", "run", "--config", configs / f"{name}.toml")
        stack.enter_context(program(*words, log=tmp_path / f"{name}.log"))

    with contextlib.ExitStack() as stack:
        agent("agent-2")
        log = tmp_path / "serve.log"
        serve = stack.enter_context(program("-m", "coordinator", "serve", *coordinator, log=log))
        until(log, "agent_joined agent=agent-2", serve)
        for name in ("agent-head", "agent-1"):
            agent(name)
        run = headwater("run", *coordinator, "--method", "repper", "--rounds", 2, "--json")
        until(log, "1 more must come", serve)
        agent("agent-3")
        code, out, err = answer(run)
        said = json.loads(answer(headwater("status", *coordinator, "--json"))[1])
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["run_id"], summary["method"], summary["faults"]) == ("run-0001", "repper", {})
    assert [a["id"] for a in summary["agents"]] == ["agent-1", "agent-2", "agent-3", "agent-head"]
    assert {a["id"]: a["torch_loaded"] for a in summary["agents"]}["agent-head"] is False
    assert "run-0001: round 2 of 2 is closed" in err
    assert [found["status"] for found in said["runs"]] == ["finished"]

    bundle = tmp_path / "b.hwb"
    exporting = headwater("export", *coordinator, "--run", "run-0001", "--out", bundle, "--json")
    shown = answer(headwater("report", *coordinator))[1]
    assert Path(shown.strip()).is_file()
    exported = json.loads(answer(exporting)[1])
    assert (exported["bytes"], exported["bundle_id"]) == (bundle.stat().st_size, summary["bundle"]["bundle_id"])


def headwater(*words: object) -> subprocess.Popen[str]:
    """The command, begun."""
    command = [sys.executable, "-m", "coordinator", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err
