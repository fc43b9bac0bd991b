"""Paths of blobs that hold for one agent, one blob and a short time, with a proof that only this process can make.

The key is random and never leaves the process, so paths end with it at the latest. Their end is a moment of the
process's own clock that never goes back: setting the wall clock neither prolongs nor shortens them.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

KEY_BYTES = 32
"""The bytes of the key of the proofs."""

_PATH = re.compile(r"/blobs/([0-9a-f]{64})\?agent=([a-z0-9][a-z0-9_-]{0,62})&until=([0-9]{1,12})&proof=([0-9a-f]{64})")


@dataclass(frozen=True)
class Grant:
    """What a path with a valid proof allows: one agent to fetch one blob.

    Attributes:
        agent: The agent that may fetch.
        digest: The blob that it may fetch.
    """

    agent: str
    digest: str


class PathSigner:
    """Makes paths, and tells those that hold from all others."""

    def __init__(self, key: bytes, clock: Callable[[], float], valid_s: float) -> None:
        """Sign with a key.

        Args:
            key: At least `KEY_BYTES` random bytes.
            clock: The time in seconds, which only goes forward.
            valid_s: How long a path holds.
        """
        self._key = key
        self._clock = clock
        self._valid_s = valid_s

    def path(self, agent: str, digest: str) -> str:
        """Return the path by which an agent can fetch a blob from now on."""
        until = math.ceil(self._clock() + self._valid_s)
        proof = self._proof(agent, digest, str(until))
        return f"/blobs/{digest}?agent={agent}&until={until}&proof={proof}"

    def grant(self, path: str) -> Grant | None:
        """Return what a path allows; None where it is malformed, forged, of an earlier process, or has ended."""
        parts = _PATH.fullmatch(path)
        if parts is None:
            return None
        digest, agent, until, proof = parts.groups()
        # The proof comes first, in constant time: only who was given a path learns that it has ended.
        if not hmac.compare_digest(proof, self._proof(agent, digest, until)):
            return None
        if self._clock() > int(until):
            return None
        return Grant(agent, digest)

    def _proof(self, agent: str, digest: str, until: str) -> str:
        """Return the proof of a path: a MAC over all that it allows, none of which may contain a line break."""
        content = f"headwater blob path 1\n{digest}\n{agent}\n{until}"
        return hmac.new(self._key, content.encode(), hashlib.sha256).hexdigest()
