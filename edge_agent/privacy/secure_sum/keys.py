"""Keys, secrets and shares of a secure sum, which both sides compute."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from ...core.config import LEAST_CLIENTS
from ...core.errors import CodecError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


PRIME = 2**521 - 1
"""The size of the field of the shares."""

SHARE_BYTES = 66
"""The bytes of a share, a number below `PRIME`."""

SECRET_BYTES = 32
"""The bytes of a secret: a private key, or the seed of a mask."""

Entropy = Callable[[int], bytes]
"""A function that returns the given number of random bytes."""


def threshold(clients: int) -> int:
    """Return how many clients must deliver and answer: at least three, and two thirds, so that 30 % may drop out."""
    return max(LEAST_CLIENTS, math.ceil(2 * clients / 3))


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of one client, which it sends in phase 0.

    Attributes:
        share: The key (32 bytes) for which shares are encrypted.
        mask: The key (32 bytes) from which the masks of pairs are derived.
        seed: SHA-256 of the seed of the client's own mask, by which wrong shares of it are found.
    """

    share: bytes
    mask: bytes
    seed: bytes

    def is_of(self, secret: bytes, *, delivered: bool) -> bool:
        """Return whether ``secret`` is this client's: its seed if it has delivered, else its mask key."""
        if delivered:
            return sha256(secret).digest() == self.seed
        return private_key(secret).public_key().public_bytes_raw() == self.mask


def private_key(secret: bytes) -> X25519PrivateKey:
    """Return the private key of X25519 with these 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def pair_seed(key: X25519PrivateKey, public: bytes, context: bytes) -> bytes:
    """Return the seed of the mask of two clients, the same on both sides."""
    return agreed(key, public, b"mask " + context)


def agreed(key: X25519PrivateKey, public: bytes, info: bytes) -> bytes:
    """Return 32 bytes for one purpose that only the owners of the two keys can compute (X25519, then `derived`).

    Raises:
        CodecError: The bytes are not a valid public key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return derived(key.exchange(X25519PublicKey.from_public_bytes(public)), info)
    except ValueError as error:  # not 32 bytes, or a point of small order
        raise CodecError(f"a public key of a secure sum is invalid: {error}") from error


def derived(shared: bytes, info: bytes) -> bytes:
    """Return 32 bytes for one purpose, derived from a shared secret (HKDF with SHA-256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), SECRET_BYTES, None, info).derive(shared)


def stream(seed: bytes, size: int) -> np.ndarray:
    """Return the mask of a seed: integers (size,) uint64 of ChaCha20's key stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    encryptor = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * size)), "<u8").astype(np.uint64)


def add_pair(vector: np.ndarray, seed: bytes, *, positive: bool) -> None:
    """Add the mask of a pair of clients to ``vector`` (n,) uint64 in place, or subtract it where not ``positive``."""
    if positive:
        vector += stream(seed, len(vector))
    else:
        vector -= stream(seed, len(vector))


def split(secret: bytes, least: int, count: int, entropy: Entropy) -> list[bytes]:
    """Return Shamir's shares of a secret of up to 32 bytes, at the points 1, 2, … ``count``; any ``least`` give it."""
    rest = [int.from_bytes(entropy(SHARE_BYTES + 16), "big") % PRIME for _ in range(least - 1)]
    shares = []
    for point in range(1, count + 1):
        value = 0
        for coefficient in (*reversed(rest), int.from_bytes(secret, "big")):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def at_zero(points: Sequence[int]) -> list[int]:
    """Return Lagrange's factors at 0 for shares at these points."""
    factors = []
    for point in points:
        others = [other for other in points if other != point]
        bottom = math.prod(other - point for other in others)
        factors.append(math.prod(others) * pow(bottom, -1, PRIME) % PRIME)
    return factors


def outlier(shares: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> int | None:
    """Return the point without which the others' shares give a secret that fits; None where there is no such point.

    The polynomial through all points but q is sum(f y) - sum(p f y) / q at 0, for shares y at p, with `at_zero`'s f.
    """
    terms = {
        point: factor * int.from_bytes(share, "big")
        for (point, share), factor in zip(shares.items(), at_zero(list(shares)), strict=True)
    }
    total = sum(terms.values())
    slope = sum(point * term for point, term in terms.items())
    for point in shares:
        with contextlib.suppress(CodecError):
            if fits(_as_secret(total - slope * pow(point, -1, PRIME))):
                return point
    return None


def joined(factors: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """Return the secret (32 bytes) of shares at points with these factors (`at_zero`).

    Raises:
        CodecError: The shares do not give such a secret.
    """
    return _as_secret(sum(factor * int.from_bytes(share, "big") for factor, share in zip(factors, shares, strict=True)))


def _as_secret(value: int) -> bytes:
    """Return a number of the field as a secret, which must have 32 bytes."""
    try:
        return (value % PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError as error:
        raise CodecError("shares of a secure sum give no key: one of them is wrong") from error
