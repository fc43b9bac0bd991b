"""Paths of blobs that hold for one agent, one blob and a short time, with a proof that only this process can make.

A path of an upload holds for one round of a run and one size, too. Neither kind of path holds for the other direction.

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


_UPLOAD = re.compile(
    r"/uploads/([0-9a-f]{64})\?agent=([a-z0-9][a-z0-9_-]{0,62})&run=([a-z0-9][a-z0-9-]{0,63})&round=([0-9]{1,7})"
    r"&size=([0-9]{1,10})&until=([0-9]{1,12})&proof=([0-9a-f]{64})"
)


@dataclass(frozen=True)
class Grant:
    """What a path with a valid proof allows: one agent to fetch one blob.

    Attributes:
        agent: The agent that may fetch.
        digest: The blob that it may fetch.
    """

    agent: str
    digest: str


@dataclass(frozen=True)
class UploadGrant:
    """What a path with a valid proof allows: one agent to send one update, for one round of a run.

    Attributes:
        agent: The agent that may send.
        digest: The SHA-256 of the update.
        run: The id of the run.
        round: The number of the round.
        size_bytes: The bytes of the update.
    """

    agent: str
    digest: str
    run: str
    round: int
    size_bytes: int


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

    def upload_path(self, grant: UploadGrant) -> str:
        """Return the path by which an agent can send an update from now on."""
        until = math.ceil(self._clock() + self._valid_s)
        scope = f"agent={grant.agent}&run={grant.run}&round={grant.round}&size={grant.size_bytes}&until={until}"
        return f"/uploads/{grant.digest}?{scope}&proof={self._upload_proof(grant, str(until))}"

    def upload_grant(self, path: str) -> UploadGrant | None:
        """Return what a path of an upload allows; None as for `grant`."""
        parts = _UPLOAD.fullmatch(path)
        if parts is None:
            return None
        digest, agent, run, number, size, until, proof = parts.groups()
        grant = UploadGrant(agent, digest, run, int(number), int(size))
        if not hmac.compare_digest(proof, self._upload_proof(grant, until)):
            return None
        if self._clock() > int(until):
            return None
        return grant

    def _upload_proof(self, grant: UploadGrant, until: str) -> str:
        """Return the proof of a path of an upload, which is none of a download."""
        scope = f"{grant.digest}\n{grant.agent}\n{grant.run}\n{grant.round}\n{grant.size_bytes}\n{until}"
        content = f"headwater upload path 1\n{scope}"
        return hmac.new(self._key, content.encode(), hashlib.sha256).hexdigest()

    def _proof(self, agent: str, digest: str, until: str) -> str:
        """Return the proof of a path: a MAC over all that it allows, none of which may contain a line break."""
        content = f"headwater blob path 1\n{digest}\n{agent}\n{until}"
        return hmac.new(self._key, content.encode(), hashlib.sha256).hexdigest()
