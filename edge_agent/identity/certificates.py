"""The certificate of a device: requested with a token, installed, and checked against the clock and its name.

``edge-agent enroll`` makes a key here, which never leaves the device, and asks the coordinator to certify it. The token
holds the fingerprint of the federation's certificate authority, so that the device knows whom it asks. It also holds a
secret from which a signing key is derived: that key signs the request, so nobody on the way can replace the device's.
"""

from __future__ import annotations

import base64
import hmac
import logging
import ssl
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..bundle.trust import Envelope, TrustStore, parse
from ..core.config import AgentConfig, BrokerConfig, TlsConfig
from ..core.errors import (
    EnrolmentRefused,
    MessageError,
    StateError,
    cause,
)
from ..core.storage import IDENTITY, read_regular_text, write_private
from ..core.task import Frozen, parse_json
from ..wire.messages.fields import Serial
from ..wire.seal import ENROLLED_KEY, check_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from edge_agent.identity.enrolment_port import CertificateRequest, ask, decode_field
from edge_agent.identity.keys import (
    Fingerprint,
    Name,
    Port,
    fingerprint,
    key_fingerprint,
    need_cryptography,
    pem_of,
    read_key,
    signing_request,
    token_key,
)
from edge_agent.identity.signed_request import (
    CERTIFICATE_REQUEST,
    ENROLMENT_ANSWER,
    TOKEN_REQUEST,
    answer_bytes,
    request_bytes,
)
from edge_agent.identity.tokens import MOST_TIME, Token

log = logging.getLogger(__name__)


MOST_SKEW_S = 86_400.0
"""The seconds by which the clocks of device and coordinator may differ; beyond, the enrolment says so and stops."""


class Identity(Frozen):
    """The content of an agent's certificate, and where it is renewed: the first line of the certificate's file."""

    federation: Name
    name: Name
    serial: Serial
    not_before: float = Field(description="Unix time in seconds")
    not_after: float = Field(description="Unix time in seconds")
    host: str = Field(max_length=253)
    port: Port
    authority: Fingerprint


class IdentityFolder:
    """The folder of an agent's key and certificate below its state folder, readable by its user alone."""

    def __init__(self, state: Path) -> None:
        self.path = state / IDENTITY
        self.file = self.path / "agent.pem"
        self.ca = self.path / "ca.pem"
        self.pending = self.path / "pending.pem"
        self.commands = state / ENROLLED_KEY

    def read(self) -> Identity | None:
        """Return the content of the certificate; None where there is none.

        Raises:
            StateError: The identity file is damaged.
        """
        try:
            line = read_regular_text(self.file, encoding="ascii").partition("\n")[0]
            return Identity.model_validate(parse_json(line.encode()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StateError(
                f"{self.file}: the identity cannot be read ({cause(error)}); enroll this device again: 'headwater "
                "enroll NAME' on the coordinator"
            ) from error

    def broker(self, url: str) -> BrokerConfig:
        """Return the configuration with which this agent connects to the broker at ``url``."""
        return BrokerConfig(url=url, tls=TlsConfig(ca=self.ca, cert=self.file))

    def pending_key(self) -> EllipticCurvePrivateKey:
        """Return the key that is to be certified, made on the first call.

        A request whose answer was lost is repeated with the same key.
        """
        from cryptography.hazmat.primitives.asymmetric import ec

        key = read_key(self.pending)
        if key is None:
            key = ec.generate_private_key(ec.SECP256R1())
            write_private(self.pending, pem_of(key))
        return key

    def request(self, federation: str, name: str, secret: str | None = None) -> CertificateRequest:
        """Return a request for the pending key, signed with a token's key, or with that of the certificate here.

        Raises:
            StateError: The folder holds neither a token nor a certificate.
        """
        need_cryptography()
        csr = base64.b64encode(signing_request(self.pending_key(), name)).decode()
        if secret is None:
            return self._proven(federation, name, csr)
        signature = TOKEN_REQUEST.sign(token_key(secret), request_bytes(federation, name, csr, ""))
        return CertificateRequest(
            federation=federation, name=name, csr=csr, signature=base64.b64encode(signature).decode()
        )

    def question(self, federation: str, name: str) -> CertificateRequest:
        """Return a request that asks whether the certificate here is still accepted, and for no new one.

        Raises:
            StateError: The folder holds no certificate.
        """
        need_cryptography()
        return self._proven(federation, name, "")

    def _proven(self, federation: str, name: str, csr: str) -> CertificateRequest:
        """Return a request that is signed with the key of the certificate here."""
        identity = self.read()
        key = read_key(self.file)
        if identity is None or key is None:
            raise StateError(
                f"{self.file} holds no certificate; 'headwater enroll {name}' on the coordinator makes a token"
            )
        signature = CERTIFICATE_REQUEST.sign(key, request_bytes(federation, name, csr, identity.serial))
        return CertificateRequest(
            federation=federation,
            name=name,
            csr=csr,
            serial=identity.serial,
            signature=base64.b64encode(signature).decode(),
        )

    def install(self, certificate: bytes, *, ca: bytes, name: str, federation: str, host: str, port: int) -> Identity:
        """Replace key and certificate, in one file, by the pending key and its new certificate (DER).

        Raises:
            MessageError: The certificate has another key, name or authority.
        """
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import NameOID

        key = self.pending_key()
        try:
            received = x509.load_der_x509_certificate(certificate)
            authority = x509.load_der_x509_certificate(ca)
            received.verify_directly_issued_by(authority)
            names = [str(entry.value) for entry in received.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        except (ValueError, TypeError, InvalidSignature) as error:
            raise MessageError(
                f"certificate: the answer is not one of this federation's authority ({error})"
            ) from error
        if received.public_key() != key.public_key() or names != [name]:
            raise MessageError(f"certificate: the answer is for {names} and perhaps another key, not for '{name}'")
        identity = Identity(
            federation=federation,
            name=name,
            serial=f"{received.serial_number:x}",
            not_before=received.not_valid_before_utc.timestamp(),
            not_after=received.not_valid_after_utc.timestamp(),
            host=host,
            port=port,
            authority=fingerprint(ca),
        )
        write_private(self.ca, authority.public_bytes(Encoding.PEM))
        content = identity.model_dump_json().encode() + b"\n" + pem_of(key) + received.public_bytes(Encoding.PEM)
        write_private(self.file, content)
        self.pending.unlink(missing_ok=True)
        return identity

    def key_fingerprint(self) -> str:
        """Return the fingerprint of the certified key, which the coordinator's log shows; empty where there is none."""
        key = read_key(self.file)
        return "" if key is None else key_fingerprint(key.public_key())

    def ca_der(self) -> bytes:
        """Return the certificate of the federation's authority (DER).

        Raises:
            StateError: The certificate cannot be read.
        """
        try:
            return ssl.PEM_cert_to_DER_cert(read_regular_text(self.ca, encoding="ascii"))
        except (OSError, ValueError) as error:
            raise StateError(f"{self.ca}: {cause(error)}; enroll this device again") from error


# --- asking the enrolment port ---------------------------------------------------------------------------------------


def enroll(token: Token, folder: IdentityFolder, now: Callable[[], float] = time.time) -> Identity:
    """Get a certificate for this device from the enrolment port.

    Raises:
        EnrolmentRefused: The token is invalid or used, the clocks differ, or another coordinator answers.
        BrokerAway: No coordinator answers.
        MessageError: The answer is malformed.
    """
    had_key = folder.pending.exists()
    request = make_request(token, folder)
    try:
        # The authority comes from a stranger: the fingerprint in the token tells whether it is the right one.
        answer = ask(token.address, None, {"ask": "authority"})
        ca = _check_authority(token, answer)
        check_clock(answer, now())
        return _install(token, folder, ca, ask(token.address, ca, request.model_dump()))
    except EnrolmentRefused:  # nothing was certified; a key of before may be that of a request in a file
        if not had_key:
            folder.pending.unlink(missing_ok=True)
        raise


def make_request(token: Token, folder: IdentityFolder) -> CertificateRequest:
    """Return the request for a certificate of a device with this token.

    Raises:
        EnrolmentRefused: The device is enrolled in another federation.
    """
    need_cryptography()
    before = folder.read()
    if before is not None and before.authority != token.authority:
        raise EnrolmentRefused(
            f"state: {folder.path.parent} is enrolled in federation '{before.federation}' (authority "
            f"{before.authority}), and the token is for '{token.federation}' (authority {token.authority}); name "
            "another --state, or remove that folder"
        )
    return folder.request(token.federation, token.name, token.secret)


def install_answer(token: Token, folder: IdentityFolder, answer: dict[str, Any]) -> Identity:
    """Install an answer of 'headwater sign' that was carried here in a file.

    Raises:
        EnrolmentRefused: The answer is of another federation.
        MessageError: The answer belongs to another request.
    """
    need_cryptography()
    return _install(token, folder, _check_authority(token, answer), answer)


def _install(token: Token, folder: IdentityFolder, ca: bytes, answer: dict[str, Any]) -> Identity:
    """Install the certificate, the key of commands and the trusted root in an answer, and return the identity."""
    host, port = token.address
    certificate = decode_field(answer, "certificate")
    commands = str(answer.get("commands"))
    root = answer.get("root")
    _check_signature(token, ca, answer)
    check_key(commands, token.federation, token.name)
    if root is not None:
        TrustStore(folder.path.parent / "bundles").anchor(parse(Envelope, str(root).encode(), "answer"))
    write_private(folder.commands, commands.encode())  # before the certificate, which ends the enrolment
    identity = folder.install(certificate, ca=ca, name=token.name, federation=token.federation, host=host, port=port)
    log.info("enrolled agent=%s federation=%s until=%s", token.name, token.federation, show_utc(identity.not_after))
    return identity


def _check_signature(token: Token, ca: bytes, answer: dict[str, Any]) -> None:
    """Require that the authority has signed the whole answer, because one in a file may be changed on its way.

    Raises:
        MessageError: The authority's signature is missing or wrong.
    """
    refusal = MessageError(
        "answer: it has no valid signature of the federation's authority for the device of this token; it was "
        "changed on its way, or the coordinator is older than this device; get it again"
    )
    # The answer is whatever JSON has arrived: its signature may be missing, its fields too deep to be written again.
    try:
        signature = decode_field(answer, "signature")
        content = answer_bytes(token.federation, token.name, answer)
    except (ValueError, RecursionError, MessageError) as error:
        raise refusal from error
    if not ENROLMENT_ANSWER.is_valid(ca, signature, content):
        raise refusal


def _check_authority(token: Token, answer: dict[str, Any]) -> bytes:
    """Return the authority's certificate (DER), which the coordinator shows and the token's fingerprint confirms.

    Raises:
        EnrolmentRefused: The certificate is that of another federation's authority.
    """
    ca = decode_field(answer, "authority")
    if not hmac.compare_digest(fingerprint(ca), token.authority):
        host, port = token.address
        raise EnrolmentRefused(
            f"authority: {host}:{port} shows the authority {fingerprint(ca)}, and the token is for {token.authority}: "
            f"another federation, or somebody in between; 'headwater enroll {token.name}' on the right coordinator "
            "makes a token"
        )
    return ca


def check_clock(answer: dict[str, Any], now: float) -> float:
    """Return the seconds by which this device's clock is ahead of the coordinator's.

    Raises:
        EnrolmentRefused: The clocks of device and coordinator are more than a day apart.
        MessageError: The answer has no time.
    """
    theirs: Any = answer.get("time")
    if type(theirs) not in (int, float) or not 0 <= theirs <= MOST_TIME:
        raise MessageError("answer: it has no time in Unix seconds; is that an enrolment port?")
    skew_s: float = now - theirs
    if abs(skew_s) > MOST_SKEW_S:
        raise EnrolmentRefused(
            f"clock: this device's says {show_utc(now)}, the coordinator's {show_utc(theirs)}; certificates are "
            "valid for a certain time only: set the clock that is wrong ('timedatectl set-ntp true'), then try again"
        )
    return skew_s


def show_utc(unix_s: float) -> str:
    """Return a Unix time in the form for people, ``2030-01-31 02:00 UTC``."""
    try:
        return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "a time that no calendar has"


def subject_names(pem: bytes) -> list[str]:
    """Return the names that the first certificate in a PEM file is for, then its IP addresses; none if unknown."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def check_name(config: AgentConfig) -> None:
    """Require that the agent logs in with a certificate of its own name and federation, if with any from enrolment.

    With another one, the broker would accept the connection and drop all messages silently.

    Raises:
        EnrolmentRefused: The certificate is for another agent or federation.
        StateError: The certificate cannot be read.
    """
    folder = IdentityFolder(config.state)
    if config.broker.tls is None or config.broker.tls.cert != folder.file:
        return
    identity = folder.read()
    if identity is not None:
        _check_name(config, identity)


def _check_name(config: AgentConfig, identity: Identity) -> None:
    """Require that a certificate is for the agent and the federation of the configuration."""
    if (identity.name, identity.federation) != (config.id, config.federation):
        raise EnrolmentRefused(
            f"certificate: it is for '{identity.name}' in federation '{identity.federation}', and the configuration "
            f"for '{config.id}' in '{config.federation}'; change id and federation there, or: {_again(config)}"
        )


def _again(config: AgentConfig) -> str:
    """Return how to enroll this agent again."""
    return f"'headwater enroll {config.id}' on the coordinator makes a token, 'edge-agent enroll -' takes it here"


def check_identity(config: AgentConfig, now: float) -> str:
    """Check the certificate of an agent, and return until when it is valid, as a clause for people.

    Raises:
        EnrolmentRefused: The certificate is not valid now, or is for another agent or federation.
        StateError: The certificate cannot be read.
    """
    identity = IdentityFolder(config.state).read()
    again = _again(config)
    if identity is None:
        raise StateError(f"certificate: there is none in {config.state}; {again}")
    _check_name(config, identity)
    if now < identity.not_before:
        raise EnrolmentRefused(
            f"certificate: it is valid from {show_utc(identity.not_before)} on, and this device's clock says "
            f"{show_utc(now)}; set the clock ('timedatectl set-ntp true')"
        )
    if now > identity.not_after:
        raise EnrolmentRefused(
            f"certificate: it expired at {show_utc(identity.not_after)}, and this device's clock says {show_utc(now)}; "
            f"'edge-agent run' renews it where that was not too long ago; else {again}"
        )
    half = identity.not_before + (identity.not_after - identity.not_before) / 2
    return f"holds until {show_utc(identity.not_after)}; a running agent renews it from {show_utc(half)} on"
