"""Mosquitto from the operating system, with a temporary configuration; for tests, benchmarks, single hosts."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from pathlib import Path

from edge_agent.errors import MissingCapability

from .access import mosquitto_acl
from .supervise import SupervisedBroker

MAX_PACKET_BYTES = 1 << 20
MAX_INFLIGHT = 256
"""Unacknowledged messages for one client: more than the 16 chunks of 16 uploads at once that a coordinator grants."""

MAX_QUEUED = 8192
"""Messages kept for one slow client. Mosquitto's own 1,000 are gone within one 60 MB download, silently."""


def find_mosquitto() -> Path | None:
    """The mosquitto program, or None; ``/usr/sbin`` is searched even where it is not on the path."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
    result = shutil.which("mosquitto", path=path)
    return Path(result) if result else None


class MosquittoBroker(SupervisedBroker):
    """Mosquitto on ``bind:port`` (0: any free port), with a temporary configuration and without persistence."""

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
        self._folder: tempfile.TemporaryDirectory[str] | None = None

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
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-mosquitto-")
        super().start()

    def stop(self) -> None:
        """End the process and remove its configuration."""
        super().stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def command(self) -> list[str]:
        """The command line that serves ``bind`` and ``port``; the configuration is written on the way."""
        folder = Path(self._folder.name if self._folder is not None else tempfile.gettempdir())
        acl = folder / "acl"
        acl.write_text(mosquitto_acl(self.federation), encoding="utf-8")
        settings = folder / "mosquitto.conf"
        access = (self.password_file.resolve(), acl) if self.password_file is not None else None
        settings.write_text(settings_text(self.bind, self.port, access), encoding="utf-8")
        for private in (acl, settings):
            private.chmod(0o600)
        # Ends with its parent also when the parent is killed; setpriv is part of every Linux with util-linux.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        return [*guard, str(find_mosquitto()), "-c", str(settings)]


def settings_text(bind: str, port: int, access: tuple[Path, Path] | None = None) -> str:
    """A mosquitto configuration; ``access`` holds password file and ACL file, None accepts everybody."""
    lines = [
        f"listener {port} {bind}",
        f"user {getpass.getuser()}",
        "persistence false",
        "set_tcp_nodelay true",
        f"max_packet_size {MAX_PACKET_BYTES}",
        f"max_inflight_messages {MAX_INFLIGHT}",
        f"max_queued_messages {MAX_QUEUED}",
        "max_keepalive 600",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        f"allow_anonymous {'true' if access is None else 'false'}",
    ]
    if access is not None:
        lines += [f"password_file {access[0]}", f"acl_file {access[1]}"]
    return "\n".join([*lines, ""])
