"""The forms of everything that is signed: what is signed, by whom, for what, until when, and how that is checked.

=====================  =====================================  =======================  ===============================
Form                   What is signed                         By whom                  For what, and until when
=====================  =====================================  =======================  ===============================
`TOKEN_REQUEST`        `request_bytes` without a serial       the token's secret       one enrolment, until the token
                                                                                       expires, is used or is replaced
`CERTIFICATE_REQUEST`  `request_bytes` with the serial of     the key of the           a renewal, or the question
                       the certificate that signs             certificate named by     whether the certificate still
                                                              the serial               counts; until the certificate
                                                                                       is revoked or its grace period
                                                                                       after its end is over
`ENROLMENT_ANSWER`     `answer_bytes`: all fields of the      the federation's         the device that the answer
                       answer but ``signature``               certificate authority    names; as long as its pending
                                                                                       key is the one certified
`COMMAND`              `command_bytes`: the receiver and the  the agent's own command  one agent, once, until the
                       message without its field ``mac``      key, which the           agent or the coordinator
                                                              coordinator derives      starts anew (`wire.seal.Guard`)
`ANNOUNCEMENT`         the message without its field ``sig``  the key of               all agents, as often as it is
                                                              announcements, derived   repeated; what it says is
                                                              from the same secret     checked by epoch
`METADATA`             `canonical`: the JSON of a release or  keys of a role, as many  devices that trust the root;
                       of a root                              as its threshold says    until ``expires`` in the JSON,
                                                                                       above the version known already
=====================  =====================================  =======================  ===============================

Forms differ in their algorithm, because peers of older versions check them, but are used alike: ``sign`` returns the
proof of a content, and ``is_valid`` tells whether a proof is of that key and content. ``is_valid`` tells nothing about
time: whoever calls it checks the last column. Each content names its purpose or is the whole of a typed document, so
that no proof of one form counts in another one. Loading this module loads no ``cryptography``, which takes 7 MB.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class MacForm:
    """A form whose proof is an HMAC-SHA256: both sides have the same key of 32 bytes."""

    name: str

    def sign(self, key: bytes, content: bytes) -> bytes:
        """Return the proof (32 bytes) of a content."""
        return hmac.digest(key, content, "sha256")

    def is_valid(self, key: bytes, proof: bytes, content: bytes) -> bool:
        """Return whether a proof is of this key and content; the time it takes does not depend on where they differ."""
        return hmac.compare_digest(proof, self.sign(key, content))


@dataclass(frozen=True)
class Ed25519Form:
    """A form whose proof is an Ed25519 signature: whoever checks it has the raw public key of 32 bytes."""

    name: str

    def sign(self, key: Ed25519PrivateKey, content: bytes) -> bytes:
        """Return the proof (64 bytes) of a content."""
        return key.sign(content)

    def is_valid(self, public_key: bytes, proof: bytes, content: bytes) -> bool:
        """Return whether a proof is of the owner of this public key and of this content."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(proof, content)
        except (InvalidSignature, ValueError):  # a ValueError is for bytes that are no public key
            return False
        return True


@dataclass(frozen=True)
class EcdsaForm:
    """A form whose proof is an ECDSA signature (SHA-256, DER): whoever checks it has the signer's certificate."""

    name: str

    def sign(self, key: EllipticCurvePrivateKey, content: bytes) -> bytes:
        """Return a proof of a content; no two calls return the same one."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return key.sign(content, ec.ECDSA(hashes.SHA256()))

    def is_valid(self, certificate: bytes, proof: bytes, content: bytes) -> bool:
        """Return whether a proof is of the owner of this certificate (DER) and of this content."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            key = x509.load_der_x509_certificate(certificate).public_key()
            # A certificate may hold a key of another kind, which cannot have made such a proof.
            if not isinstance(key, ec.EllipticCurvePublicKey):
                return False
            key.verify(proof, content, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError):  # a ValueError is for bytes that are no certificate
            return False
        return True


TOKEN_REQUEST = Ed25519Form("token request")
CERTIFICATE_REQUEST = EcdsaForm("certificate request")
ENROLMENT_ANSWER = EcdsaForm("enrolment answer")
COMMAND = MacForm("command")
ANNOUNCEMENT = Ed25519Form("announcement")
METADATA = Ed25519Form("metadata")


def request_bytes(federation: str, name: str, csr: str, serial: str) -> bytes:
    """Return the bytes that a device signs in a request, so that no part of it can be put into another request.

    Args:
        federation: The name of the federation.
        name: The agent's id.
        csr: The certificate signing request (DER) in Base64; empty in a question about the certificate.
        serial: The serial of the certificate whose key signs; empty where the token's key signs.
    """
    return f"headwater certificate request 1\n{federation}\n{name}\n{serial}\n{csr}".encode()


def answer_bytes(federation: str, name: str, answer: Mapping[str, Any]) -> bytes:
    """Return the bytes that the authority signs in an answer: all fields but ``signature``, and for whom it is."""
    signed = {key: value for key, value in answer.items() if key != "signature"}
    return f"headwater certificate answer 1\n{federation}\n{name}\n{json.dumps(signed, sort_keys=True)}".encode()


def command_bytes(agent: str, payload: bytes) -> bytes:
    """Return the bytes that the MAC of a command to ``agent`` covers, so that it is not a command to another one."""
    return b"%s\0%s" % (agent.encode(), payload)


def canonical(content: Mapping[str, Any]) -> bytes:
    """Return canonical JSON, which is that of TUF for metadata without control characters in their texts."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
