"""The one way in which this program starts another process, and ends it.

Seven places start processes, each for a purpose of its own, and all of them use `Child`:

- `core.children.answer_of_child` asks one question of a new interpreter and reads one answer.
- `core.children.answer_of_watched` also follows the progress, and ends a child that is silent or too slow.
- `heads.svm` fits a head with scikit-learn, which the agent itself never loads.
- `personal.encoder` converts an encoder to the format that the runtime maps into memory.
- ``coordinator.processes.supervisor`` keeps long-lived children (brokers, hosted agents, compute, workers of a
  simulation, the web view), which talk over a pipe and end with their owner.
- `serving.sources.rpicam` runs the program of a camera, and reads its pictures.
- `core.children.in_child` is the exception: it forks, because its child continues with the state of this process.

A command is a list of words, never the line of a shell. The commands of our own functions and modules are made here,
too: a child finds our packages, and takes no module from the folder in which it happens to work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that holds our packages, also if they were not installed; searched after Python's own modules."""

_IMPORT_OURS = (
    "import sys; sys.path[:1] = [path for path in sys.path[:1] if path]; "
    "at = [n for n, path in enumerate(sys.path) if path.endswith('-packages')] or [len(sys.path)]; "
    "sys.path.insert(at[0], sys.argv.pop(1)); "
)
"""The beginning of the program of a child.

Python searches the working folder first: a user's ``queue.py`` there would replace Python's own. Everything else on the
module path, ``PYTHONPATH`` included, is found as usual.
"""

_RUN_MODULE = _IMPORT_OURS + "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"

_CALL_FUNCTION = _IMPORT_OURS + (
    "import importlib; module = importlib.import_module(sys.argv.pop(1)); "
    "getattr(module, sys.argv.pop(1))(*sys.argv[1:])"
)


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module as ``python -m module arguments`` would, without the working folder."""
    return (sys.executable, "-c", _RUN_MODULE, _ROOT, module, *arguments)


def function_command(module: str, function: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that calls a function of a module with these arguments in a new interpreter."""
    return (sys.executable, "-c", _CALL_FUNCTION, _ROOT, module, function, *arguments)


@dataclass(frozen=True)
class Streams:
    """What a child has as its standard streams: a file descriptor, a constant of `subprocess`, or None for ours.

    Attributes:
        input: What the child reads; by default a pipe to this process.
        output: Where the child writes; by default a pipe to this process.
        errors: Where the child writes errors; by default a pipe of its own to this process.
    """

    input: int | None = subprocess.PIPE
    output: int | None = subprocess.PIPE
    errors: int | None = subprocess.PIPE


PIPES = Streams()


@dataclass(frozen=True)
class Finished:
    """The end of a child that was waited for.

    Attributes:
        command: The words of its command.
        code: Its exit code, negative for a signal.
        output: All that it wrote to standard output.
        errors: All that it wrote to standard error.
    """

    command: Sequence[str]
    code: int
    output: str
    errors: str

    def check(self) -> None:
        """Require that the child ended with exit code 0.

        Raises:
            subprocess.CalledProcessError: It ended otherwise; the error holds the exit code and what it wrote.
        """
        if self.code != 0:
            raise subprocess.CalledProcessError(self.code, self.command, self.output, self.errors)


class Child:
    """A process that this one has started and has to end: by `finish`, or by `kill` or `kill_session`, and `close`.

    The child inherits no open file but its standard streams, and gets this process's environment. Signals of a terminal
    or of a systemd unit reach it as well, unless it has a session of its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        streams: Streams = PIPES,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        has_own_session: bool = False,
    ) -> None:
        """Start the process.

        Args:
            command: The program and its arguments.
            streams: What it reads from and writes to.
            environment: Variables that are added to this process's environment, or replace those of the same name.
            folder: The folder in which it works; None: that of this process.
            has_own_session: Whether `kill_session` can end it together with the processes that it starts itself.

        Raises:
            OSError: It cannot be started.
        """
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            stdin=streams.input,
            stdout=streams.output,
            stderr=streams.errors,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=has_own_session,
        )
        self._command = command

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def write_input(self, content: bytes) -> None:
        """Write all that the child is to read, and close its standard input; one that has ended reads nothing."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin:
                self._process.stdin.write(content)

    def read_lines(self, most_bytes: int = -1) -> Iterator[bytes]:
        """Yield the lines of output until the child closes it.

        Args:
            most_bytes: The bytes after which a longer line is cut in two; negative: a line may have any length.
        """
        output = self._process.stdout
        if output is None:
            return
        while True:
            line = output.readline(most_bytes)
            if not line:
                return
            yield line

    def read_chunks(self, most_bytes: int) -> Iterator[bytes]:
        """Yield what the child writes, as it comes and at most ``most_bytes`` at once, until it closes its output."""
        output = self._process.stdout
        if output is None:
            return
        while True:
            chunk = os.read(output.fileno(), most_bytes)
            if not chunk:
                return
            yield chunk

    def finish(self, text: str = "", *, limit_s: float) -> Finished:
        """Give the child its input, read all that it writes, and wait for its end.

        Args:
            text: What it reads as standard input.
            limit_s: Seconds after which it is killed.

        Raises:
            subprocess.TimeoutExpired: It took longer.
        """
        # Leaving the context closes the pipes and waits: nothing of the child is left, however this ends.
        with self._process:
            try:
                output, errors = self._process.communicate(text.encode(), limit_s)
            except BaseException:
                self.kill()
                raise
        return Finished(
            self._command,
            self._process.returncode,
            output.decode(errors="replace"),
            errors.decode(errors="replace"),
        )

    def wait(self, limit_s: float | None = None) -> int:
        """Wait for the end, and return the exit code, negative for a signal.

        Args:
            limit_s: Seconds after which waiting ends; None: it waits for as long as it takes.

        Raises:
            subprocess.TimeoutExpired: The process still runs after ``limit_s``.
        """
        return self._process.wait(limit_s)

    def wait_or_kill(self, limit_s: float) -> int:
        """Wait for the end, kill the process if it still runs after ``limit_s``, and return the exit code."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def terminate(self) -> None:
        """Ask the process to end, without waiting for that."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process at once; it may have ended already."""
        self._process.kill()

    def kill_session(self) -> None:
        """Kill the process with its own children, which are in its session, and wait; it may have ended already."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process if it still runs, wait for its end, and close all pipes to it."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def close_output(self) -> None:
        """Close the pipe of its output, where there is one."""
        if self._process.stdout is not None:
            self._process.stdout.close()
