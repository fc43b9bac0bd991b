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
from edge_agent.errors import RunFailed

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
        first, second = child.pipe.receive(), child.pipe.receive()
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
    exits, served, line = [], [], "import sys; print('ready', flush=True); sys.stdin.read()"

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
