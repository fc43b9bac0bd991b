"""The agents of a site, as its relay knows them; what they have said of themselves stays on disk for a restart."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.config import NAME_PATTERN
from ..core.errors import HeadwaterError, cause
from ..core.storage import read_regular, write_atomic
from ..wire.messages import codec, up
from ..wire.messages.fields import MAX_HEARTBEAT_S, PROTOCOL, Control

log = logging.getLogger(__name__)

_OFFLINE = re.compile(rb"offline ([A-Za-z0-9-]{1,32}) ([0-9]{1,16})")
"""What the broker of the site publishes when an agent's connection breaks: the agent's start, and the connection."""


SILENT_S = 3 * MAX_HEARTBEAT_S
"""Seconds after which an agent that is not known to have left makes room for others: it has sent no heartbeat."""


@dataclass
class Member:
    """An agent of the site."""

    hello: up.Hello | None = None
    """What it has said of itself last, which is said again when the relay has a new connection; None: nothing yet."""

    boot: str = ""
    """The start of the agent that has said something last; empty: none has."""

    federation: str = ""
    """The federation that it follows."""

    protocol: int = PROTOCOL
    """The version of the protocol that it speaks."""

    is_online: bool = False
    """Whether it has said hello, and has not left since."""

    heard_at: float = 0.0
    """When it was heard last, in monotonic seconds."""

    is_reachable: bool = False
    """Whether the coordinator's broker has confirmed that messages to this agent come to the relay."""

    def note_words(self, message: Control) -> None:
        """Note who speaks, as any message of an agent says it."""
        self.boot = message.boot
        self.federation = message.federation
        self.protocol = message.v

    def is_away(self, now: float) -> bool:
        """Return whether the agent is offline, or silent for so long that it must be; ``now``: monotonic seconds."""
        return not self.is_online or now - self.heard_at > SILENT_S

    def is_end_of_connection(self, presence: bytes) -> bool:
        """Return whether a message on the topic of presence says that the agent's last connection has ended.

        The broker may report the end of an earlier connection late.
        """
        offline = _OFFLINE.fullmatch(presence)
        if offline is None or self.hello is None:
            return False
        return (self.hello.boot, self.hello.connection) == (offline[1].decode(), int(offline[2]))


class Members:
    """All agents of a site, at most ``most`` of them, with a file for each that is online."""

    def __init__(self, folder: Path, most: int, now: float) -> None:
        """Begin with those that were online when an earlier process ended.

        Args:
            folder: Folder of the files.
            most: The most agents.
            now: The time, in monotonic seconds.
        """
        self._folder = folder
        self._most = most
        self._members = dict[str, Member]()
        for path in sorted(folder.glob("*.hello")):
            if len(self._members) < most and re.fullmatch(NAME_PATTERN, path.stem):
                self._restore(path, now)

    def __iter__(self) -> Iterator[tuple[str, Member]]:
        """Yield the id of each agent, and what is noted of it."""
        return iter(self._members.items())

    def __len__(self) -> int:
        return len(self._members)

    @property
    def online(self) -> int:
        """How many of them are online."""
        return sum(member.is_online for member in self._members.values())

    def get(self, agent: str) -> Member | None:
        """Return what is noted of an agent; None: it is none of the site's."""
        return self._members.get(agent)

    def add(self, agent: str, now: float) -> tuple[Member | None, str]:
        """Add an agent, in place of one that is offline or silent where there are as many as may be.

        Args:
            agent: The agent.
            now: The time, in monotonic seconds.

        Returns:
            The new member, None where there is no room for it; and the agent that has made room, empty where none has.
        """
        left = ""
        if len(self._members) >= self._most:
            left = next((name for name, member in self._members.items() if member.is_away(now)), "")
            if not left:
                return None, ""
            self.gone(left)
            del self._members[left]
        member = self._members[agent] = Member(heard_at=now)
        return member, left

    def said_hello(self, agent: str, hello: up.Hello) -> None:
        """Note what an agent says of itself, also on disk: after a restart it is said again in its name."""
        member = self._members[agent]
        member.hello = hello
        member.is_online = True
        try:
            write_atomic(self._path(agent), codec.encode(hello, hello.v), durable=False)
        except OSError as error:
            log.warning("hello_not_kept agent=%s reason=%s", agent, cause(error))

    def gone(self, agent: str) -> None:
        """Note that an agent is offline: it will say hello itself when it is back."""
        self._members[agent].is_online = False
        try:
            self._path(agent).unlink(missing_ok=True)
        except OSError as error:
            log.warning("hello_not_removed agent=%s reason=%s", agent, cause(error))

    def cut(self) -> None:
        """Note that the relay's connection to the coordinator's broker is lost."""
        for member in self._members.values():
            member.is_reachable = False

    def _path(self, agent: str) -> Path:
        return self._folder / f"{agent}.hello"

    def _restore(self, path: Path, now: float) -> None:
        """Add the agent of a file; one that is damaged is left out, and replaced when the agent says hello."""
        try:
            hello = codec.parse_from_agent(read_regular(path))
        except (HeadwaterError, OSError) as error:
            log.warning("hello_unreadable path=%s reason=%s", path, error)
            return
        if isinstance(hello, up.Hello):
            member = self._members[path.stem] = Member(hello, is_online=True, heard_at=now)
            member.note_words(hello)
