"""Long work beside a loop that must not stop listening: one job at a time, its result handed back to the loop."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

Done = Callable[[Any, BaseException | None], None]
"""Called in the loop's own thread with (result, None) or (None, error)."""


def in_child(check: Callable[[], object]) -> None:
    """Return when ``check()`` does, called in a child process where the system can fork: what it loads is not kept.

    Call it before threads are started.

    Raises:
        Exception: what ``check`` raises; it is then called again, in this process.
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


_BEGIN = (
    "import sys; sys.path[:1] = [path for path in sys.path[:1] if path]; sys.path.append(sys.argv.pop(1)); "
    "from {module} import {name}; {name}()"
)
_ROOT = str(Path(__file__).resolve().parents[1])


def answer_of_child(module: str, name: str, question: Any, limit_s: float) -> dict[str, Any]:
    """The JSON object that a function prints last, run without arguments by a new interpreter.

    It reads ``question`` as JSON from stdin. What it loads goes with the process.

    Raises:
        OSError, subprocess.SubprocessError, ValueError, IndexError: the process failed, took longer than ``limit_s``
            seconds, or printed something else.
    """
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN.format(module=module, name=name), _ROOT],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def is_stopped(error: BaseException) -> bool:
    """Whether ``error`` comes from a child that was asked to stop, as systemd asks all processes of a unit at once."""
    cause = error.__cause__
    return isinstance(cause, subprocess.CalledProcessError) and -cause.returncode in {signal.SIGTERM, signal.SIGINT}


class Worker(Protocol):
    """Runs jobs; `collect` delivers what is finished, in the caller's thread."""

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:
        """Begin ``job``, or queue it behind the one that runs."""

    def collect(self) -> None:
        """Call ``done`` of every job that has finished since."""

    def close(self) -> None:
        """Take no more jobs; a running one is left to end with the process."""


class InlineWorker:
    """Does each job at once, in the caller's thread: for simulation and tests."""

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:  # noqa: ARG002 - names are for threads
        """Run ``job`` and deliver its result before returning."""
        try:
            result = job()
        except Exception as error:  # noqa: BLE001 - errors of a job are delivered to its owner
            done(None, error)
        else:
            done(result, None)

    def collect(self) -> None:
        """Nothing is ever left to deliver."""

    def close(self) -> None:
        """Nothing to stop."""


class ThreadWorker:
    """One thread; ``wake`` is called from it when something has finished, so that the loop looks."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="work", daemon=True)
        self._thread.start()

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:
        """Queue ``job``."""
        self._jobs.put((name, job, done))

    def collect(self) -> None:
        """Deliver what has finished."""
        while True:
            try:
                deliver = self._finished.get_nowait()
            except queue.Empty:
                return
            deliver()

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            name, job, done = item
            log.debug("work_started name=%s", name)
            try:
                deliver = functools.partial(done, job(), None)
            except BaseException as error:  # noqa: BLE001 - delivered to its owner; a job that exits ends itself only
                deliver = functools.partial(done, None, error)
            self._finished.put(deliver)
            self._wake()


class Stop(threading.Event):
    """Set by a signal; ``signal`` is its number, 0 before one has come."""

    signal = 0

    def by_signal(self, number: int, _frame: object) -> None:
        """The handler."""
        self.signal = number
        self.set()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """An event that SIGTERM and Ctrl-C set; outside the main thread, which alone gets signals, nothing sets it."""
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
