"""The parts of messages in both directions: names, digests, bounds, and base classes.

A federation id is random and made with the coordinator's state folder. A run id is the run's name there, for people,
and a random part: ``run-0001-`` and 32 hexadecimal digits. So no two runs have the same id.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    TypeAdapter,
)

from ...core.config import NAME_PATTERN
from ...core.errors import PrivacyRefused, SharesWrong, SumRefused, UsageError
from ...core.formats import printable
from ...core.task import Frozen

Text = Annotated[str, AfterValidator(printable)]
"""Text without control characters, line breaks and changes of the direction of writing."""

Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{1,4000}={0,2}$")]

Serial = Annotated[str, Field(pattern=r"^([0-9a-f]{1,40})?$")]
"""The serial number of a certificate in hexadecimal; empty where there is none."""

Start = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{0,32}$")]
"""The id of one start of a program, or of a question to it; logs, status and reports show it."""

START = TypeAdapter[str](Start)

METRIC_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The pattern of the names of metrics."""

Metrics = Annotated[dict[Annotated[str, Field(pattern=METRIC_NAME)], float | None], Field(max_length=64)]
"""Metrics by name; the value of a metric that is not finite is None."""

Fact = Annotated[Text, Field(max_length=64)]
"""The name of a fact about a device."""

FactText = Annotated[Text, Field(max_length=256)]
"""The value of a fact about a device."""

DISK_ERROR = "DiskError"
"""The error of a `Fault` that says that an agent's disk cannot be written."""

PRIVACY_REFUSED = PrivacyRefused.__name__
"""The error of a `Fault` that says that the device's own policy does not allow the job."""

SHARES_WRONG = SharesWrong.__name__
"""The error of a `Fault` of a device that cannot decrypt shares of others, which it names as ``accused``."""

REFUSALS = frozenset({PRIVACY_REFUSED, SumRefused.__name__, SHARES_WRONG})
"""The errors of a `Fault` by which a device refuses a job without being at fault itself."""

ConditionName = Literal["ok", "fault", "stalled"]
"""The condition of an agent: able to work, failed at its last task, or unable to write to its disk."""


def metrics_of(log: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics of a client in the form of messages, with None for values that are not finite.

    Raises:
        UsageError: The name is one that no coordinator accepts.
    """
    for name in log:
        if not re.fullmatch(METRIC_NAME, name):
            raise UsageError(
                f"metric {name[:80]!r} cannot be sent; its name must be 1 to 64 letters, digits, dots, underscores and "
                "hyphens, the first a letter or digit: rename it in the method's client.log"
            )
    return {name: value if math.isfinite(value) else None for name, value in log.items()}


PROTOCOL = 4
"""The newest version of the protocol that this side speaks."""

OLDEST_PROTOCOL = 3
"""The oldest version of the protocol that is understood. Version 2 rejects the fields of a `Report` on the local model.

A coordinator serves agents of the version before: messages to an agent are of the agent's version. A field that version
4 adds to a command has a default that means what version 3 did, and is marked ``json_schema_extra={"since": 4}``, so
that it is left out for an older agent. An agent speaks its own version alone, so coordinators are upgraded first.

What is sent only to a peer that has said that it knows it needs no other version: `Located` goes to agents whose hello
has the fact `HTTP_BLOBS`, and ``Want.by_chunks`` is an answer to it. `UploadUrls` goes to agents with the fact
`HTTP_UPLOADS`, and ``UpdateManifest.way`` is an answer to it.
"""

MAX_MESSAGE_BYTES = 48 * 1024
"""The most bytes of a control message."""

LARGE_TASK_BYTES = 16 * 1024
"""The bytes of a task beyond which it travels as a blob, once for all rounds."""

MAX_TASK_BYTES = 8 << 20
"""The most bytes of a task in a blob."""

SHA256 = r"^[0-9a-f]{64}$"
"""The pattern of a SHA-256 in hexadecimal."""

MAX_RANGES = 64
"""The most ranges of chunks in a message."""

MISTAKE_CHARS = 180
"""The most characters of one mistake that are quoted: a key of the peer's may be in it."""

MAX_CREDITS = 4096
"""The most chunks of an update that may be unacknowledged."""

MAX_EPOCH = 1 << 53
"""The largest epoch: the largest integer that JSON readers keep exactly."""

MAX_HEARTBEAT_S = 300.0
"""The most seconds between heartbeats."""

MAX_WAIT_S = 400 * 86_400.0
"""The most seconds that an activation of a bundle may wait or last."""

MAX_ROUND = 2_000_000
"""The largest number of a round."""

MAX_SAMPLES = 1_000_000_000
"""The largest number of samples of a device."""

MAX_URLS = 4
"""The most URLs of one blob in a message."""

Url = Annotated[str, Field(pattern=r"^https?://[!-~]{1,4000}$")]
"""A URL of HTTP or HTTPS in printable ASCII."""

HTTP_BLOBS = "http_blobs"
"""The fact of a hello by which an agent says that it fetches blobs by HTTP."""

HTTP_UPLOADS = "http_uploads"
"""The fact of a hello by which an agent says that it can send updates by HTTP."""

RELAY = "relay"
"""The fact of a hello that names the relay through which an agent speaks; the relay adds it."""

Digest = Annotated[str, Field(pattern=SHA256)]
"""The SHA-256 of a blob, in hexadecimal."""

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""A name of an agent, a federation, a method or a channel."""

RUN_PATTERN = r"[a-z0-9][a-z0-9-]{0,63}"
"""The pattern of a run id."""

RunId = Annotated[str, Field(pattern=f"^{RUN_PATTERN}$")]
"""The id of a run."""

AnyRun = Annotated[str, Field(pattern=f"^({RUN_PATTERN})?$")]
"""The id of a run, or empty for no run."""

FederationId = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
"""The id of a federation; empty where the sender belongs to none yet."""

Epoch = Annotated[int, Field(ge=0, le=MAX_EPOCH)]
"""A number that counts the starts of a coordinator."""

_RANDOM_PART = re.compile(r"-[0-9a-f]{32}\Z")
"""The end of a run id that is not its name."""

Purpose = Literal[
    "train",
    "contribute",
    "personalize",
    "batch_norm_stats",
    "activation_ranges",
    "secure_keys",
    "secure_shares",
    "secure_unmask",
]
"""The purpose of a job, see `Job`."""

OUTSIDE_ROUNDS: tuple[Purpose, ...] = ("batch_norm_stats", "activation_ranges")
"""The purposes of updates that are collected once, beside those of a round."""

EXCHANGES: tuple[Purpose, ...] = ("secure_keys", "secure_shares", "secure_unmask")
"""The purposes of the exchanges of a secure sum, see `edge_agent.privacy.secure_sum`."""

Session = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
"""The id of one attempt at a secure sum; empty where there is none."""

Partition = Annotated[str, Field(pattern=r"^([0-9]{1,4}-of-[0-9]{1,4})?$")]
"""The part of a federation's agents that one aggregator serves, such as ``2-of-4``; empty: no aggregator does."""

RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUND)]
"""The number of a round."""

Ranges = Annotated[tuple[tuple[int, int], ...], Field(max_length=MAX_RANGES)]
"""Half-open ranges of chunk numbers."""


def start_of_partition(boot: str, partition: str) -> str:
    """Return the start under which an aggregator sends commands for a coordinator whose start is ``boot``."""
    return f"{boot}-{partition}"


class Control(Frozen):
    """Base of all control messages, with the fields that each of them has."""

    v: int = PROTOCOL
    boot: Start = Field("", description="the sender's start; a new one after each restart")
    seq: int = Field(0, ge=0, description="counts up within one boot")
    federation: FederationId = Field("", description="that of the coordinator, or that the agent follows")
    type: str


class Command(Control):
    """Base of the messages of a coordinator; an agent obeys one federation and epoch."""

    epoch: Epoch = Field(0, description="counts the starts of this coordinator")


Kind = TypeVar("Kind", bound=Control)


class BlobRef(Frozen):
    """The reference to a blob, which is named by its content."""

    digest: Digest
    size_bytes: int = Field(ge=1, le=1 << 33)
    chunk_bytes: int = Field(ge=64, le=1 << 20)


class JobKey(NamedTuple):
    """The key that identifies a job among those of one agent; its purpose is None where that is unknown."""

    run: str
    round: int = 0
    purpose: Purpose | None = "train"
    session: str = ""


def new_id() -> str:
    """Return a new federation id, or a new random part of a run id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_name(run_id: str) -> str:
    """Return the run's name: its id without the random part."""
    return _RANDOM_PART.sub("", run_id)
