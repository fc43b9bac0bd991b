"""What all control messages are written in: one JSON object with a protocol version and, at its end, a checksum."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from ..errors import MessageError, ProtocolMismatch, cause

PROTOCOL = 1
OLDEST_PROTOCOL = 1
"""Versions from this one up to `PROTOCOL` are understood."""

MAX_MESSAGE_BYTES = 48 * 1024
_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\Z')


SPOKEN = f"speaks protocol {OLDEST_PROTOCOL}..{PROTOCOL}"
"""What this side says of itself where the other side is not understood."""


def sealed(payload: bytes) -> bytes:
    """A JSON object with its checksum as the last field."""
    return payload[:-1] + b',"crc":"%08x"}' % zlib.crc32(payload)


def unsealed(payload: bytes) -> bytes:
    """The message without its checksum, which must be right where there is one (whoever writes by hand may omit it).

    TCP lets one broken segment in some 10^9 pass, and one flipped digit here changes a learning rate or a weight.
    """
    found = _SEAL.search(payload)
    if found is None:
        return payload
    body = payload[: found.start()] + b"}"
    if zlib.crc32(body) != int(found[1], 16):
        raise MessageError("checksum is wrong, the message was changed on the way")
    return body


def is_sealed(payload: bytes) -> bool:
    """Whether a checksum ends the message; one flipped bit there leaves a message that seems to have none."""
    return _SEAL.search(payload) is not None


def check_version(version: object) -> None:
    """Return quietly for a protocol version that we understand.

    Raises:
        ProtocolMismatch: names both versions and the side to upgrade.
        MessageError: no version at all.
    """
    if type(version) is not int:
        raise MessageError(f"protocol version is {str(version)[:40]!r}, expected a number")
    shown = str(version)[:40]
    if version > PROTOCOL:
        raise ProtocolMismatch(f"peer speaks protocol {shown}, this side up to {PROTOCOL}; upgrade this side")
    if version < OLDEST_PROTOCOL:
        raise ProtocolMismatch(f"peer speaks protocol {shown}, this side from {OLDEST_PROTOCOL}; upgrade the peer")


def json_object(payload: bytes) -> dict[str, Any]:
    """The JSON object in a payload.

    Raises:
        MessageError: too large, not JSON, not an object, or with a key that occurs twice.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        # As text: from bytes, json would guess UTF-16 and UTF-32, and NaN is no JSON either.
        raw = json.loads(payload.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {cause(error)[:120]}") from error
    if not isinstance(raw, dict):
        raise MessageError(f"JSON {type(raw).__name__}, expected an object")
    return raw


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
