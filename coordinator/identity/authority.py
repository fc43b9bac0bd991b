"""A federation's certificate authority: one key (EC P-256), ten years; what it issues and what it revokes.

Agents' certificates are good for clients only and the broker's for a server only, so that no enrolled device can stand
for the broker.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edge_agent.core.config import credential
from edge_agent.core.errors import StateError, UsageError, cause
from edge_agent.core.storage import read_regular, write_private
from edge_agent.identity.keys import fingerprint
from edge_agent.identity.signed_request import ENROLMENT_ANSWER

LONGEST_NAME = 64
"""Characters that X.509 allows; agents know an authority by its fingerprint, not by its name."""

AUTHORITY_DAYS = 3653
BACKDATED = timedelta(hours=1)
"""Certificates hold from this long ago: clocks differ."""


class Authority:
    """The key and certificate of a federation's authority."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self.certificate = certificate

    @classmethod
    def create(cls, folder: Path, federation: str, now: datetime) -> Authority:
        """Return a new authority, written to ``folder``.

        Raises:
            UsageError: there is one already: devices that it has certified would be shut out.
        """
        if (folder / "ca.key").exists():
            raise UsageError(f"{folder} holds the authority of a federation already; agents depend on it, so it stays")
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"Headwater {federation}"[:LONGEST_NAME])
        built = (
            _builder(subject, subject, key.public_key(), now, timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        authority = cls(key, built.sign(key, hashes.SHA256()))
        write_private(folder / "ca.pem", authority.certificate.public_bytes(Encoding.PEM))
        write_private(folder / "ca.key", pem_of(key))
        return authority

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Return the authority in ``folder``; its key may be a credential that systemd gives.

        Raises:
            StateError: there is none, or it is damaged.
        """
        try:
            key = load_pem_private_key(read_regular(credential(folder / "ca.key")), None)
            certificate = x509.load_pem_x509_certificate(read_regular(folder / "ca.pem"))
        except FileNotFoundError as error:
            raise StateError(
                f"{folder}: no certificate authority; 'headwater init' makes one, a backup brings a lost one back"
            ) from error
        except (OSError, ValueError) as error:
            raise StateError(
                f"{folder}: the certificate authority cannot be read ({cause(error)}); put it back"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise StateError(f"{folder}: ca.key is not the key of ca.pem; put both back from one backup")
        return cls(key, certificate)

    @property
    def der(self) -> bytes:
        """The authority's certificate, in DER."""
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def fingerprint(self) -> str:
        """What tokens hold, and what both sides show."""
        return fingerprint(self.der)

    def for_client(self, name: str, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta) -> x509.Certificate:
        """Return a client's certificate; ``name`` is its user and its id at the broker."""
        return self._issue(name, key, now, life, ExtendedKeyUsageOID.CLIENT_AUTH)

    def for_server(
        self, hosts: Iterable[str], key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
    ) -> x509.Certificate:
        """Return the certificate of a program that devices connect to under these names and addresses."""
        return self._issue("broker", key, now, life, ExtendedKeyUsageOID.SERVER_AUTH, [*map(_general_name, hosts)])

    def revocations(self, revoked: Iterable[tuple[int, datetime]], now: datetime) -> bytes:
        """Return the list (PEM) of revoked serials. It ends with the authority: an old list must shut nobody out."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - BACKDATED)
            .next_update(self.certificate.not_valid_after_utc)
        )
        for serial, at in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(at).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def sign(self, content: bytes) -> bytes:
        """Return the authority's proof of an answer, which is no certificate, and does not begin as one."""
        return ENROLMENT_ANSWER.sign(self._key, content)

    def _issue(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        now: datetime,
        life: timedelta,
        use: x509.ObjectIdentifier,
        names: list[x509.GeneralName] | None = None,
    ) -> x509.Certificate:
        """Return a certificate that this authority signs.

        Args:
            name: The subject.
            key: The public key.
            now: The time from which ``life`` counts.
            life: How long the certificate holds.
            use: Whether it is one of a client or of a server.
            names: Host names and addresses of a server.
        """
        builder = (
            _builder(_name(name), self.certificate.subject, key, now, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key, not encrypted: who reads the file has it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    """Return what all certificates have; they hold from a little before ``now``, for clocks that are late."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - min(BACKDATED, life / 10))
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return the use of a key: to sign certificates and their revocations, or to prove who one is."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
