"""Messages between a coordinator and its aggregators, with a proof that both have the secret of the state folder.

A message is repeated until the other side answers what it asks for; nothing depends on the broker's memory. A recorded
message does no harm, nor one that the broker delivers twice or late: what it says is checked against the round that is
open, and against the files that it names, and messages of presence and of partitions have numbers that only grow.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from edge_agent.core.task import Frozen
from edge_agent.wire.messages.fields import (
    Digest,
    Epoch,
    FederationId,
    Name,
    Start,
    Text,
)
from edge_agent.wire.messages.proven import ProvenMessages
from edge_agent.wire.messages.up import UpdateManifest

from ..fleet.partitions import MOST_PARTITIONS

MOST_UPDATES = 64
"""The most updates in one message: each has up to a thousand bytes."""

RequestId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Number = Annotated[int, Field(ge=1, le=MOST_PARTITIONS)]


class ServedPartition(Frozen):
    """A partition that an aggregator serves."""

    number: Number
    term: int = Field(ge=1, lt=1 << 20, description="counts who has served this partition")


class Serving(Frozen):
    """An aggregator is online. It says so each second, and what it does now."""

    type: Literal["serving"] = "serving"
    name: Name
    boot: Start
    number: int = Field(ge=0, description="counts the messages of this kind")
    software: Text = Field(max_length=40)
    host: Text = Field("", max_length=255)
    process: int = Field(0, ge=0)
    wants: Number = Field(description="the partition that it was started for")
    of: Number
    start: Start = Field("", description="of the coordinator whose partitions it has; empty: of none yet")
    partitions: tuple[ServedPartition, ...] = Field((), max_length=MOST_PARTITIONS)
    collection: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="of the open round; empty: none")
    updates: int = Field(0, ge=0, description="that it has stored since its start")


class Stored(Frozen):
    """An update that an aggregator has received: it is stored, or was refused, or is of no round that it knows."""

    manifest: UpdateManifest
    agent: Name
    refused: Text = Field("", max_length=1000, description="why it does not count; empty: it is stored, or unknown")
    is_stored: bool = False


class Updates(Frozen):
    """Updates that have reached an aggregator; repeated until they are noted."""

    type: Literal["updates"] = "updates"
    name: Name
    number: int = Field(ge=0, description="counts the messages of this kind")
    boot: Start
    updates: tuple[Stored, ...] = Field(max_length=MOST_UPDATES)


class PassDone(Frozen):
    """A pass over the updates of a partition is finished; its answer is a file beside the request."""

    type: Literal["pass-done"] = "pass-done"
    name: Name
    request: RequestId
    error: Text = Field("", max_length=1000, description="why there is no answer; empty: there is one")


class ServePartitions(Frozen):
    """The partitions and the round that one aggregator is to serve from now on."""

    type: Literal["serve-partitions"] = "serve-partitions"
    whom: Name
    boot: Start = Field(description="of the aggregator")
    federation: FederationId
    epoch: Epoch
    start: Start = Field(description="of the coordinator")
    partitions: tuple[ServedPartition, ...] = Field(max_length=MOST_PARTITIONS)
    collection: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="digest of the open round's file")


class Noted(Frozen):
    """The coordinator has the updates of a message."""

    type: Literal["noted"] = "noted"
    whom: Name
    boot: Start
    federation: FederationId
    epoch: Epoch
    number: int = Field(ge=0)
    missing: tuple[Digest, ...] = Field((), max_length=MOST_UPDATES, description="updates that are not in the store")


class MakePass(Frozen):
    """Make a pass over updates of a partition: the request is a file in the shared folder."""

    type: Literal["make-pass"] = "make-pass"
    whom: Name
    request: RequestId


class Dismissed(Frozen):
    """The aggregator cannot serve this federation; the reason says what to do."""

    type: Literal["dismissed"] = "dismissed"
    whom: Name
    boot: Start
    federation: FederationId
    epoch: Epoch
    reason: Text = Field(max_length=1000)


FromAggregator = Serving | Updates | PassDone
ToAggregator = ServePartitions | Noted | MakePass | Dismissed

_FROM_AGGREGATOR: TypeAdapter[FromAggregator] = TypeAdapter(Annotated[FromAggregator, Field(discriminator="type")])
_TO_AGGREGATOR: TypeAdapter[ToAggregator] = TypeAdapter(Annotated[ToAggregator, Field(discriminator="type")])


class Sealed:
    """Writes and reads messages with a proof by a key of the federation that agents do not have."""

    def __init__(self, key: bytes) -> None:
        self._messages = ProvenMessages(
            key, "coordinator and aggregators", "both need the identity/master.key of the same state folder"
        )

    def encode(self, message: FromAggregator | ToAggregator) -> bytes:
        """Return a message and its proof as bytes.

        Raises:
            MessageError: It is too large.
        """
        return self._messages.encode(message)

    def from_aggregator(self, payload: bytes) -> FromAggregator:
        """Return a message of an aggregator.

        Raises:
            MessageError: The payload is not such a message, or its sender has another secret.
        """
        return self._messages.decode(_FROM_AGGREGATOR, payload)

    def to_aggregator(self, payload: bytes) -> ToAggregator:
        """Return a message of a coordinator.

        Raises:
            MessageError: The payload is not such a message, or its sender has another secret.
        """
        return self._messages.decode(_TO_AGGREGATOR, payload)
