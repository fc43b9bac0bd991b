"""Children of tests that begin with our packages imported: what they do is what a new interpreter does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
import warm_children

from coordinator.processes.supervisor import ChildProcess, Limits, worker_command
from coordinator.state.store import StateFolder
from edge_agent.core.child_process import Child, Streams

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems start new interpreters")

FUNCTIONS = """
import json, os, signal, sys, threading

def look(pipe, how):
    print(json.dumps([sys.argv, os.getcwd(), os.environ["OWN"], sys.path[:1], __name__, os.getsid(0) == os.getpid()]))
    print("an error", file=sys.stderr)
    if how == "thread":
        threading.Thread(target=lambda: print("the last words")).start()
    elif how == "crash":
        undefined
    elif how == "signal":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.exit(json.loads(how))

def stay(pipe):
    print(os.getsid(0) == os.getpid(), flush=True)
    signal.pause()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder, and a module in it that children find by ``PYTHONPATH``."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [["coordinator", "--version"], ["coordinator", "simulat"], ["edge_agent", "fit"]])
def test_programs_say_the_same_and_end_the_same(place, words):
    ends = []
    for start in (subprocess.Popen, warm_children.Popen):
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with start([sys.executable, "-m", *words], cwd=place, **streams) as child:
            ends.append((*child.communicate(timeout=300), child.returncode))
    assert child._line is not None
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("how", ["0", "3", "null", '"text"', "thread", "crash", "signal"])
def test_a_function_sees_the_same_and_ends_the_same(place, monkeypatch, how):
    ends = []
    for is_warm in (False, True):
        monkeypatch.setattr(warm_children, "IS_OPEN", is_warm)
        child = ChildProcess(worker_command("functions:look", how), place / "log", environment={"OWN": "own"})
        assert (child._process._process._line is not None) is is_warm
        code = child._process.wait(300)
        child.close()
        # Of a traceback the last line: who has called the program differs.
        lines = (place / "log").read_text().splitlines()
        ends.append((code, sorted([line for line in lines if not line.startswith((" ", "Traceback"))])))
    assert ends[0] == ends[1]
    assert any("own" in line for line in ends[0][1])


def test_a_child_is_asked_whether_it_runs_is_waited_for_and_is_killed_with_its_session(place):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = Child(
            worker_command("functions:stay"), streams=Streams(input=theirs.fileno()), folder=place, has_own_session=True
        )
    assert child._process._line is not None
    assert next(child.read_lines()) == b"True\n"
    assert child.is_running
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill_session()
    assert child.wait() == -signal.SIGKILL
    assert not child.is_running
    child.close()


def test_what_has_limits_or_another_environment_of_python_is_a_new_interpreter():
    command = worker_command("functions:look")
    environment = dict(os.environ)
    assert warm_children.can_be_warm(command, environment)
    assert not warm_children.can_be_warm(command, {**environment, **Limits(memory_mb=100).environment()})
    assert not warm_children.can_be_warm(command, {**environment, **Limits(threads=7).environment()})
    assert not warm_children.can_be_warm(command, {**environment, "PYTHONWARNINGS": "error"})
    assert not warm_children.can_be_warm((sys.executable, "-c", "print()"), environment)
    assert not warm_children.can_be_warm(("sleep", "1"), environment)


@pytest.mark.fresh
def test_a_test_can_ask_for_new_interpreters():
    assert not warm_children.can_be_warm(worker_command("functions:look"), dict(os.environ))


def test_a_program_of_a_shell_hands_on_signals_and_ends_as_the_child_does(tmp_path):
    program = tmp_path / "headwater"
    program.write_text(warm_children.script_of("-m", "coordinator"))
    program.chmod(0o755)
    done = subprocess.run([program, "simulat"], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, "did you mean" in done.stderr.lower()) == (2, True)
    # A command that stays until it is asked to end; it says when it is there.
    with StateFolder(tmp_path / "state").look(create=True):
        words = [program, "web", "--state", "state", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        said = child.stderr.readline()
        child.send_signal(signal.SIGINT)
        said += child.stderr.read()
    assert child.returncode == 130, said
