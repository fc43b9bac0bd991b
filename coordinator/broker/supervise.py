"""A broker in a supervised child process: ready when `start` returns, restarted when it exits, gone after `stop`."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from edge_agent.config import BrokerConfig
from edge_agent.errors import BrokerAway, UsageError

from ..processes.supervisor import ChildProcess, Supervisor

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
"""A Raspberry Pi 4 imports the embedded broker in a few seconds; this is ten times that."""

LONGEST_PAUSE_S = 5.0
"""Before a restart: the whole fleet waits for its broker."""


class SupervisedBroker(ABC):
    """A broker in a child process; subclasses give the command. Use as a context manager, or start and stop."""

    def __init__(self, bind: str = "127.0.0.1", port: int = 0) -> None:
        self.bind, self.port = bind, port
        self._supervisor: Supervisor | None = None
        self._exit_reason = "no output"

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
        return self._child.pid if self._child is not None else None

    @property
    def restarts(self) -> int:
        """How often it was restarted since `start`."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    @property
    def is_alive(self) -> bool:
        """Whether the process runs now."""
        return self._child is not None and self._child.is_running

    def config(self) -> BrokerConfig:
        """How a client on this machine connects."""
        return BrokerConfig(url=self.url)

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command line that serves ``bind`` and ``port``."""

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections.

        Raises:
            UsageError: the port is taken.
            BrokerAway: the process did not start; the message says why.
        """
        with held_port(self.bind, self.port) as self.port:
            self._supervisor = Supervisor(
                "broker",
                lambda: ChildProcess(self.command()),
                lambda child: child.follow_output(lambda line: log.info("broker output: %s", line)),
                self._on_exit,
                longest_pause_s=LONGEST_PAUSE_S,
            )
            self._supervisor.start()
            try:
                self._wait_until_ready(self._supervisor)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._supervisor is not None:
            self._supervisor.stop(politely=True)

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _child(self) -> ChildProcess | None:
        return None if self._supervisor is None else self._supervisor.child

    def _wait_until_ready(self, supervisor: Supervisor) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self.is_alive and self._accepts()):
            if supervisor.restarts:
                raise BrokerAway(f"the broker on {self.bind}:{self.port} does not start: {self._exit_reason}")
            if time.monotonic() > deadline:
                raise BrokerAway(
                    f"the broker on {self.bind}:{self.port} did not accept connections within {START_TIMEOUT_S:g} s"
                )
            supervisor.wait(0.02)

    def _on_exit(self, reason: str, pause_s: float) -> None:
        self._exit_reason = reason
        log.warning("broker_exited reason=%s restart=%d in_s=%.1f", reason, self.restarts, pause_s)

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self._reachable_host(), self.port), timeout=1).close()
            return True
        return False

    def _reachable_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)  # noqa: S104 - compared, not bound


@contextlib.contextmanager
def held_port(bind: str, port: int) -> Iterator[int]:
    """``port``, found to be free, or any free one where it is 0; the system gives it to nobody else meanwhile.

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
        result = int(probe.getsockname()[1])
        if sys.platform != "linux":
            probe.close()
        yield result


def is_loopback(bind: str) -> bool:
    """Whether only this machine reaches ``bind``."""
    if bind == "localhost":
        return True
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return False
