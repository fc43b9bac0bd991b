"""Child processes: their command lines, start with a pipe and limits, restart when they exit, and why they exited."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.child_process import Child, Streams, module_command
from edge_agent.core.errors import cause
from edge_agent.core.storage import open_regular

from .pipe import Pipe

log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""How often processes may crash at one task before the task fails: memory that is too small stays too small."""

EXIT_TIMEOUT_S = 3.0
"""How long a process may take to exit after it has closed its pipe or was asked to stop; then it is killed."""

STABLE_S = 30.0
"""A process that ran for so long is restarted at once."""

FIRST_PAUSE_S = 0.05
"""The pause before a restart doubles with each short run; this is the unit in which it grows."""

LONGEST_PAUSE_S = 30.0
"""The longest pause before a restart."""

STOP_SIGNALS = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a process that was asked to stop, perhaps together with all others of its terminal or systemd unit."""

OWNER_STOP_S = 1.0
"""How long the owner of such a process waits before a restart: it may be about to receive the same signal."""

TAIL_LINES = 5
TAIL_BYTES = 1 << 16


def worker_command(function: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a child that calls ``function`` (``module:name``) with its pipe and these arguments."""
    return module_command("coordinator.processes.worker_main", function, *arguments)


@dataclass(frozen=True)
class Limits:
    """The limits of a child; None: no limit. Beyond ``memory_mb`` allocations fail, beyond ``cpu_s`` it is killed."""

    memory_mb: int | None = None
    cpu_s: int | None = None
    threads: int | None = None
    """Threads of BLAS and OpenMP, torch's included."""

    def environment(self) -> dict[str, str]:
        """Return environment variables with the limits of the child; `worker_main` applies them."""
        variables = {
            "HEADWATER_MEMORY_MB": self.memory_mb,
            "HEADWATER_CPU_S": self.cpu_s,
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), self.threads),
        }
        return {name: str(value) for name, value in variables.items() if value}


NO_LIMITS = Limits()


class ChildProcess:
    """A child process. Its standard input is the pipe: when the owner exits, for whatever reason, the child does, too.

    Output and errors go to the file ``log``; without one, `follow_output` has to read them.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None = None,
        limits: Limits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; ``environment`` is added to this one's.

        Raises:
            OSError: it cannot be started.
        """
        self._log = log
        self._tail = deque[str](maxlen=TAIL_LINES)
        ours, theirs = socket.socketpair()
        self.pipe = Pipe(ours)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(theirs)
                output = subprocess.PIPE
                if log is not None:
                    log.parent.mkdir(parents=True, exist_ok=True)
                    output = stack.enter_context(log.open("wb")).fileno()
                self._process = Child(
                    command,
                    streams=Streams(input=theirs.fileno(), output=output, errors=subprocess.STDOUT),
                    environment={**limits.environment(), **(environment or {})},
                )
        except BaseException:
            self.pipe.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not exited."""
        return self._process.is_running

    def follow_output(self, on_line: Callable[[str], None]) -> None:
        """Call ``on_line`` with each line of output until the process closes it."""
        for line in self._process.read_lines():
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            on_line(text)

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def terminate(self) -> None:
        """Ask the process to stop; it is not waited for."""
        self._process.terminate()

    def stop(self) -> None:
        """Ask the process to stop, wait, and kill it if it does not."""
        self.terminate()
        self.pipe.close()
        self.wait()

    def wait(self) -> int:
        """Wait for the exit, kill the process after ``EXIT_TIMEOUT_S``, and return its code, negative for a signal."""
        return self._process.wait_or_kill(EXIT_TIMEOUT_S)

    def exit_reason(self) -> str:
        """Wait for the exit, and return exit code or signal with the last lines of output, as text."""
        return exit_reason(self.wait(), self._log or list(self._tail))

    def close(self) -> None:
        """Kill the process if it still runs, and release everything."""
        self._process.close()
        self.pipe.close()


def exit_reason(code: int, output: Path | Sequence[str]) -> str:
    """Return exit code or signal as text, and the last lines of the output.

    Args:
        code: The exit code, negative for a signal.
        output: A log file, or the last lines of the output.
    """
    how = _describe_code(code)
    lines: Sequence[str]
    if isinstance(output, Path):
        try:
            lines = _last_lines(output)
        except OSError:
            return f"{how}; its log {output} cannot be read"
    else:
        lines = output
    if not lines:
        return f"{how}; no output"
    return f"{how}; last output: {' / '.join(lines)}"


def _describe_code(code: int) -> str:
    """Return an exit code as text, with the name of a signal."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: f" ({number.name})" for number in signal.Signals}  # most real-time signals have no name
    return f"signal {-code}{names.get(-code, '')}"


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of a log file.

    Raises:
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


class Supervisor:
    """A thread that keeps one child process running: restarted when it exits, after growing pauses, until `stop`.

    ``spawn`` starts the child, ``serve`` communicates with it and returns when it has exited or closed its pipe,
    ``on_exit`` gets the reason and the pause in seconds before the restart. All are called in the thread, which is
    the parent of every child.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], ChildProcess],
        serve: Callable[[ChildProcess], None],
        on_exit: Callable[[str, float], None],
        *,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self.child: ChildProcess | None = None
        self.restarts = 0
        self._spawn = spawn
        self._serve = serve
        self._on_exit = on_exit
        self._longest_pause_s = longest_pause_s
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread still supervises."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; the child is not waited for."""
        self._thread.start()

    def stop(self, *, politely: bool = False) -> None:
        """End the child, at once unless ``politely``, and the thread."""
        with self._starting:
            self._stopping.set()
            if self.child is not None and politely:
                self.child.stop()
            elif self.child is not None:
                self.child.kill()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until `stop`; return whether it was called."""
        return self._stopping.wait(seconds)

    def _run(self) -> None:
        """Start children one after another until `stop`, with pauses that grow while they exit early."""
        short_runs = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            code, reason = self._run_once()
            if self._stopping.is_set():
                return
            short_runs = 0 if time.monotonic() - started > STABLE_S else short_runs + 1
            pause_s = restart_pause_s(short_runs, self._longest_pause_s)
            self.restarts += 1
            try:
                self._on_exit(reason, pause_s)
            except Exception:
                log.exception("exit_not_handled child=%s", self._thread.name)
            # Whoever has stopped the child may be about to stop this process, too.
            if code in STOP_SIGNALS:
                pause_s = max(pause_s, OWNER_STOP_S)
            self._stopping.wait(pause_s)

    def _run_once(self) -> tuple[int, str]:
        """Start a child, serve it until it exits, and return its exit code and reason.

        A child that could not be started has code 0 and the reason for that; no exception ends this thread.
        """
        child = None
        try:
            with self._starting:
                if self._stopping.is_set():
                    return 0, ""
                self.child = child = self._spawn()
            self._serve(child)
            return child.wait(), child.exit_reason()
        except Exception as error:  # no memory, too many open files, a full disk: all of them may pass
            if not isinstance(error, OSError):
                log.exception("child_lost name=%s", self._thread.name)
            reason = f"{type(error).__name__}: {cause(error)}"
            if child is None:
                return 0, reason
            child.kill()
            return child.wait(), f"{reason}; {child.exit_reason()}"
        finally:
            if child is not None:
                child.close()


def restart_pause_s(short_runs: int, longest_s: float = LONGEST_PAUSE_S) -> float:
    """Return the seconds before a restart after so many short runs in a row; the first restart is immediate."""
    if short_runs < 2:
        return 0.0
    return min(longest_s, FIRST_PAUSE_S * 2.0 ** min(short_runs, 20))
