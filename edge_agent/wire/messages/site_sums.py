"""Messages between a coordinator and the relay of a site that sums the updates of its agents.

Each begins with a proof, an HMAC by the key that the relay shares with its coordinator. They are repeated until they
are answered. A recorded message of the coordinator does no harm: the relay ignores those that are older than the last.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ...core.errors import MessageError
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
from .proven import ProvenMessages, parse_as

MOST_MEMBERS = 512
"""The most agents of one site in a round; where a site has more, their updates pass one by one."""

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
    members = parse_as(_MEMBERS, text, what="a list of the members of a sum")
    if not 1 <= len(members) <= MOST_MEMBERS or len({member.agent for member in members}) != len(members):
        raise MessageError(f"a sum of {len(members)} updates; expected 1..{MOST_MEMBERS} of different agents")
    return members


class SiteSeal:
    """Writes and reads these messages, with the key that a relay shares with its coordinator."""

    def __init__(self, key: AgentKey) -> None:
        """Take the key of the relay's commands, which it shares with its coordinator."""
        self._messages = ProvenMessages(
            derive(key.key, "headwater sums of a site"),
            "coordinator and relay",
            "enroll the relay again, or make its key by 'headwater password'",
        )

    def encode(self, message: FromSite | ToSite) -> bytes:
        """Return a message and its proof as bytes.

        Raises:
            MessageError: It is too large.
        """
        return self._messages.encode(message)

    def from_site(self, payload: bytes) -> FromSite:
        """Return a message of a relay.

        Raises:
            MessageError: The payload is not such a message, or its sender has another key.
        """
        return self._messages.decode(_FROM_SITE, payload)

    def to_site(self, payload: bytes) -> ToSite:
        """Return a message of a coordinator.

        Raises:
            MessageError: The payload is not such a message, or its sender has another key.
        """
        return self._messages.decode(_TO_SITE, payload)
