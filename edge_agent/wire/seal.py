"""Authentic commands: an agent that has a key obeys only the coordinator that made it.

A command to one agent ends in an HMAC-SHA256 with the agent's own key. An announcement to all ends in an Ed25519
signature, whose public key is beside the agent's key. Both cover the whole message. An agent without a key obeys all.

A recorded command stays authentic, so each agent also requires that commands are new. Its start has a random id, and a
`Welcome` that does not name it is of an earlier start. Other commands are obeyed only after that welcome, from the
coordinator's start that sent it, above its sequence number, and once; a rejection also before, if it names the agent's
start. Grants and acknowledgements of an update may be of an aggregator, whose start begins with the coordinator's. So a
restarted agent refuses everything that was recorded before, and writes nothing to its disk for each message; an old
image of the disk opens no gap either.
"""

from __future__ import annotations

import hmac
import logging
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import Field, ValidationError

from ..core.config import AgentBrokerConfig, credential
from ..core.errors import ConfigError, MessageError, StateError, cause
from ..core.logs import is_power_of_two
from ..core.storage import IDENTITY, read_json
from ..core.task import Frozen, parse_json
from ..identity.signed_request import ANNOUNCEMENT, COMMAND, command_bytes
from .messages.codec import proof_of
from .messages.down import Ack, Announce, Grant, Queued, Refused, Welcome, Who
from .messages.fields import Command, Name, start_of_partition

log = logging.getLogger(__name__)

KEY_BYTES = 32
"""The bytes of a key."""

ENROLLED_KEY = Path(IDENTITY) / "commands.key"
"""The file of the key in the state folder of an agent that was enrolled."""

REMEMBERED = 256
"""The number of the latest sequence numbers that are remembered, so that each is accepted once; lower are refused."""

STARTS = 8
"""The number of starts of coordinators whose sequence numbers are remembered."""


def derive(secret: bytes, *about: str) -> bytes:
    """Return a key of 32 bytes for the purpose that ``about`` names: HKDF-SHA256 (RFC 5869) without a salt."""
    extracted = hmac.digest(bytes(KEY_BYTES), secret, "sha256")
    return hmac.digest(extracted, "\0".join(about).encode() + b"\x01", "sha256")


def with_mac(key: bytes, agent: str, payload: bytes) -> bytes:
    """Return a command to ``agent`` with its MAC as the last field."""
    mac = COMMAND.sign(key, command_bytes(agent, payload))
    return payload[:-1] + b',"mac":"%s"}' % mac.hex().encode()


def with_signature(signature: bytes, payload: bytes) -> bytes:
    """Return an announcement with its signature (64 bytes) as the last field."""
    return payload[:-1] + b',"sig":"%s"}' % signature.hex().encode()


class _KeyFile(Frozen):
    """The content of the file of an agent's key; keys are in hexadecimal."""

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
        """Return the content of the key's file."""
        keys = {"key": self.key.hex(), "public_key": self.public_key.hex()}
        return _KeyFile(federation=self.federation, agent=self.agent, **keys).model_dump_json(indent=1) + "\n"


def check_key(text: str, federation: str, agent: str) -> None:
    """Require that ``text`` is the content of the key file of that agent.

    Raises:
        MessageError: ``text`` is damaged, or the file of another agent or federation.
    """
    try:
        content = _KeyFile.model_validate(parse_json(text.encode()))
    except (ValueError, RecursionError):  # the error quotes the key
        raise MessageError("the key of the coordinator's commands is malformed", is_public=True) from None
    if (content.federation, content.agent) != (federation, agent):
        raise MessageError("the key of the coordinator's commands is that of another agent", is_public=True)


class KeyOwner(Protocol):
    """A configuration of a program that has a key: that of an agent, or of a relay."""

    @property
    def id(self) -> str:
        """Its id in the federation."""

    @property
    def federation(self) -> str:
        """The name of the federation."""

    @property
    def state(self) -> Path:
        """Its state folder."""

    @property
    def broker(self) -> AgentBrokerConfig:
        """How it connects, and perhaps the file of its key."""


def key_file(config: KeyOwner) -> Path | None:
    """Return the file of an agent's key: the one that is configured, or else that of its enrolment; None: neither."""
    if config.broker.command_key_file is not None:
        return credential(config.broker.command_key_file)
    path = credential(config.state / ENROLLED_KEY)
    return path if path.exists() else None


def read_key(config: KeyOwner) -> AgentKey | None:
    """Return the key in the file of `key_file`; None where there is no file.

    Raises:
        ConfigError: The file cannot be read, holds no key, or holds that of another agent or federation.
    """
    path = key_file(config)
    if path is None:
        return None
    advice = "'headwater password', or enrolling again, writes this file for each agent"
    try:
        raw = read_json(path)
        if raw is None:
            raise ConfigError("broker.command_key_file", [f"{path}: no such file; {advice}"])
        content = _KeyFile.model_validate(raw)
    except StateError as error:
        reason = "it holds no JSON object" if error.__cause__ is None else cause(error.__cause__)
        raise ConfigError("broker.command_key_file", [f"{path}: cannot be read: {reason}; {advice}"]) from None
    except ValidationError as error:  # the error quotes the key
        wrong = ", ".join(sorted({str(detail["loc"][0]) for detail in error.errors()}))
        raise ConfigError("broker.command_key_file", [f"{path}: wrong or missing: {wrong}; {advice}"]) from None
    if (content.federation, content.agent) != (config.federation, config.id):
        mistake = (
            f"{path}: the key of agent '{content.agent}' in federation '{content.federation}'; expected that of "
            f"'{config.id}' in '{config.federation}'; {advice}"
        )
        raise ConfigError("broker.command_key_file", [mistake])
    return AgentKey(content.federation, content.agent, bytes.fromhex(content.key), bytes.fromhex(content.public_key))


class _Numbers:
    """The sequence numbers of one start of a coordinator, each of which is accepted once."""

    def __init__(self) -> None:
        self.floor = -1
        self._seen: list[int] = []

    def accept(self, seq: int) -> bool:
        """Note a sequence number, and return whether it is new."""
        at = bisect_left(self._seen, seq)
        if seq <= self.floor or self._seen[at : at + 1] == [seq]:
            return False
        self._seen.insert(at, seq)
        if len(self._seen) > REMEMBERED:
            self.floor = self._seen.pop(0)
        return True


class Guard:
    """The filter of an agent's commands: it lets in authentic ones, and each once.

    Attributes:
        refused: The number of commands that were not authentic.
        replayed: The number of authentic commands that were recorded earlier.
    """

    def __init__(self, key: AgentKey | None, boot: str) -> None:
        self._key = key
        self._boot = boot
        self._numbers: OrderedDict[str, _Numbers] = OrderedDict()
        self._coordinator: str | None = None
        self._before: set[str] = set()
        self.refused = 0
        self.replayed = 0

    @property
    def is_on(self) -> bool:
        """Whether this agent has a key."""
        return self._key is not None

    def lets_in(self, payload: bytes, *, to_all: bool) -> bool:
        """Return whether a command is authentic; ``to_all``: whether it came on the topic of announcements."""
        if self._key is None or self._is_authentic(self._key, payload, to_all=to_all):
            return True
        self.refused += 1
        if is_power_of_two(self.refused):
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
        if is_power_of_two(self.replayed):
            log.warning("replay_refused type=%s boot=%s seq=%d", message.type, message.boot, message.seq)
        return False

    def _is_new(self, message: Command) -> bool:
        """Return whether a command is of a start that may command now, and has a new sequence number."""
        if not self._may_command(message):
            return False
        numbers = self._numbers.setdefault(message.boot, _Numbers())
        self._numbers.move_to_end(message.boot)
        # The numbers of the coordinator itself stay: it may have been silent while others were heard.
        if len(self._numbers) > STARTS:
            oldest = next(boot for boot in self._numbers if boot != self._coordinator)
            del self._numbers[oldest]
        if not numbers.accept(message.seq):
            return False
        # A welcome makes its sender the coordinator; everything before it is over.
        if isinstance(message, Welcome) and message.boot != self._coordinator:
            if self._coordinator is not None:
                self._before.add(self._coordinator)
            self._coordinator = message.boot
            numbers.floor = message.seq
        return True

    def _may_command(self, message: Command) -> bool:
        """Return whether the start that sent a command may send one of its kind to this start of the agent."""
        if isinstance(message, Who):
            return True
        if isinstance(message, Welcome):
            return message.answers == self._boot and message.boot not in self._before
        if message.boot == self._coordinator:
            return True
        # An aggregator takes updates in the name of the coordinator, and commands nothing else.
        if self._coordinator is not None and isinstance(message, Grant | Queued | Ack):
            return message.boot.startswith(start_of_partition(self._coordinator, ""))
        is_rejection_of_this_start = isinstance(message, Refused) and message.whom == self._boot
        return is_rejection_of_this_start and message.boot not in self._before

    def _is_authentic(self, key: AgentKey, payload: bytes, *, to_all: bool) -> bool:
        """Return whether a command ends in the right MAC or signature."""
        sealed, kind, proof = proof_of(payload)
        if not to_all:
            return kind == "mac" and COMMAND.is_valid(key.key, proof, command_bytes(key.agent, sealed))
        if kind != "sig" or len(proof) != 64:
            return False
        return ANNOUNCEMENT.is_valid(key.public_key, proof, sealed)
