"""Control messages: small JSON objects, checked before use, and the topics that they are published on.

Every message carries the protocol version, the boot of its sender and a sequence number within that boot, so that a
repeated message is recognised, and the id of the federation that its sender belongs to, so that nobody works for two.
What a coordinator says carries its epoch as well. Errors cross the wire as `Fault`, never as a traceback.

A federation id is random and made with the coordinator's state folder. A run id is the run's name there, for people,
and a random part: ``run-0001-`` and 32 hexadecimal digits. So two runs never have one id, whoever asked for them.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, ValidationError

from ..config import NAME_PATTERN, mistakes_of
from ..errors import MessageError, ProtocolMismatch, UsageError, cause
from ..task import Frozen, Task


def printable(text: str) -> str:
    """``text`` with a space for each character that could steer a terminal or break a line of a log."""
    return "".join(character if character.isprintable() else " " for character in text)


Text = Annotated[str, AfterValidator(printable)]
"""No control characters, no line breaks, nothing that changes the direction of writing."""

Start = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{0,32}$")]
"""What one start of a program is known by, or a question to it; logs, status and reports show it."""

METRIC_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Metrics = Annotated[dict[Annotated[str, Field(pattern=METRIC_NAME)], float | None], Field(max_length=64)]
Fact = Annotated[Text, Field(max_length=64)]
FactText = Annotated[Text, Field(max_length=256)]

DISK_ERROR = "DiskError"
"""The error of a `Fault` that says that an agent's disk cannot be written."""

ConditionName = Literal["ok", "fault", "stalled"]
"""How an agent is: able to work, failed at something last, or unable to keep anything on its disk now."""


def metrics_of(log: Mapping[str, float]) -> dict[str, float | None]:
    """What a client has computed, as it travels: None for what is not finite.

    Raises:
        UsageError: a name that no other side would take.
    """
    if wrong := [name for name in log if not re.fullmatch(METRIC_NAME, name)]:
        raise UsageError(
            f"metric {wrong[0][:80]!r} cannot be sent; its name must be 1 to 64 letters, digits, dots, underscores and "
            "hyphens, the first a letter or digit: rename it in the method's client.log"
        )
    return {name: value if math.isfinite(value) else None for name, value in log.items()}


PROTOCOL = 2
OLDEST_PROTOCOL = 2
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
    result = _SEAL.search(payload)
    if result is None:
        return payload
    body = payload[: result.start()] + b"}"
    if zlib.crc32(body) != int(result[1], 16):
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
        # As text: from bytes, json would guess UTF-16 and UTF-32, and NaN is not valid JSON.
        raw = json.loads(payload.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {cause(error)[:120]}") from error
    if not isinstance(raw, dict):
        raise MessageError(f"JSON {type(raw).__name__}, expected an object")
    return raw


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


GENERATION = 1
"""Topic level that changes only when old and new peers must not even hear each other."""

_AGENT = re.compile(NAME_PATTERN)


@dataclass(frozen=True)
class Topics:
    """All topics of one federation."""

    federation: str
    prefix: str = "fl"

    @property
    def root(self) -> str:
        """What every topic of this federation begins with."""
        return f"{self.prefix}/{GENERATION}/{self.federation}"

    @property
    def announce(self) -> str:
        """Topic of the coordinator's announcements."""
        return f"{self.root}/ann"

    @property
    def coordinators(self) -> str:
        """Topic on which coordinators of the same federation find each other."""
        return f"{self.root}/co"

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
        """Signs of life."""
        return f"{self.root}/h/{agent}"

    def for_coordinator(self) -> tuple[str, ...]:
        """Filters that a coordinator subscribes to."""
        from_agents = (f"{self.root}/a/+/up", f"{self.root}/a/+/ub", f"{self.root}/s/+", f"{self.root}/h/+")
        return (*from_agents, self.coordinators)

    def for_agent(self, agent: str) -> tuple[str, ...]:
        """Filters that an agent always subscribes to."""
        return (self.down(agent), self.down_chunks(agent), self.announce)

    def sender(self, topic: str) -> tuple[str, str]:
        """(agent, kind) of a topic that a coordinator hears; kind is ``up``, ``ub``, ``s`` or ``h``.

        Raises:
            MessageError: not such a topic, or an agent name that cannot be.
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
"""How much of one mistake is told: a key of the peer's may be in it."""
MAX_CREDITS = 4096
MAX_EPOCH = 1 << 53
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
Purpose = Literal["train", "contribute", "personalize", "batch_norm_stats"]
"""What an agent is asked to do, see `Job`."""

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
    """What every message of a coordinator carries beside that; an agent takes orders of one federation and epoch."""

    epoch: Epoch = Field(0, description="counts the starts of this coordinator")


Kind = TypeVar("Kind", bound=Control)


class BlobRef(Frozen):
    """A blob by content: what it is, not where."""

    digest: Digest
    size_bytes: int = Field(ge=1, le=1 << 33)
    chunk_bytes: int = Field(ge=64, le=1 << 20)


# --- agent -> coordinator --------------------------------------------------------------------------------------------


class Hello(Control):
    """An agent is here. Sent after each connect, and whenever the coordinator asks or announces itself."""

    type: Literal["hello"] = "hello"
    software: Text = Field(max_length=40)
    tier: Literal["train", "head"]
    samples: int = Field(ge=0, le=MAX_SAMPLES, description="training samples at hand")
    bundle_id: Text = Field("", max_length=64, description="id of the bundle that the device runs, empty: none")
    condition: ConditionName = "ok"
    answers: Start = Field("", description="the question of the `Who` that this answers")
    connection: int = Field(0, ge=0, le=MAX_EPOCH, description="counts up within one boot; the last will has it, too")
    epoch: Epoch = Field(0, description="the highest one that this agent has accepted of the federation")
    facts: dict[Fact, FactText | int | float | bool | None] = Field(default_factory=dict, max_length=32)


class Have(Control):
    """The blob is in the agent's cache: nothing needs to be sent."""

    type: Literal["have"] = "have"
    digest: Digest


class Want(Control):
    """These chunks are missing; the agent is subscribed to the blob's broadcast topic."""

    type: Literal["want"] = "want"
    digest: Digest
    ranges: Ranges


class Progress(Control):
    """How many frames of the blob this agent has seen since its `Want`."""

    type: Literal["progress"] = "progress"
    digest: Digest
    seen: int = Field(ge=0)


class UpdateManifest(Control):
    """An update is ready to be sent; repeated until its receipt comes."""

    type: Literal["update"] = "update"
    run: RunId
    round: RoundNumber
    purpose: Purpose = "train"
    blob: BlobRef
    samples: int = Field(ge=0, le=MAX_SAMPLES)
    metrics: Metrics = Field(default_factory=dict)


class Report(Control):
    """What a device got out of a run. All figures are of the run's encoder, also where it went back to another."""

    type: Literal["report"] = "report"
    run: RunId
    about: Text = Field("", max_length=64, description="id of the bundle that the figures are of; empty: trained here")
    bundle_id: Text = Field("", max_length=64, description="id of the bundle that the device runs now")
    fingerprint: Text = Field("", max_length=64, description="of the encoder's variant that the figures are of")
    precision: Literal["", "fp32", "int8"] = Field("", description="of that variant; empty: none was used")
    rolled_back: Text = Field("", max_length=1000, description="why it is not the run's bundle; empty: it is")
    samples: int = Field(ge=0, le=MAX_SAMPLES)
    support: int = Field(0, ge=0, le=MAX_SAMPLES, description="held-out samples behind the accuracies")
    one_class: bool = Field(False, description="its data hold a single class, so accuracies say nothing")
    head: Text = Field("", max_length=64)
    acc_local: float | None = Field(None, ge=0, le=1)
    acc_global: float | None = Field(None, ge=0, le=1)
    acc_personal: float | None = Field(None, ge=0, le=1)
    rss_mb: float = Field(0, ge=0)
    torch_loaded: bool = False
    metrics: Metrics = Field(default_factory=dict)


class Fault(Control):
    """An error of ours, told to the other side: class name and message."""

    type: Literal["fault"] = "fault"
    error: Text = Field(max_length=64)
    message: Text = Field(max_length=2000)
    remedy: Text = Field("", max_length=500, description="what somebody should do about it")
    run: AnyRun = ""
    round: RoundNumber = 0
    purpose: Purpose | None = Field(
        None, description="of the job; None: no job, or one of a purpose that is unknown here"
    )


class Heartbeat(Control):
    """The agent lives, this is the round that it works for (empty: none), and how it is."""

    type: Literal["heartbeat"] = "heartbeat"
    run: AnyRun = ""
    round: RoundNumber = 0
    purpose: Purpose = "train"
    condition: ConditionName = "ok"


class Bye(Control):
    """The agent stops on purpose."""

    type: Literal["bye"] = "bye"


# --- coordinator -> agent --------------------------------------------------------------------------------------------


class Announce(Command):
    """A coordinator is here; agents answer with `Hello`, also those that follow another federation or epoch."""

    type: Literal["announce"] = "announce"
    software: Text = Field(max_length=40)


class Who(Command):
    """Say hello: a sign of life came from an agent that is not on the roster, or two seem to have one id."""

    type: Literal["who"] = "who"
    question: Start = Field("", description="repeated in the answer, which is newer than the question")


class Welcome(Command):
    """The agent is on the roster of this federation."""

    type: Literal["welcome"] = "welcome"
    software: Text = Field(max_length=40)
    lease_s: float = Field(gt=0)
    time: Text = Field("", max_length=40, description="coordinator's clock, for logs only")


class Refused(Command):
    """The agent cannot take part; the reason says what to do."""

    type: Literal["refused"] = "refused"
    whom: Start = Field("", description="the start that is meant, where several have one id; empty: all")
    error: Text = Field(max_length=64)
    message: Text = Field(max_length=2000)


class Job(Command):
    """One task for one agent; run, round and purpose identify it.

    ``train``: train and send an update. ``contribute``: the same for a device without torch, which sends what it can
    compute on features of the encoder in ``bundle``. ``personalize``: after the last round, personalize and report.
    ``batch_norm_stats``: after round ``round``, send the encoder's batch norm tensors that stay on devices otherwise.
    """

    type: Literal["job"] = "job"
    purpose: Purpose = "train"
    run: RunId
    round: RoundNumber
    rounds: RoundNumber
    seed: int = Field(ge=0, lt=1 << 63)
    method: Name
    params: dict[str, Any] = Field(default_factory=dict)
    task: Task
    blobs: tuple[BlobRef, ...] = Field(max_length=4, description="tensors that the job starts from")
    bundle: BlobRef | None = Field(None, description="encoder for those who do not train it")
    deadline_s: float = Field(gt=0, description="seconds from receipt until the round closes")
    evaluate: bool = True

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """Everything that the agent has to have before it can begin."""
        return self.blobs if self.bundle is None else (*self.blobs, self.bundle)


class Cancel(Command):
    """The round is over for this agent; whatever it still does for it is in vain."""

    type: Literal["cancel"] = "cancel"
    run: RunId
    round: RoundNumber
    purpose: Purpose = "train"
    reason: Text = Field(max_length=500)


class Grant(Command):
    """Send the update: ``missing`` chunks, at most ``credits`` of them unacknowledged."""

    type: Literal["grant"] = "grant"
    run: RunId
    digest: Digest
    credits: int = Field(ge=1, le=MAX_CREDITS)
    missing: Ranges


class Ack(Command):
    """Chunks that have arrived, counted, and the gaps below the highest of them."""

    type: Literal["ack"] = "ack"
    run: RunId
    digest: Digest
    received: int = Field(ge=0)
    missing: Ranges = ()


class Receipt(Command):
    """The update is on disk (or was refused): the agent may forget it."""

    type: Literal["receipt"] = "receipt"
    run: RunId
    digest: Digest
    accepted: bool
    reason: Text = Field("", max_length=1000)


class Install(Command):
    """A bundle for this device: fetch, verify, test, refit, compare, switch, report."""

    type: Literal["install"] = "install"
    run: RunId
    bundle_id: Digest
    release: int = Field(0, ge=0, description="counts the federation's releases; a higher one is newer")
    blob: BlobRef


class TaskNotice(Command):
    """What the run under way, or else the next one, is about: the agent looks whether its data and head fit.

    It answers with a `Fault` where they do not. For agents that would find out only when a bundle comes.
    """

    type: Literal["task"] = "task"
    task: Task


# --- coordinator -> coordinator --------------------------------------------------------------------------------------


class Present(Command):
    """A coordinator of this federation's name says that it is there, so that no two of them serve at a time."""

    type: Literal["present"] = "present"
    host: Text = Field("", max_length=255)
    process: int = Field(0, ge=0)
    serving_s: float | None = Field(None, ge=0, description="for how long it has served; None: it has yet to begin")
    answers: Start = Field("", description="the boot of the coordinator whose message this answers")


FromAgent = Hello | Have | Want | Progress | UpdateManifest | Report | Fault | Heartbeat | Bye
FromCoordinator = Announce | Who | Welcome | Refused | Job | Cancel | Grant | Ack | Receipt | Install | TaskNotice


class _Parser(Generic[Kind]):
    """Bytes to one of a set of messages."""

    def __init__(self, *kinds: type[Kind]) -> None:
        self.kinds = {kind.model_fields["type"].default: kind for kind in kinds}

    def __call__(self, payload: bytes) -> Kind:
        """The message in ``payload``.

        Raises:
            MessageError: not one of the expected messages, or a field out of bounds.
            ProtocolMismatch: it speaks another protocol version.
        """
        payload = unsealed(payload)
        raw = json_object(payload)
        check_version(raw.get("v"))
        kind = self.kinds.get(raw.get("type")) if isinstance(raw.get("type"), str) else None
        if kind is None:
            raise MessageError(f"type {str(raw.get('type'))[:40]!r} is not one of {', '.join(self.kinds)}")
        try:
            return kind.model_validate_json(payload)
        except ValidationError as error:
            mistakes = (printable(mistake)[:MISTAKE_CHARS] for mistake in mistakes_of(error, kind)[:5])
            raise MessageError(f"{kind.__name__}: {'; '.join(mistakes)}") from error


parse_from_agent: _Parser[Control] = _Parser(*get_args(FromAgent))
parse_from_coordinator: _Parser[Command] = _Parser(*get_args(FromCoordinator))
parse_between_coordinators = _Parser(Present)


def encode(message: Control) -> bytes:
    """A message as UTF-8 JSON, its checksum last; fields at their default are left out, ``v`` and ``type`` never.

    Raises:
        MessageError: larger than the other side reads, or with NaN or infinity in it.
    """
    plain = {name for name, f in type(message).model_fields.items() if getattr(message, name) == f.default}
    fields = message.model_dump(mode="json", exclude=plain - {"v", "type"})
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
    """The name that people know a run by: its id without the random part."""
    return _RANDOM_PART.sub("", run_id)


def named_job(payload: bytes) -> tuple[str, int] | None:
    """Run and round of a whole and undamaged `Job` that this side has no words for; None for anything else."""
    if not is_sealed(payload):
        return None
    try:
        raw = json_object(unsealed(payload))
    except MessageError:
        return None
    run, number = raw.get("run"), raw.get("round")
    if raw.get("type") != "job" or not isinstance(run, str) or type(number) is not int:
        return None
    return (run, number) if re.fullmatch(_RUN, run) and 0 <= number <= MAX_ROUND else None
