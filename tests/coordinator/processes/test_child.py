"""Children of this program in a folder where somebody keeps modules named like Python's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator
import edge_agent
import export
from coordinator.hosted import placement
from coordinator.processes import compute
from coordinator.processes.compute import ComputeProcess
from coordinator.processes.supervisor import ChildProcess
from coordinator.simulation.engines import pool
from edge_agent.core.child_process import module_command
from edge_agent.core.errors import RunFailed

HOSTILE = "raise RuntimeError('a file of the working folder was imported')\n"
PACKAGES = [Path(package.__file__).parent for package in (coordinator, edge_agent, export)]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    for name in ("queue", "json", "socket", "runpy", "coordinator", "edge_agent"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*line, **environment):
    done = subprocess.run(
        line, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout, done.stderr


def test_python_itself_would_take_the_working_folders(hostile):
    code, _, words = said(sys.executable, "-c", "import queue")
    assert code == 1
    assert "a file of the working folder was imported" in words


@pytest.mark.parametrize("line", [placement.COMMAND, compute.COMMAND, pool.COMMAND])
def test_children_begin_whatever_lies_in_the_working_folder(hostile, line):
    """They exit without output when their owner has closed the pipe."""
    child = ChildProcess(line, hostile / "child.log")
    child.pipe.close()
    assert child._process.wait(120) == 0
    assert (hostile / "child.log").read_text() == ""
    child.close()


def test_a_question_is_answered_there(hostile):
    asked = ComputeProcess(hostile / "words.log")
    try:
        with pytest.raises(RunFailed, match="KeyError: 'do'"):
            asked.submit({})
    finally:
        asked.close()


def test_it_is_otherwise_as_with_m(hostile):
    """The arguments, the name, the packages of this very place, and what PYTHONPATH names before all others."""
    other = hostile / "elsewhere"
    other.mkdir()
    (other / "shown.py").write_text(
        "import sys, queue, coordinator\nprint(__name__, sys.argv[1:], coordinator.__file__, '' in sys.path)\n"
    )
    code, out, words = said(*module_command("shown", "a b", "-c"), PYTHONPATH=str(other))
    assert (code, words) == (0, "")
    assert out == f"__main__ ['a b', '-c'] {coordinator.__file__} False\n"


def test_no_child_is_started_in_another_way():
    """No module but one makes the command of a child, or starts a process."""
    starting = (
        "subprocess.Popen(",
        "subprocess.run(",
        "os.posix_spawn",
        "multiprocessing",
        "[sys.executable",
        "(sys.executable, ",
    )
    sources = [path for package in PACKAGES for path in package.rglob("*.py")]
    found = {path.name for path in sources if any(text in path.read_text(encoding="utf-8") for text in starting)}
    assert found == {"child_process.py"}
