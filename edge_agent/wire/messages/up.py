"""Messages of agents to their coordinator."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
)

from edge_agent.wire.messages.fields import (
    MAX_EPOCH,
    MAX_SAMPLES,
    AnyRun,
    Base64,
    BlobRef,
    ConditionName,
    Control,
    Digest,
    Epoch,
    Fact,
    FactText,
    Metrics,
    Name,
    Purpose,
    Ranges,
    RoundNumber,
    RunId,
    Serial,
    Session,
    Start,
    Text,
)

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
    by_chunks: bool = Field(False, description="the URLs of the blob were of no use: send chunks, and no URLs again")


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
    way: Literal["", "chunks", "stored"] = Field(
        "",
        description="chunks: the URLs of an upload were of no use; stored: the update is behind the URL that was "
        "given; empty: the coordinator decides",
    )


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
    code: str = Field("", pattern=r"^[a-z-]{0,32}$", description="what failed, see `wire.faults`")
    message: Text = Field(max_length=2000)
    remedy: Text = Field("", max_length=500, description="what to do about it")
    run: AnyRun = ""
    round: RoundNumber = 0
    purpose: Purpose | None = Field(
        None, description="of the job; None: no job, or one of a purpose that is unknown here"
    )
    session: Session = Field("", description="of the job, where it is part of a secure sum")
    release: int = Field(0, ge=0, description="number of the release whose bundle could not be installed; 0: of none")
    accused: tuple[Name, ...] = Field(
        (), max_length=64, description="the agents whose shares of a secure sum cannot be decrypted"
    )


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


FromAgent = Hello | Have | Want | Progress | UpdateManifest | Report | Fault | Heartbeat | Bye | Renew
