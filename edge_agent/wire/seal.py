"""Authentic commands: an agent that has a key obeys only the coordinator that made it.

A command to one agent ends in an HMAC-SHA256 with the agent's own key. An announcement to all ends in an Ed25519
signature, whose public key is beside the agent's key. Both cover the whole message. An agent without a key obeys all.

A recorded command stays authentic, so each agent also asks for something new: its start is random, and a `Welcome` that
does not name it is of an earlier start. The others count only after that welcome, from the coordinator's start that
sent it, above its sequence number, and once; a rejection also before, where it names the agent's start. So a restarted
agent refuses everything that was recorded before, and needs to write nothing to its disk for each message; an old image
of the disk opens no gap either.
"""

from __future__ import annotations

import hmac
import logging
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError

from ..core.config import AgentConfig, credential
from ..core.errors import ConfigError, MessageError, StateError, cause
from ..core.storage import IDENTITY, read_json
from ..core.task import Frozen, parse_json
from .messages.codec import proof_of
from .messages.down import Announce, Refused, Welcome, Who
from .messages.fields import Command, Name

log = logging.getLogger(__name__)

KEY_BYTES = 32
ENROLLED_KEY = Path(IDENTITY) / "commands.key"
"""In the state folder of an agent that was enrolled."""

REMEMBERED = 256
"""Sequence numbers of which each is accepted once; lower ones than these are refused."""

STARTS = 8
"""Starts of coordinators whose numbers are remembered."""


def derive(secret: bytes, *about: str) -> bytes:
    """Return a key of 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) without a salt; ``about`` names the purpose."""
    extracted = hmac.digest(bytes(KEY_BYTES), secret, "sha256")
    return hmac.digest(extracted, "\0".join(about).encode() + b"\x01", "sha256")


def with_mac(key: bytes, agent: str, payload: bytes) -> bytes:
    """Return a command to ``agent`` with its MAC as the last field."""
    return payload[:-1] + b',"mac":"%s"}' % _mac(key, agent, payload).hex().encode()


def with_signature(signature: bytes, payload: bytes) -> bytes:
    """Return an announcement with its signature (64 bytes) as the last field."""
    return payload[:-1] + b',"sig":"%s"}' % signature.hex().encode()


def _mac(key: bytes, agent: str, payload: bytes) -> bytes:
    return hmac.digest(key, b"%s\0%s" % (agent.encode(), payload), "sha256")


class _KeyFile(Frozen):
    """What is in the file of an agent's key; keys in hexadecimal."""

    federation: Name
    agent: Name
    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    public_key: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True)
class AgentKey:
    """One agent's key, which the coordinator can derive again, and the public key of its announcements."""

    federation: str
    agent: str
    key: bytes = field(repr=False)
    public_key: bytes

    def text(self) -> str:
        """Return the content of its file."""
        keys = {"key": self.key.hex(), "public_key": self.public_key.hex()}
        return _KeyFile(federation=self.federation, agent=self.agent, **keys).model_dump_json(indent=1) + "\n"


def check_key(text: str, federation: str, agent: str) -> None:
    """Return quietly where ``text`` is the content of that agent's file.

    Raises:
        MessageError: ``text`` is damaged, or the file of another agent or federation.
    """
    try:
        known = _KeyFile.model_validate(parse_json(text.encode()))
    except (ValueError, RecursionError):  # it quotes the key
        raise MessageError("the key of the coordinator's commands is malformed", is_public=True) from None
    if (known.federation, known.agent) != (federation, agent):
        raise MessageError("the key of the coordinator's commands is that of another agent", is_public=True)


def key_file(config: AgentConfig) -> Path | None:
    """Of an agent's key: the file that its configuration names, or that it got when it was enrolled; None: neither."""
    if config.broker.command_key_file is not None:
        return credential(config.broker.command_key_file)
    path = credential(config.state / ENROLLED_KEY)
    return path if path.exists() else None


def read_key(config: AgentConfig) -> AgentKey | None:
    """Return the key in that file (`key_file`); None where there is none.

    Raises:
        ConfigError: The file cannot be read, holds no key, or holds that of another agent or federation.
    """
    if (path := key_file(config)) is None:
        return None
    advice = "'headwater password', or enrolling again, writes this file for each agent"
    try:
        if (raw := read_json(path)) is None:
            raise ConfigError("broker.command_key_file", [f"{path}: no such file; {advice}"])
        known = _KeyFile.model_validate(raw)
    except StateError as error:
        why = cause(error.__cause__) if error.__cause__ is not None else "it holds no JSON object"
        raise ConfigError("broker.command_key_file", [f"{path}: cannot be read: {why}; {advice}"]) from None
    except ValidationError as error:  # it quotes the key
        wrong = ", ".join(sorted({str(detail["loc"][0]) for detail in error.errors()}))
        raise ConfigError("broker.command_key_file", [f"{path}: wrong or missing: {wrong}; {advice}"]) from None
    if (known.federation, known.agent) != (config.federation, config.id):
        mistake = (
            f"{path}: the key of agent '{known.agent}' in federation '{known.federation}'; expected that of "
            f"'{config.id}' in '{config.federation}'; {advice}"
        )
        raise ConfigError("broker.command_key_file", [mistake])
    return AgentKey(known.federation, known.agent, bytes.fromhex(known.key), bytes.fromhex(known.public_key))


class _Numbers:
    """Sequence numbers of one start of a coordinator, each accepted once."""

    def __init__(self) -> None:
        self.floor = -1
        self._seen: list[int] = []

    def accept(self, seq: int) -> bool:
        """Return whether this one is new."""
        at = bisect_left(self._seen, seq)
        if seq <= self.floor or self._seen[at : at + 1] == [seq]:
            return False
        self._seen.insert(at, seq)
        if len(self._seen) > REMEMBERED:
            self.floor = self._seen.pop(0)
        return True


class Guard:
    """What an agent lets in. ``refused`` counts commands that are not authentic, ``replayed`` those of the past."""

    def __init__(self, key: AgentKey | None, boot: str) -> None:
        self._key = key
        self._boot = boot
        self._numbers: OrderedDict[str, _Numbers] = OrderedDict()
        self._coordinator: str | None = None
        self._before: set[str] = set()
        self.refused = self.replayed = 0

    @property
    def is_on(self) -> bool:
        """Whether this agent has a key."""
        return self._key is not None

    def lets_in(self, payload: bytes, *, to_all: bool) -> bool:
        """Return whether a command is authentic; ``to_all``: on the topic of announcements."""
        if self._key is None or self._is_authentic(self._key, payload, to_all=to_all):
            return True
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning(
                "unauthentic_refused count=%d: a command without the coordinator's proof; if all are refused, the "
                "coordinator has a new state folder: enroll this agent again",
                self.refused,
            )
        return False

    def is_new(self, message: Command) -> bool:
        """Return whether an authentic command is to be obeyed now; False for one that was recorded earlier."""
        if self._key is None or isinstance(message, Announce) or self._is_new(message):
            return True
        self.replayed += 1
        if self.replayed & (self.replayed - 1) == 0:
            log.warning("replay_refused type=%s boot=%s seq=%d", message.type, message.boot, message.seq)
        return False

    def _is_new(self, message: Command) -> bool:
        if isinstance(message, Welcome):
            if message.answers != self._boot or message.boot in self._before:
                return False
        elif isinstance(message, Refused):
            if message.boot != self._coordinator and (message.whom != self._boot or message.boot in self._before):
                return False
        elif not isinstance(message, Who) and message.boot != self._coordinator:
            return False
        numbers = self._numbers.setdefault(message.boot, _Numbers())
        self._numbers.move_to_end(message.boot)
        if (
            len(self._numbers) > STARTS
        ):  # those of the coordinator stay: it may have been silent while others were heard
            del self._numbers[next(boot for boot in self._numbers if boot != self._coordinator)]
        if not numbers.accept(message.seq):
            return False
        if isinstance(message, Welcome) and message.boot != self._coordinator:
            if self._coordinator is not None:
                self._before.add(self._coordinator)
            self._coordinator = message.boot
            numbers.floor = message.seq
        return True

    def _is_authentic(self, key: AgentKey, payload: bytes, *, to_all: bool) -> bool:
        sealed, kind, proof = proof_of(payload)
        if not to_all:
            return kind == "mac" and hmac.compare_digest(proof, _mac(key.key, key.agent, sealed))
        if kind != "sig" or len(proof) != 64:
            return False
        from cryptography.exceptions import InvalidSignature  # takes 7 MB: only agents with a key
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(key.public_key).verify(proof, sealed)
        except InvalidSignature:
            return False
        return True
