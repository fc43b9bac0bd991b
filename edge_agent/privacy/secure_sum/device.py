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
"""Clients whose shares are wrong, in a message."""


class Participant:
    """One client in one round. Its secrets live as long as this object, and each phase has one result.

    A phase that is asked for again with the same values gives the same result. With others it is refused: two
    encryptions, masked vectors or answers of different values would tell what one must not.
    """

    def __init__(self, client: str, context: bytes, entropy: Entropy = secrets.token_bytes) -> None:
        """``context`` names run, round and session: nothing of another attempt decrypts or cancels in this one."""
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
            SumRefused: There are too few clients, the keys of this client were replaced, two clients have the same
                keys, or other keys were received before.
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
        least = threshold(len(keys))
        order = [*ordered]
        of_key = split(self._mask_key.private_bytes_raw(), least, len(order), self._entropy)
        of_seed = split(self._seed, least, len(order), self._entropy)
        sealed = {}
        for other, one, two in zip(order, of_key, of_seed, strict=True):
            if other == self.client:
                self._shares[other] = (one, two)
            else:
                box = self._box(self.client, other, ordered[other].share)
                sealed[other] = box.encrypt(bytes(12), one + two, self._context)
        self._keys = ordered
        self._sealed = sealed
        return sealed

    def receive(self, sealed: Mapping[str, bytes]) -> None:
        """Take in what the others have encrypted for this one in phase 1; those who did not have dropped out.

        Raises:
            SumRefused: Too few clients have sent shares, a client is not of this round, or other shares were received
                before.
            SharesWrong: Shares of some clients were not encrypted by them for this client and attempt.
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
            SumRefused: The call comes before `receive`, or is the second: the difference of two vectors would have no
                mask.
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
            add_pair(result, pair, positive=self.client < other)
        return result

    def unmask(self, delivered: Iterable[str]) -> dict[str, bytes]:
        """Phase 3: for each client that has sent shares one of them, of its seed where it has delivered, else its key.

        Raises:
            SumRefused: This client has answered before, or too few clients have delivered for a sum that hides them.
        """
        survivors = frozenset(delivered)
        least = threshold(len(self._keys))
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
