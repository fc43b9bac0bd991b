"""Keys of devices and the fingerprints that name them."""

from __future__ import annotations

import base64
import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..core.config import NAME_PATTERN
from ..core.errors import (
    MissingCapability,
)
from ..core.storage import read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


SECRET_BYTES = 16
"""The number of random bytes in a token."""

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""A name of an agent or a federation."""

Fingerprint = Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]
"""The SHA-256 of a certificate or public key, in the form of ssh."""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate or public key, in the form of ssh."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")


def key_fingerprint(key: Any) -> str:
    """Return the fingerprint of a public key, which coordinator and device show alike."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return fingerprint(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def token_key(secret: str) -> Ed25519PrivateKey:
    """Return the signing key that is derived from a token's secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"headwater token\0" + secret.encode()).digest())


def new_secret() -> str:
    """Return a new random part for a token."""
    return secrets.token_urlsafe(SECRET_BYTES)


def need_cryptography() -> None:
    """Require the package ``cryptography``, which makes and reads certificates.

    Raises:
        MissingCapability: The package ``cryptography`` is not installed.
    """
    try:
        import cryptography  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise MissingCapability(
            "certificates need the package 'cryptography', which is not installed; pip install cryptography"
        ) from error


def signing_request(key: EllipticCurvePrivateKey, name: str) -> bytes:
    """Return a certificate signing request (DER) for ``name``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return built.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def pem_of(key: EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM (PKCS #8), not encrypted."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_key(path: Path) -> EllipticCurvePrivateKey | None:
    """Return the private key in a file; None where there is no such file, or no key in it."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        content = read_regular(path)
        key = load_pem_private_key(content[content.index(b"-----BEGIN") :], None)
    except (FileNotFoundError, ValueError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None
