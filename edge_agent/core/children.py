"""Long work beside a loop that must not stop listening: one job at a time, its result handed back to the loop."""

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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from .errors import ChildFailed

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
_ROOT = str(Path(__file__).resolve().parents[2])


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


LOOK_S = 0.25
"""Between two looks at a watched child while it is silent."""

_MOST_LINE = 1 << 22


def answer_of_watched(
    module: str,
    name: str,
    question: Any,
    heard: Callable[[dict[str, Any]], object],
    *,
    silent_s: float,
    limit_s: float,
    look: Callable[[int], object] = lambda _process: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """As `answer_of_child`, of a child that says what it does meanwhile: a JSON object a line, each given to ``heard``.

    The answer is the line with the one key ``answer``. A child that says nothing for ``silent_s`` seconds hangs: it is
    killed, with its own children. ``look`` gets its process id some times a second.

    Raises:
        OSError: no process can be started.
        ChildFailed: it ended without an answer, said nothing for too long, or took longer than ``limit_s``.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _BEGIN.format(module=module, name=name), _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            threading.Thread(target=_read_lines, args=(child, lines), name="child", daemon=True).start()
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError), child.stdin:
                    child.stdin.write(json.dumps(question).encode())
            begin = spoken_at = clock()
            while True:
                look(child.pid)
                try:
                    line = lines.get(timeout=LOOK_S)
                except queue.Empty:
                    line = b"\n"
                now = clock()
                if line.strip():
                    spoken_at = now
                    said = _object(line)
                    if said.keys() == {"answer"}:
                        answer: dict[str, Any] = said["answer"]
                        return answer
                    heard(said)
                elif not line:
                    code = child.wait()
                    tail = _tail_of(errors)
                    raise ChildFailed(f"it ended by signal {-code}" if code < 0 else f"it ended with code {code}", tail)
                if now - begin > limit_s:
                    raise ChildFailed(f"it took longer than {limit_s:g} s")
                if now - spoken_at > silent_s:
                    raise ChildFailed(f"it made no progress for {silent_s:g} s")
        finally:
            _end(child)


def _read_lines(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Until the end, which is an empty line without its newline."""
    if child.stdout is not None:
        with contextlib.suppress(OSError, ValueError), child.stdout:
            while line := child.stdout.readline(_MOST_LINE):
                lines.put(line)
    lines.put(b"")


def _object(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ChildFailed("it wrote a line that holds no JSON object")
    return said


def _tail_of(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4000))
    return str(file.read().decode(errors="replace").strip())


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with its own children, which are in its session; it may have ended."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


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
        # In a thread: the main one, in which this runs, may be inside of `wait` with the event's lock. Starting a
        # `threading.Thread` takes locks as well.
        _thread.start_new_thread(self.set, ())


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
