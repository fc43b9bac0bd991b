"""Tokens for devices, certificates for those who show one, their renewal and revocation.

All state is in files, so commands work while the coordinator serves, and see what it did.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from edge_agent.bundle.trust import dump
from edge_agent.core.errors import EnrolmentRefused, NotProven, StateError, UsageError
from edge_agent.core.storage import write_private
from edge_agent.identity.certificates import show_utc
from edge_agent.identity.enrolment_port import CertificateRequest
from edge_agent.identity.keys import key_fingerprint, new_secret, token_key
from edge_agent.identity.signed_request import CERTIFICATE_REQUEST, TOKEN_REQUEST, answer_bytes
from edge_agent.identity.tokens import Token

from ..broker.access import COORDINATOR_USER, Relays
from ..config import IdentityConfig
from ..journal.store import utc_now
from ..state.command_keys import CommandKeys
from ..state.release_keys import ReleaseKeys
from .authority import Authority
from .ledger import (
    REVOKED,
    AgentRecord,
    CertificateRecord,
    Ledger,
    Revoked,
    RevokedCertificate,
    TokenRecord,
    identity_folder,
)

log = logging.getLogger(__name__)

MOST_CERTIFICATES = 8
"""Of one agent that hold at a time, and expired ones that are kept for a renewal. An honest agent has two that hold."""

LISTED_S = 86_400.0
"""Of a certificate that expired earlier nobody asks whether it was revoked."""

RESERVED = frozenset({COORDINATOR_USER, "broker"})
"""Names that no agent may have: the broker knows the coordinator by its name."""


class Enrolment:
    """Certifies the agents of one federation."""

    def __init__(
        self,
        state: Path,
        federation: str,
        config: IdentityConfig,
        *,
        now: Callable[[], datetime] = utc_now,
        taken: frozenset[str] = frozenset(),
    ) -> None:
        """Open the authority in the state folder. ``taken``: ids of clients that the coordinator itself hosts.

        Raises:
            StateError: there is none.
        """
        self.folder = identity_folder(state)
        self.federation = federation
        self.config = config
        self.now = now
        self.authority = Authority.open(self.folder)
        self.ledger = Ledger(self.folder / "agents")
        self._taken = taken
        self.crl = self.folder / "crl.pem"

    @property
    def life(self) -> timedelta:
        """How long an agent's certificate holds."""
        return timedelta(days=self.config.certificate_days)

    def token(
        self,
        name: str,
        life: timedelta,
        *,
        replaces: str = "",
        owner: str | None = None,
        max_samples: int | None = None,
        relay_for: tuple[str, ...] | None = None,
    ) -> Token:
        """Return a new token for an agent; one that was made for it before does not count any more.

        ``owner``, ``max_samples`` and ``relay_for`` (see `AgentRecord`) stay as they were where they are None.

        Raises:
            UsageError: no agent can have that name, or its owner has as many agents as one may have.
        """
        if name in RESERVED:
            raise UsageError(f"'{name}' is the name of a program of the federation; choose another for the device")
        if name in self._taken:
            raise UsageError(f"'{name}' is a client that this coordinator hosts ([[hosted]]); choose another name")
        now = self.now()
        secret = new_secret()
        public = token_key(secret).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        expires = now + life
        token = TokenRecord(
            public_key=base64.b64encode(public).decode(),
            made_at=now.timestamp(),
            expires=expires.timestamp(),
            replaces=replaces,
        )
        with self.ledger.changing() as ledger:
            record = ledger.get(name) or AgentRecord(name=name)
            # A device that gets another name stays that of its owner.
            renamed = ledger.get(replaces) if replaces else None
            if renamed is not None:
                record = record.model_copy(update={"owner": renamed.owner, "max_samples": renamed.max_samples})
            changes: dict[str, object] = {"token": token}
            if owner is not None:
                changes["owner"] = owner
            if max_samples is not None:
                changes["max_samples"] = max_samples
            if relay_for is not None:
                changes["relay_for"] = relay_for
            record = record.model_copy(update=changes)
            self._check_quota(record, replaces)
            ledger.put(record)
        return Token(
            url=self.config.url,
            port=self.config.enroll_port,
            federation=self.federation,
            name=name,
            authority=self.authority.fingerprint,
            secret=secret,
            expires=int(expires.timestamp()),
            replaces=replaces or None,
        )

    def relays(self) -> Relays:
        """Return the relays, and the agents for which each of them speaks."""
        return {record.name: record.relay_for for record in self.ledger.records() if record.relay_for}

    def certify(self, request: CertificateRequest) -> CertificateRecord:
        """Return a certificate for a device that shows a token, or the certificate that it has.

        Raises:
            NotProven: it shows neither; the message is the same whether or not there is such an agent.
            EnrolmentRefused: it may have none; the message says why and what to do.
            UsageError: no agent can have that name.
        """
        self._check_federation(request)
        key = self._read_key(request)
        with self.ledger.changing():
            record = self.ledger.get(request.name)
            if request.serial:
                return self._renew(record, request, key)
            return self._enroll(record, request, key)

    def standing(self, request: CertificateRequest) -> CertificateRecord:
        """Return the certificate of a device that asks whether it counts.

        Raises:
            NotProven: it does not sign with the key of one; as in `certify`.
            EnrolmentRefused: it counts no more; the message says why and what to do.
            UsageError: no agent can have that name.
        """
        self._check_federation(request)
        return self._check_shown(self.ledger.get(request.name), request)

    def answer(self, name: str, made: CertificateRecord) -> dict[str, str]:
        """Return what a device is sent, signed by the authority: a file may be changed on its way.

        By ``commands`` it knows the coordinator's commands, by ``root``, where there are release keys, its releases.
        """
        state = self.folder.parent
        answer = {
            "authority": base64.b64encode(self.authority.der).decode(),
            "certificate": made.der,
            "commands": self.command_key(name),
        }
        keys = ReleaseKeys(state)
        if keys.exist:
            answer["root"] = dump(keys.roots()[-1]).decode()
        signature = self.authority.sign(answer_bytes(self.federation, name, answer))
        return {**answer, "signature": base64.b64encode(signature).decode()}

    def command_key(self, name: str) -> str:
        """Return the content of the file by which an agent knows the coordinator's commands."""
        return CommandKeys.of(self.folder.parent, self.federation, self._generation).of_agent(name).text()

    def revoke(self, name: str) -> AgentRecord:
        """Revoke all certificates of an agent, and its token.

        Raises:
            UsageError: there is no such agent.
        """
        with self.ledger.changing() as ledger:
            record = ledger.get(name)
            if record is None:
                names = ", ".join(agent.name for agent in ledger.records()[:10]) or "none"
                raise UsageError(f"there is no agent '{name}'; known are: {names}")
            ended = record.revoked(self.now().timestamp())
            ledger.put(ended)
            self.write_crl()
        return ended

    def write_crl(self) -> None:
        """Write the list of revoked certificates; inside `Ledger.changing`, or before anybody else is there."""
        now = self.now()
        records = self.ledger.records()
        try:
            before = self.revoked()
        except StateError as error:
            log.error("revocations_damaged reason=%s", error)
            before = Revoked()
        listed = _list_revoked(before, records, now.timestamp() - LISTED_S)
        # The list with names comes first: the coordinator reads it when it sees a new list of the broker.
        write_private(self.folder / REVOKED, listed.model_dump_json().encode())
        dated = []
        for serial, certificate in listed.certificates.items():
            dated.append((int(serial, 16), datetime.fromtimestamp(certificate.revoked_at, timezone.utc)))
        write_private(self.crl, self.authority.revocations(dated, now))

    def revoked(self) -> Revoked:
        """Return what the list of revoked certificates says, with names.

        Raises:
            StateError: it is damaged.
        """
        return Revoked.read(self.folder)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _generation(self, name: str) -> int:
        record = self.ledger.get(name)
        return 0 if record is None else record.generation

    def _check_quota(self, agent: AgentRecord, replaces: str) -> None:
        """Require that an owner has fewer other agents than one may have; ``replaces`` is the agent's former name."""
        most = self.config.agents_per_owner
        if most is None or not agent.owner:
            return
        now = self.now().timestamp()
        others = []
        for record in self.ledger.records():
            is_other = record.name not in {agent.name, replaces}
            if is_other and record.owner == agent.owner and record.counts(now):
                others.append(record.name)
        if len(others) >= most:
            raise UsageError(
                f"owner '{agent.owner}' has {len(others)} agents ({', '.join(others[:10])}), and "
                f"identity.agents_per_owner is {most}; 'headwater agents revoke NAME' ends one of them"
            )

    def _check_federation(self, request: CertificateRequest) -> None:
        if request.federation != self.federation:
            raise NotProven(
                f"federation: the request is for '{request.federation}', and this coordinator serves "
                f"'{self.federation}'; 'headwater enroll {request.name}' on the right coordinator makes a token"
            )

    def _read_key(self, request: CertificateRequest) -> ec.EllipticCurvePublicKey:
        """Return the key that a request wants to have certified.

        Raises:
            NotProven: It is no key of ours, is not shown to be the sender's, or is for another name.
        """
        try:
            csr = x509.load_der_x509_csr(base64.b64decode(request.csr, validate=True))
            names = [str(entry.value) for entry in csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            key = csr.public_key()
            is_signed = csr.is_signature_valid
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise NotProven(
                f"request: it is no certificate signing request ({error}); run the command again"
            ) from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not is_signed:
            raise NotProven("request: its key is not of EC P-256, or it is not signed with that key")
        if names != [request.name]:
            raise NotProven(f"request: it is for {names}, and the message for '{request.name}'")
        return key

    def _enroll(
        self, known: AgentRecord | None, request: CertificateRequest, key: ec.EllipticCurvePublicKey
    ) -> CertificateRecord:
        """Return the certificate of a device that shows a token; a repeated request gets the same one.

        Raises:
            NotProven: The request is not signed with the secret of the agent's newest token.
            EnrolmentRefused: Another device has used the token, or it has expired.
        """
        name = request.name
        now = self.now().timestamp()
        # Whoever cannot sign with the token's secret gets one answer, whatever is known of that name.
        record, token = _shown_token(known, request)
        used_by = key_fingerprint(key)
        if token.used_at is not None:
            # The answer to the first request was lost, if the key is the same.
            for certificate in record.certificates:
                if certificate.key == used_by and certificate.revoked_at is None:
                    return certificate
            raise EnrolmentRefused(
                f"token: it was used at {show_utc(token.used_at)} by a device with the key {token.used_by}, and counts "
                "once",
                _again(name),
            )
        if token.expires < now:
            raise EnrolmentRefused(f"token: it expired at {show_utc(token.expires)}", _again(name))
        # The device's former certificates end before the token counts as used: after a crash, or with a full disk, all
        # of it is done again.
        ended = self._end_former(record, token, now)
        certificate = self._issue(name, key)
        self._write(ended, certificate, token.model_copy(update={"used_at": now, "used_by": used_by}))
        return certificate

    def _end_former(self, record: AgentRecord, token: TokenRecord, now: float) -> AgentRecord:
        """Revoke the certificates of a device, and those of the agent that its token replaces.

        Args:
            record: The device's record.
            token: The token that it shows.
            now: The time of the revocation, in seconds since 1970.

        Returns:
            The record without a certificate that counts; it still has the token.
        """
        ended = record.revoked(now).model_copy(update={"token": token})
        revoked = [ended] if record.certificates else []
        former = self.ledger.get(token.replaces) if token.replaces else None
        if former is not None:
            revoked.append(former.revoked(now))
        if revoked:
            for agent in revoked:
                self.ledger.put(agent)
            self.write_crl()
        return ended

    def _check_shown(self, record: AgentRecord | None, request: CertificateRequest) -> CertificateRecord:
        """Return the certificate whose key has signed the request, where it counts or may be renewed.

        Raises:
            NotProven: The request is signed with the key of none.
            EnrolmentRefused: The certificate was revoked, or has expired too long ago.
        """
        name = request.name
        now = self.now()
        # Whoever cannot sign with the certificate's key gets one answer, whatever is known of that name.
        shown = _shown_certificate(record, request)
        if shown.revoked_at is not None:
            raise EnrolmentRefused(f"certificate: it was revoked at {show_utc(shown.revoked_at)}", _again(name))
        last = shown.not_after + self.config.grace_days * 86_400
        if now.timestamp() > last:
            raise EnrolmentRefused(
                f"certificate: it expired at {show_utc(shown.not_after)}, and could be renewed until {show_utc(last)}",
                _again(name),
            )
        return shown

    def _renew(
        self, known: AgentRecord | None, request: CertificateRequest, key: ec.EllipticCurvePublicKey
    ) -> CertificateRecord:
        """Return a new certificate for a device that shows its present one; a repeated request gets the same one.

        Raises:
            NotProven: The request is not signed with the key of a certificate of the agent.
            EnrolmentRefused: The certificate counts no more, it is too early, or the agent has too many.
        """
        shown = self._check_shown(known, request)
        record = known or AgentRecord(name=request.name)  # it is known: a certificate of it was shown
        name = record.name
        now = self.now()
        valid = [certificate for certificate in record.certificates if certificate.revoked_at is None]
        # The answer to the first request was lost, if the key is the same.
        for certificate in valid:
            if certificate.renews == request.serial and certificate.key == key_fingerprint(key):
                return certificate
        first = shown.not_before + (shown.not_after - shown.not_before) / 4
        if now.timestamp() < first:
            raise EnrolmentRefused(
                f"certificate: it can be renewed from {show_utc(first)} on, and the coordinator's clock says "
                f"{show_utc(now.timestamp())}",
                "try again then",
            )
        holding = [certificate for certificate in valid if certificate.not_after > now.timestamp()]
        if len(holding) >= MOST_CERTIFICATES:
            raise EnrolmentRefused(f"certificate: '{name}' has {len(holding)} that hold already", _again(name))
        renewed = self._issue(name, key, renews=request.serial)
        self._write(record, renewed, record.token)
        return renewed

    def _issue(self, name: str, key: ec.EllipticCurvePublicKey, *, renews: str = "") -> CertificateRecord:
        """Certify a key; ``renews`` is the serial of the certificate that the new one follows."""
        certificate = self.authority.for_client(name, key, self.now(), self.life)
        return CertificateRecord(
            serial=f"{certificate.serial_number:x}",
            der=base64.b64encode(certificate.public_bytes(Encoding.DER)).decode(),
            key=key_fingerprint(key),
            not_before=certificate.not_valid_before_utc.timestamp(),
            not_after=certificate.not_valid_after_utc.timestamp(),
            renews=renews,
        )

    def _write(self, record: AgentRecord, certificate: CertificateRecord, token: TokenRecord | None) -> None:
        """Write a record with a new certificate, without most of those that have expired."""
        now = self.now().timestamp()
        renewable_from = now - self.config.grace_days * 86_400
        listed_from = now - LISTED_S
        # Those that have expired but may still be renewed stay, the newest of them.
        renewable = [
            old
            for old in record.certificates
            if old.revoked_at is None and renewable_from < old.not_after <= listed_from
        ]
        newest_renewable = renewable[-MOST_CERTIFICATES:]
        kept = [old for old in record.certificates if old.not_after > listed_from or old in newest_renewable]
        self.ledger.put(record.model_copy(update={"certificates": (*kept, certificate), "token": token}))


def _list_revoked(before: Revoked, records: Sequence[AgentRecord], listed_from: float) -> Revoked:
    """Return the list of revoked certificates that follows from all records and the list before.

    Args:
        before: The list before; it counts for agents whose record is not there.
        records: The records of all agents.
        listed_from: The time (Unix seconds) before which a certificate must have ended to leave the list.
    """
    certificates = dict(before.certificates)
    for record in records:
        for certificate in record.certificates:
            if certificate.revoked_at is not None:
                certificates[certificate.serial] = RevokedCertificate(
                    agent=record.name, revoked_at=certificate.revoked_at, not_after=certificate.not_after
                )
    recorded = {record.name for record in records}
    agents = [name for name in before.agents if name not in recorded]
    agents.extend(record.name for record in records if record.is_revoked)
    generations = {name: number for name, number in before.generations.items() if name not in recorded}
    generations.update({record.name: record.generation for record in records if record.generation})
    return Revoked(
        certificates={serial: entry for serial, entry in certificates.items() if entry.not_after > listed_from},
        agents=tuple(agents),
        generations=generations,
    )


def _shown_token(record: AgentRecord | None, request: CertificateRequest) -> tuple[AgentRecord, TokenRecord]:
    """Return the agent, and its newest token, with whose secret the request is signed.

    Raises:
        NotProven: there is no such agent or token, or the request is not signed with its secret.
    """
    name = request.name
    refusal = NotProven(
        f"token: it is not the newest one for '{name}': it was replaced, its agent was revoked, or it was never made "
        f"here; {_again(name)}"
    )
    if record is None or record.token is None:
        raise refusal
    try:
        public_key = base64.b64decode(record.token.public_key)
        signature = base64.b64decode(request.signature)
    except ValueError as error:
        raise refusal from error
    if not TOKEN_REQUEST.is_valid(public_key, signature, request.signed()):
        raise refusal
    return record, record.token


def _shown_certificate(record: AgentRecord | None, request: CertificateRequest) -> CertificateRecord:
    """Return the certificate that the request names and with whose key it is signed; it may count no more.

    Raises:
        NotProven: there is no such agent or certificate, or the request is not signed with its key.
    """
    name = request.name
    refusal = NotProven(
        f"certificate: none of '{name}' is known here with the serial and the key of this request; {_again(name)}"
    )
    certificates = () if record is None else record.certificates
    matching = [certificate for certificate in certificates if certificate.serial == request.serial]
    certificate = matching[0] if matching else None
    if certificate is None:
        raise refusal
    try:
        signer = base64.b64decode(certificate.der)
        signature = base64.b64decode(request.signature)
    except ValueError as error:
        raise refusal from error
    if not CERTIFICATE_REQUEST.is_valid(signer, signature, request.signed()):
        raise refusal
    return certificate


def _again(name: str) -> str:
    return f"'headwater enroll {name}' on the coordinator makes a token"
