"""The agents of a federation: for each one its token and the certificates that it has got, in one file.

A change is read, made and written under a lock, so the coordinator and commands beside it do not lose each other's.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from edge_agent.core.config import NAME_PATTERN
from edge_agent.core.errors import HeadwaterError, StateError, UsageError
from edge_agent.core.locks import waited_lock
from edge_agent.core.storage import IDENTITY, private_folder, read_regular, write_private
from edge_agent.core.task import Frozen, parse_json

log = logging.getLogger(__name__)

Time = Annotated[float, Field(ge=0)]
"""Unix time in seconds."""


class TokenRecord(Frozen):
    """A token that was made for an agent. Its secret is not here, only the public key that belongs to it."""

    public_key: str = Field(description="Ed25519, base64")
    made_at: Time
    expires: Time
    used_at: Time | None = None
    used_by: str = Field("", description="fingerprint of the key that it has certified")
    replaces: str = Field("", description="another agent, whose certificates are revoked when the token is used")


class CertificateRecord(Frozen):
    """A certificate that an agent has got."""

    serial: str = Field(description="hexadecimal")
    der: str = Field(description="the certificate, base64")
    key: str = Field(description="fingerprint of its key")
    not_before: Time
    not_after: Time
    renews: str = Field("", description="serial of the certificate whose key asked for it; empty: a token's did")
    revoked_at: Time | None = None

    def revoked(self, at: float) -> CertificateRecord:
        """Return the same, revoked at that time unless it was before; ``at`` in seconds since 1970."""
        return self if self.revoked_at is not None else self.model_copy(update={"revoked_at": at})


class AgentRecord(Frozen):
    """What the ledger has of one agent: its token and its certificates."""

    name: str = Field(pattern=NAME_PATTERN)
    owner: str = Field("", description="whose device it is; a person's devices are counted together")
    max_samples: int | None = Field(None, description="a larger count that it declares counts as this")
    relay_for: tuple[str, ...] = Field(
        (), description="agents for which it speaks, as the relay of their site; '*': all; empty: it is no relay"
    )
    token: TokenRecord | None = None
    certificates: tuple[CertificateRecord, ...] = ()
    generation: int = Field(0, ge=0, description="of the key of its commands; each revocation begins another one")

    def current(self) -> CertificateRecord | None:
        """Return the newest certificate that is not revoked; it may have expired."""
        valid = [certificate for certificate in self.certificates if certificate.revoked_at is None]
        return max(valid, key=lambda certificate: certificate.not_after) if valid else None

    @property
    def is_revoked(self) -> bool:
        """Whether it had certificates, and none counts any more."""
        return bool(self.certificates) and self.current() is None

    def counts(self, now: float) -> bool:
        """Return whether it is let in, or may still use its token."""
        if self.current() is not None:
            return True
        return self.token is not None and self.token.used_at is None and self.token.expires >= now

    def revoked(self, at: float) -> AgentRecord:
        """Return the same with all certificates revoked, and without a token that could still be used."""
        certificates = tuple(certificate.revoked(at) for certificate in self.certificates)
        is_used = self.token is not None and self.token.used_at is not None
        token = self.token if is_used else None
        generation = self.generation
        if certificates != self.certificates:
            generation += 1
        changes = {"certificates": certificates, "token": token, "generation": generation, "relay_for": ()}
        return self.model_copy(update=changes)


def identity_folder(state: Path) -> Path:
    """Return where a coordinator keeps its authority, certificates and ledger."""
    return state / IDENTITY


REVOKED = "revoked.json"
"""In the folder of the federation's identity, beside the records."""


class RevokedCertificate(Frozen):
    """One that counts no more."""

    agent: str
    revoked_at: Time
    not_after: Time


class Revoked(Frozen):
    """What follows from revocations, in one file: a coordinator of thousands of agents does not read all their records.

    It also outlasts a record that is damaged.
    """

    certificates: dict[str, RevokedCertificate] = Field(default_factory=dict, description="by serial")
    agents: tuple[str, ...] = Field((), description="those without any other certificate")
    generations: dict[str, int] = Field(default_factory=dict, description="see `AgentRecord`; 0 is left out")

    @classmethod
    def read(cls, folder: Path) -> Revoked:
        """Return what the list in the folder of the federation's identity says; empty where there is none.

        Raises:
            StateError: it is damaged.
        """
        path = folder / REVOKED
        try:
            return cls.model_validate(parse_json(read_regular(path)))
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            raise StateError(f"{path}: damaged; 'headwater serve' writes it again at its next start") from error


def is_revoked(folder: Path, name: str) -> bool:
    """Return whether an agent that is on the list of revoked ones has got no other certificate since."""
    try:
        record = Ledger(folder / "agents").get(name)
    except (HeadwaterError, OSError):  # damaged: the last that is known of it counts
        return True
    return record is None or record.is_revoked


class Ledger:
    """The records in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> AgentRecord | None:
        """Return the record of an agent; None where there is none.

        Raises:
            UsageError: no agent can have that name.
            StateError: the record is damaged.
        """
        path = self._path(name)
        try:
            return AgentRecord.model_validate(parse_json(read_regular(path)))
        except FileNotFoundError:
            return None
        except (ValidationError, ValueError) as error:
            raise StateError(
                f"{path}: damaged record of an agent; put it back from a backup, or enroll the device by another name"
            ) from error

    def records(self) -> list[AgentRecord]:
        """Return all agents by name, without those whose records are damaged, which are logged."""
        readable = []
        for name in sorted(path.stem for path in self.folder.glob("*.json")):
            try:
                record = self.get(name)
            except StateError as error:
                log.error("record_damaged agent=%s reason=%s", name, error)
                continue
            # A record may go between the list and the look.
            if record is not None:
                readable.append(record)
        return readable

    @contextlib.contextmanager
    def changing(self) -> Iterator[Ledger]:
        """Inside, nobody else changes records."""
        private_folder(self.folder)
        with waited_lock(self.folder):
            yield self

    def put(self, record: AgentRecord) -> None:
        """Write a record; inside `changing`."""
        write_private(self._path(record.name), record.model_dump_json(exclude_defaults=True).encode())

    def _path(self, name: str) -> Path:
        if not re.fullmatch(NAME_PATTERN, name):
            raise UsageError(f"'{name[:80]}' cannot be an agent's name; it has to match {NAME_PATTERN}")
        return self.folder / f"{name}.json"
