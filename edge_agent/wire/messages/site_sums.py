"""Messages between a coordinator and the relay of a site that sums the updates of its agents.

Each begins with a proof, an HMAC by the key that the relay shares with its coordinator. They are repeated until they
are answered. A recorded message of the coordinator does no harm: the relay ignores those that are older than the last.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from ...core.errors import MessageError
from ...core.formats import printable
from ...core.task import Frozen
from ..seal import AgentKey, derive
from .down import Ack, Grant
from .fields import (
    MAX_SAMPLES,
    METRIC_NAME,
    BlobRef,
    Digest,
    Epoch,
    Name,
    Ranges,
    RoundNumber,
    RunId,
    Start,
    Text,
)

T = TypeVar("T")

MAX_BYTES = 96 * 1024
"""The most bytes of one message."""

MOST_MEMBERS = 512
"""The most agents of one site in a round; where a site has more, their updates pass one by one."""

_PROOF_BYTES = 64
"""The bytes of a proof, in hexadecimal."""

Dtype = Annotated[str, Field(pattern=r"^[<|][fiub][1248]$")]
"""A dtype as numpy writes it, such as ``<f4``."""

Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], Field(max_length=8)]
"""A shape."""

Forms = dict[str, tuple[Dtype, Shape]]
"""Name of a tensor -> its dtype and its shape."""


class SiteRound(Frozen):
    """The round whose updates a relay is to sum."""

    run: RunId
    round: RoundNumber
    agents: tuple[Name, ...] = Field(max_length=MOST_MEMBERS, description="of this site, that have not delivered")
    update: Forms = Field(description="the tensors of an update")
    weighting: Literal["samples", "uniform"] = Field(description="`Method.weighting`")
    within_s: float = Field(gt=0, description="seconds from receipt after which the sum is sent, whoever is missing")


class OpenSite(Frozen):
    """What the relay is to sum now; it counts up within one start of the coordinator."""

    type: Literal["open"] = "open"
    epoch: Epoch
    start: Start = Field(description="of the coordinator")
    number: int = Field(ge=1)
    round: SiteRound | None = Field(description="None: nothing, updates pass one by one")


class SendSum(Frozen):
    """Send the chunks of a sum that are missing."""

    type: Literal["send-sum"] = "send-sum"
    digest: Digest
    missing: Ranges


class SumReceipt(Frozen):
    """The coordinator has a sum, or takes none with these members."""

    type: Literal["sum-receipt"] = "sum-receipt"
    digest: Digest
    is_accepted: bool
    reason: Text = Field("", max_length=1000)
    without: tuple[Name, ...] = Field((), max_length=MOST_MEMBERS, description="members that a sum may not have")


class Heard(Frozen):
    """The coordinator has heard the relay, and still takes its sums."""

    type: Literal["heard"] = "heard"


class SiteSays(Frozen):
    """A relay is online, and holds updates of these agents."""

    type: Literal["says"] = "says"
    boot: Start
    software: Text = Field(max_length=40)
    host: Text = Field("", max_length=255)
    start: Start = Field("", description="of the coordinator that it follows; empty: none yet")
    number: int = Field(0, ge=0, description="of the newest `OpenSite` of that start")
    holds: tuple[Name, ...] = Field((), max_length=MOST_MEMBERS)


class Speak(Frozen):
    """A request to send a command to an agent of the site: the relay has no key that the agent would trust."""

    type: Literal["speak"] = "speak"
    agent: Name
    command: Annotated[Grant | Ack, Field(discriminator="type")]


class SumReady(Frozen):
    """A sum is ready to be sent; repeated until its receipt comes."""

    type: Literal["sum-ready"] = "sum-ready"
    run: RunId
    round: RoundNumber
    blob: BlobRef


FromSite = SiteSays | Speak | SumReady
ToSite = OpenSite | SendSum | SumReceipt | Heard

_FROM_SITE: TypeAdapter[FromSite] = TypeAdapter(Annotated[FromSite, Field(discriminator="type")])
_TO_SITE: TypeAdapter[ToSite] = TypeAdapter(Annotated[ToSite, Field(discriminator="type")])


class SummedUpdate(Frozen):
    """One update of a sum, as the sum names it."""

    agent: Name
    digest: Digest
    samples: int = Field(ge=1, le=MAX_SAMPLES)
    metrics: dict[Annotated[str, Field(pattern=METRIC_NAME)], float] = Field(default_factory=dict, max_length=64)


MEMBERS = "members"
"""The name of the list of updates in the metadata of a sum."""

_MEMBERS: TypeAdapter[tuple[SummedUpdate, ...]] = TypeAdapter(tuple[SummedUpdate, ...])


def members_text(members: tuple[SummedUpdate, ...]) -> str:
    """Return the updates of a sum as text for its metadata."""
    return _MEMBERS.dump_json(members).decode()


def members_of(text: str) -> tuple[SummedUpdate, ...]:
    """Return the updates of a sum from its metadata.

    Raises:
        MessageError: The text is no such list, or names an agent twice.
    """
    try:
        members = _MEMBERS.validate_json(text)
    except ValidationError as error:
        raise MessageError(f"a sum whose list of members is malformed: {_places_of(error)}") from error
    if not 1 <= len(members) <= MOST_MEMBERS or len({member.agent for member in members}) != len(members):
        raise MessageError(f"a sum of {len(members)} updates; expected 1..{MOST_MEMBERS} of different agents")
    return members


class SiteSeal:
    """Writes and reads these messages, with the key that a relay shares with its coordinator."""

    def __init__(self, key: AgentKey) -> None:
        """Take the key of the relay's commands, which it shares with its coordinator."""
        self._key = derive(key.key, "headwater sums of a site")

    def encode(self, message: FromSite | ToSite) -> bytes:
        """Return a message and its proof as bytes.

        Raises:
            MessageError: It is too large.
        """
        body = message.model_dump_json().encode()
        if len(body) + _PROOF_BYTES > MAX_BYTES:
            raise MessageError(f"{type(message).__name__} of {len(body)} bytes, at most {MAX_BYTES} are read")
        return self._proof(body) + body

    def from_site(self, payload: bytes) -> FromSite:
        """Return a message of a relay.

        Raises:
            MessageError: The payload is not such a message, or its sender has another key.
        """
        return self._read(_FROM_SITE, payload)

    def to_site(self, payload: bytes) -> ToSite:
        """Return a message of a coordinator.

        Raises:
            MessageError: The payload is not such a message, or its sender has another key.
        """
        return self._read(_TO_SITE, payload)

    def _read(self, reader: TypeAdapter[T], payload: bytes) -> T:
        if len(payload) > MAX_BYTES:
            raise MessageError(f"message of {len(payload)} bytes, at most {MAX_BYTES} are read")
        body = payload[_PROOF_BYTES:]
        if not hmac.compare_digest(payload[:_PROOF_BYTES], self._proof(body)):
            raise MessageError(
                "a message between coordinator and relay without their key; enroll the relay again, or make its key by "
                "'headwater password'"
            )
        try:
            return reader.validate_json(body)
        except ValidationError as error:
            raise MessageError(
                f"a message between coordinator and relay is not as this version has it: {_places_of(error)}; run both "
                "of one version"
            ) from error

    def _proof(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256").hex().encode()


def _places_of(error: ValidationError) -> str:
    return "; ".join(printable(str(detail["loc"])) for detail in error.errors()[:3])
