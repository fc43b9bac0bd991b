"""The device's half of a secure sum: one `Participant` for each attempt, which answers each phase once."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from ...core.config import LEAST_CLIENTS
from ...core.errors import SharesWrong, SumRefused

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from edge_agent.privacy.secure_sum.keys import (
    SECRET_BYTES,
    SHARE_BYTES,
    Entropy,
    PublicKeys,
    add_pair,
    agreed,
    pair_seed,
    private_key,
    split,
    stream,
    threshold,
)

MOST_NAMED = 20
"""The most clients that a message names because their shares are wrong."""


class Participant:
    """A client in one round of a secure sum. Its secrets live as long as this object, and each phase has one result.

    A phase that is called again with the same values gives the same result. With other values it is refused: two
    encryptions, masked vectors or answers of different values would reveal what one of them does not.
    """

    def __init__(self, client: str, context: bytes, entropy: Entropy = secrets.token_bytes) -> None:
        """Make the secrets of a client.

        Args:
            client: The client's name.
            context: Names run, round and session, so that nothing of another attempt decrypts or cancels in this one.
            entropy: The source of random bytes.
        """
        self.client = client
        self._context = context
        self._entropy = entropy
        self._share_key = private_key(entropy(SECRET_BYTES))
        self._mask_key = private_key(entropy(SECRET_BYTES))
        self._seed = entropy(SECRET_BYTES)
        self._keys: Mapping[str, PublicKeys] = {}
        self._sealed: dict[str, bytes] = {}
        self._received: Mapping[str, bytes] = {}
        self._shares: dict[str, tuple[bytes, bytes]] = {}
        """The shares of mask key and seed that each client has sent to this one."""

        self._has_masked = False
        self._answered: tuple[frozenset[str], dict[str, bytes]] | None = None

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients of the round, sorted; empty before phase 1."""
        return tuple(self._keys)

    def keys(self) -> PublicKeys:
        """Return the public keys that this client contributes in phase 0."""
        return PublicKeys(
            self._share_key.public_key().public_bytes_raw(),
            self._mask_key.public_key().public_bytes_raw(),
            sha256(self._seed).digest(),
        )

    def shares(self, keys: Mapping[str, PublicKeys]) -> dict[str, bytes]:
        """Return the shares of this client's mask key and seed of phase 1, encrypted for each of the other clients.

        ``keys`` are the public keys of all clients.

        Raises:
            SumRefused: There are too few clients, the keys of this client were replaced, two clients have the same
                keys, or other keys were received before.
        """
        if len(keys) < LEAST_CLIENTS:
            raise SumRefused(f"a secure sum of {len(keys)} clients hides nobody; it needs {LEAST_CLIENTS}")
        # A server could replace keys by its own, or give one client two names.
        if keys.get(self.client) != self.keys():
            raise SumRefused(f"the keys of '{self.client}' in the list are not its own; it takes no part")
        distinct = {public.mask for public in keys.values()} | {public.share for public in keys.values()}
        if len(distinct) < 2 * len(keys):
            raise SumRefused("a public key occurs twice in the list; it takes no part")
        # Shares for other keys would be further shares of the same secrets.
        if self._keys:
            if self._keys != keys:
                raise SumRefused("shares for other keys were made in this round before; it takes no part")
            return self._sealed
        ordered = dict(sorted(keys.items()))
        least = threshold(len(keys))
        order = [*ordered]
        key_shares = split(self._mask_key.private_bytes_raw(), least, len(order), self._entropy)
        seed_shares = split(self._seed, least, len(order), self._entropy)
        sealed = {}
        for other, key_share, seed_share in zip(order, key_shares, seed_shares, strict=True):
            if other == self.client:
                self._shares[other] = (key_share, seed_share)
            else:
                box = self._box(self.client, other, ordered[other].share)
                sealed[other] = box.encrypt(bytes(12), key_share + seed_share, self._context)
        self._keys = ordered
        self._sealed = sealed
        return sealed

    def receive(self, sealed: Mapping[str, bytes]) -> None:
        """Decrypt the shares that other clients have sent to this one in phase 1; all others have dropped out.

        Raises:
            SumRefused: Too few clients have sent shares, a client is not of this round, or other shares were received
                before.
            SharesWrong: Shares of some clients were not encrypted by them for this client and attempt.
        """
        unknown = sealed.keys() - (self._keys.keys() - {self.client})
        if unknown:
            raise SumRefused(f"{min(unknown)!r} is said to have sent shares and is not of this round")
        least = threshold(len(self._keys))
        if len(sealed) + 1 < least:
            raise SumRefused(f"{len(sealed) + 1} of {len(self._keys)} clients have sent shares, it takes {least}")
        if self._received and self._received != sealed:
            raise SumRefused("other shares were received in this round before; it takes no part")
        # All are decrypted before one of them counts, so that the message names everybody whose shares are wrong.
        opened: dict[str, tuple[bytes, bytes]] = {}
        wrong: list[str] = []
        for other, box in sealed.items():
            shares = self._opened(other, box)
            if shares is None:
                wrong.append(other)
            else:
                opened[other] = shares
        if wrong:
            named = sorted(wrong)[:MOST_NAMED]
            raise SharesWrong(f"{', '.join(named)}: no shares for '{self.client}' in this round", named)
        self._shares.update(opened)
        self._received = dict(sealed)

    def masked(self, numbers: np.ndarray) -> np.ndarray:
        """Return the integers ``numbers`` (n,) uint64 under the masks of phase 2: uniformly random without the masks.

        Raises:
            SumRefused: The call comes before `receive`, or is the second: the difference of two vectors would have no
                mask.
        """
        if not self._received:
            raise SumRefused("no shares have arrived, so no mask could be removed again")
        if self._has_masked:
            raise SumRefused("an update was masked in this round before; another one would reveal the difference")
        self._has_masked = True
        result = np.array(numbers, np.uint64)
        result += stream(self._seed, len(numbers))
        for other in self._received:
            pair = pair_seed(self._mask_key, self._keys[other].mask, self._context)
            add_pair(result, pair, positive=self.client < other)
        return result

    def unmask(self, delivered: Iterable[str]) -> dict[str, bytes]:
        """Return the answer of phase 3: a share of one secret of each client that has sent shares.

        It is the share of the seed of those clients that have ``delivered``, and of the mask key of all others.

        Raises:
            SumRefused: This client has answered before, or too few clients have delivered for a sum that hides them.
        """
        survivors = frozenset(delivered)
        least = threshold(len(self._keys))
        if self._answered is not None:
            if self._answered[0] == survivors:
                return self._answered[1]
            raise SumRefused("the masks of this round were asked for before; a second answer could reveal an update")
        unknown = survivors - self._shares.keys()
        if unknown:
            raise SumRefused(f"{min(unknown)!r} is said to have delivered and has sent no shares")
        if len(survivors) < least:
            raise SumRefused(f"{len(survivors)} of {len(self._keys)} clients have delivered, it takes {least}")
        answer = {}
        for other, (of_key, of_seed) in sorted(self._shares.items()):
            answer[other] = of_seed if other in survivors else of_key
        self._answered = survivors, answer
        return answer

    def _opened(self, other: str, box: bytes) -> tuple[bytes, bytes] | None:
        """Return the shares of mask key and seed that another client has encrypted; None where it did not do so."""
        from cryptography.exceptions import InvalidTag

        try:
            opener = self._box(other, self.client, self._keys[other].share)
            shares = opener.decrypt(bytes(12), box, self._context)
        except InvalidTag:
            return None
        return shares[:SHARE_BYTES], shares[SHARE_BYTES:]

    def _box(self, sender: str, receiver: str, public: bytes) -> ChaCha20Poly1305:
        """Return the cipher of messages from ``sender`` to ``receiver``, one of which is this client.

        Its key is for this direction, pair and attempt alone, and encrypts once: therefore the nonce is 0. ``public``
        is the share key of the other client.
        """
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        info = f"shares {len(sender)} {sender} {receiver} ".encode() + self._context
        return ChaCha20Poly1305(agreed(self._share_key, public, info))
