"""Messages as bytes: encoded, sealed, and checked before anything of them is used.

Every message carries the protocol version, the boot of its sender and a sequence number within that boot, so that a
repeated message is recognised, and the id of its sender's federation, so that no agent works for two. Messages of a
coordinator carry its epoch as well, and a proof of who sent them (`wire.seal`).
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Callable
from typing import Any, get_args

from pydantic import (
    ValidationError,
)

from edge_agent.wire.messages.down import FromCoordinator, Present
from edge_agent.wire.messages.fields import (
    MAX_MESSAGE_BYTES,
    MAX_ROUND,
    MISTAKE_CHARS,
    OLDEST_PROTOCOL,
    PROTOCOL,
    RUN_PATTERN,
    START,
    Command,
    Control,
    JobKey,
    Kind,
)
from edge_agent.wire.messages.up import FromAgent

from ...core.config import mistakes_of
from ...core.errors import MessageError, ProtocolMismatch, cause
from ...core.formats import printable
from ...core.task import parse_json

_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\Z')
"""The checksum at the end of a message."""

_PROOF = re.compile(rb',"(mac|sig)":"((?:[0-9a-f]{64}){1,2})"\}\Z')
"""The MAC or signature at the end of a message of a coordinator, behind its checksum."""

SPOKEN = f"speaks protocol {OLDEST_PROTOCOL}..{PROTOCOL}"
"""The clause that names the protocol versions of this side, for messages about another version."""


def sealed(payload: bytes) -> bytes:
    """Return a JSON object with its checksum as the last field."""
    return payload[:-1] + b',"crc":"%08x"}' % zlib.crc32(payload)


def unsealed(payload: bytes) -> bytes:
    """Return a message without its checksum, which must be right if there is one.

    TCP lets one damaged segment in some 10^9 pass, and one flipped digit changes a learning rate or a weight.

    Raises:
        MessageError: The checksum is wrong.
    """
    payload = proof_of(payload)[0]
    seal = _SEAL.search(payload)
    if seal is None:
        return payload
    body = payload[: seal.start()] + b"}"
    if zlib.crc32(body) != int(seal[1], 16):
        raise MessageError("the checksum is wrong, the message was changed on the way")
    return body


def proof_of(payload: bytes) -> tuple[bytes, str, bytes]:
    """Split a message into its content and its proof.

    Returns:
        The message without its MAC or signature; which of the two it had, ``mac``, ``sig`` or empty; and its bytes.
    """
    proof = _PROOF.search(payload, max(0, len(payload) - 144))
    if proof is None:
        return payload, "", b""
    return payload[: proof.start()] + b"}", proof[1].decode(), bytes.fromhex(proof[2].decode())


def start_of(payload: bytes) -> str:
    """Return the start (``boot``) that a message of whatever protocol version names; empty where it names none."""
    try:
        return START.validate_python(json_object(unsealed(payload)).get("boot"))
    except (MessageError, ValidationError):
        return ""


def check_version(version: object) -> None:
    """Require a protocol version that this side understands.

    Raises:
        ProtocolMismatch: The peer speaks another version; the message names both versions and the side to upgrade.
        MessageError: The message has no version.
    """
    if type(version) is not int:
        raise MessageError(f"protocol version is {str(version)[:40]!r}, expected a number")
    number = str(version)[:40]
    if version > PROTOCOL:
        raise ProtocolMismatch(f"peer speaks protocol {number}, this side up to {PROTOCOL}; upgrade this side")
    if version < OLDEST_PROTOCOL:
        raise ProtocolMismatch(
            f"peer speaks protocol {number}, this side from {OLDEST_PROTOCOL}; upgrade the peer", is_peer_older=True
        )


def json_object(payload: bytes) -> dict[str, Any]:
    """Return the JSON object in a payload.

    Raises:
        MessageError: The payload is too large, is not a JSON object, or repeats a key.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        raw = parse_json(payload)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {cause(error)[:120]}") from error
    if not isinstance(raw, dict):
        raise MessageError(f"JSON {type(raw).__name__}, expected an object")
    return raw


def _parser(*kinds: type[Kind]) -> Callable[[bytes], Kind]:
    """Return a function that parses messages of these kinds.

    The function raises `MessageError` for other messages and for fields out of bounds, and `ProtocolMismatch` for
    another protocol version.
    """
    by_type = {kind.model_fields["type"].default: kind for kind in kinds}

    def parse(payload: bytes) -> Kind:
        # The version comes first: the fields of another one may have other meanings.
        payload = unsealed(payload)
        raw = json_object(payload)
        check_version(raw.get("v"))
        name = raw.get("type")
        if not isinstance(name, str) or name not in by_type:
            raise MessageError(f"type {str(name)[:40]!r} is not one of {', '.join(by_type)}")
        kind = by_type[name]
        try:
            return kind.model_validate_json(payload)
        except ValidationError as error:
            mistakes = (printable(mistake)[:MISTAKE_CHARS] for mistake in mistakes_of(error, kind)[:5])
            raise MessageError(f"{kind.__name__}: {'; '.join(mistakes)}", is_public=True) from error

    return parse


parse_from_agent: Callable[[bytes], Control] = _parser(*get_args(FromAgent))
"""Parse a message of an agent."""

parse_from_coordinator: Callable[[bytes], Command] = _parser(*get_args(FromCoordinator))
"""Parse a message of a coordinator to its agents."""

parse_between_coordinators = _parser(Present)
"""Parse a message of a coordinator to another one."""


@functools.cache
def _newer_fields(kind: type[Control], protocol: int) -> frozenset[str]:
    """Return the fields of a message that this version of the protocol does not have."""
    newer = set[str]()
    for name, field in kind.model_fields.items():
        if not isinstance(field.json_schema_extra, dict):
            continue
        since = field.json_schema_extra.get("since")
        if isinstance(since, int) and since > protocol:
            newer.add(name)
    return frozenset(newer)


def encode(message: Control, protocol: int = PROTOCOL) -> bytes:
    """Return a message as UTF-8 JSON with its checksum last, in the version ``protocol`` that the receiver speaks.

    Fields at their default are left out, but for ``v`` and ``type``.

    Raises:
        MessageError: The message is larger than the other side reads, or holds NaN or infinity.
    """
    fields_of_kind = type(message).model_fields
    at_default = {name for name, field in fields_of_kind.items() if getattr(message, name) == field.default}
    left_out = (at_default | _newer_fields(type(message), protocol)) - {"v", "type"}
    fields = {**message.model_dump(mode="json", by_alias=True, exclude=left_out), "v": protocol}
    try:
        payload = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise MessageError(f"{type(message).__name__} cannot be written as JSON: {error}") from error
    payload = sealed(payload)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{type(message).__name__} of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    return payload


def named_job(payload: bytes) -> JobKey | None:
    """Return the key of an undamaged `Job` with fields that this side does not know; None for anything else."""
    # One flipped bit in the checksum leaves a message without any, so a missing one may be damage.
    if not _SEAL.search(proof_of(payload)[0]):
        return None
    try:
        raw = json_object(unsealed(payload))
    except MessageError:
        return None
    if raw.get("type") != "job":
        return None
    run = raw.get("run")
    number = raw.get("round")
    if not isinstance(run, str) or not re.fullmatch(RUN_PATTERN, run):
        return None
    # A bool is an int, too, but no number of a round.
    if type(number) is not int or not 0 <= number <= MAX_ROUND:
        return None
    return JobKey(run, number, None)
