"""The embedded broker's process: amqtt with as few plugins as possible, and ours for users and topics."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import Action
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin

from edge_agent.wire.mqtt import agent_of
from edge_agent.wire.transport import DEFAULT_MAX_PAYLOAD_BYTES

from ..processes.pipe import Pipe
from ..processes.worker_main import listen
from . import REFUSED_LINE
from .access import Rules, is_password, read_passwords, read_relays, relays_file

log = logging.getLogger(__name__)

LARGEST_READ_BYTES = 128 * 1024 + DEFAULT_MAX_PAYLOAD_BYTES
"""A longer packet is not read: its sender is disconnected as soon as it has announced the length."""

REFUSALS_PER_S = 10
"""Refused logins that are reported; further ones in the same second are those of a flood."""

PENDING_CHECKS = 200
"""Logins whose passwords wait to be checked; further ones are refused at once, and clients try again."""


class AccessPlugin(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]
    """Accepts the users of a password file, and limits each to the topics that `access.Rules` grants."""

    @dataclass
    class Config:
        """The options of this plugin, as amqtt gives them."""

        password_file: str = ""
        federation: str = "home"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._path = Path(self.config.password_file)
        self._rules = Rules(self.config.federation, read_relays(self._path))
        self._users = read_passwords(self._path)
        self._read_at = self._changed_at()
        # A password takes milliseconds to check, on purpose: in another thread it delays no message, and one that
        # was right is known again at once, so that agents come back while somebody tries passwords.
        self._checking = ThreadPoolExecutor(1, "passwords")
        self._pending = 0
        self._reported = (0, 0)
        """The second, and how many refused logins it has had."""

        self._secret = secrets.token_bytes(32)
        self._right = dict[str, tuple[str, bytes]]()

    async def authenticate(self, *, session: Any) -> bool:
        """Return whether this CONNECT is granted."""
        self._read_changed_users()
        user = session.username
        will = session.will_topic
        if not user:
            return self._refuse(session, "user")
        if user not in self._users:
            return self._refuse(session, "unknown")
        is_right = await self._is_right(user, session.password or "")
        if is_right is None:
            return self._refuse(session, "busy")
        if not is_right:
            return self._refuse(session, "password")
        # The broker itself checks the topics of publishes, but not those of wills.
        if will and not self._rules.may_publish(user, will):
            return self._refuse(session, "topics")
        return True

    def _read_changed_users(self) -> None:
        """Read the users and relays again if a file has changed, so that enrolling needs no restart."""
        with contextlib.suppress(OSError):
            changed_at = self._changed_at()
            if changed_at != self._read_at:
                self._users = read_passwords(self._path)
                self._rules.relays = read_relays(self._path)
                self._read_at = changed_at

    def _changed_at(self) -> tuple[int, int]:
        """Return when the users, and the relays among them, were written last; 0 where nobody is a relay.

        Raises:
            OSError: There is no file of users.
        """
        relays = relays_file(self._path)
        return self._path.stat().st_mtime_ns, relays.stat().st_mtime_ns if relays.exists() else 0

    def _refuse(self, session: Any, why: str) -> bool:
        """Report a refused login on stdout, for `EmbeddedBroker.refusal_in`, and return False."""
        now = int(time.monotonic())
        second, count = self._reported
        count = count + 1 if second == now else 1
        self._reported = (now, count)
        if count <= REFUSALS_PER_S:
            user = str(session.username or "")[:80]
            agent = agent_of(str(session.client_id or ""))[:80]
            line = json.dumps({"user": user, "id": agent, "why": why})
            sys.stdout.write(f"{REFUSED_LINE}{line}\n")
            sys.stdout.flush()
        return False

    async def _is_right(self, user: str, password: str) -> bool | None:
        """Return whether the password is the user's; None: too many wait to be checked."""
        hashed = self._users.get(user, "")
        digest = hmac.digest(self._secret, password.encode(), hashlib.sha256)
        mark = (hashed, digest)
        # A password that was right before, for the same hash, needs no check.
        hashed_before, digest_before = self._right.get(user, ("", b""))
        if hmac.compare_digest(digest_before, digest) and hashed_before == hashed:
            return True
        if self._pending >= PENDING_CHECKS:
            return None
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            is_right = await loop.run_in_executor(self._checking, is_password, password, hashed)
        finally:
            self._pending -= 1
        if is_right:
            self._right[user] = mark
        return is_right

    async def topic_filtering(self, *, session: Any = None, topic: str | None = None, action: Any = None) -> bool:
        """Return whether this publish, subscription or delivery is granted."""
        user = session.username if session is not None else None
        if not user or not topic:
            return False
        if action == Action.PUBLISH:
            return self._rules.may_publish(user, topic)
        return self._rules.may_subscribe(user, topic)


class BoundedReader(StreamReaderAdapter):  # type: ignore[misc]
    """Reads no more at once than the largest packet of the protocol; ``abort`` ends the connection of another one."""

    def __init__(self, reader: asyncio.StreamReader, abort: Callable[[], None]) -> None:
        super().__init__(reader)
        self._abort = abort

    async def read(self, n: int = -1) -> bytes:
        """Return up to ``n`` bytes.

        Raises:
            ConnectionResetError: the packet is larger; the session ends.
        """
        if n > LARGEST_READ_BYTES:
            log.warning("packet_too_large bytes=%d at_most=%d: its sender is disconnected", n, LARGEST_READ_BYTES)
            self._abort()
            raise ConnectionResetError("packet too large")
        data: bytes = await super().read(n)
        return data


class BoundedBroker(Broker):  # type: ignore[misc]
    """amqtt with bounded packets, which retains nothing.

    No message of the protocol is retained, and amqtt hands retained ones to new sessions past all rules of access.
    """

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        """Serve one connection, with bounded packets."""
        await self._client_connected(
            listener_name, BoundedReader(reader, writer.transport.abort), StreamWriterAdapter(writer)
        )

    async def retain_message(self, *_: object) -> None:
        """Do nothing: no message is retained."""


def settings(bind: str, port: int, federation: str, password_file: str | None) -> dict[str, Any]:
    """Return amqtt's configuration. No event, packet or ``$SYS`` plugin: each costs a call for each packet."""
    host = f"[{bind}]" if ":" in bind else bind
    plugins: dict[str, Any] = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    if password_file is not None:
        plugins = {f"{__name__}.AccessPlugin": {"password_file": password_file, "federation": federation}}
    return {"listeners": {"default": {"type": "tcp", "bind": f"{host}:{port}"}}, "plugins": plugins}


def serve(pipe: Pipe, bind: str, port: str, federation: str, password_file: str | None = None) -> None:
    """Serve in the child process until the owner closes the pipe."""
    for name in ("amqtt", "transitions"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A connection that sends nothing is how one asks whether a broker accepts connections; that is no error.
    logging.getLogger("amqtt.broker").addFilter(lambda record: "No data" not in record.getMessage())
    gc.collect()
    gc.freeze()  # what the imports made stays; later collections need not look at it
    listen(pipe, lambda _: None)
    asyncio.run(_serve(settings(bind, int(port), federation, password_file)))


async def _serve(config: dict[str, Any]) -> None:
    await BoundedBroker(config).start()
    await asyncio.Event().wait()
