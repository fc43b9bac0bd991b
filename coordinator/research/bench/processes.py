"""Processes under measurement: started, measured through the kernel's figures, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent.errors import MeasuringFailed, MissingCapability

from ...processes import supervisor

PATIENCE_S = 3.0
"""Time between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Usage:
    """What one process has used so far.

    CPU seconds, those of its ended children included; memory in RAM now, of it its own (not of files), and at most, all
    in MB (10^6 bytes).
    """

    cpu_s: float
    rss_mb: float
    own_mb: float
    peak_mb: float


def usage(pid: int) -> Usage:
    """What process ``pid`` has used.

    Raises:
        MissingCapability: this system has no /proc.
        MeasuringFailed: there is no such process.
    """
    process = Path("/proc") / str(pid)
    if not Path("/proc/self/status").exists():
        raise MissingCapability("measuring processes needs Linux and its /proc; run this command there")
    try:
        sizes = dict(line.split(":", 1) for line in (process / "status").read_text(encoding="ascii").splitlines())
        seconds = _cpu_s(process)
        rss, own, peak = (_megabytes(sizes[name]) for name in ("VmRSS", "RssAnon", "VmHWM"))
    except (OSError, KeyError) as error:
        raise MeasuringFailed(f"process {pid} ended while it was measured ({error})") from error
    return Usage(seconds, rss, own, peak)


def forget_peak(pid: int) -> None:
    """Let the peak of process ``pid`` count from now on (nothing happens where the kernel does not offer it)."""
    with contextlib.suppress(OSError):
        (Path("/proc") / str(pid) / "clear_refs").write_text("5", encoding="ascii")


@dataclass
class Measured:
    """A process of ours, and the file of its stderr."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Check that it still runs.

        Raises:
            MeasuringFailed: it has ended.
        """
        code = self.process.poll()
        if code is not None:
            raise MeasuringFailed(f"{self.name} ended with code {code}; its stderr ends:\n{self.stderr_tail()}")

    def stderr_tail(self) -> str:
        """The last lines that it logged."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-5:]) or "(stderr is empty)"


@contextlib.contextmanager
def module(
    name: str, arguments: Sequence[object], folder: Path, *, module: str, environment: dict[str, str] | None = None
) -> Iterator[Measured]:
    """``python -m module arguments`` as long as the context lasts; its standard input ends when we do, even killed."""
    log = folder / f"{name}.log"
    command = supervisor.command(module, *map(str, arguments))
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield Measured(name, process, log)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM first, SIGKILL where that does not help."""
    process.terminate()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answer(measured: Measured) -> str:
    """The next line that the process prints.

    Raises:
        MeasuringFailed: it ended instead.
    """
    stream = measured.process.stdout
    line = stream.readline() if stream is not None else b""
    if not line:
        measured.process.wait(PATIENCE_S)
        measured.check()
    return line.decode().strip()


def say(line: str) -> None:
    """One line from a measured process to the one that waits in `answer`."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tell(measured: Measured, line: str = "") -> None:
    """Give the process one line on its standard input."""
    stream = measured.process.stdin
    if stream is not None:
        stream.write(line.encode() + b"\n")
        stream.flush()


def wait_for(
    found: Callable[[], bool], processes: Iterable[Measured], *, what: str, limit_s: float, every_s: float = 0.1
) -> None:
    """Return as soon as ``found()`` is true.

    Raises:
        MeasuringFailed: it is not within ``limit_s``, or one of ``processes`` has ended.
    """
    watched, pause, until = tuple(processes), threading.Event(), time.monotonic() + limit_s
    while not found():
        for measured in watched:
            measured.check()
        if time.monotonic() > until:
            tails = "\n".join(f"[{m.name}] {m.stderr_tail()}" for m in watched)
            raise MeasuringFailed(f"{what}: not within {limit_s:.0f} s; stderr:\n{tails}")
        pause.wait(every_s)


@contextlib.contextmanager
def scratch(root: Path | None) -> Iterator[Path]:
    """A temporary folder; on the disk of ``root`` where given, because the cost of syncs depends on the disk."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=root) as folder:
        yield Path(folder)


def _cpu_s(process: Path) -> float:
    """User and system time of all threads and of children that have ended, in clock ticks of usually 10 ms."""
    fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _megabytes(field: str) -> float:
    return int(field.split(maxsplit=1)[0]) * 1024 / 1e6
