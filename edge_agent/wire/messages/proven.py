"""Messages with a proof: both sides share a key, and nothing of a payload is parsed whose proof is wrong."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from ...core.errors import MessageError
from ...core.formats import printable
from ...core.task import Frozen

T = TypeVar("T")

MAX_BYTES = 96 * 1024
"""The most bytes of one message; the limit of a broker is larger."""

PROOF_BYTES = 64
"""The bytes of a proof, an HMAC-SHA256 in hexadecimal, at the beginning of a payload."""


@dataclass(frozen=True)
class ProvenMessages:
    """Writes and reads messages between two sides that share a key."""

    key: bytes = field(repr=False)
    between: str
    """The two sides, as ``coordinator and relay``."""

    remedy: str
    """What to do where the other side has another key."""

    def encode(self, message: Frozen) -> bytes:
        """Return a message and its proof as bytes.

        Raises:
            MessageError: It is too large.
        """
        body = message.model_dump_json().encode()
        size = len(body) + PROOF_BYTES
        if size > MAX_BYTES:
            raise MessageError(f"{type(message).__name__} of {size} bytes, at most {MAX_BYTES} are read")
        return self._proof(body) + body

    def decode(self, reader: TypeAdapter[T], payload: bytes) -> T:
        """Return a message whose size, proof and form are right, in this order.

        Raises:
            MessageError: The payload is no such message, or its sender has another key.
        """
        if len(payload) > MAX_BYTES:
            raise MessageError(f"message of {len(payload)} bytes, at most {MAX_BYTES} are read")
        proof = payload[:PROOF_BYTES]
        body = payload[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(body)):
            raise MessageError(f"a message between {self.between} without their key; {self.remedy}")
        return parse_as(reader, body, what=f"a message between {self.between}")

    def _proof(self, body: bytes) -> bytes:
        return hmac.digest(self.key, body, "sha256").hex().encode()


def parse_as(reader: TypeAdapter[T], text: bytes | str, *, what: str) -> T:
    """Return the value that JSON describes.

    Args:
        reader: Its type.
        text: The JSON.
        what: What the text is, for the error.

    Raises:
        MessageError: The text does not fit.
    """
    try:
        return reader.validate_json(text)
    except ValidationError as error:
        places = "; ".join(printable(str(detail["loc"])) for detail in error.errors()[:3])
        raise MessageError(f"{what} that is malformed at {places}; run both sides of one version") from error
