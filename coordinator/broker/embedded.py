"""The broker that comes with the coordinator: amqtt in a child process, for trials and single hosts.

Why a process of its own: its event loop would share the interpreter lock with rounds, and its crash would take the
coordinator along. Nothing of ours leans on its sessions or its storage.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from edge_agent.config import BrokerConfig

from .access import COORDINATOR_USER
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
        coordinator_password_file: Path | None = None,
    ) -> None:
        super().__init__(bind, port)
        self.federation, self.password_file = federation, password_file
        self.coordinator_password_file = coordinator_password_file

    def start(self) -> None:
        """Start the process and return as soon as it accepts connections.

        Raises:
            UsageError: the port is taken.
            BrokerAway: the process did not come up; the message holds its last words.
        """
        if self.password_file is None and not is_loopback(self.bind):
            log.warning(
                "anonymous broker on a public address bind=%s: anybody who reaches it can take part; "
                "set embedded.password_file, or bind to 127.0.0.1",
                self.bind,
            )
        super().start()

    def config(self) -> BrokerConfig:
        """How the coordinator connects."""
        if self.password_file is None:
            return BrokerConfig(url=self.url)
        return BrokerConfig(url=self.url, user=COORDINATOR_USER, password_file=self.coordinator_password_file)

    def command(self) -> list[str]:
        """The command line that serves ``bind`` and ``port``."""
        command = [sys.executable, "-m", "coordinator.broker", "--bind", self.bind, "--port", str(self.port)]
        command += ["--federation", self.federation]
        if self.password_file is not None:
            command += ["--password-file", str(self.password_file.resolve())]
        return command
