"""Child processes: frames with shared memory, limits, and a supervisor that restarts what exits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading

import pytest

from coordinator.processes.compute import ComputeProcess
from coordinator.processes.pipe import Pipe, SharedBuffer
from coordinator.processes.supervisor import ChildProcess, Limits, Supervisor, worker_command
from edge_agent.core.errors import ExportRejected, RunFailed, StateError, UsageError

FUNCTIONS = """
import resource, time

def echo(pipe, *arguments):
    while True:
        frame = pipe.receive()
        pipe.send(frame.topic, " ".join(arguments).encode() + frame.payload, frame.buffers)

def allocate(request):
    return {"bytes": len(bytes(request["bytes"]))}

def spin(request):
    while True:
        pass

def who(request):
    import os
    return {"pid": os.getpid(), "setup": getattr(time, "setup", 0)}

def begin():
    time.setup = getattr(time, "setup", 0) + 1

def fails(request):
    from edge_agent.core import errors
    kind, arguments = request["error"]
    raise (OSError if kind == "OSError" else getattr(errors, kind))(*arguments)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_frames_keep_topic_payload_and_shared_memory(functions):
    child = ChildProcess(worker_command("functions:echo", "a", "b"), functions / "log")
    try:
        buffer = SharedBuffer.of(b"one ", memoryview(b"two"))
        child.pipe.send("töpic", b"\x00" * 300_000, [buffer])
        buffer.close()
        child.pipe.send("", b"")
        first = child.pipe.receive()
        second = child.pipe.receive()
    finally:
        child.close()
    assert (first.topic, first.payload) == ("töpic", b"a b" + b"\x00" * 300_000)
    assert bytes(first.buffers[0].map()) == b"one two"
    assert second == ("", b"a b", ())


def test_a_pipe_whose_other_end_is_closed_is_at_its_end():
    ours, theirs = socket.socketpair()
    pipe = Pipe(ours)
    theirs.sendall(b"\x01\x00")
    theirs.close()
    with pytest.raises(EOFError):
        pipe.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        pipe.send("topic", b"payload")
    pipe.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of data segments are Linux's")
def test_a_memory_limit_fails_an_allocation_and_a_cpu_limit_ends_the_process(functions):
    limited = ComputeProcess(functions / "log", Limits(memory_mb=600, threads=1))
    try:
        assert limited.submit({"do": "functions:allocate", "bytes": 1000}) == {"bytes": 1000}
        with pytest.raises(RunFailed, match="MemoryError"):
            limited.submit({"do": "functions:allocate", "bytes": 10**9})
    finally:
        limited.close()
    limited = ComputeProcess(functions / "log", Limits(cpu_s=1))
    try:
        with pytest.raises(RunFailed, match=r"crashed 3 times, the last time with signal \d+ \(SIG(XCPU|KILL)\)"):
            limited.submit({"do": "functions:spin"})
    finally:
        limited.close()


def test_a_supervised_process_is_restarted_and_its_reason_told_until_it_is_stopped(functions):
    exits = []
    served = []
    line = "import sys; print('ready', flush=True); sys.stdin.read()"

    def serve(child):
        child.follow_output(lambda text: (served.append(child.pid), ready.release()) if text == "ready" else None)

    ready = threading.Semaphore(0)
    supervisor = Supervisor(
        "test", lambda: ChildProcess([sys.executable, "-c", line]), serve, lambda *told: exits.append(told)
    )
    supervisor.start()
    assert ready.acquire(timeout=60)
    os.kill(served[0], signal.SIGKILL)
    assert ready.acquire(timeout=60)
    supervisor.stop(politely=True)
    assert exits == [("signal 9 (SIGKILL); last output: ready", 0.0)]
    assert supervisor.restarts == 1
    assert not supervisor.is_alive
    for pid in served:
        with pytest.raises(ProcessLookupError), contextlib.suppress(PermissionError):
            os.kill(pid, 0)


def test_a_function_that_is_not_there_is_told(functions):
    process = ComputeProcess(functions / "log")
    try:
        with pytest.raises(RunFailed, match="AttributeError: module 'functions' has no attribute 'nothing'"):
            process.submit(json.loads('{"do": "functions:nothing"}'))
    finally:
        process.close()


def test_a_child_ends_when_idle_and_the_next_request_starts_another(functions):
    now = [100.0]
    process = ComputeProcess(functions / "log", setup=("functions:begin",), idle_s=60, clock=lambda: now[0])
    try:
        process.end_if_idle()
        first = process.submit({"do": "functions:who"})
        now[0] += 59
        process.end_if_idle()
        assert process.submit({"do": "functions:who"}) == first == {"pid": process.pid, "setup": 1}
        now[0] += 60
        process.end_if_idle()
        assert process.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(first["pid"], 0)
        second = process.submit({"do": "functions:who"})
        assert second["pid"] != first["pid"]
        assert second["setup"] == 1
    finally:
        process.close()


def test_a_child_at_work_is_not_idle(functions):
    now = [100.0]
    process = ComputeProcess(functions / "log", idle_s=60, clock=lambda: now[0])
    failed = []

    def ask():
        with pytest.raises(RunFailed, match="request cancelled"):
            process.submit({"do": "functions:spin"})
        failed.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    pause = threading.Event()
    tries = 0
    while process.pid is None and (tries := tries + 1) < 1000:
        pause.wait(0.01)
    now[0] += 1000
    process.end_if_idle()
    assert process.pid is not None
    process.close()
    thread.join(20)
    assert failed == [True]


def test_a_child_that_hangs_is_killed_and_the_next_request_is_answered(functions):
    process = ComputeProcess(functions / "log")
    try:
        hung = process.submit({"do": "functions:who"})["pid"]
        with pytest.raises(RunFailed, match=r"functions:spin: no result within 0\.2 s; the compute process was killed"):
            process.submit({"do": "functions:spin"}, 0.2)
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
        assert process.submit({"do": "functions:who"})["pid"] != hung
    finally:
        process.close()


@pytest.mark.parametrize(
    "raised, kind, message",
    [
        (("ExportRejected", ["parity 3"]), ExportRejected, "parity 3"),
        (("StateError", ["x: damaged"]), StateError, "x: damaged"),
        (("ConfigError", ["here", ["one", "two"]]), UsageError, "here: 2 mistakes\n  - one\n  - two"),
        (("nothing", []), RunFailed, "AttributeError: module 'edge_agent.core.errors' has no attribute 'nothing'"),
    ],
)
def test_errors_of_the_child_keep_their_class(functions, raised, kind, message):
    process = ComputeProcess(functions / "log")
    try:
        with pytest.raises(kind) as caught:
            process.submit({"do": "functions:fails", "error": raised})
        assert (type(caught.value), str(caught.value)) == (kind, message)
        with pytest.raises(OSError, match="No space left") as full:
            process.submit({"do": "functions:fails", "error": ("OSError", [28, "No space left on device", "/x"])})
        assert (full.value.errno, full.value.filename) == (28, "/x")
    finally:
        process.close()
