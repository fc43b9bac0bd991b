"""The embedded broker's process: amqtt with as few plugins as possible, and ours for users and topics."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amqtt.broker import Broker
from amqtt.contexts import Action
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin

from ..processes.pipe import Pipe
from ..processes.worker_main import listen
from .access import Rules, is_password, read_passwords


class AccessPlugin(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]
    """Accepts the users of a password file, and limits each to the topics that `access.Rules` grants."""

    @dataclass
    class Config:
        """Options of this plugin."""

        password_file: str = ""
        federation: str = "home"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._path = Path(self.config.password_file)
        self._rules = Rules(self.config.federation)
        self._users, self._read_at = read_passwords(self._path), self._path.stat().st_mtime_ns

    async def authenticate(self, *, session: Any) -> bool:
        """Whether this CONNECT is granted; the broker itself checks the topics of publishes but not those of wills."""
        with contextlib.suppress(OSError):  # enrolling needs no restart
            changed = self._path.stat().st_mtime_ns
            if changed != self._read_at:
                self._users, self._read_at = read_passwords(self._path), changed
        user, will = session.username, session.will_topic
        if not user or not is_password(session.password or "", self._users.get(user, "")):
            return False
        return not will or self._rules.may_publish(user, will)

    async def topic_filtering(self, *, session: Any = None, topic: str | None = None, action: Any = None) -> bool:
        """Whether this publish, subscription or delivery is granted."""
        user = session.username if session is not None else None
        if not user or not topic:
            return False
        if action == Action.PUBLISH:
            return self._rules.may_publish(user, topic)
        return self._rules.may_subscribe(user, topic)


def settings(bind: str, port: int, federation: str, password_file: str | None) -> dict[str, Any]:
    """amqtt's configuration. No event, packet or ``$SYS`` plugin: each costs a call for each packet."""
    host = f"[{bind}]" if ":" in bind else bind
    plugins: dict[str, Any] = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    if password_file is not None:
        plugins = {f"{__name__}.AccessPlugin": {"password_file": password_file, "federation": federation}}
    return {"listeners": {"default": {"type": "tcp", "bind": f"{host}:{port}"}}, "plugins": plugins}


def serve(pipe: Pipe, bind: str, port: str, federation: str, password_file: str | None = None) -> None:
    """The child process: serve until the owner closes the pipe."""
    for name in ("amqtt", "transitions"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A connection that sends nothing is how one asks whether a broker accepts connections; that is no error.
    logging.getLogger("amqtt.broker").addFilter(lambda record: "No data" not in record.getMessage())
    gc.collect()
    gc.freeze()  # what the imports made stays; later collections need not look at it
    listen(pipe, lambda _: None)
    asyncio.run(_serve(settings(bind, int(port), federation, password_file)))


async def _serve(config: dict[str, Any]) -> None:
    await Broker(config).start()
    await asyncio.Event().wait()
