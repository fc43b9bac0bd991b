"""What the messages of both directions consist of: names, digests, bounds, and their base classes.

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
from ...core.task import Frozen


def printable(text: str) -> str:
    """``text`` with a space for each character that could steer a terminal or break a line of a log."""
    return "".join(character if character.isprintable() else " " for character in text)


Text = Annotated[str, AfterValidator(printable)]
"""No control characters, no line breaks, nothing that changes the direction of writing."""


Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{1,4000}={0,2}$")]


Serial = Annotated[str, Field(pattern=r"^([0-9a-f]{1,40})?$")]
"""Of a certificate, hexadecimal; empty: of none."""


Start = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{0,32}$")]
"""Id of one start of a program, or of a question to it; logs, status and reports show it."""


START = TypeAdapter[str](Start)


METRIC_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


Metrics = Annotated[dict[Annotated[str, Field(pattern=METRIC_NAME)], float | None], Field(max_length=64)]


Fact = Annotated[Text, Field(max_length=64)]


FactText = Annotated[Text, Field(max_length=256)]


DISK_ERROR = "DiskError"
"""The error of a `Fault` that says that an agent's disk cannot be written."""


PRIVACY_REFUSED = PrivacyRefused.__name__
"""The error of a `Fault` that says that the device's own policy does not allow the job."""


SHARES_WRONG = SharesWrong.__name__
"""The error of a `Fault` whose message begins with the names of those whose shares do not open, and a colon."""


REFUSALS = frozenset({PRIVACY_REFUSED, SumRefused.__name__, SHARES_WRONG})
"""The errors of a `Fault` by which a device refuses a job, and is not at fault itself."""


ConditionName = Literal["ok", "fault", "stalled"]
"""State of an agent: able to work, failed at its last task, or unable to write to its disk."""


def metrics_of(log: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics of a client as they are sent: None for what is not finite.

    Raises:
        UsageError: The name is one that no coordinator accepts.
    """
    if wrong := [name for name in log if not re.fullmatch(METRIC_NAME, name)]:
        raise UsageError(
            f"metric {wrong[0][:80]!r} cannot be sent; its name must be 1 to 64 letters, digits, dots, underscores and "
            "hyphens, the first a letter or digit: rename it in the method's client.log"
        )
    return {name: value if math.isfinite(value) else None for name, value in log.items()}


PROTOCOL = 3


OLDEST_PROTOCOL = 3
"""Versions from this one up to `PROTOCOL` are understood. Not 2: it refuses what a `Report` says of the local model.

A coordinator serves agents of the version before: what it sends to an agent is of the agent's version. A field that
version 4 adds to a command has a default that means what version 3 did, and is marked
``json_schema_extra={"since": 4}``, so that it is left out for an older agent. An agent speaks its own version alone, so
coordinators are upgraded first.
"""


MAX_MESSAGE_BYTES = 48 * 1024


LARGE_TASK_BYTES = 16 * 1024
"""A longer task travels as a blob, once for all rounds."""


MAX_TASK_BYTES = 8 << 20


SHA256 = r"^[0-9a-f]{64}$"


MAX_RANGES = 64


MISTAKE_CHARS = 180
"""How much of one mistake is quoted: a key of the peer's may be in it."""


MAX_CREDITS = 4096


MAX_EPOCH = 1 << 53


MAX_HEARTBEAT_S = 300.0


MAX_WAIT_S = 400 * 86_400.0


MAX_ROUND = 2_000_000


MAX_SAMPLES = 1_000_000_000


Digest = Annotated[str, Field(pattern=SHA256)]


Name = Annotated[str, Field(pattern=NAME_PATTERN)]


RUN_PATTERN = r"[a-z0-9][a-z0-9-]{0,63}"


RunId = Annotated[str, Field(pattern=f"^{RUN_PATTERN}$")]


AnyRun = Annotated[str, Field(pattern=f"^({RUN_PATTERN})?$")]
"""A run id, or empty: of no run."""


FederationId = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
"""Empty: of a sender that belongs to no federation yet."""


Epoch = Annotated[int, Field(ge=0, le=MAX_EPOCH)]


_RANDOM_PART = re.compile(r"-[0-9a-f]{32}\Z")


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
"""What an agent is asked to do, see `Job`."""


OUTSIDE_ROUNDS: tuple[Purpose, ...] = ("batch_norm_stats", "activation_ranges")
"""Purposes of updates that are collected once, beside those of a round."""


EXCHANGES: tuple[Purpose, ...] = ("secure_keys", "secure_shares", "secure_unmask")
"""Purposes of what agents send so that a round's updates can be added up unseen:
`edge_agent.privacy.secure_sum`."""


Session = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
"""Of one attempt at a secure sum; empty: of none."""


RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUND)]


Ranges = Annotated[tuple[tuple[int, int], ...], Field(max_length=MAX_RANGES)]
"""Half-open ranges of chunk numbers."""


class Control(Frozen):
    """What every control message carries."""

    v: int = PROTOCOL
    boot: Start = Field("", description="the sender's start; a new one after each restart")
    seq: int = Field(0, ge=0, description="counts up within one boot")
    federation: FederationId = Field("", description="that of the coordinator, or that the agent follows")
    type: str


class Command(Control):
    """What messages of a coordinator carry as well; an agent obeys one federation and epoch."""

    epoch: Epoch = Field(0, description="counts the starts of this coordinator")


Kind = TypeVar("Kind", bound=Control)


class BlobRef(Frozen):
    """A blob, named by its content."""

    digest: Digest
    size_bytes: int = Field(ge=1, le=1 << 33)
    chunk_bytes: int = Field(ge=64, le=1 << 20)


class JobKey(NamedTuple):
    """What identifies a job among those of one agent; without a purpose where that is unknown."""

    run: str
    round: int = 0
    purpose: Purpose | None = "train"
    session: str = ""


def new_id() -> str:
    """Return a federation id, or the random part of a run id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_name(run_id: str) -> str:
    """Return the run's name: its id without the random part."""
    return _RANDOM_PART.sub("", run_id)
