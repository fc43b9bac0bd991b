"""Keys by which agents know the commands of their coordinator, see `edge_agent.wire.seal`.

One secret of 32 random bytes in the state folder is enough: each agent's key and the key that signs announcements are
derived from it, so there is no list to keep, and a backup of the state folder holds all of them.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.core.config import credential
from edge_agent.core.errors import StateError, cause
from edge_agent.core.locks import waited_lock
from edge_agent.core.storage import IDENTITY, private_folder, read_regular, write_private
from edge_agent.identity.signed_request import ANNOUNCEMENT
from edge_agent.wire.seal import KEY_BYTES, AgentKey, derive, with_mac, with_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MASTER = Path(IDENTITY) / "master.key"
"""In the state folder."""

MOST_AGENTS = 1 << 14
"""Agents whose derived keys stay in memory."""


class CommandKeys:
    """The keys of one federation."""

    def __init__(self, master: bytes, federation: str, generation: Callable[[str], int] = lambda _: 0) -> None:
        """``generation`` of an agent's key: another one is another key, so that who had one has not the next."""
        self._master = master
        self._federation = federation
        self._generation = generation
        self._derived = functools.lru_cache(MOST_AGENTS)(self._derive)

    @classmethod
    def of(cls, state: Path, federation: str, generation: Callable[[str], int] = lambda _: 0) -> CommandKeys:
        """Return the keys of a state folder, whose secret is made where there is none, or given by systemd.

        Raises:
            StateError: the secret cannot be read, or is no secret of ours.
            OSError: it cannot be written.
        """
        path = credential(state / MASTER)
        if path.parent == (state / MASTER).parent:
            cls._make(state)
        try:
            master = read_regular(path)
        except OSError as error:
            raise StateError(f"{path}: cannot be read: {cause(error)}; the coordinator's user must own it") from error
        if len(master) != KEY_BYTES:
            raise StateError(
                f"{path}: {len(master)} bytes, expected {KEY_BYTES}; put it back from a backup, or remove it and "
                "enroll all agents again"
            )
        return cls(master, federation, generation)

    @staticmethod
    def _make(state: Path) -> None:
        path = state / MASTER
        private_folder(path.parent)
        with waited_lock(path.parent):  # 'headwater password' and a starting coordinator make one secret, not two
            if not path.exists():
                write_private(path, secrets.token_bytes(KEY_BYTES))

    def of_agent(self, agent: str) -> AgentKey:
        """Return the key that an agent gets, with the public key of announcements."""
        public_key = self._signing_key.public_key().public_bytes_raw()
        return AgentKey(self._federation, agent, self._key_of(agent), public_key)

    def for_aggregators(self) -> bytes:
        """Return the key of the messages between coordinator and aggregators, which no agent has."""
        return derive(self._master, "headwater aggregators", self._federation)

    def proven(self, agent: str, payload: bytes) -> bytes:
        """Return a command to an agent with its proof."""
        return with_mac(self._key_of(agent), agent, payload)

    def signed(self, payload: bytes) -> bytes:
        """Return an announcement to all agents with its proof."""
        return with_signature(ANNOUNCEMENT.sign(self._signing_key, payload), payload)

    def _key_of(self, agent: str) -> bytes:
        return self._derived(agent, self._generation(agent))

    def _derive(self, agent: str, generation: int) -> bytes:
        number = (str(generation),) if generation else ()
        return derive(self._master, "headwater commands", self._federation, agent, *number)

    @functools.cached_property
    def _signing_key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        seed = derive(self._master, "headwater announcements", self._federation)
        return Ed25519PrivateKey.from_private_bytes(seed)
