"""The one way to start a process: what it gets, how it is waited for, and that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from edge_agent.core.child_process import Child, Streams, function_command, module_command


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_child_reads_its_input_and_its_output_is_returned():
    code = "import sys; print(sys.stdin.read().upper()); print('late', file=sys.stderr)"
    finished = Child(python(code)).finish("question", limit_s=60)
    assert (finished.code, finished.output.split(), finished.errors.split()) == (0, ["QUESTION"], ["late"])
    finished.check()


def test_a_failed_child_says_how_it_ended():
    finished = Child(python("import sys; sys.exit('no memory')")).finish(limit_s=60)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        finished.check()
    assert (caught.value.returncode, caught.value.stderr.strip()) == (1, "no memory")


def test_a_child_that_takes_too_long_is_killed():
    child = Child(python("import time; time.sleep(600)"))
    with pytest.raises(subprocess.TimeoutExpired):
        child.finish(limit_s=0.05)
    assert not child.is_running
    assert child.wait() == -9


def test_a_child_that_does_not_end_by_itself_is_killed_after_a_while():
    child = Child(python("import time; time.sleep(600)"))
    assert child.wait_or_kill(0.05) == -9
    child.close()


def test_a_session_is_killed_with_the_children_of_the_child():
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    child = Child(python(code), streams=Streams(errors=subprocess.DEVNULL), has_own_session=True)
    grandchild = int(next(child.read_lines()))
    assert os.getpgid(grandchild) == child.pid
    child.kill_session()
    # The group is empty as soon as its last process has been reaped; the child itself has been.
    assert child.wait() == -9
    child.close()


def test_variables_are_added_to_those_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWATER_TEST_OURS", "1")
    code = "import os; print(os.environ['HEADWATER_TEST_OURS'], os.environ['HEADWATER_TEST_ADDED'], os.getcwd())"
    finished = Child(python(code), environment={"HEADWATER_TEST_ADDED": "2"}, folder=tmp_path).finish(limit_s=60)
    assert finished.output.split() == ["1", "2", str(tmp_path.resolve())]


@pytest.mark.parametrize("make_command", [module_command, function_command])
def test_modules_of_the_working_folder_are_not_imported(tmp_path, monkeypatch, make_command):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the working folder was imported')\n")
    (other / "asked.py").write_text(
        "import queue, sys\n"
        "def answer(*words):\n    print('answer', *words)\n"
        "if __name__ == '__main__':\n    answer(*sys.argv[1:])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(other))
    words = ("answer", "a b") if make_command is function_command else ("a b",)
    finished = Child(make_command("asked", *words), folder=tmp_path).finish(limit_s=60)
    assert (finished.code, finished.output) == (0, "answer a b\n"), finished.errors
