"""What an agent runs on: clocks, a worker, the id of its start, and what only some agents have."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..core.children import InlineWorker, Worker
from ..identity.renewal import Renewal
from ..wire.blobs.by_http import BlobFetcher
from ..wire.blobs.put_by_http import BlobSender

RefusedTopics = Callable[[Mapping[str, bytes]], "dict[str, str] | None"]
"""See `edge_agent.wire.mqtt.refused_topics`."""


def _random_boot() -> str:
    return secrets.token_hex(8)


def _unseeded_rng() -> random.Random:
    return random.Random()  # noqa: S311 - spreads hellos, guards nothing


@dataclass(frozen=True)
class AgentRuntime:
    """The surroundings of one agent; the defaults are those of an agent that does its work in the caller's thread."""

    clock: Callable[[], float] = time.monotonic
    """Seconds, for pauses and deadlines."""

    now: Callable[[], float] = time.time
    """The device's wall clock, which is compared with the coordinator's."""

    worker: Worker = field(default_factory=InlineWorker)
    """Does what takes long."""

    boot: str = field(default_factory=_random_boot)
    """The id of this start of the agent."""

    rng: random.Random = field(default_factory=_unseeded_rng)
    """Spreads the hellos of a fleet whose coordinator speaks another protocol."""

    renewal: Renewal | None = None
    """The renewal of this agent's certificate; None where it has no certificate."""

    refused_topics: RefusedTopics | None = None
    """Asks the broker which messages it does not let this agent publish, for when no coordinator answers."""

    leave_broker: Callable[[str], None] | None = None
    """Leaves the connected broker for the next one of the list, with the reason; None where there is only one."""

    fetcher: BlobFetcher | None = None
    """Fetches blobs by HTTP; None: they come over MQTT alone."""

    sender: BlobSender | None = None
    """Sends updates by HTTP; None: they go over MQTT alone."""
