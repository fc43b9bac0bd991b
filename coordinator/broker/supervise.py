"""One broker process, watched: ready when `start` returns, restarted when it dies, gone after `stop`."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from edge_agent.config import BrokerConfig
from edge_agent.errors import BrokerAway, UsageError

from ..processes.launch import wait_before_restart

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
"""A Raspberry Pi 4 imports the embedded broker in a few seconds; this is ten times that."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses before restarts double from the first to the longest, so that a broken broker does not eat a core."""

STEADY_S = 30.0
"""A broker that lived so long was well: the next restart begins with the first pause again."""


class SupervisedBroker(ABC):
    """A broker in a child process; subclasses say with which command. Use as a context manager, or start and stop."""

    def __init__(self, bind: str = "127.0.0.1", port: int = 0) -> None:
        self.bind, self.port = bind, port
        self.restarts = 0
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._last_words: deque[str] = deque(maxlen=20)

    def __enter__(self) -> SupervisedBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        return f"mqtt://{self._reachable_host()}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process number of the broker; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs now."""
        return self._process is not None and self._process.poll() is None

    def config(self) -> BrokerConfig:
        """How a client on this machine connects."""
        return BrokerConfig(url=self.url)

    @abstractmethod
    def command(self) -> list[str]:
        """The command line that serves ``bind`` and ``port``."""

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections.

        Raises:
            UsageError: the port is taken.
            BrokerAway: the process did not come up; the message holds its last words.
        """
        with held_port(self.bind, self.port) as self.port:
            self._stopping.clear()
            self._watcher = threading.Thread(target=self._watch, name="broker", daemon=True)
            self._watcher.start()
            try:
                self._wait_until_ready(START_TIMEOUT_S)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the process; nothing happens where there is none."""
        self._stopping.set()
        if self._process is not None:
            _end(self._process)
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return as soon as it accepts connections (again).

        Raises:
            BrokerAway: it does not within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self._accepts():
            if time.monotonic() > deadline:
                raise self._not_up(f"did not accept connections within {timeout_s:g} s")
            self._stopping.wait(0.02)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not (self.is_alive and self._accepts()):
            if self.restarts:
                raise self._not_up("ended while starting")
            if time.monotonic() > deadline:
                raise self._not_up(f"did not accept connections within {timeout_s:g} s")
            self._stopping.wait(0.02)

    def _watch(self) -> None:
        """Run the process again and again, always as a child of this one thread, which lives as long as we do."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            code = self._run_once()
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - began
            pause_s = FIRST_PAUSE_S if lived_s > STEADY_S else pause_s
            self.restarts += 1
            log.warning("broker died code=%s lived_s=%.1f restart=%d in_s=%.1f", code, lived_s, self.restarts, pause_s)
            wait_before_restart(self._stopping, code, pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _run_once(self) -> int:
        with subprocess.Popen(
            self.command(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            self._process = process
            if self._stopping.is_set():  # stop() came between the check and the start
                _end(process)
            for line in process.stderr or ():
                self._last_words.append(line.rstrip())
                log.info("broker says: %s", line.rstrip())
            return process.wait()

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self._reachable_host(), self.port), timeout=1).close()
            return True
        return False

    def _reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)  # noqa: S104 - compared, not bound

    def _not_up(self, what: str) -> BrokerAway:
        words = "\n".join(self._last_words) or "(it said nothing)"
        return BrokerAway(f"the broker on {self.bind}:{self.port} {what}; its last words:\n{words}")


def claim_port(bind: str, port: int) -> int:
    """``port``, found to be free, or any free one where it is 0.

    Raises:
        UsageError: the port is taken, or the address is not one of this machine.
    """
    with held_port(bind, port) as found:
        return found


@contextlib.contextmanager
def held_port(bind: str, port: int) -> Iterator[int]:
    """A free port as `claim_port` finds it, which the system gives to nobody else meanwhile.

    A child may listen on it all the same: on Linux, sockets that allow it share a port until one of them listens.

    Raises:
        UsageError: the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            raise UsageError(
                f"cannot listen on {bind}:{port} ({error.strerror or error}); "
                "stop what uses the port, or choose another"
            ) from error
        found = int(probe.getsockname()[1])
        if sys.platform != "linux":
            probe.close()
        yield found


def is_loopback(bind: str) -> bool:
    """Whether only this machine reaches ``bind``."""
    if bind == "localhost":
        return True
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return False


def _end(process: subprocess.Popen[str], patience_s: float = 3.0) -> None:
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
