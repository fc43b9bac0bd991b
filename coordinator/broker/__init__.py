"""MQTT brokers that this machine can run: the embedded one, and mosquitto where it is installed.

Both run in a child process that is restarted when it exits and ends with its parent. Federations that outgrow one host
use their own broker and name it in ``[broker]``. Nothing here connects as a client: that is `edge_agent.wire.mqtt`.

This file starts and supervises a broker; `access` holds who may connect and speak on which topics, for every broker
alike, and `serve` is the process of the embedded one.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edge_agent.core.config import NAME_PATTERN, BrokerConfig, is_loopback
from edge_agent.core.errors import BrokerAway, MissingCapability, UsageError
from edge_agent.core.limits import OPEN_FILES, allow_open_files
from edge_agent.core.storage import Access, read_regular_text, write_atomic

from ..processes.supervisor import ChildProcess, Supervisor, worker_command
from .access import (
    COORDINATOR_USER,
    NO_RELAYS,
    is_password,
    mosquitto_acl,
    read_passwords,
    read_relays,
    set_password,
)

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
"""A Raspberry Pi 4 imports the embedded broker in a few seconds; this is ten times that."""

ANSWER_TIMEOUT_S = 1.0
"""How long one try to reach the broker may take."""

RELOAD_WAIT_S = 3.0
"""How long a reload waits for a Mosquitto that has just started; it usually answers within some 10 ms.

The coordinator handles no message meanwhile, but none arrives while its broker starts.
"""

LONGEST_PAUSE_S = 5.0
"""Before a restart: the whole fleet waits for its broker."""


OnRefused = Callable[[str, str, str], None]
"""Called with the name of an agent that the broker does not let in (empty: it gave none), why, and what to do."""

REFUSED_LINE = "login_refused "
"""Begins a line of the embedded broker about a refused login; JSON follows."""


def _not_noted(_agent: str, _message: str, _remedy: str) -> None:
    """For a broker whose refusals are not followed."""


class SupervisedBroker(ABC):
    """A broker on ``bind:port`` (0: any free port) in a child process. Use as a context manager, or start and stop.

    With a password file its users have the rights of `access.Rules`. Subclasses give the command.
    """

    usual_output: tuple[str, ...] = ()
    """Parts of lines that look like faults and are none."""

    def __init__(
        self, bind: str = "127.0.0.1", port: int = 0, *, federation: str = "home", password_file: Path | None = None
    ) -> None:
        self.bind = bind
        self.port = port
        self.federation = federation
        self.password_file = password_file
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)  # noqa: S104 - compared, not bound
        self.on_refused: OnRefused = _not_noted
        """Set it before `start`; it is called in a thread that reads the broker's output."""

        self._exit_reason = "no output"
        self._supervisor = Supervisor(
            "broker",
            lambda: ChildProcess(self.command()),
            lambda child: child.follow_output(self._log_output),
            self._on_exit,
            longest_pause_s=LONGEST_PAUSE_S,
        )

    def __enter__(self) -> SupervisedBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        return f"mqtt://{self._host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the broker; None while there is none."""
        child = self._supervisor.child
        return None if child is None else child.pid

    @property
    def restarts(self) -> int:
        """How often it was restarted since `start`."""
        return self._supervisor.restarts

    @property
    def is_alive(self) -> bool:
        """Whether the process runs now."""
        child = self._supervisor.child
        return child is not None and child.is_running

    def config(self) -> BrokerConfig:
        """Return how a client on this machine connects."""
        return BrokerConfig(url=self.url)

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command line that serves ``bind`` and ``port``."""

    def start(self) -> None:
        """Start the process, once, and return as soon as it accepts connections.

        Raises:
            UsageError: the port is taken.
            BrokerAway: the process did not start; the message says why.
        """
        with held_port(self.bind, self.port) as self.port:
            self._supervisor.start()
            try:
                self._wait_until_ready()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the process, if there is one."""
        self._supervisor.stop(politely=True)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> None:
        """Wait until the broker accepts connections.

        Raises:
            BrokerAway: It has exited, or accepts none within `START_TIMEOUT_S`.
        """
        where = f"the broker on {self.bind}:{self.port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self.is_alive and self._is_ready():
                return
            if self.restarts:
                raise BrokerAway(f"{where} does not start: {self._exit_reason}")
            if time.monotonic() > deadline:
                raise BrokerAway(f"{where} did not accept connections within {START_TIMEOUT_S:g} s")
            self._supervisor.wait(0.02)

    def _is_ready(self) -> bool:
        """Return whether the broker accepts connections."""
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), timeout=ANSWER_TIMEOUT_S).close()
            return True
        return False

    def refusal_in(self, line: str) -> tuple[str, str, str] | None:  # noqa: ARG002 - subclasses know their lines
        """Return agent, reason and remedy where a line of output says that a client was not let in."""
        return None

    def _log_output(self, line: str) -> None:
        """Log a line of the broker, and report the client that it says was not let in."""
        refusal = self.refusal_in(line)
        if refusal is not None:
            self.on_refused(*refusal)
            log.debug("broker_output line=%s", line)
            return
        is_usual = any(usual in line for usual in self.usual_output)
        log.log(logging.DEBUG if is_usual else logging.INFO, "broker_output line=%s", line)

    def _on_exit(self, reason: str, pause_s: float) -> None:
        self._exit_reason = reason
        log.warning("broker_exited reason=%s restart=%d in_s=%.1f", reason, self.restarts, pause_s)


@contextlib.contextmanager
def held_port(bind: str, port: int) -> Iterator[int]:
    """``port`` when it is free, or any free one where it is 0; the system gives it to no other process meanwhile.

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
        free = int(probe.getsockname()[1])
        if sys.platform != "linux":
            probe.close()
        yield free


class EmbeddedBroker(SupervisedBroker):
    """amqtt, for trials and single hosts; the coordinator depends neither on its sessions nor on its storage.

    In its own process: its event loop would share the interpreter lock with rounds, and its crash would end the
    coordinator.
    """

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections.

        Raises:
            MissingCapability: amqtt is not installed.
            UsageError: the port is taken.
            BrokerAway: the process did not start; the message says why.
        """
        if importlib.util.find_spec("amqtt") is None:
            raise MissingCapability.package("amqtt", "coordinator", "the embedded broker")
        if not is_loopback(self.bind):
            who = "anybody who can connect can take part" if self.password_file is None else "passwords can be read"
            log.warning("insecure_broker bind=%s: without TLS on a public address: %s", self.bind, who)
        if self.password_file is not None:
            _set_own_password(self.password_file)
        super().start()

    def config(self) -> BrokerConfig:
        """Return the configuration with which the coordinator connects."""
        if self.password_file is None:
            return BrokerConfig(url=self.url)
        return BrokerConfig(url=self.url, user=COORDINATOR_USER, password_file=_own_password(self.password_file))

    def command(self) -> Sequence[str]:
        """Return the command line that serves ``bind`` and ``port``."""
        users = [] if self.password_file is None else [str(self.password_file.resolve())]
        return worker_command("coordinator.broker.serve:serve", self.bind, str(self.port), self.federation, *users)

    def refusal_in(self, line: str) -> tuple[str, str, str] | None:
        """Return agent, reason and remedy where a line of output says that a client was not let in."""
        if not line.startswith(REFUSED_LINE):
            return None
        try:
            refusal = json.loads(line.removeprefix(REFUSED_LINE))
            user = str(refusal["user"])
            agent = str(refusal["id"])
            code = str(refusal["why"])
        except (ValueError, KeyError, TypeError):
            return None
        name = user if re.fullmatch(NAME_PATTERN, user) else "NAME"
        password = f"'headwater password {name} --out FILE' makes a new password for the device"
        texts = {
            "user": (f"a login without a user; agent id '{agent}'", "set broker.password_file on the device"),
            "unknown": (f"no user '{user}' is in the password file", password),
            "password": (f"user '{user}' has another password", password),
            "topics": (
                f"user '{user}' may not speak for id '{agent}'",
                "give id and broker.user of the device the same name",
            ),
            "busy": ("too many logins at once", "nothing: it tries again"),
        }
        if code not in texts:
            return None
        message, remedy = texts[code]
        return agent, message, remedy


def _own_password(password_file: Path) -> Path:
    """Return the file of the coordinator's own password."""
    return password_file.with_name(f"{password_file.name}.coordinator")


def _set_own_password(password_file: Path) -> None:
    """Make the coordinator a user of the password file; its password is generated once."""
    path = _own_password(password_file)
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32).encode(), access=Access.private())
    password = read_regular_text(path).strip()
    hashes = read_passwords(password_file) if password_file.exists() else {}
    if not is_password(password, hashes.get(COORDINATOR_USER, "")):
        set_password(password_file, COORDINATOR_USER, password)


MAX_PACKET_BYTES = 1 << 20
MAX_INFLIGHT = 256
"""Unacknowledged messages for one client: about as many frames as a coordinator has of updates under way at once."""

MAX_QUEUED = 8192
"""Messages kept for one slow client. Mosquitto's own limit of 1,000 silently drops chunks of a 60 MB download."""


def find_mosquitto() -> Path | None:
    """Return the mosquitto program, or None; ``/usr/sbin`` is searched even where it is not on the path."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
    program = shutil.which("mosquitto", path=path)
    return Path(program) if program else None


class Mosquitto(SupervisedBroker):
    """Mosquitto from the operating system; subclasses give the configuration."""

    # Topics that all agents read are patterns, too; a program that looks whether the port is open says nothing.
    usual_output = ("does not contain '%c' or '%u'", "unexpected eof while reading")

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections.

        Raises:
            MissingCapability: mosquitto is not installed.
            UsageError: the port is taken.
            BrokerAway: the process did not start; the message says why.
        """
        if find_mosquitto() is None:
            raise MissingCapability(
                "mosquitto is not installed; 'apt-get install mosquitto', or use the embedded broker"
            )
        # Mosquitto keeps one file open for each client, and for each stranger who says nothing for 90 s; many systems
        # give a process 1,024.
        allow_open_files(OPEN_FILES)
        super().start()

    def _is_ready(self) -> bool:
        """Return whether Mosquitto answers, and not only the operating system in its place.

        The system accepts connections as soon as Mosquitto has opened its port. Mosquitto sets up its signal handlers
        after that, and until then SIGHUP ends it. A connection whose client has ended its side is closed by
        Mosquitto's main loop, which begins last.
        """
        address = (self._host, self.port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=ANSWER_TIMEOUT_S) as connection:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return True
        return False

    def started_with(self, settings: Path) -> list[str]:
        """Return the command line for a configuration."""
        # Ends with its parent also when the parent is killed; setpriv is part of every Linux with util-linux.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        return [*guard, str(find_mosquitto()), "-c", str(settings)]


_UNKNOWN_CERTIFICATE = re.compile(
    r"\A(?:\d+: )?(?:Client connection from (?P<address>\S+) failed|OpenSSL Error\[0\]): error:[^:]*:.*:"
    r"(?P<why>[a-z ]*certificate[a-z ]*)\.?\Z"
)


class ManagedMosquitto(Mosquitto):
    """Mosquitto with TLS and a configuration file that the coordinator keeps."""

    def __init__(self, bind: str, port: int, settings: Path) -> None:
        super().__init__(bind, port)
        self._settings = settings
        self._ready_pid: int | None = None
        """The process that is known to answer."""

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"mqtts://{host}:{self.port}"

    def command(self) -> list[str]:
        """Return the command line that serves with the settings given."""
        return self.started_with(self._settings)

    def refusal_in(self, line: str) -> tuple[str, str, str] | None:
        """Return agent, reason and remedy where a line of output says that a client was not let in."""
        match = _UNKNOWN_CERTIFICATE.match(line)
        if match is None:
            return None
        where = f" at {match['address']}" if match["address"] else ""
        remedy = "'edge-agent status' on the device says why; 'headwater enroll NAME' lets it in again"
        return "", f"a client{where} has no certificate that counts here ({match['why']})", remedy

    def reload(self) -> None:
        """Have it read its list of revoked certificates and its own certificate again; sessions stay.

        A process that has just been restarted is waited for, `RELOAD_WAIT_S` at most: SIGHUP would end it while it has
        no handler for it. It may have read the files before they changed, so it gets the signal all the same.
        """
        self._wait_until_it_answers()
        pid = self.pid
        if pid is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)

    def _wait_until_it_answers(self) -> None:
        """Wait until the process of now answers; one that ends or does not answer in time is not waited for."""
        deadline = time.monotonic() + RELOAD_WAIT_S
        pid = self.pid
        while pid != self._ready_pid and self.is_alive and time.monotonic() < deadline:
            if self._is_ready() and self.pid == pid:
                self._ready_pid = pid
                return
            self._supervisor.wait(0.02)
            pid = self.pid


class MosquittoBroker(Mosquitto):
    """Mosquitto with a temporary configuration and without persistence."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections."""
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-mosquitto-")
        super().start()

    def stop(self) -> None:
        """End the process and remove its configuration."""
        super().stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def command(self) -> list[str]:
        """Return the command line that serves ``bind`` and ``port``; the configuration is written on the way."""
        folder = Path(self._folder.name if self._folder is not None else tempfile.gettempdir())
        acl = folder / "acl"
        relays = NO_RELAYS if self.password_file is None else read_relays(self.password_file)
        acl.write_text(mosquitto_acl(self.federation, relays), encoding="utf-8")
        settings = folder / "mosquitto.conf"
        access = (self.password_file.resolve(), acl) if self.password_file is not None else None
        settings.write_text(settings_text(self.bind, self.port, access), encoding="utf-8")
        for private in (acl, settings):
            private.chmod(0o600)
        return self.started_with(settings)


def limits_text() -> list[str]:
    """Return the lines of every Mosquitto configuration: limits, and what goes to the log."""
    return [
        "persistence false",
        "set_tcp_nodelay true",
        f"max_packet_size {MAX_PACKET_BYTES}",
        f"max_inflight_messages {MAX_INFLIGHT}",
        f"max_queued_messages {MAX_QUEUED}",
        "max_keepalive 600",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
    ]


def settings_text(bind: str, port: int, access: tuple[Path, Path] | None = None) -> str:
    """Return a mosquitto configuration; ``access`` holds password file and ACL file, None accepts all clients."""
    lines = [
        f"listener {port} {bind}",
        f"user {getpass.getuser()}",
        f"allow_anonymous {'true' if access is None else 'false'}",
        *limits_text(),
    ]
    if access is not None:
        lines += [f"password_file {access[0]}", f"acl_file {access[1]}"]
    return "\n".join([*lines, ""])
