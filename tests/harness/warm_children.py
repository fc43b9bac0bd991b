"""Child processes of tests, forked from an interpreter that has imported our packages before they are needed.

A new interpreter takes some two seconds of a processor to import torch and this project, and the tests start some
hundreds. Here one process for each process of tests, the nursery, does it once. It starts no thread, and forks itself
for each child that is wanted. The child gets the streams, the environment and the working folder that a new interpreter
would have had, and runs the program of its command.

A test asks for a child through a Unix socket: the size of a JSON object with the three descriptors, then the object.
The nursery answers with the process id, and with the status as ``waitpid`` gives it when the child has ended. It ends
itself when its standard input is closed, which is when the tests end, in whatever way.

Three things differ from a new interpreter: the modules that are loaded already, memory that is shared with the nursery,
and the parent, which is the nursery. Tests that are about one of them are marked ``fresh``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

IMPORTED = (
    "coordinator.broker.serve",
    "coordinator.cli.options",
    "coordinator.hosted.agents",
    "coordinator.processes.compute",
    "coordinator.research.compare.runners",
    "coordinator.service.app",
    "coordinator.simulation.engines.pool",
    "coordinator.web.app",
    "coordinator.web.server",
    "edge_agent.agent.app",
    "edge_agent.client",
    "torch",
)
"""What children begin with."""

WORKER = "coordinator.processes.worker_main"
"""The module by which workers of the coordinator, of simulations and of comparisons start."""

PROGRAMS = ("coordinator", "edge_agent")
"""The packages that are programs, run by ``python -m``."""

READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH", "CUDA", "MPL")
"""How the variables begin that are read while an interpreter starts or imports."""

LIMITED = ("HEADWATER_MEMORY_MB", "HEADWATER_CPU_S")
"""The variables of limits, which would count what the nursery has."""

EARLY = {name: value for name, value in os.environ.items() if name.startswith(READ_EARLY)}
"""The variables that the nursery has read, whatever a test sets later."""

IS_OPEN = True
"""Whether the running test gets such children; `tests/conftest.py` sets it to false for tests that are ``fresh``."""


def can_be_warm(command: object, environment: Mapping[str, str]) -> bool:
    """Return whether a forked child would do what a new interpreter does with this command and environment."""
    # Only Linux has sockets with names that are no files.
    if not IS_OPEN or sys.platform != "linux" or not isinstance(command, (list, tuple)):
        return False
    words = [str(word) for word in command]
    is_worker = words[:2] == [sys.executable, "-c"] and words[3:5] == [str(ROOT), WORKER]
    is_program = words[:2] == [sys.executable, "-m"] and words[2:3] in ([program] for program in PROGRAMS)
    if not is_worker and not is_program:
        return False
    if any(name in environment for name in LIMITED):
        return False
    return _read_before_modules(environment) == _read_before_modules(EARLY)


def _read_before_modules(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a forked child cannot follow any more; it can add to where modules are searched."""
    early = {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}
    early.pop("PYTHONPATH", None)
    return early


class Nursery:
    """The process that children are forked from, and the name of the socket by which it is asked for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._name = ""
        self._is_ours = True

    @property
    def name(self) -> str:
        """The name of the socket; the process is started on first use, and again if something has killed it."""
        with self._lock:
            if self._is_ours and (self._process is None or self._process.poll() is not None):
                self._start()
            return self._name

    def join(self, name: str) -> None:
        """Ask the process behind this socket, which another process has started."""
        self._name = name
        self._is_ours = False

    def connect(self) -> socket.socket:
        """Return a connection to the process.

        Raises:
            OSError: It has ended.
        """
        line = socket.socket(socket.AF_UNIX)
        line.connect(f"\0{self.name}")
        return line

    def close(self) -> None:
        """End the process; children that still run are left to those who have started them."""
        with self._lock:
            if self._process is not None:
                self._process.stdin.close()
                self._process.wait()
                self._process = None

    def _start(self) -> None:
        """Start the process, which answers when it has imported everything."""
        self._name = f"headwater-nursery-{os.getpid()}-{secrets.token_hex(8)}"
        later = {name: value for name, value in os.environ.items() if not name.startswith(READ_EARLY)}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{self._name}")
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, "as-nursery", self._name, str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env={**later, **EARLY},
                pass_fds=[listening.fileno()],
            )


nursery = Nursery()
"""The nursery of this process, or in a child of a nursery that nursery."""


class Popen(subprocess.Popen):
    """A `subprocess.Popen` whose children come from the nursery where that makes no difference.

    It steps in where ``Popen`` itself starts a process and asks for its status; all else is inherited.
    """

    _line: socket.socket | None = None
    """The connection by which the status of a warm child comes; None: the child is a new interpreter."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ):  # fmt: skip
        environment = dict(os.environ if env is None else env)
        has_extras = executable is not None or preexec_fn is not None or bool(pass_fds) or shell or not close_fds
        has_folder = cwd is None or Path(cwd).is_dir()
        if has_extras or not has_folder or not can_be_warm(args, environment):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
            )  # fmt: skip
            return
        request = {
            "command": [str(word) for word in args],
            "environment": environment,
            "folder": str(Path.cwd() if cwd is None else cwd),
            "has_own_session": others[5],
        }
        # A stream that is not redirected is this process's own.
        streams = [
            own if redirected == -1 else redirected for own, redirected in enumerate((p2cread, c2pwrite, errwrite))
        ]
        self._line = nursery.connect()
        self.pid = _ask_for_child(self._line, request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, _deadstate=None, **others):
        if self._line is None:
            return super()._internal_poll(_deadstate, **others)
        if self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags):
        if self._line is None:
            return super()._try_wait(wait_flags)
        flags = socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else socket.MSG_WAITALL
        try:
            status = self._line.recv(4, flags)
        except BlockingIOError:
            return 0, 0
        self._line.close()
        # Nothing was said where the nursery itself was killed: nobody can tell how the child ends.
        return self.pid, int.from_bytes(status, "little") if status else signal.SIGKILL


def _ask_for_child(line: socket.socket, request: Mapping[str, Any], streams: Sequence[int]) -> int:
    """Send a request to the nursery and return the process id of the child."""
    content = json.dumps(request).encode()
    socket.send_fds(line, [len(content).to_bytes(4, "little")], streams)
    line.sendall(content)
    return int.from_bytes(_read_exactly(line, 4), "little")


def _read_exactly(line: socket.socket, count: int) -> bytes:
    """Return so many bytes from a connection.

    Raises:
        OSError: It was closed before.
    """
    content = b""
    while len(content) < count:
        piece = line.recv(count - len(content))
        if not piece:
            raise OSError("the nursery of the tests has ended")
        content += piece
    return content


@contextlib.contextmanager
def used_by_the_product() -> Iterator[None]:
    """Let the children that our packages start come from the nursery, where that makes no difference."""
    from edge_agent.core import child_process

    child_process.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})
    try:
        yield
    finally:
        child_process.subprocess = subprocess


# --- in place of a program that a shell starts ------------------------------------------------------------------------


def script_of(*words: str) -> str:
    """Return a shell script that runs ``python WORDS`` with its own arguments, in a child of the nursery if it can."""
    start = " ".join(words)
    if can_be_warm((sys.executable, *words, ""), EARLY):
        start = f"-SE {__file__} as-program {nursery.name} {start}"
    return f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n'


def _stand_for(command: Sequence[str]) -> int:
    """Run a command of Python in a child, hand on signals to it, and end as it does."""
    child = Popen([sys.executable, *command])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    code = child.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# --- in the nursery ---------------------------------------------------------------------------------------------------


def _serve(listening: socket.socket, owner: int) -> None:
    """Fork children and tell how they end, until the owner closes the pipe."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C is for the tests, which close this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for end in (listening, owner, woken):
            selector.register(end, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
                _tell_ends(lines)
            if listening in ready:
                line, _ = listening.accept()
                _fork_child(line, lines)
            if owner in ready:
                return


def _tell_ends(lines: dict[int, socket.socket]) -> None:
    """Tell those who wait for children that have ended how they ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with lines.pop(pid) as line, contextlib.suppress(OSError):
                line.sendall(status.to_bytes(4, "little"))


def _fork_child(line: socket.socket, lines: dict[int, socket.socket]) -> None:
    """Read a request and fork the child."""
    size, streams, _, _ = socket.recv_fds(line, 4, 3)
    request = json.loads(_read_exactly(line, int.from_bytes(size, "little")))
    pid = os.fork()
    if pid == 0:
        _become_child(request, streams)
    for stream in streams:
        os.close(stream)
    lines[pid] = line
    with contextlib.suppress(OSError):
        line.sendall(pid.to_bytes(4, "little"))


def _become_child(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Take over streams, folder and environment, run the program, and end as an interpreter does; never return."""
    code = 1
    try:
        # 1. Nothing of the nursery is left but its modules.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["has_own_session"]:
            os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        _open_streams()
        # 2. The program, and what an interpreter does after it.
        code = _run(request["command"])
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _open_streams() -> None:
    """Make Python's streams anew, as an interpreter makes them at its start."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), line_buffering=os.isatty(1), write_through=is_unbuffered
    )
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), errors="backslashreplace", line_buffering=True
    )


def _run(command: Sequence[str]) -> int:
    """Run the program of a command of Python and return the exit code."""
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in searched if path not in sys.path]
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    # It is the program itself; Python would warn of a module that was imported before it is run.
    sys.modules.pop(WORKER, None)
    sys.orig_argv = list(command)
    _, option, program, *arguments = command
    try:
        if option == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments]
            exec(compile(program, "<string>", "exec"), main_module.__dict__)
        else:
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = ["-m", *arguments]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None:
            return 0
        if isinstance(ended.code, int):
            return ended.code & 255
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - an interpreter prints whatever its program raises
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Be a nursery, or stand for a program."""
    role, name, *others = sys.argv[1:]
    nursery.join(name)
    if role == "as-program":
        sys.exit(_stand_for(others))
    # The first place where modules are searched is the folder of this file, which children do not search.
    sys.path[0] = str(ROOT)
    for module in IMPORTED:
        importlib.import_module(module)
    sys.path.pop(0)
    # A child would have the locks of other threads, and not the threads.
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit(f"an import has started threads: {threading.enumerate()}")
    # Children that are never looked through for garbage share their memory.
    gc.collect()
    gc.freeze()
    with used_by_the_product():
        _serve(socket.socket(fileno=int(others[0])), sys.stdin.fileno())


if __name__ == "__main__":
    main()
