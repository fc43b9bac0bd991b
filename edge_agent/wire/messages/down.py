"""Messages of a coordinator to its agents, and to other coordinators."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from edge_agent.wire.messages.fields import (
    EXCHANGES,
    MAX_CREDITS,
    MAX_HEARTBEAT_S,
    MAX_TASK_BYTES,
    MAX_URLS,
    MAX_WAIT_S,
    SHA256,
    Base64,
    BlobRef,
    Command,
    Digest,
    Epoch,
    JobKey,
    Name,
    Partition,
    Purpose,
    Ranges,
    RoundNumber,
    RunId,
    Session,
    Start,
    Text,
    Url,
)
from edge_agent.wire.messages.up import UpdateManifest

from ...core.config import LEAST_NOISE, mistakes_of, zero_or_from
from ...core.errors import MessageError, cause
from ...core.task import Frozen, Task, parse_json

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
"""The least noise multiplier of a single device: its part of `LEAST_NOISE` among a million devices."""


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
    With a ``session`` the update of ``train`` or ``contribute`` leaves masked, and is part of a sum. Before it,
    ``secure_keys`` asks for public keys, and ``secure_shares`` for shares of their secrets; after it, ``secure_unmask``
    for shares of others.
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
    partition: Partition = Field(
        "",
        description="whose aggregator takes the update, on topics of its own; empty: the coordinator",
        json_schema_extra={"since": 4},
    )

    @property
    def refs(self) -> tuple[BlobRef, ...]:
        """The blobs that the agent needs before it can begin."""
        return tuple(ref for ref in (*self.blobs, self.bundle, self.given) if isinstance(ref, BlobRef))

    @property
    def task(self) -> Task:
        """The learning task; for one that travels as a blob see `with_task`.

        Raises:
            MessageError: The task is in a blob that has yet to arrive.
        """
        if isinstance(self.given, BlobRef):
            raise MessageError(f"the task is in blob {self.given.digest[:12]}, which has yet to arrive")
        return self.given

    def with_task(self, raw: bytes) -> Job:
        """Return this job with the task in the content of a blob.

        Raises:
            MessageError: The blob holds no valid task.
        """
        try:
            return self.model_copy(update={"given": Task.model_validate(parse_json(raw))})
        except (ValueError, RecursionError) as error:
            reason = mistakes_of(error, Task)[0] if isinstance(error, ValidationError) else cause(error)
            raise MessageError(f"the blob of the task holds no valid task: {reason}", is_public=True) from error

    @model_validator(mode="after")
    def _check_session(self) -> Job:
        """Require a session of a secure sum for its exchanges, and allow one for updates of a round beside them."""
        if self.session and self.purpose not in {*EXCHANGES, "train", "contribute"}:
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


def job_key(message: Job | Cancel | UpdateManifest) -> JobKey:
    """Return the key of the job to which a message belongs."""
    return JobKey(message.run, message.round, message.purpose, message.session)


class Listen(Command):
    """Subscribe to the blob's broadcast topic, or unsubscribe from it, and request the blob then.

    An agent on a slow link gets its chunks alone: the broadcast would wait for it, or fill the queue of its link.
    """

    type: Literal["listen"] = "listen"
    digest: Digest
    broadcast: bool


class Located(Command):
    """The answer to a `Want`: fetch the missing bytes by HTTP range requests from one of these URLs.

    Only agents whose hello says that they fetch blobs by HTTP get it. The URLs are short-lived, and the bytes count
    only where the blob's SHA-256 is right. An agent that cannot use them asks for chunks, see ``Want.by_chunks``.
    """

    type: Literal["located"] = "located"
    digest: Digest
    urls: tuple[Url, ...] = Field(min_length=1, max_length=MAX_URLS, description="in the order to try them")


class Grant(Command):
    """Send the update: ``missing`` chunks, at most ``credits`` of them unacknowledged."""

    type: Literal["grant"] = "grant"
    run: RunId
    digest: Digest
    credits: int = Field(ge=1, le=MAX_CREDITS)
    missing: Ranges


class UploadUrls(Command):
    """Send what is missing of the update by HTTP PUT to one of these URLs, instead of in chunks.

    Only agents whose hello says that they can do so get it. A URL is short-lived, and of this agent, this update and
    its size. The update counts from its `Receipt` on, as one that comes in chunks. An agent that cannot use the URLs
    announces the update again, see ``UpdateManifest.way``.
    """

    type: Literal["upload_urls"] = "upload_urls"
    run: RunId
    digest: Digest
    urls: tuple[Url, ...] = Field(min_length=1, max_length=MAX_URLS, description="in the order to try them")
    whole: bool = Field(
        False,
        description="the URLs are of a store that takes the update in one request, with its SHA-256 in the head; "
        "false: each range has a request of its own, with Content-Range",
    )
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


FromCoordinator = (
    Announce
    | Who
    | Welcome
    | Refused
    | Job
    | Cancel
    | Listen
    | Located
    | Grant
    | UploadUrls
    | Queued
    | Ack
    | Receipt
    | Install
    | TaskNotice
    | Renewed
    | Pinned
)
