"""Secure sum: a server learns the sum of vectors of its clients, and of each single vector nothing but noise.

Source: Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, protocol of Figure 4 with both masks, for a server that is honest but
curious. Per round: (0) each client sends two public keys and the hash of its own mask's seed; (1) with everybody's keys
it sends encrypted shares of its mask key and of that seed; (2) it sends its vector plus its own mask plus or minus one
mask for each client that has sent shares; (3) knowing who has delivered, it reveals one share for each client: of the
own mask of those who have, of the mask key of those who have not. So the masks of all can be removed from the sum, and
from no single vector: the own mask protects a vector that arrives late, after its client's mask key was given up.

What is protected: a vector, against a server that follows the protocol and up to ``t - 1`` clients that tell it all
they know, with ``t`` of ``n`` shares needed. A server that names different clients as delivered to different clients
does not get further, as long as fewer than ``2 t - n`` clients help it: each answers once in a round, and ``2 t > n``.
What is not: a server that makes up clients (nobody but it vouches for public keys), a sum of which all other terms are
known, wrong vectors, and who takes part. A server that stops after phase 2 learns nothing.

Differs: the hash of phase 0 is not in the paper; wrong shares of a seed are found by it. Shares are of 32-byte secrets
in the field of 2^521 - 1. Numbers are fixed-point, see `FixedPoint`.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from .config import LEAST_CLIENTS
from .errors import CodecError, SharesWrong, SumRefused, TrainingFailed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

PRIME = 2**521 - 1
SHARE_BYTES = 66
SECRET_BYTES = 32
MOST_NAMED = 20
"""Clients whose shares are wrong, in a message."""

Entropy = Callable[[int], bytes]
"""So many random bytes."""


def threshold(clients: int) -> int:
    """How many clients must deliver and answer: two thirds, so that 30 % of them may drop out, and at least three."""
    return max(LEAST_CLIENTS, math.ceil(2 * clients / 3))


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as integers modulo 2^64: rounded to multiples of 2^-``bits``.

    A sum over n clients differs from the exact one by at most n 2^-(bits + 1) in each number. Each number of a client
    may reach 2^(62 - bits) / n, so that no sum wraps around.
    """

    bits: int = 24

    def bound(self, clients: int) -> float:
        """The largest absolute value of a client's number."""
        return float(2.0 ** (62 - self.bits) / clients)

    def encode(self, numbers: np.ndarray, clients: int) -> np.ndarray:
        """Integers (n,) uint64 of numbers (n,).

        Raises:
            TrainingFailed: a number is not finite, or too large for the sum.
        """
        largest = float(np.abs(numbers).max(initial=0.0))
        if not largest <= self.bound(clients):
            raise TrainingFailed(
                f"a number of {largest:g} in the weighted update, a secure sum of {clients} clients holds up to "
                f"{self.bound(clients):g}; lower the step size, or clip the update"
            )
        return np.rint(numbers.astype(np.float64) * 2.0**self.bits).astype(np.int64).view(np.uint64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Numbers (n,) float64 of a sum (n,) uint64."""
        return total.view(np.int64).astype(np.float64) / 2.0**self.bits


@dataclass(frozen=True)
class PublicKeys:
    """Phase 0 of one client: the key that its shares are encrypted for, and the one that its masks come from.

    ``seed``: SHA-256 of the seed of its own mask, so that wrong shares of it are found.
    """

    share: bytes
    mask: bytes
    seed: bytes

    def is_of(self, secret: bytes, *, delivered: bool) -> bool:
        """Whether this is the client's secret: its seed where it has delivered, else its mask key."""
        if delivered:
            return sha256(secret).digest() == self.seed
        return private_key(secret).public_key().public_bytes_raw() == self.mask


class Participant:
    """One client in one round. Its secrets live as long as this object, and each phase has one result.

    A phase that is asked for again with the same values gives the same result. With others it is refused: two
    encryptions, masked vectors or answers of different values would tell what one must not.
    """

    def __init__(self, client: str, context: bytes, entropy: Entropy = secrets.token_bytes) -> None:
        """``context`` names run, round and session: nothing of another attempt decrypts or cancels in this one."""
        self.client, self._context, self._entropy = client, context, entropy
        self._share_key, self._mask_key = private_key(entropy(SECRET_BYTES)), private_key(entropy(SECRET_BYTES))
        self._seed = entropy(SECRET_BYTES)
        self._keys: Mapping[str, PublicKeys] = {}
        self._sealed: dict[str, bytes] = {}
        self._received: Mapping[str, bytes] = {}
        self._shares: dict[str, tuple[bytes, bytes]] = {}
        """Client that has sent shares -> its shares of mask key and seed for this one."""

        self._has_masked = False
        self._answered: tuple[frozenset[str], dict[str, bytes]] | None = None

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients of the round, sorted; empty before phase 1."""
        return tuple(self._keys)

    def keys(self) -> PublicKeys:
        """Phase 0."""
        return PublicKeys(
            self._share_key.public_key().public_bytes_raw(),
            self._mask_key.public_key().public_bytes_raw(),
            sha256(self._seed).digest(),
        )

    def shares(self, keys: Mapping[str, PublicKeys]) -> dict[str, bytes]:
        """Phase 1: for each other client the encrypted shares of this one's mask key and seed.

        Raises:
            SumRefused: too few clients, this one's keys were replaced, two clients have the same, or there were
                other keys before.
        """
        if len(keys) < LEAST_CLIENTS:
            raise SumRefused(f"a secure sum of {len(keys)} clients hides nobody; it needs {LEAST_CLIENTS}")
        if keys.get(self.client) != self.keys():
            raise SumRefused(f"the keys of '{self.client}' in the list are not its own; it takes no part")
        if len({one.mask for one in keys.values()} | {one.share for one in keys.values()}) < 2 * len(keys):
            raise SumRefused("a public key occurs twice in the list; it takes no part")
        if self._keys:
            if self._keys != keys:
                raise SumRefused("shares for other keys were made in this round before; it takes no part")
            return self._sealed
        ordered = dict(sorted(keys.items()))
        least, order = threshold(len(keys)), [*ordered]
        of_key = split(self._mask_key.private_bytes_raw(), least, len(order), self._entropy)
        of_seed = split(self._seed, least, len(order), self._entropy)
        sealed = {}
        for other, one, two in zip(order, of_key, of_seed, strict=True):
            if other == self.client:
                self._shares[other] = (one, two)
            else:
                box = self._box(self.client, other, ordered[other].share)
                sealed[other] = box.encrypt(bytes(12), one + two, self._context)
        self._keys, self._sealed = ordered, sealed
        return sealed

    def receive(self, sealed: Mapping[str, bytes]) -> None:
        """Take in what the others have encrypted for this one in phase 1; those who did not have dropped out.

        Raises:
            SumRefused: too few have, one is not of this round, or others had before.
            SharesWrong: shares of some were not encrypted by them for this one and attempt.
        """
        if unknown := sealed.keys() - (self._keys.keys() - {self.client}):
            raise SumRefused(f"{min(unknown)!r} is said to have sent shares and is not of this round")
        if len(sealed) + 1 < (least := threshold(len(self._keys))):
            raise SumRefused(f"{len(sealed) + 1} of {len(self._keys)} clients have sent shares, it takes {least}")
        if self._received and self._received != sealed:
            raise SumRefused("other shares were received in this round before; it takes no part")
        opened = {other: self._opened(other, box) for other, box in sealed.items()}
        if wrong := sorted(other for other, both in opened.items() if both is None):
            raise SharesWrong(f"{', '.join(wrong[:MOST_NAMED])}: no shares for '{self.client}' in this round")
        self._shares.update({other: both for other, both in opened.items() if both is not None})
        self._received = dict(sealed)

    def masked(self, numbers: np.ndarray) -> np.ndarray:
        """Phase 2: integers (n,) uint64, uniformly random to who lacks the masks, of integers (n,) uint64.

        Raises:
            SumRefused: before `receive`, or a second time: the difference of two vectors would have no mask.
        """
        if not self._received:
            raise SumRefused("nobody's shares have come, so no mask could be removed again")
        if self._has_masked:
            raise SumRefused("an update was masked in this round before; another one would bare the difference")
        self._has_masked = True
        result = np.array(numbers, np.uint64)
        result += stream(self._seed, len(numbers))
        for other in self._received:
            pair = pair_seed(self._mask_key, self._keys[other].mask, self._context)
            _add_pair(result, pair, positive=self.client < other)
        return result

    def unmask(self, delivered: Iterable[str]) -> dict[str, bytes]:
        """Phase 3: for each client that has sent shares one of them, of its seed where it has delivered, else its key.

        Raises:
            SumRefused: it has answered before, or too few have delivered for a sum that hides them.
        """
        survivors, least = frozenset(delivered), threshold(len(self._keys))
        if self._answered is not None:
            if self._answered[0] == survivors:
                return self._answered[1]
            raise SumRefused("the masks of this round were asked for before; a second answer could bare an update")
        if unknown := survivors - self._shares.keys():
            raise SumRefused(f"{min(unknown)!r} is said to have delivered and has sent no shares")
        if len(survivors) < least:
            raise SumRefused(f"{len(survivors)} of {len(self._keys)} clients have delivered, it takes {least}")
        answer = {}
        for other, (of_key, of_seed) in sorted(self._shares.items()):
            answer[other] = of_seed if other in survivors else of_key
        self._answered = survivors, answer
        return answer

    def _opened(self, other: str, box: bytes) -> tuple[bytes, bytes] | None:
        from cryptography.exceptions import InvalidTag

        try:
            opener = self._box(other, self.client, self._keys[other].share)
            both = opener.decrypt(bytes(12), box, self._context)
        except InvalidTag:
            return None
        return both[:SHARE_BYTES], both[SHARE_BYTES:]

    def _box(self, sender: str, receiver: str, public: bytes) -> ChaCha20Poly1305:
        """What encrypts from one to the other, once: the nonce is 0 because the key is of this pair and round alone.

        ``public``: the other one's key.
        """
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        info = f"shares {len(sender)} {sender} {receiver} ".encode() + self._context
        return ChaCha20Poly1305(agreed(self._share_key, public, info))


def unmasked(
    masked: Mapping[str, np.ndarray],
    keys: Mapping[str, PublicKeys],
    answers: Mapping[str, Mapping[str, bytes]],
    context: bytes,
    blame: Callable[[str], None] = lambda _: None,
) -> np.ndarray:
    """The server's last step: the sum (n,) uint64 of the integers of all who have delivered.

    ``masked``: client -> phase 2. ``keys``: of all clients of phase 0. ``answers``: client -> phase 3, of at least
    `threshold` clients, about those that have sent shares. ``blame`` is called with each whose answer was wrong, where
    the others are enough: found is a single wrong share of a secret.

    Raises:
        TrainingFailed: too few answers.
        CodecError: shares that do not give the secret of that client, and nobody knows which of them is wrong.
    """
    honest = dict(answers)
    while isinstance(secrets_of := _revealed(masked, keys, honest), str):
        blame(secrets_of)
        del honest[secrets_of]
    total = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():
        total += vector
    for client, secret in secrets_of.items():
        if client in masked:
            total -= stream(secret, len(total))
            continue
        key = private_key(secret)
        for other in masked:  # of each pair the one who has delivered has put the mask in; it is taken out
            _add_pair(total, pair_seed(key, keys[other].mask, context), positive=other > client)
    return total


def _revealed(
    delivered: Container[str], keys: Mapping[str, PublicKeys], answers: Mapping[str, Mapping[str, bytes]]
) -> dict[str, bytes] | str:
    """The secrets of all clients that have sent shares, or the one whose answer is wrong."""
    least = threshold(len(keys))
    if len(answers) < least:
        raise TrainingFailed(f"{len(answers)} of {len(keys)} clients have revealed their shares, it takes {least}")
    points = {point: client for point, client in enumerate(sorted(keys), 1) if client in answers}
    chosen, one_more = list(points)[:least], list(points)[: least + 1]
    factors, result = at_zero(chosen), {}
    for client in answers[points[chosen[0]]]:
        fits = partial(keys[client].is_of, delivered=client in delivered)
        with contextlib.suppress(CodecError):
            secret = joined(factors, [answers[points[point]][client] for point in chosen])
            if fits(secret):
                result[client] = secret
                continue
        wrong = outlier({point: answers[points[point]][client] for point in one_more}, fits)
        if len(one_more) == least or wrong is None:
            raise CodecError(
                f"the shares of '{client}' do not give its secret; it has made wrong ones, or one of "
                f"{', '.join(points[point] for point in one_more)} has revealed a wrong one"
            )
        return points[wrong]
    return result


def private_key(secret: bytes) -> X25519PrivateKey:
    """The key of these 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def pair_seed(key: X25519PrivateKey, public: bytes, context: bytes) -> bytes:
    """The seed of the mask of two clients, the same on both sides."""
    return agreed(key, public, b"mask " + context)


def agreed(key: X25519PrivateKey, public: bytes, info: bytes) -> bytes:
    """32 bytes for one purpose that only the owners of both keys know (X25519, then `derived`).

    Raises:
        CodecError: the public key is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return derived(key.exchange(X25519PublicKey.from_public_bytes(public)), info)
    except ValueError as error:  # not 32 bytes, or a point of small order
        raise CodecError(f"a public key of a secure sum is invalid: {error}") from error


def derived(shared: bytes, info: bytes) -> bytes:
    """32 bytes for one purpose out of a shared secret (HKDF with SHA-256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), SECRET_BYTES, None, info).derive(shared)


def stream(seed: bytes, size: int) -> np.ndarray:
    """Integers (size,) uint64 of ChaCha20's key stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    encryptor = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * size)), "<u8").astype(np.uint64)


def _add_pair(vector: np.ndarray, seed: bytes, *, positive: bool) -> None:
    if positive:
        vector += stream(seed, len(vector))
    else:
        vector -= stream(seed, len(vector))


def split(secret: bytes, least: int, count: int, entropy: Entropy) -> list[bytes]:
    """Shamir's shares of a secret of up to 32 bytes, at 1, 2, … ``count``; any ``least`` of them give it."""
    rest = [int.from_bytes(entropy(SHARE_BYTES + 16), "big") % PRIME for _ in range(least - 1)]
    shares = []
    for point in range(1, count + 1):
        value = 0
        for coefficient in (*reversed(rest), int.from_bytes(secret, "big")):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's factors at 0 of the shares at these points."""
    factors = []
    for point in points:
        others = [other for other in points if other != point]
        bottom = math.prod(other - point for other in others)
        factors.append(math.prod(others) * pow(bottom, -1, PRIME) % PRIME)
    return factors


def outlier(shares: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> int | None:
    """The point without which the others' shares give a secret that fits; None where there is no such point.

    The polynomial through all points but q is sum(f y) - sum(p f y) / q at 0, for shares y at p, with `at_zero`'s f.
    """
    terms = {
        point: factor * int.from_bytes(share, "big")
        for (point, share), factor in zip(shares.items(), at_zero(list(shares)), strict=True)
    }
    total, slope = sum(terms.values()), sum(point * term for point, term in terms.items())
    for point in shares:
        with contextlib.suppress(CodecError):
            if fits(_as_secret(total - slope * pow(point, -1, PRIME))):
                return point
    return None


def joined(factors: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The secret (32 bytes) of shares at points with these factors (`at_zero`).

    Raises:
        CodecError: the shares belong to no such secret.
    """
    return _as_secret(sum(factor * int.from_bytes(share, "big") for factor, share in zip(factors, shares, strict=True)))


def _as_secret(value: int) -> bytes:
    try:
        return (value % PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError as error:
        raise CodecError("shares of a secure sum give no key: one of them is wrong") from error
