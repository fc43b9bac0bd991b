"""The broker that comes with the coordinator: amqtt in a child process, for trials and single hosts.

Why a process of its own: its event loop would share the interpreter lock with rounds, and its crash would take the
coordinator along. Nothing of ours leans on its sessions or its storage.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from edge_agent.config import BrokerConfig
from edge_agent.errors import MissingCapability
from edge_agent.storage import Access, write_atomic

from ..processes.launch import worker_command
from .access import COORDINATOR_USER, is_password, read_passwords, set_password
from .supervise import SupervisedBroker, is_loopback

log = logging.getLogger(__name__)


class EmbeddedBroker(SupervisedBroker):
    """amqtt on ``bind:port`` (0: any free port). With a password file its users have the rights of `access.Rules`."""

    def __init__(
        self,
        bind: str = "127.0.0.1",
        port: int = 0,
        *,
        federation: str = "home",
        password_file: Path | None = None,
    ) -> None:
        super().__init__(bind, port)
        self.federation, self.password_file = federation, password_file

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections.

        Raises:
            MissingCapability: amqtt is not installed.
            UsageError: the port is taken.
            BrokerAway: the process did not start; the message says why.
        """
        if importlib.util.find_spec("amqtt") is None:
            raise MissingCapability.package("amqtt", "coordinator", "the embedded broker")
        if self.password_file is None and not is_loopback(self.bind):
            log.warning(
                "anonymous broker on a public address bind=%s: anybody who can connect can take part; "
                "set embedded.password_file, or bind to 127.0.0.1",
                self.bind,
            )
        if self.password_file is not None:
            _let_coordinator_in(self.password_file)
        super().start()

    def config(self) -> BrokerConfig:
        """How the coordinator connects."""
        if self.password_file is None:
            return BrokerConfig(url=self.url)
        return BrokerConfig(url=self.url, user=COORDINATOR_USER, password_file=_own_password(self.password_file))

    def command(self) -> Sequence[str]:
        """The command line that serves ``bind`` and ``port``."""
        users = [] if self.password_file is None else [str(self.password_file.resolve())]
        return worker_command("coordinator.broker.serve:serve", self.bind, str(self.port), self.federation, *users)


def _own_password(password_file: Path) -> Path:
    """Where the coordinator keeps its own password: beside those that it gave to the agents."""
    return password_file.with_name(f"{password_file.name}.coordinator")


def _let_coordinator_in(password_file: Path) -> None:
    """Make the coordinator a user of the broker that it starts; its password is generated once."""
    own = _own_password(password_file)
    if not own.exists():
        write_atomic(own, secrets.token_urlsafe(32).encode(), access=Access.private())
    password = own.read_text(encoding="utf-8").strip()
    known = read_passwords(password_file) if password_file.exists() else {}
    if not is_password(password, known.get(COORDINATOR_USER, "")):
        set_password(password_file, COORDINATOR_USER, password)
