"""Child processes and worker threads, for long work beside a loop that must go on listening to messages."""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

from .child_process import Child, Streams, function_command
from .errors import ChildFailed

log = logging.getLogger(__name__)

Done = Callable[[Any, BaseException | None], None]
"""The function that receives what a job has ended with, in the loop's own thread: (result, None) or (None, error)."""


def in_child(check: Callable[[], object]) -> None:
    """Call ``check`` in a child process, where the system can fork, so that the modules it loads are not kept here.

    It must be called before threads are started.

    Raises:
        Exception: The error of ``check``, which is called again in this process if the child process failed.
    """
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                check()
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1] == 0:
            return
    check()


def answer_of_child(module: str, name: str, question: Any, limit_s: float) -> dict[str, Any]:
    """Return the JSON object that a function prints as its last line, run by a new interpreter.

    Args:
        module: The module with the function.
        name: The function's name; it is called without arguments.
        question: What the function reads as JSON from stdin.
        limit_s: Seconds after which the process is killed.

    Raises:
        OSError, subprocess.SubprocessError, ValueError, IndexError: The process failed, took longer than ``limit_s``
            seconds, or printed something else.
    """
    finished = Child(function_command(module, name)).finish(json.dumps(question), limit_s=limit_s)
    finished.check()
    result: dict[str, Any] = json.loads(finished.output.splitlines()[-1])
    return result


def is_stopped(error: BaseException) -> bool:
    """Return whether ``error`` comes from a child that was ended by SIGTERM or SIGINT.

    On a stop, systemd sends the signal to all processes of a unit at once.
    """
    cause = error.__cause__
    return isinstance(cause, subprocess.CalledProcessError) and -cause.returncode in {signal.SIGTERM, signal.SIGINT}


LOOK_S = 0.25
"""Seconds between two calls of ``look`` while a watched child is silent."""

_MOST_LINE = 1 << 22
"""The most bytes of one line that a watched child writes."""


def _look_at_nothing(_process: int) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """The limits under which a child process works, and what looks at it meanwhile."""

    silent_s: float
    """Seconds without a line after which the child counts as hanging."""

    limit_s: float
    """Seconds that the child may take in all."""

    look: Callable[[int], object] = _look_at_nothing
    """Receives the process id of the child every `LOOK_S` seconds or more often."""

    clock: Callable[[], float] = time.monotonic
    """The time in seconds."""

    def check(self, begin: float, last_line_at: float) -> None:
        """Return quietly while a child that wrote its last line then is within its limits.

        Raises:
            ChildFailed: It took longer than ``limit_s``, or wrote nothing for ``silent_s``.
        """
        now = self.clock()
        if now - begin > self.limit_s:
            raise ChildFailed(f"it took longer than {self.limit_s:g} s")
        if now - last_line_at > self.silent_s:
            raise ChildFailed(f"it made no progress for {self.silent_s:g} s")


def answer_of_watched(
    module: str, name: str, question: Any, heard: Callable[[dict[str, Any]], object], watch: Watch
) -> dict[str, Any]:
    """Return the answer of a child process that reports its progress, and kill it with its own children at the end.

    The child writes a JSON object a line. The line whose only key is ``answer`` holds its answer.

    Args:
        module: The module with the function that the child calls.
        name: The function's name; it is called without arguments.
        question: What the function reads as JSON from stdin.
        heard: Receives every line of progress.
        watch: The limits of the child.

    Raises:
        OSError: The process cannot be started.
        ChildFailed: The child ended without an answer, or exceeded a limit of ``watch``.
    """
    with tempfile.TemporaryFile() as errors:
        child = Child(function_command(module, name), streams=Streams(errors=errors.fileno()), has_own_session=True)
        try:
            lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            threading.Thread(target=_read_lines, args=(child, lines), name="child", daemon=True).start()
            child.write_input(json.dumps(question).encode())
            return _await_answer(child, lines, errors, heard, watch)
        finally:
            child.kill_session()


def _await_answer(
    child: Child,
    lines: queue.SimpleQueue[bytes],
    errors: IO[bytes],
    heard: Callable[[dict[str, Any]], object],
    watch: Watch,
) -> dict[str, Any]:
    """Hand on the progress of a child until its answer comes; see `answer_of_watched`."""
    begin = watch.clock()
    last_line_at = begin
    while True:
        watch.look(child.pid)
        # An empty line stands for silence; no bytes at all for the end of the child's output.
        try:
            line = lines.get(timeout=LOOK_S)
        except queue.Empty:
            line = b"\n"
        if not line:
            code = child.wait()
            how = f"it ended by signal {-code}" if code < 0 else f"it ended with code {code}"
            raise ChildFailed(how, _tail_of(errors))
        if line.strip():
            last_line_at = watch.clock()
            message = _object(line)
            if message.keys() == {"answer"}:
                answer: dict[str, Any] = message["answer"]
                return answer
            heard(message)
        watch.check(begin, last_line_at)


def _read_lines(child: Child, lines: queue.SimpleQueue[bytes]) -> None:
    """Queue the lines that the child writes until its output ends, then no bytes as the mark of the end."""
    with contextlib.suppress(OSError, ValueError):
        for line in child.read_lines(_MOST_LINE):
            lines.put(line)
    child.close_output()
    lines.put(b"")


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line of a child.

    Raises:
        ChildFailed: The line holds something else.
    """
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ChildFailed("it wrote a line that holds no JSON object")
    return message


def _tail_of(file: Any) -> str:
    """Return the last 4,000 bytes of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4000))
    return str(file.read().decode(errors="replace").strip())


class Worker(Protocol):
    """A runner of jobs, whose results `collect` delivers in the caller's thread."""

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:
        """Start ``job``, or queue it behind the one that runs."""

    def collect(self) -> None:
        """Call the ``done`` of every job that has finished since the last call."""

    def close(self) -> None:
        """Take no more jobs; a running one is left to end with the process."""


class InlineWorker:
    """A worker that runs each job at once, in the caller's thread: for simulation and tests."""

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:  # noqa: ARG002 - names are for threads
        """Run ``job`` and deliver its result before returning."""
        try:
            result = job()
        except Exception as error:  # noqa: BLE001 - errors of a job are delivered to its owner
            done(None, error)
        else:
            done(result, None)

    def collect(self) -> None:
        """Do nothing: every result has been delivered by `submit`."""

    def close(self) -> None:
        """Do nothing: no thread has to be stopped."""


class ThreadWorker:
    """A worker with one thread, which calls ``wake`` when a job has finished, so that the loop calls `collect`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)
        self._thread.start()

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:
        """Queue ``job`` for the thread."""
        self._jobs.put((name, job, done))

    def collect(self) -> None:
        """Deliver the results of the jobs that have finished."""
        while True:
            try:
                deliver = self._finished.get_nowait()
            except queue.Empty:
                return
            deliver()

    def close(self) -> None:
        """Let the thread end after the jobs that are queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        """Do the jobs one after another, and put what is to be called with each result into the queue of the loop."""
        while True:
            item = self._jobs.get()
            if item is None:
                return
            name, job, done = item
            log.debug("work_started name=%s", name)
            try:
                deliver = functools.partial(done, job(), None)
            except BaseException as error:  # noqa: BLE001 - delivered to its owner; a job that exits ends itself only
                deliver = functools.partial(done, None, error)
            self._finished.put(deliver)
            self._wake()


class Stop(threading.Event):
    """An event that is set by a signal; ``signal`` is the number of the signal, or 0 before one has arrived."""

    signal = 0

    def by_signal(self, number: int, _frame: object) -> None:
        """Note the signal and set the event; it has the form of a handler for `signal.signal`."""
        self.signal = number
        # In a thread: the main one, in which this runs, may be inside of `wait` with the event's lock. Starting a
        # `threading.Thread` takes locks as well.
        _thread.start_new_thread(self.set, ())


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yield an event that SIGTERM and Ctrl-C set; only the main thread gets signals, in another one nothing sets it."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.by_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
