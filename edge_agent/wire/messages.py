"""Control messages: small JSON objects, checked before use, and the topics that they are published on.

Every message carries the protocol version, the boot of its sender and a sequence number within that boot, so that a
repeated message is recognised, and the id of its sender's federation, so that no agent works for two. Messages of a
coordinator carry its epoch as well, and a proof of who sent them (`wire.authentic`). Errors cross the wire as `Fault`,
never as a traceback.

A federation id is random and made with the coordinator's state folder. A run id is the run's name there, for people,
and a random part: ``run-0001-`` and 32 hexadecimal digits. So no two runs have the same id.
"""

from __future__ import annotations

import functools
import json
import math
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from ..config import LEAST_NOISE, NAME_PATTERN, mistakes_of, zero_or_from
from ..errors import MessageError, PrivacyRefused, ProtocolMismatch, SharesWrong, SumRefused, UsageError, cause
from ..task import Frozen, Task, parse_json


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

_START = TypeAdapter[str](Start)

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
        UsageError: a name that no coordinator accepts.
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
_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\Z')
_PROOF = re.compile(rb',"(mac|sig)":"((?:[0-9a-f]{64}){1,2})"\}\Z')


SPOKEN = f"speaks protocol {OLDEST_PROTOCOL}..{PROTOCOL}"
"""The protocol versions of this side, for messages about another version."""


def sealed(payload: bytes) -> bytes:
    """A JSON object with its checksum as the last field."""
    return payload[:-1] + b',"crc":"%08x"}' % zlib.crc32(payload)


def unsealed(payload: bytes) -> bytes:
    """The message without its checksum, which must be right where there is one (a message may have none).

    TCP lets one broken segment in some 10^9 pass, and one flipped digit here changes a learning rate or a weight.

    Raises:
        MessageError: the checksum is wrong.
    """
    payload = proof_of(payload)[0]
    seal = _SEAL.search(payload)
    if seal is None:
        return payload
    body = payload[: seal.start()] + b"}"
    if zlib.crc32(body) != int(seal[1], 16):
        raise MessageError("checksum is wrong, the message was changed on the way")
    return body


def proof_of(payload: bytes) -> tuple[bytes, str, bytes]:
    """A message without its MAC or signature, which of the two it had (``mac``, ``sig`` or empty), and its bytes."""
    proof = _PROOF.search(payload, max(0, len(payload) - 144))
    if proof is None:
        return payload, "", b""
    return payload[: proof.start()] + b"}", proof[1].decode(), bytes.fromhex(proof[2].decode())


def start_of(payload: bytes) -> str:
    """The start (``boot``) that a message of whatever protocol version names; empty where it names none."""
    try:
        return _START.validate_python(json_object(unsealed(payload)).get("boot"))
    except (MessageError, ValidationError):
        return ""


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
        raw = parse_json(payload)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {cause(error)[:120]}") from error
    if not isinstance(raw, dict):
        raise MessageError(f"JSON {type(raw).__name__}, expected an object")
    return raw


GENERATION = 1
"""Topic level that changes only when old and new peers must not even receive each other's messages."""

_AGENT = re.compile(NAME_PATTERN)


class Topics:
    """All topics of one federation."""

    def __init__(self, federation: str) -> None:
        self.federation = federation
        self.root = f"fl/{GENERATION}/{federation}"
        """What every topic of this federation begins with."""

        self.announce = f"{self.root}/ann"
        """Announcements of the coordinator."""

        self.coordinators = f"{self.root}/co"
        """On which coordinators of the same federation detect each other."""

    def up(self, agent: str) -> str:
        """Control from an agent."""
        return f"{self.root}/a/{agent}/up"

    def down(self, agent: str) -> str:
        """Control to an agent."""
        return f"{self.root}/a/{agent}/dn"

    def up_chunks(self, agent: str) -> str:
        """Chunks from an agent."""
        return f"{self.root}/a/{agent}/ub"

    def down_chunks(self, agent: str) -> str:
        """Chunks to one agent."""
        return f"{self.root}/a/{agent}/db"

    def broadcast(self, digest: str) -> str:
        """Chunks of one blob to many."""
        return f"{self.root}/b/{digest[:16]}"

    def presence(self, agent: str) -> str:
        """Online, offline."""
        return f"{self.root}/s/{agent}"

    def heartbeat(self, agent: str) -> str:
        """Heartbeats."""
        return f"{self.root}/h/{agent}"

    def for_coordinator(self) -> tuple[str, ...]:
        """Filters that a coordinator subscribes to."""
        from_agents = (f"{self.root}/a/+/up", f"{self.root}/a/+/ub", f"{self.root}/s/+", f"{self.root}/h/+")
        return (*from_agents, self.coordinators)

    def for_agent(self, agent: str) -> tuple[str, ...]:
        """Filters that an agent always subscribes to."""
        return (self.down(agent), self.down_chunks(agent), self.announce)

    def sender(self, topic: str) -> tuple[str, str]:
        """(agent, kind) of a topic that agents publish on; kind is ``up``, ``ub``, ``s`` or ``h``.

        Raises:
            MessageError: not such a topic, or an invalid agent name.
        """
        inside = topic.startswith(f"{self.root}/")
        levels = topic[len(self.root) + 1 :].split("/") if inside else []
        if len(levels) == 3 and levels[0] == "a" and levels[2] in {"up", "ub"}:
            _, agent, kind = levels
        elif len(levels) == 2 and levels[0] in {"s", "h"}:
            kind, agent = levels
        else:
            raise MessageError(f"topic {topic[:120]!r} is not one that agents speak on")
        if not _AGENT.fullmatch(agent):
            raise MessageError(f"agent name {agent[:80]!r} does not match {NAME_PATTERN}")
        return agent, kind


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a topic falls under a filter with ``+`` (one level) and ``#`` (all that follow)."""
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for position, level in enumerate(wanted):
        if level == "#":
            return True
        if position >= len(levels) or level not in {"+", levels[position]}:
            return False
    return len(wanted) == len(levels)


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
_RUN = r"[a-z0-9][a-z0-9-]{0,63}"
RunId = Annotated[str, Field(pattern=f"^{_RUN}$")]
AnyRun = Annotated[str, Field(pattern=f"^({_RUN})?$")]
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
"""Purposes of what agents send so that a round's updates can be added up unseen: `edge_agent.secure_sum`."""
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


# --- agent -> coordinator --------------------------------------------------------------------------------------------


class Hello(Control):
    """An agent is online. Sent after each connect, and whenever the coordinator asks or announces itself."""

    type: Literal["hello"] = "hello"
    software: Text = Field(max_length=40)
    tier: Literal["train", "head"]
    samples: int = Field(ge=0, le=MAX_SAMPLES, description="training samples at hand")
    bundle_id: Text = Field("", max_length=64, description="id of the bundle that the device runs, empty: none")
    condition: ConditionName = "ok"
    answers: Start = Field("", description="the question of the `Who` that this answers")
    connection: int = Field(0, ge=0, le=MAX_EPOCH, description="counts up within one boot; the last will has it, too")
    epoch: Epoch = Field(0, description="the highest one that this agent has accepted of the federation")
    channel: Name = Field("stable", description="whose releases this device takes")
    kept: Text = Field("", max_length=1000, description="why the device keeps its bundle by its owner's choice")
    facts: dict[Fact, FactText | int | float | bool | None] = Field(default_factory=dict, max_length=32)


class Have(Control):
    """The blob is in the agent's cache: nothing needs to be sent."""

    type: Literal["have"] = "have"
    digest: Digest


class Want(Control):
    """These chunks are missing."""

    type: Literal["want"] = "want"
    digest: Digest
    ranges: Ranges
    direct: bool = Field(False, description="the agent is not subscribed to the blob's broadcast topic")


class Progress(Control):
    """Chunks have arrived since the agent's `Want`; these are still missing."""

    type: Literal["progress"] = "progress"
    digest: Digest
    missing: Ranges


class UpdateManifest(Control):
    """An update is ready to be sent; repeated until its receipt comes."""

    type: Literal["update"] = "update"
    run: RunId
    round: RoundNumber
    purpose: Purpose = "train"
    session: Session = Field("", description="attempt at a secure sum that the update is masked for; empty: none")
    blob: BlobRef
    samples: int = Field(ge=0, le=MAX_SAMPLES)
    metrics: Metrics = Field(default_factory=dict)


class Report(Control):
    """The result of a run on a device. All figures are of the run's encoder, also where it was rolled back."""

    type: Literal["report"] = "report"
    run: RunId
    about: Text = Field("", max_length=64, description="id of the bundle that the figures are of; empty: trained here")
    release: int = Field(0, ge=0, description="number of the release by which that bundle came; 0: by none")
    bundle_id: Text = Field("", max_length=64, description="id of the bundle that the device runs now")
    fingerprint: Text = Field("", max_length=64, description="of the encoder's variant that the figures are of")
    precision: Literal["", "fp32", "int8"] = Field("", description="of that variant; empty: none was used")
    rolled_back: Text = Field("", max_length=1000, description="why it is not the run's bundle; empty: it is")
    kept: Text = Field("", max_length=1000, description="why that is its owner's choice; empty: it is not")
    samples: int = Field(ge=0, le=MAX_SAMPLES)
    support: int = Field(0, ge=0, le=MAX_SAMPLES, description="held-out samples behind the accuracies")
    one_class: bool = Field(False, description="its data hold a single class, so accuracies say nothing")
    head: Text = Field("", max_length=64)
    acc_local: float | None = Field(None, ge=0, le=1)
    acc_global: float | None = Field(None, ge=0, le=1)
    acc_personal: float | None = Field(None, ge=0, le=1)
    local_model: Text = Field("", max_length=64, description="what acc_local is of; empty: it was not looked for")
    better_alone: bool = Field(False, description="acc_local is above acc_personal by more than noise")
    rss_mb: float = Field(0, ge=0)
    torch_loaded: bool = False
    metrics: Metrics = Field(default_factory=dict)


class Fault(Control):
    """An error of the sender. Paths, file names, class names and all other text of a device stay there."""

    type: Literal["fault"] = "fault"
    error: Text = Field(max_length=64, description="class, of our tree or Python's own")
    code: str = Field("", pattern=r"^[a-z-]{0,32}$", description="what failed, see `agent.health`")
    message: Text = Field(max_length=2000)
    remedy: Text = Field("", max_length=500, description="what to do about it")
    run: AnyRun = ""
    round: RoundNumber = 0
    purpose: Purpose | None = Field(
        None, description="of the job; None: no job, or one of a purpose that is unknown here"
    )
    session: Session = Field("", description="of the job, where it is part of a secure sum")
    release: int = Field(0, ge=0, description="number of the release whose bundle could not be installed; 0: of none")


class Heartbeat(Control):
    """The agent is online; the job that it works for (empty: none), and its condition."""

    type: Literal["heartbeat"] = "heartbeat"
    run: AnyRun = ""
    round: RoundNumber = 0
    purpose: Purpose = "train"
    condition: ConditionName = "ok"


class Bye(Control):
    """The agent stops on purpose."""

    type: Literal["bye"] = "bye"


class Renew(Control):
    """A request for a new certificate, signed with the key of the one that the agent has."""

    type: Literal["renew"] = "renew"
    csr: Base64 = Field(description="certificate signing request (DER)")
    serial: Serial = Field(description="of the certificate that the agent has")
    signature: Base64 = Field(description="of the request, by the key of that certificate")


# --- coordinator -> agent --------------------------------------------------------------------------------------------


class Announce(Command):
    """A coordinator is online; agents answer with `Hello`, also those that follow another federation or epoch."""

    type: Literal["announce"] = "announce"
    software: Text = Field(max_length=40)


class Who(Command):
    """Request for a `Hello`: an agent that is not on the roster has sent something, or two seem to have one id."""

    type: Literal["who"] = "who"
    question: Start = Field("", description="repeated in the answer, which is newer than the question")


class Welcome(Command):
    """The agent is on the roster of this federation."""

    type: Literal["welcome"] = "welcome"
    software: Text = Field(max_length=40)
    lease_s: float = Field(gt=0)
    heartbeat_s: float = Field(
        0, ge=0, le=MAX_HEARTBEAT_S, description="least time between heartbeats of an agent without a job"
    )
    time: Text = Field(
        "", max_length=40, description="coordinator's clock, for logs and the status of the device alone"
    )
    answers: Start = Field("", description="the agent's start that is welcome")


class Refused(Command):
    """The agent cannot take part; the reason says what to do."""

    type: Literal["refused"] = "refused"
    whom: Start = Field("", description="the start that is meant, where several have one id; empty: all")
    error: Text = Field(max_length=64)
    message: Text = Field(max_length=2000)


LEAST_PART = LEAST_NOISE / 1000
"""A device's part of the least noise, among a million devices."""


class Noise(Frozen):
    """Differential privacy that a run asks for: the device clips its update and adds noise, see `Job.privacy`."""

    clip: float = Field(gt=0, le=1e9, description="largest L2 norm of the change of all shared tensors together")
    clip_statistics: float = Field(
        gt=0, le=1e9, description="largest L2 norm of all other arrays of the update together"
    )
    noise: Annotated[float, zero_or_from(LEAST_PART)] = Field(
        0.0, ge=0, le=1e9, description="standard deviation of the device's own noise over clip"
    )


class Job(Command):
    """One task for one agent; run, round and purpose identify it.

    ``train``: train and send an update. ``contribute``: the same for a device without torch, which sends what it can
    compute on features of the encoder in ``bundle``. ``personalize``: after the last round, personalize and report.
    ``batch_norm_stats``: after round ``round``, send the encoder's batch norm tensors that stay on devices otherwise.
    ``activation_ranges``: then, send the smallest and largest value of each step of that encoder on own samples.
    With a ``session`` the update of ``train`` leaves masked, and is part of a sum. Before it, ``secure_keys`` asks for
    public keys, and ``secure_shares`` for shares of their secrets; after it, ``secure_unmask`` for shares of others.
    """

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["job"] = "job"
    purpose: Purpose = "train"
    run: RunId
    round: RoundNumber
    rounds: RoundNumber
    seed: int = Field(ge=0, lt=1 << 63)
    method: Name
    method_sha256: str = Field(
        "",
        pattern=f"({SHA256})|^$",
        description="hash of the method's file, where it is in one; empty: it is installed",
    )
    params: dict[str, Any] = Field(default_factory=dict)
    given: Task | BlobRef = Field(alias="task", description="the task; where it is large, the blob that holds it")
    blobs: tuple[BlobRef, ...] = Field(max_length=4, description="tensors that the job starts from")
    bundle: BlobRef | None = Field(None, description="encoder for those who do not train it")
    deadline_s: float = Field(gt=0, description="seconds from receipt until the round closes")
    work: float = Field(1.0, gt=0, le=1, description="share of local training to do; less on a device that was late")
    evaluate: bool = True
    privacy: Noise | None = Field(None, description="clipping and noise of the update; None: as the device's file says")
    session: Session = Field("", description="attempt at a secure sum that the job is part of; empty: none")

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """Everything that the agent needs before it can begin."""
        return tuple(ref for ref in (*self.blobs, self.bundle, self.given) if isinstance(ref, BlobRef))

    @property
    def task(self) -> Task:
        """The task, once it is here: `with_task`.

        Raises:
            MessageError: it is in a blob that has yet to arrive.
        """
        if isinstance(self.given, BlobRef):
            raise MessageError(f"the task is in blob {self.given.digest[:12]}, which has yet to arrive")
        return self.given

    def with_task(self, raw: bytes) -> Job:
        """This job with the task of a blob.

        Raises:
            MessageError: the blob holds no task.
        """
        try:
            return self.model_copy(update={"given": Task.model_validate(parse_json(raw))})
        except (ValueError, RecursionError) as error:
            why = mistakes_of(error, Task)[0] if isinstance(error, ValidationError) else cause(error)
            raise MessageError(f"the blob of the task is no task: {why}", is_public=True) from error

    @model_validator(mode="after")
    def _check_session(self) -> Job:
        if self.session and self.purpose not in {*EXCHANGES, "train"}:
            raise ValueError(f"a job '{self.purpose}' is part of no secure sum and names a session of one")
        if self.purpose in EXCHANGES and not self.session:
            raise ValueError(f"a job '{self.purpose}' is part of a secure sum and names no session")
        return self

    @field_validator("given")
    @classmethod
    def _check_size(cls, given: Task | BlobRef) -> Task | BlobRef:
        if isinstance(given, BlobRef) and given.size_bytes > MAX_TASK_BYTES:
            raise ValueError(f"a task of {given.size_bytes} bytes, at most {MAX_TASK_BYTES} are read")
        return given


class Cancel(Command):
    """The round is over for this agent; what it still does for it is not used."""

    type: Literal["cancel"] = "cancel"
    run: RunId
    round: RoundNumber
    purpose: Purpose = "train"
    session: Session = ""
    reason: Text = Field(max_length=500)


class JobKey(NamedTuple):
    """What identifies a job among those of one agent; without a purpose where that is unknown."""

    run: str
    round: int = 0
    purpose: Purpose | None = "train"
    session: str = ""


def job_key(message: Job | Cancel | UpdateManifest) -> JobKey:
    """The job that a message is about."""
    return JobKey(message.run, message.round, message.purpose, message.session)


class Listen(Command):
    """Subscribe to the blob's broadcast topic, or unsubscribe from it, and request the blob then.

    An agent on a slow link gets its chunks alone: the broadcast would wait for it, or fill the queue of its link.
    """

    type: Literal["listen"] = "listen"
    digest: Digest
    broadcast: bool


class Grant(Command):
    """Send the update: ``missing`` chunks, at most ``credits`` of them unacknowledged."""

    type: Literal["grant"] = "grant"
    run: RunId
    digest: Digest
    credits: int = Field(ge=1, le=MAX_CREDITS)
    missing: Ranges


class Queued(Command):
    """The update has to wait until others are here; a `Grant` follows."""

    type: Literal["queued"] = "queued"
    run: RunId
    digest: Digest
    before: int = Field(ge=0, description="how many updates come first")
    again_s: float = Field(gt=0, le=3600, description="announce it again after so many seconds without a grant")


class Ack(Command):
    """Chunks have arrived since the `Grant`; these are still missing."""

    type: Literal["ack"] = "ack"
    run: RunId
    digest: Digest
    missing: Ranges


class Receipt(Command):
    """The update is on disk, or was rejected: the agent may remove it."""

    type: Literal["receipt"] = "receipt"
    run: RunId
    digest: Digest
    accepted: bool
    reason: Text = Field("", max_length=1000)


class Install(Command):
    """A bundle for this device: fetch, verify, test, refit, compare, switch at the time, report."""

    type: Literal["install"] = "install"
    run: RunId
    bundle_id: Digest
    release: int = Field(0, ge=0, description="counts the federation's releases; a higher one is newer")
    blob: BlobRef
    compare: bool = Field(
        default=True, description="keep the pair in use where that is better; false: an operator's rollback or pin"
    )
    activate_in_s: float = Field(
        0, ge=0, le=MAX_WAIT_S, description="seconds from receipt until the device may switch; it downloads before"
    )
    activate_within_s: float | None = Field(
        None, gt=0, le=MAX_WAIT_S, description="for how long it may then; None: without end"
    )


class TaskNotice(Command):
    """The task of the run under way, or else of the next one: the agent checks whether its data and head fit.

    It answers with a `Fault` where they do not. For agents that would notice only when a bundle arrives.
    """

    type: Literal["task"] = "task"
    task: Task


class Renewed(Command):
    """The new certificate, or why there is none."""

    type: Literal["renewed"] = "renewed"
    certificate: Base64 | Literal[""] = Field("", description="DER")
    refused: Text = Field("", max_length=1000)


class Pinned(Command):
    """The operator has this device stay with one release, whatever else is released; release 0: not any more."""

    type: Literal["pinned"] = "pinned"
    release: int = Field(ge=0)
    until: Text = Field("", max_length=40, description="end, ISO 8601; empty: until the operator ends it")
    reason: Text = Field("", max_length=1000)


# --- coordinator -> coordinator --------------------------------------------------------------------------------------


class Present(Command):
    """A coordinator of this federation's name is online; so no two of them serve at a time."""

    type: Literal["present"] = "present"
    host: Text = Field("", max_length=255)
    process: int = Field(0, ge=0)
    serving_s: float | None = Field(None, ge=0, description="for how long it has served; None: it has yet to begin")
    answers: Start = Field("", description="the boot of the coordinator whose message this answers")
    standby: bool = Field(default=False, description="it only watches, and takes over when no other one answers")
    takeover: Epoch = Field(0, description="epoch of the newest takeover in its journal; 0: there was none")
    is_copy: bool = Field(
        default=False, description="its state folder began as a backup, and nobody told it to take over"
    )
    entries: Epoch = Field(0, description="entries of its journal beside starts: of two journals the newer has more")
    newest_run: int = Field(0, ge=0, le=999_999_999, description="number of the newest run that it knows; 0: none")


FromAgent = Hello | Have | Want | Progress | UpdateManifest | Report | Fault | Heartbeat | Bye | Renew
FromCoordinator = (
    Announce
    | Who
    | Welcome
    | Refused
    | Job
    | Cancel
    | Listen
    | Grant
    | Queued
    | Ack
    | Receipt
    | Install
    | TaskNotice
    | Renewed
    | Pinned
)


def _parser(*kinds: type[Kind]) -> Callable[[bytes], Kind]:
    """A function that parses these messages.

    Raises (the function):
        MessageError: not one of the expected messages, or a field out of bounds.
        ProtocolMismatch: it speaks another protocol version.
    """
    by_type = {kind.model_fields["type"].default: kind for kind in kinds}

    def parse(payload: bytes) -> Kind:
        payload = unsealed(payload)
        raw = json_object(payload)
        check_version(raw.get("v"))
        kind = by_type.get(raw.get("type")) if isinstance(raw.get("type"), str) else None
        if kind is None:
            raise MessageError(f"type {str(raw.get('type'))[:40]!r} is not one of {', '.join(by_type)}")
        try:
            return kind.model_validate_json(payload)
        except ValidationError as error:
            mistakes = (printable(mistake)[:MISTAKE_CHARS] for mistake in mistakes_of(error, kind)[:5])
            raise MessageError(f"{kind.__name__}: {'; '.join(mistakes)}", is_public=True) from error

    return parse


parse_from_agent: Callable[[bytes], Control] = _parser(*get_args(FromAgent))
parse_from_coordinator: Callable[[bytes], Command] = _parser(*get_args(FromCoordinator))
parse_between_coordinators = _parser(Present)


@functools.cache
def _later(kind: type[Control], protocol: int) -> frozenset[str]:
    """Fields of a message that are not in this version of the protocol."""
    later = set[str]()
    for name, field in kind.model_fields.items():
        since = field.json_schema_extra.get("since") if isinstance(field.json_schema_extra, dict) else None
        if isinstance(since, int) and since > protocol:
            later.add(name)
    return frozenset(later)


def encode(message: Control, protocol: int = PROTOCOL) -> bytes:
    """A message as UTF-8 JSON, its checksum last; fields at their default are left out, ``v`` and ``type`` never.

    ``protocol``: the version that the receiver speaks.

    Raises:
        MessageError: larger than the other side reads, or with NaN or infinity in it.
    """
    plain = {name for name, f in type(message).model_fields.items() if getattr(message, name) == f.default}
    left_out = (plain | _later(type(message), protocol)) - {"v", "type"}
    fields = {**message.model_dump(mode="json", by_alias=True, exclude=left_out), "v": protocol}
    try:
        payload = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise MessageError(f"{type(message).__name__} cannot be written as JSON: {error}") from error
    payload = sealed(payload)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{type(message).__name__} of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    return payload


def new_id() -> str:
    """A federation id, or the random part of a run id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_name(run_id: str) -> str:
    """The run's name: its id without the random part."""
    return _RANDOM_PART.sub("", run_id)


def named_job(payload: bytes) -> JobKey | None:
    """The key of an undamaged `Job` with fields that this side does not know; None for anything else."""
    if not _SEAL.search(proof_of(payload)[0]):  # one flipped bit in the checksum leaves a message without any
        return None
    try:
        raw = json_object(unsealed(payload))
    except MessageError:
        return None
    run, number = raw.get("run"), raw.get("round")
    if raw.get("type") != "job" or not isinstance(run, str) or type(number) is not int:
        return None
    return JobKey(run, number, None) if re.fullmatch(_RUN, run) and 0 <= number <= MAX_ROUND else None
