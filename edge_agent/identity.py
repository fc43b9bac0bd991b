"""Who an agent is to its federation: token, key, certificate and renewal.

``edge-agent enroll TOKEN`` makes a key here, which never leaves the device, and asks the coordinator to certify it. The
token holds the fingerprint of the federation's certificate authority, so that the device knows whom it asks, and a
secret from which a signing key is derived: it signs the request, so nobody on the way can replace the device's key. The
coordinator keeps only the public half. A renewal is signed with the key of the certificate that it replaces.

Requests travel over TLS to the coordinator's enrolment port, as one line of JSON each way; a renewal also as a message.
``cryptography`` takes 13 MB: an agent renews in a child process, and itself loads the 7 MB that check an announcement.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from .config import NAME_PATTERN, AgentConfig, BrokerConfig, TlsConfig
from .errors import (
    BrokerAway,
    EnrolmentRefused,
    HeadwaterError,
    MessageError,
    MissingCapability,
    NotTheCoordinator,
    StateError,
    UsageError,
    cause,
)
from .storage import IDENTITY, read_regular, read_regular_text, write_private
from .task import Frozen, parse_json
from .trust import Envelope, TrustStore, parse
from .wire.authentic import ENROLLED_KEY, check_key
from .wire.messages import Base64, Renew, Serial, printable
from .worker import answer_of_child

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger(__name__)

TOKEN_PREFIX = "hw1."  # noqa: S105 - not a secret, the beginning of every token
SECRET_BYTES = 16
MAX_LINE_BYTES = 16 * 1024
"""Longest request and answer on the enrolment port."""

TIMEOUT_S = 10.0
"""For connecting to the enrolment port, and for its answer."""

NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME."""

MOST_SKEW_S = 86_400.0
"""Clocks that are further apart are named as the reason before anything else fails because of it."""

MOST_TIME = 1 << 40
"""Unix time in seconds, in some 30,000 years."""

AGAIN_S = 60.0
"""Pause between two tries of a renewal."""

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Fingerprint = Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class Token(Frozen):
    """What a device needs to enroll once."""

    url: str = Field(description="of the broker, mqtts://host:port")
    port: Port = Field(description="enrolment port of the coordinator")
    host: str = Field("", max_length=253, description="host of that port; empty: the broker's")
    federation: Name
    name: Name = Field(description="the agent's id")
    authority: Fingerprint = Field(description="of the federation's certificate authority")
    secret: str = Field(pattern=r"^[A-Za-z0-9_-]{22}$", description=f"{SECRET_BYTES} random bytes")
    expires: int = Field(ge=0, le=MOST_TIME, description="Unix time in seconds")
    replaces: Name | None = Field(None, description="the id that its device has now: it is renamed")

    def text(self) -> str:
        """The one line that a person copies; its end is a checksum, so that the device notices a typing error."""
        content = json.dumps(self.model_dump(exclude_defaults=True), separators=(",", ":")).encode()
        body = base64.urlsafe_b64encode(content).decode().rstrip("=")
        return f"{TOKEN_PREFIX}{body}.{_checksum(body)}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token in a line.

        Raises:
            UsageError: it is no token, not the whole one, or mistyped.
        """
        text = text.strip()
        advice = "copy the whole line that 'headwater enroll NAME' prints on the coordinator"
        if not text.startswith(TOKEN_PREFIX):
            raise UsageError(f"token: '{printable(text[:12])}…' does not begin with {TOKEN_PREFIX}; {advice}")
        body, _, check = text[len(TOKEN_PREFIX) :].partition(".")
        if not hmac.compare_digest(check.encode(), _checksum(body).encode()):
            raise UsageError(f"token: it is mistyped or cut off ({len(text)} characters); {advice}")
        try:
            token = cls.model_validate(parse_json(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
            BrokerConfig(url=token.url)
        except (ValueError, RecursionError) as error:
            raise UsageError("token: another version has made it; upgrade the older side") from error
        return token

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to ask."""
        return self.host or urlsplit(self.url).hostname or "", self.port


class CertificateRequest(Frozen):
    """A device's request for a certificate of its key."""

    federation: Name
    name: Name
    csr: Base64 | Literal[""] = Field(description="certificate signing request (DER); empty: see `Renewal.standing`")
    serial: Serial = Field("", description="of the certificate whose key has signed; empty: the token's key has")
    signature: Base64

    def signed(self) -> bytes:
        """The bytes that the signature covers."""
        return signed_bytes(self.federation, self.name, self.csr, self.serial)


class Identity(Frozen):
    """What an agent's certificate says, and where it is renewed; the first line of its file."""

    federation: Name
    name: Name
    serial: Serial
    not_before: float = Field(description="Unix time in seconds")
    not_after: float = Field(description="Unix time in seconds")
    host: str = Field(max_length=253)
    port: Port
    authority: Fingerprint


def signed_bytes(federation: str, name: str, csr: str, serial: str) -> bytes:
    """What a device signs when it asks for a certificate: no part can be exchanged for that of another request."""
    return f"headwater certificate request 1\n{federation}\n{name}\n{serial}\n{csr}".encode()


def answer_bytes(federation: str, name: str, answer: Mapping[str, Any]) -> bytes:
    """What the authority signs of an answer, so that no part can be exchanged: all but the ``signature``."""
    signed = {key: value for key, value in answer.items() if key != "signature"}
    return f"headwater certificate answer 1\n{federation}\n{name}\n{json.dumps(signed, sort_keys=True)}".encode()


def _checksum(body: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body.encode()).digest())[:6].decode()


def fingerprint(der: bytes) -> str:
    """SHA-256 of a certificate or public key, as ssh writes it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")


def key_fingerprint(key: Any) -> str:
    """`fingerprint` of a public key; coordinator and device show the same one."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return fingerprint(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def token_key(secret: str) -> Ed25519PrivateKey:
    """The signing key of a token's secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"headwater token\0" + secret.encode()).digest())


def new_secret() -> str:
    """The random part of a token."""
    return secrets.token_urlsafe(SECRET_BYTES)


def need_cryptography() -> None:
    """Return where certificates can be made.

    Raises:
        MissingCapability: the package is not installed.
    """
    try:
        import cryptography  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise MissingCapability(
            "identity needs 'cryptography', which is not installed; pip install cryptography"
        ) from error


class IdentityFolder:
    """Key and certificate of an agent below its state folder, readable by its user only."""

    def __init__(self, state: Path) -> None:
        self.path = state / IDENTITY
        self.file, self.ca, self.pending = self.path / "agent.pem", self.path / "ca.pem", self.path / "pending.pem"
        self.commands = state / ENROLLED_KEY

    def read(self) -> Identity | None:
        """What the certificate says; None where there is none.

        Raises:
            StateError: the file is damaged.
        """
        try:
            line = read_regular_text(self.file, encoding="ascii").partition("\n")[0]
            return Identity.model_validate(parse_json(line.encode()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StateError(
                f"{self.file}: no identity that can be read ({cause(error)}); enroll this device again: 'headwater "
                "enroll NAME' on the coordinator"
            ) from error

    def broker(self, url: str) -> BrokerConfig:
        """How this agent connects."""
        return BrokerConfig(url=url, tls=TlsConfig(ca=self.ca, cert=self.file))

    def pending_key(self) -> EllipticCurvePrivateKey:
        """The key that is to be certified; a request whose answer was lost is repeated with the same key."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = _read_key(self.pending)
        if key is None:
            key = ec.generate_private_key(ec.SECP256R1())
            write_private(self.pending, _pem_of(key))
        return key

    def request(self, federation: str, name: str, secret: str | None = None) -> CertificateRequest:
        """A request for the pending key, signed with a token's key, or with that of the certificate here.

        Raises:
            StateError: there is neither.
        """
        need_cryptography()
        csr = base64.b64encode(signing_request(self.pending_key(), name)).decode()
        if secret is None:
            return self._proven(federation, name, csr)
        signature = token_key(secret).sign(signed_bytes(federation, name, csr, ""))
        return CertificateRequest(
            federation=federation, name=name, csr=csr, signature=base64.b64encode(signature).decode()
        )

    def question(self, federation: str, name: str) -> CertificateRequest:
        """A request that asks for no certificate, but whether the one here counts.

        Raises:
            StateError: there is none.
        """
        need_cryptography()
        return self._proven(federation, name, "")

    def _proven(self, federation: str, name: str, csr: str) -> CertificateRequest:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        now, key = self.read(), _read_key(self.file)
        if now is None or key is None:
            raise StateError(
                f"{self.file} holds no certificate; 'headwater enroll {name}' on the coordinator makes a token"
            )
        signature = key.sign(signed_bytes(federation, name, csr, now.serial), ec.ECDSA(hashes.SHA256()))
        return CertificateRequest(
            federation=federation,
            name=name,
            csr=csr,
            serial=now.serial,
            signature=base64.b64encode(signature).decode(),
        )

    def install(self, certificate: bytes, *, ca: bytes, name: str, federation: str, host: str, port: int) -> Identity:
        """Replace key and certificate, in one file, by the pending key and its new certificate (DER).

        Raises:
            MessageError: the certificate is not of that key, name and authority.
        """
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import NameOID

        key = self.pending_key()
        try:
            made, authority = x509.load_der_x509_certificate(certificate), x509.load_der_x509_certificate(ca)
            made.verify_directly_issued_by(authority)
            named = [str(one.value) for one in made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        except (ValueError, TypeError, InvalidSignature) as error:
            raise MessageError(
                f"certificate: the answer is not one of this federation's authority ({error})"
            ) from error
        if made.public_key() != key.public_key() or named != [name]:
            raise MessageError(f"certificate: the answer is for {named} and perhaps another key, not for '{name}'")
        identity = Identity(
            federation=federation,
            name=name,
            serial=f"{made.serial_number:x}",
            not_before=made.not_valid_before_utc.timestamp(),
            not_after=made.not_valid_after_utc.timestamp(),
            host=host,
            port=port,
            authority=fingerprint(ca),
        )
        write_private(self.ca, authority.public_bytes(Encoding.PEM))
        content = identity.model_dump_json().encode() + b"\n" + _pem_of(key) + made.public_bytes(Encoding.PEM)
        write_private(self.file, content)
        self.pending.unlink(missing_ok=True)
        return identity

    def key_fingerprint(self) -> str:
        """Of the certified key, as the coordinator's log shows it; empty where there is none."""
        key = _read_key(self.file)
        return "" if key is None else key_fingerprint(key.public_key())

    def ca_der(self) -> bytes:
        """The authority's certificate.

        Raises:
            StateError: it cannot be read.
        """
        try:
            return ssl.PEM_cert_to_DER_cert(read_regular_text(self.ca, encoding="ascii"))
        except (OSError, ValueError) as error:
            raise StateError(f"{self.ca}: {cause(error)}; enroll this device again") from error


def signing_request(key: EllipticCurvePrivateKey, name: str) -> bytes:
    """A certificate signing request (DER) for ``name``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return built.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def _pem_of(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read_key(path: Path) -> EllipticCurvePrivateKey | None:
    """The private key in a file; None where there is no such file, or no key in it."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        content = read_regular(path)
        key = load_pem_private_key(content[content.index(b"-----BEGIN") :], None)
    except (FileNotFoundError, ValueError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


# --- asking the enrolment port ---------------------------------------------------------------------------------------


def enroll(token: Token, folder: IdentityFolder, now: Callable[[], float] = time.time) -> Identity:
    """Get a certificate for this device from the enrolment port.

    Raises:
        EnrolmentRefused: the token does not count (any more), the clocks differ, or another coordinator answers.
        BrokerAway: no coordinator answers.
        MessageError: the answer makes no sense.
    """
    had_key = folder.pending.exists()
    request = requested(token, folder)
    try:
        answer = ask(token.address, None, {"ask": "authority"})
        ca = _authority(token, answer)
        check_clock(answer, now())
        return _installed(token, folder, ca, ask(token.address, ca, request.model_dump()))
    except EnrolmentRefused:  # nothing was certified; a key of before may be that of a request in a file
        if not had_key:
            folder.pending.unlink(missing_ok=True)
        raise


def requested(token: Token, folder: IdentityFolder) -> CertificateRequest:
    """The request that a device with this token makes.

    Raises:
        EnrolmentRefused: the device is enrolled in another federation.
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


def answered(token: Token, folder: IdentityFolder, answer: dict[str, Any]) -> Identity:
    """Install an answer that was carried here, as 'headwater sign' writes it.

    Raises:
        EnrolmentRefused: it is of another federation.
        MessageError: it is not the answer to this device's request.
    """
    need_cryptography()
    return _installed(token, folder, _authority(token, answer), answer)


def _installed(token: Token, folder: IdentityFolder, ca: bytes, answer: dict[str, Any]) -> Identity:
    host, port = token.address
    certificate, commands, root = decoded(answer, "certificate"), str(answer.get("commands")), answer.get("root")
    _check_signature(token, ca, answer)
    check_key(commands, token.federation, token.name)
    if root is not None:
        TrustStore(folder.path.parent / "bundles").anchor(parse(Envelope, str(root).encode(), "answer"))
    write_private(folder.commands, commands.encode())  # before the certificate, which ends the enrolment
    identity = folder.install(certificate, ca=ca, name=token.name, federation=token.federation, host=host, port=port)
    log.info("enrolled agent=%s federation=%s until=%s", token.name, token.federation, shown(identity.not_after))
    return identity


def _check_signature(token: Token, ca: bytes, answer: dict[str, Any]) -> None:
    """Return where the authority has signed the whole answer: one in a file may be changed on its way.

    Raises:
        MessageError: it has not.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = x509.load_der_x509_certificate(ca).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        content = answer_bytes(token.federation, token.name, answer)
        key.verify(decoded(answer, "signature"), content, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, RecursionError, MessageError) as error:
        raise MessageError(
            "answer: the federation's authority has not signed it as it is, for the device of this token; it was "
            "changed on its way, or the coordinator is older than this device: get it again"
        ) from error


def _authority(token: Token, answer: dict[str, Any]) -> bytes:
    """The authority's certificate (DER), which the coordinator shows and the token's fingerprint confirms.

    Raises:
        EnrolmentRefused: it is that of another federation.
    """
    ca = decoded(answer, "authority")
    if not hmac.compare_digest(fingerprint(ca), token.authority):
        host, port = token.address
        raise EnrolmentRefused(
            f"authority: {host}:{port} shows the authority {fingerprint(ca)}, and the token is for {token.authority}: "
            f"another federation, or somebody in between; 'headwater enroll {token.name}' on the right coordinator "
            "makes a token"
        )
    return ca


def check_clock(answer: dict[str, Any], now: float) -> float:
    """Seconds by which this device's clock is ahead of the coordinator's.

    Raises:
        EnrolmentRefused: more than a day apart.
        MessageError: the answer has no time.
    """
    theirs: Any = answer.get("time")
    if type(theirs) not in (int, float) or not 0 <= theirs <= MOST_TIME:
        raise MessageError("answer: it has no time in Unix seconds; is that an enrolment port?")
    skew_s: float = now - theirs
    if abs(skew_s) > MOST_SKEW_S:
        raise EnrolmentRefused(
            f"clock: this device's says {shown(now)}, the coordinator's {shown(theirs)}; certificates hold "
            "for certain times only: set the clock that is wrong ('timedatectl set-ntp true'), then try again"
        )
    return skew_s


def ask(
    address: tuple[str, int], ca: bytes | None, request: dict[str, Any], *, checks_time: bool = True
) -> dict[str, Any]:
    """One request to an enrolment port and its answer. Without ``ca`` the other side is a stranger.

    ``checks_time=False``: certificates that hold at another time count, too; for asking which time it is.

    Raises:
        BrokerAway: no connection, or no answer.
        NotTheCoordinator: the other side is not certified by ``ca``.
        EnrolmentRefused: it refuses; the message says why.
        MessageError: the answer is not one.
    """
    host, port = address
    context = ssl.create_default_context(cadata=ca) if ca is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not checks_time:
        context.verify_flags |= NO_CHECK_TIME
    if ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(address, TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.sendall(json.dumps(request).encode() + b"\n")
            line = read_line(secure)
    except ssl.SSLCertVerificationError as error:
        raise NotTheCoordinator(
            f"tls: {host}:{port} does not prove to be the coordinator ({cause(error)}); compare the clocks, and the "
            "authority that 'headwater enroll' shows there"
        ) from error
    except OSError as error:
        raise BrokerAway(
            f"connect: the coordinator's enrolment port {host}:{port} does not answer ({cause(error)}); 'headwater "
            "serve' has to run there, and a firewall has to let this port through"
        ) from error
    try:
        answer = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(
            f"answer: {host}:{port} sent no JSON ({len(line)} bytes); is that an enrolment port?"
        ) from error
    if not isinstance(answer, dict):
        raise MessageError(f"answer: {host}:{port} sent no JSON object; is that an enrolment port?")
    if answer.get("refused") is not None:
        raise EnrolmentRefused(printable(str(answer["refused"]))[:1000])
    return answer


def read_line(sock: socket.socket, until: float | None = None) -> bytes:
    """Bytes up to a line break or the other side's end, at most `MAX_LINE_BYTES`, within `TIMEOUT_S` in total.

    Raises:
        OSError: longer, slower, or the connection broke.
    """
    until = time.monotonic() + TIMEOUT_S if until is None else until
    line = b""
    while not line.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0 or len(line) > MAX_LINE_BYTES:
            raise TimeoutError("no whole line in time" if left_s <= 0 else f"more than {MAX_LINE_BYTES} bytes")
        sock.settimeout(left_s)
        piece = sock.recv(4096)
        if not piece:
            break
        line += piece
    return line


def decoded(content: dict[str, Any], key: str) -> bytes:
    """Base64 in a field of an answer.

    Raises:
        MessageError: there is none.
    """
    try:
        return base64.b64decode(content[key], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"answer: the field '{key}' holds no certificate") from error


def shown(unix_s: float) -> str:
    """A time for people."""
    try:
        return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "a time that no calendar has"


def check_name(config: AgentConfig) -> None:
    """Return quietly unless the agent logs in with a certificate that is for another agent or federation.

    The broker would let it in and drop all that it says without a word.

    Raises:
        EnrolmentRefused: it is.
        StateError: it cannot be read.
    """
    folder = IdentityFolder(config.state)
    if config.broker.tls is not None and config.broker.tls.cert == folder.file and (identity := folder.read()):
        _check_name(config, identity)


def _check_name(config: AgentConfig, identity: Identity) -> None:
    if (identity.name, identity.federation) != (config.id, config.federation):
        raise EnrolmentRefused(
            f"certificate: it is for '{identity.name}' in federation '{identity.federation}', and the configuration "
            f"for '{config.id}' in '{config.federation}'; change id and federation there, or: {_again(config)}"
        )


def _again(config: AgentConfig) -> str:
    return f"'headwater enroll {config.id}' on the coordinator makes a token, 'edge-agent enroll -' takes it here"


def check_identity(config: AgentConfig, now: float) -> str:
    """What the certificate of an agent says.

    Raises:
        EnrolmentRefused: it does not hold now, or is for another agent or federation.
        StateError: it cannot be read.
    """
    identity = IdentityFolder(config.state).read()
    again = _again(config)
    if identity is None:
        raise StateError(f"certificate: there is none in {config.state}; {again}")
    _check_name(config, identity)
    if now < identity.not_before:
        raise EnrolmentRefused(
            f"certificate: it holds from {shown(identity.not_before)} on, and this device's clock says {shown(now)}; "
            "set the clock ('timedatectl set-ntp true')"
        )
    if now > identity.not_after:
        raise EnrolmentRefused(
            f"certificate: it expired at {shown(identity.not_after)}, and this device's clock says {shown(now)}; "
            f"'edge-agent run' renews it where that was not too long ago; else {again}"
        )
    half = identity.not_before + (identity.not_after - identity.not_before) / 2
    return f"holds until {shown(identity.not_after)}; a running agent renews it from {shown(half)} on"


# --- renewal ---------------------------------------------------------------------------------------------------------


class Renewal:
    """Keeps a running agent's certificate valid: from half of its life on it asks for the next one.

    While there is a connection, the request goes as a message and `received` takes the answer. A certificate that has
    expired is refused by the broker: then `by_port` asks the coordinator's enrolment port, which accepts it for a grace
    period. An open connection outlives its certificate, and the next one uses the new.
    """

    def __init__(self, state: Path, *, wall: Callable[[], float] = time.time) -> None:
        self.state, self.folder, self._wall = state, IdentityFolder(state), wall
        self._look_at = float("-inf")

    @property
    def is_enrolled(self) -> bool:
        """Whether there is a certificate to renew."""
        return self.folder.file.exists()

    def is_due(self, clock_s: float) -> bool:
        """Whether to ask now: half of the certificate's life is over, and it is time for another look (`AGAIN_S`)."""
        if clock_s < self._look_at:  # called for every message
            return False
        now = self._identity()
        self._look_at = clock_s + min(AGAIN_S, (now.not_after - now.not_before) / 20)
        return self._at(0.5)

    def is_expired(self) -> bool:
        """Whether the certificate has ended."""
        return self._at(1.0)

    def message(self) -> Renew:
        """The request, to be sent over the agent's own connection."""
        request = self._request()
        return Renew(csr=request.csr, serial=request.serial, signature=request.signature)

    def by_port(self) -> Identity:
        """Ask the enrolment port, and install what it answers.

        Raises:
            EnrolmentRefused: the coordinator refuses; the message says why, and what to do.
            BrokerAway: no coordinator answers, or the clocks differ: many a device sets its own after its start.
        """
        now, ca = self._identity(), self.folder.ca_der()
        address, request = (now.host, now.port), self._request().model_dump()
        try:
            answer = ask(address, ca, {"ask": "authority"}, checks_time=False)
            check_clock(answer, self._wall())
        except (EnrolmentRefused, MessageError) as error:  # nothing is refused yet
            raise BrokerAway(str(error)) from error
        try:
            return self.received(decoded(ask(address, ca, request), "certificate"))
        except (NotTheCoordinator, MessageError) as error:
            raise BrokerAway(str(error)) from error

    def standing(self) -> str:
        """Until when the certificate counts, as the coordinator says.

        Raises:
            EnrolmentRefused: it counts no more; the message says why, and what to do.
            BrokerAway: no coordinator answers.
        """
        now = self._identity()
        question = self.folder.question(now.federation, now.name).model_dump()
        try:
            answer = ask((now.host, now.port), self.folder.ca_der(), question, checks_time=False)
        except (NotTheCoordinator, MessageError) as error:
            raise BrokerAway(str(error)) from error
        until: Any = answer.get("until")
        if type(until) not in (int, float):
            raise BrokerAway(f"answer: {now.host}:{now.port} does not say until when the certificate counts")
        return shown(until)

    def received(self, certificate: bytes) -> Identity:
        """Install a new certificate (DER).

        Raises:
            MessageError: it is not for the key that was asked for.
        """
        now = self._identity()
        return self.folder.install(
            certificate,
            ca=self.folder.ca_der(),
            name=now.name,
            federation=now.federation,
            host=now.host,
            port=now.port,
        )

    def _request(self) -> CertificateRequest:
        now = self._identity()
        return self.folder.request(now.federation, now.name)

    def _identity(self) -> Identity:
        now = self.folder.read()
        if now is None:
            raise StateError(f"{self.folder.file} is gone; enroll this device again: 'headwater enroll NAME'")
        return now

    def _at(self, share: float) -> bool:
        now = self._identity()
        return self._wall() >= now.not_before + share * (now.not_after - now.not_before)


CHILD_LIMIT_S = 60.0


Step = Literal["message", "by_port", "received", "standing"]


def renew_beside(state: Path, what: Step, certificate: str = "") -> dict[str, str]:
    """The `Renewal` method of that name, in a child process: ``cryptography`` would stay in an agent, 13 MB.

    Returns the fields of the request for "message", else the new certificate's end.

    Raises:
        HeadwaterError: as the method does.
    """
    question = {"state": str(state), "what": what, "certificate": certificate}
    try:
        result = answer_of_child(__name__, answer_parent.__name__, question, CHILD_LIMIT_S)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise StateError(f"the renewal of the certificate has failed: {cause(error)}; it is tried again") from error
    if "error" in result:
        kinds = {kind.__name__: kind for kind in (BrokerAway, EnrolmentRefused, MessageError, MissingCapability)}
        raise kinds.get(result["error"], StateError)(result["message"])
    return result


def answer_parent() -> None:
    """The child of `renew_beside`: its question comes as JSON on stdin, the answer goes to stdout."""
    question = json.load(sys.stdin)
    renewal = Renewal(Path(question["state"]))
    try:
        if question["what"] == "message":
            request = renewal.message()
            result = {"csr": request.csr, "serial": request.serial, "signature": request.signature}
        elif question["what"] == "by_port":
            result = {"until": shown(renewal.by_port().not_after)}
        elif question["what"] == "standing":
            result = {"until": renewal.standing()}
        else:
            certificate = base64.b64decode(question["certificate"])
            result = {"until": shown(renewal.received(certificate).not_after)}
    except HeadwaterError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(result) + "\n")
