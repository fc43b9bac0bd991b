"""The facts of the journal: one class for each kind of entry, with the fields of its body.

An entry's columns (run, round, agent, digest) are not repeated in its fact. A field that is not given is not written,
so that a body holds exactly what its writer said; a field that an older journal lacks has its default when it is read.
What an entry says is never changed afterwards: to give a field another meaning, add another field.

Reading is patient, because a journal outlives the version that wrote it and devices have contributed to it: fields of
newer versions are ignored, and an optional value of another form counts as absent. Writing is not: a fact with an
unknown field or a value out of its bounds cannot be made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    JsonValue,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    field_serializer,
)

from edge_agent.core.errors import StateError

from .kinds import Kind

if TYPE_CHECKING:
    from typing_extensions import Self

Number = StrictInt | StrictFloat
"""An integer stays one: the text of a body does not change when it is read and written again."""

Count = Annotated[StrictInt, Field(ge=0)]
RoundNumber = Annotated[StrictInt, Field(ge=0)]
AnyText = InstanceOf[str]
"""Text that may name a path, which need not be encodable; other texts are."""


def _with_lists(value: object) -> object:
    """Return a value of JSON with lists in place of tuples, as it is stored."""
    if isinstance(value, dict):
        return {name: _with_lists(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_lists(part) for part in value]
    return value


Json = Annotated[dict[str, JsonValue], BeforeValidator(_with_lists)]
"""A JSON object that is passed on whole, to the class that it is validated by or to people."""


class Part(BaseModel):
    """A value within a fact."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def to_body(self) -> dict[str, Any]:
        """Return the fields that were given, as the JSON object that is stored: sorted by name."""
        body: dict[str, Any] = json.loads(self.to_json())
        return body

    def to_json(self) -> str:
        """Return `to_body` as the text that is stored.

        Raises:
            ValueError: A number is infinite or none.
        """
        given = self.model_dump(exclude_unset=True)
        return json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def changed(self, **changes: object) -> Self:
        """Return a copy of this value in which these fields are replaced."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate({**given, **changes})

    def without(self, *names: str) -> Self:
        """Return the same value with some fields not given."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name not in names}
        return type(self).model_validate(given)


class Fact(Part):
    """What one entry says beside its columns."""

    kind: ClassVar[Kind]


class UnknownEntry(Part):
    """An entry of a kind that this version does not know: a newer one wrote it. It is kept, and folds pass it over."""

    name: str
    content: Json = Field(default_factory=dict)


# --- the coordinator -------------------------------------------------------------------------------------------------


class CoordinatorStarted(Fact):
    """A coordinator has begun to serve the state folder."""

    kind = "coordinator_started"

    version: str = Field("", description="of the program")
    boot: str = Field("", description="id of this start of the program")
    federation: str | None = Field(None, description="id of the federation; the first versions wrote none")
    federation_name: str = Field("", description="its name, as in topics; the first versions wrote none")
    epoch: Count | None = Field(None, description="number of the start in the federation; the first versions had none")
    is_copy: StrictBool = Field(False, description="the folder is a backup on which nobody had started yet")
    take_over: StrictBool | None = Field(None, description="it replaces another coordinator; None: not said")
    newest_run: Count | None = Field(None, description="number of the newest run of the coordinator that it replaces")


class RunHeard(Fact):
    """An agent has worked for a run that this journal does not have: its name is not given again."""

    kind = "run_heard"

    newest_run: Count | None = Field(None, description="number of that run")


# --- a run from its request to its end -------------------------------------------------------------------------------


class WeightsFile(Part):
    """A file of initial encoder weights."""

    path: AnyText
    sha256: str


class Simulated(Part):
    """What a run simulates."""

    plan: Json = Field(default_factory=dict, description="`coordinator.simulation.plan.Plan`, without defaults")
    partition_sha256: str = Field("", description="hash of the samples that each client has")
    precision: str | None = Field(None, description="that it was computed with; None: not noted")
    own_sources: dict[str, str] = Field(
        default_factory=dict,
        description="method and encoder -> SHA-256 of the source, of those that are the user's own",
    )


class RunRequested(Fact):
    """A run is to be executed. `coordinator.rounds.request.Request` is what follows from it."""

    kind = "run_requested"

    id: str | None = Field(None, description="unique among all state folders; the first versions gave none")
    method: str = Field("", description="its name")
    params: Json = Field(default_factory=dict, description="the method's parameters that differ from its defaults")
    rounds: Count = 0
    seed: StrictInt = 0
    task: Json = Field(default_factory=dict, description="`edge_agent.core.task.Task`")
    keep_every: Count = Field(0, description="checkpoints after every so many rounds stay; 0: the newest only")
    keep_updates: StrictBool = Field(False, description="the updates and checkpoints of all rounds stay")
    warm_start: Json | None = Field(None, description="`coordinator.config.WarmStartConfig`; None: no warm start")
    weights: WeightsFile | None = Field(None, description="None: initialised from the seed")
    method_file: AnyText = Field("", description="the method's own file; empty where the method is installed")
    simulation: Simulated | None = Field(None, description="None: it is not of a simulation that notes its plan")

    def settings(self) -> dict[str, Any]:
        """Return method, params, rounds and seed, as the summary of a run has them."""
        return {"method": self.method, "params": self.params, "rounds": self.rounds, "seed": self.seed}


class CancelRequested(Fact):
    """Somebody wants a run to end."""

    kind = "cancel_requested"

    reason: AnyText = ""


class RunStarted(Fact):
    """A run has its first state, the entry's digest."""

    kind = "run_started"


class WarmStarted(Fact):
    """The encoder was trained on the coordinator's own data before the first round; the digest is of that state."""

    kind = "warm_started"

    data: AnyText = Field("", description="the source of the data")
    samples: Count = Field(0, description="trained on")
    tested: Count = Field(0, description="held out")
    epochs: Count = 0
    loss: Number | None = None
    accuracy: Number | None = Field(None, description="0..1, on the held-out samples; None: there are none")
    head: str = Field("", description="shared: it is part of the state; discarded: it is not")
    device: str = Field("", description="of torch")
    seconds: Number = 0
    encoder_sha256: str | None = None


class StateKept(Fact):
    """The state of the entry's digest stays on disk."""

    kind = "state_kept"


class RunStopped(Fact):
    """No round follows the entry's round, because a program that watches the run has asked for that; the run ends."""

    kind = "run_stopped"

    reason: AnyText = ""


class RunFinished(Fact):
    """A run has ended after its last round, or earlier for the ``reason``."""

    kind = "run_finished"

    encoder_sha256: str | None = Field(None, description="empty: the method shares no encoder")
    reason: AnyText | None = Field(None, description="what its last rounds lack; None: nothing")


class RunFailed(Fact):
    """A run cannot go on."""

    kind = "run_failed"

    reason: AnyText | None = None


class RunCancelled(Fact):
    """A run was ended on request."""

    kind = "run_cancelled"

    reason: AnyText | None = None


class RunExtended(Fact):
    """A run has more rounds than it was requested with, also one that had finished; simulations alone have these."""

    kind = "run_extended"

    rounds: Count = Field(0, description="how many rounds it has now")


class PruneRequested(Fact):
    """The files of these runs are to be removed."""

    kind = "prune_requested"

    runs: tuple[str, ...]


class RunPruned(Fact):
    """The checkpoints and bundles of a run were removed."""

    kind = "run_pruned"

    files: Count = 0
    bytes: Count = 0


# --- a round ---------------------------------------------------------------------------------------------------------


class PrivacyTerms(Part):
    """What the updates of a round are made under, with differential privacy."""

    clip: Number = Field(description="bound of an update's norm")
    clip_statistics: Number = Field(description="bound of the norm of its statistics")
    noise: Number = Field(description="multiplier of the noise that each device adds")
    least: Count = Field(description="among how many updates the noise is divided")


class _HasBases(Fact):
    """A fact that names states which agents of buffered rounds have started from."""

    bases: dict[int, str] = Field(default_factory=dict, description="round -> digest of the state that it began with")

    @field_serializer("bases")
    def _name_rounds_as_text(self, bases: dict[int, str]) -> dict[str, str]:
        # Keys of JSON are text, and are sorted as text.
        return {str(number): digest for number, digest in bases.items()}


class RoundOpened(_HasBases):
    """A round has begun, or another attempt at it."""

    kind = "round_opened"

    attempt: Count = 1
    cohort: tuple[str, ...] = Field((), description="the agents that are asked")
    joining: tuple[str, ...] = Field((), description="those of them that contribute without training the encoder")
    wanted: Count = Field(0, description="updates that are waited for; 0: those of all")
    work: dict[str, Number] = Field(default_factory=dict, description="slow agent -> its share of local training")
    left_out: dict[str, AnyText] = Field(default_factory=dict, description="agent -> why it is not asked")
    again: tuple[str, ...] = Field((), description="agents whose rejection in an earlier attempt does not count")
    added: tuple[str, ...] = Field((), description="agents that have joined since the first attempt")
    overdue: Count = Field(0, description="attempts in which present agents did not answer in time")
    buffer: Count | None = Field(None, description="updates that close a buffered round; None: it is not buffered")
    asked: dict[str, RoundNumber] = Field(
        default_factory=dict, description="agent -> the earlier round that its update is of, where rounds are buffered"
    )
    session: str | None = Field(None, description="id of a secure sum's attempt; None: updates are not masked")
    privacy: PrivacyTerms | None = Field(None, description="None: without differential privacy")


class UpdateAccepted(Fact):
    """An update was acknowledged; the digest is of its blob."""

    kind = "update_accepted"

    samples: Number = Field(0, description="that it was trained on, which it is weighted by")
    metrics: dict[str, Number] = Field(default_factory=dict, description="what the agent reports about it")
    purpose: str | None = Field(None, description="of an update outside the rounds; None: of a round")
    summed: str = Field(
        "", description="digest of the update itself, where the digest of the entry is that of a sum; empty: it is not"
    )


class UpdateRefused(Fact):
    """An update was rejected, or came too late."""

    kind = "update_refused"

    reason: AnyText = ""
    boot: str = Field("", description="start of the agent that sent it; empty: not known")
    error: str | None = Field(
        None,
        description="class of the error by which the agent has no update; empty: it sent one, and the coordinator "
        "refused it; None: noted by an earlier version, at the beginning of the reason",
    )
    accused: tuple[str, ...] = Field((), description="agents whose shares of a secure sum it could not decrypt")


class SumRevealed(Fact):
    """The masks of a secure sum are about to be taken off: it cannot be made of other agents any more."""

    kind = "sum_revealed"

    agents: tuple[str, ...] = ()
    origin: str | None = Field(None, description="digest of what decides the updates, save for what is random")


class StatisticsCorrection(Part):
    """What was done to the class statistics of one update."""

    left_out: Literal["all"] | tuple[int, ...] | None = Field(None, description="classes that do not count")
    shortened: dict[str, Number] = Field(default_factory=dict, description="class -> factor (0..1) of its mean")
    counted: Number | None = Field(None, description="the lowest factor (0..1) of a sample count; None: 1")


class AggregationSettings(Part):
    """How updates were aggregated: `coordinator.config.AggregationConfig`. A bound that is not given was off."""

    rule: str = ""
    attackers: Count | None = None
    max_norm: Number | None = None
    max_weight: Number | None = None
    max_share: Number | None = None
    repeat_share: Number | None = None
    min_cosine: Number | None = None
    max_class_mean: Number | None = None
    max_loss: Number | None = None


class Aggregation(Part):
    """How a round was aggregated, and what was done to single updates beyond their mean, by agent."""

    settings: AggregationSettings = Field(default_factory=AggregationSettings)
    clipped: dict[str, Number] = Field(default_factory=dict, description="factor (0..1) that the change is scaled by")
    capped: dict[str, tuple[Number, Number]] = Field(
        default_factory=dict, description="the samples that it declared, and those that it counts"
    )
    unused: tuple[str, ...] = Field((), description="agents whose updates the rule has not used")
    statistics: dict[str, StatisticsCorrection] = Field(default_factory=dict)
    suspects: dict[str, AnyText] = Field(default_factory=dict, description="why the update is suspect")
    repeats: dict[str, Count] = Field(
        default_factory=dict, description="rounds near a bound of size, this round included, of those that have one"
    )


class GoodState(Part):
    """A state that agents have trained on without an explosion of their loss."""

    round: RoundNumber
    digest: str
    loss: Number = Field(description="the lowest median loss of the run so far")


class Restored(Part):
    """An earlier state took the place of the one that the loss exploded on."""

    round: RoundNumber = Field(description="the round that the state is of; 0: the initial one")
    loss: Number = Field(description="median loss of the round")
    bound: Number = Field(description="that it exceeds")


class LateUpdate(Part):
    """An update that came after its round had closed."""

    agent: str
    round: RoundNumber


class RoundClosed(_HasBases):
    """A round is over; the digest is of the state after it."""

    kind = "round_closed"

    clients: Count | None = Field(None, description="updates that were aggregated")
    unanswered: dict[str, AnyText] = Field(
        default_factory=dict, description="agent -> reason, of those that were present and did not deliver"
    )
    boots: dict[str, str] = Field(
        default_factory=dict, description="starts of agents that were present and have not delivered"
    )
    times: dict[str, tuple[Number, Number, StrictInt]] = Field(
        default_factory=dict,
        description="agent -> seconds to its update, share of the work, and 1 where the round closed without it",
    )
    excused: tuple[str, ...] = Field((), description="agents for which it is no failure to have missed the round")
    busy: dict[str, RoundNumber] = Field(
        default_factory=dict, description="agents that work on, and the round that they were asked in"
    )
    aggregation: Aggregation = Field(default_factory=Aggregation)
    repeats: dict[str, Count] = Field(
        default_factory=dict, description="agent -> its count of rounds at a bound of size; agents of 0 lack"
    )
    good: GoodState | None = Field(None, description="the state that a later round may restore")
    restored: Restored | None = Field(None, description="None: the round has the state that its updates give")
    seconds: Number | None = Field(None, description="from sending the tasks to the end")
    waiting_s: Number | None = Field(None, description="before that, for agents")
    bytes_up: StrictInt | None = None
    bytes_down: StrictInt | None = None
    traffic: dict[str, tuple[StrictInt, StrictInt]] = Field(
        default_factory=dict, description="agent -> bytes from it and to it"
    )
    late: tuple[LateUpdate, ...] | None = Field(None, description="None: not noted")
    noise_multiplier: Number | None = Field(None, description="of the sum, by differential privacy; None: no noise")


class NormPooled(Fact):
    """Batch norm statistics that stay on devices were pooled for a common encoder; the digest is of them."""

    kind = "norm_pooled"

    clients: tuple[str, ...] = ()


class RangesCollected(Fact):
    """The ranges of activations of clients were collected for int8; the digest is of them."""

    kind = "ranges_collected"

    clients: tuple[str, ...] = ()


class ProxyEvaluated(Fact):
    """The state after a round was evaluated on the coordinator's own data."""

    kind = "proxy_evaluated"

    acc: Number | None = Field(None, description="0..1")
    samples: Count = 0
    by: str = Field("", description="what has classified: the shared head, or a probe")
    norm: str = Field("", description="where batch norm had its statistics from")


class ProxyFailed(Fact):
    """The state after a round could not be evaluated on the coordinator's own data."""

    kind = "proxy_failed"

    reason: AnyText | None = None


# --- bundles and releases --------------------------------------------------------------------------------------------


class _OfBundle(Fact):
    """A fact about a bundle, of which the digest is the file's."""

    bundle_id: str = ""
    path: AnyText | None = Field(None, description="where the run has it")
    bytes: Count | None = None
    parity_max_abs: Number | None = Field(None, description="largest difference between the encoder and torch")
    int8_cosine: Number | None = Field(None, description="of int8 and fp32 features; None: no int8")
    held_out: dict[str, Number] = Field(default_factory=dict, description="variant -> accuracy (0..1) on held-out data")
    lineage: Json | None = Field(None, description="`edge_agent.bundle.manifest.Lineage`, method and params")
    signed: Json | None = Field(None, description="who has signed it: `edge_agent.bundle.trust.signed_by`")


class BundleExported(_OfBundle):
    """A run has exported its encoder as a bundle."""

    kind = "bundle_exported"


class ReleasePlan(Part):
    """How a release goes out: `coordinator.views.releases.Plan`, without what is as by default."""

    channel: str = "stable"
    canary: str = ""
    success: Count = 0
    max_failed: str = "100%"
    min_gain: Number | None = None
    auto_promote: StrictBool = False
    window: str = ""
    activate_at: str = ""
    note: AnyText = ""


class ReleaseMade(_OfBundle):
    """A bundle is to go to the devices of a channel."""

    kind = "release_made"

    plan: ReleasePlan = Field(default_factory=ReleasePlan)
    parent: str | None = Field(None, description="id of the bundle that everybody was to run before")
    by: AnyText | None = Field(None, description="who released it; None: a run")
    rolls_back: Count = Field(0, description="number of the release that it undoes; 0: none")

    @classmethod
    def of_bundle(cls, bundle: BundleExported) -> Self:
        """Return the release at once of a bundle that was exported."""
        return cls(**{name: getattr(bundle, name) for name in bundle.model_fields_set})


class ReleaseSigned(Fact):
    """A release was signed again; the entry's digest is that of its new file."""

    kind = "release_signed"

    release: Count = 0
    signed: Json | None = None


class ReleaseCanary(Fact):
    """The devices that get a release first, in the order in which they were drawn."""

    kind = "release_canary"

    release: Count = 0
    agents: tuple[str, ...]


class ReleaseStage(Fact):
    """The canary of a release has succeeded, or somebody has promoted it."""

    kind = "release_stage"

    release: Count = 0
    stage: str = Field(description="everybody: it goes to all; paused: it waits for a person")
    reason: AnyText = ""
    by: AnyText | None = Field(None, description="who promoted it; None: its plan did")


class ReleaseHeld(Fact):
    """A release goes to no further device."""

    kind = "release_held"

    release: Count = 0
    reason: AnyText = ""
    by: AnyText | None = Field(None, description="who held it; None: its devices failed")


class ReleaseResumed(Fact):
    """A release that was held goes on."""

    kind = "release_resumed"

    release: Count = 0
    by: AnyText | None = None


# --- what devices say ------------------------------------------------------------------------------------------------

Outcome = Literal["ok", "failed", "declined", "unable"]
"""``declined``: the device keeps its bundle by its owner's choice. ``unable``: it cannot install it, or not measure it,
for a reason of the device. Both say nothing of the release."""


class ReleaseReported(Fact):
    """What an agent reports of the encoder of a run at its end."""

    kind = "release_reported"

    id: str | None = Field(None, description="of the agent")
    tier: str = ""
    samples: Count | None = Field(None, description="of its data")
    support: Count | None = Field(None, description="held-out samples behind the accuracies")
    acc: dict[str, Number | None] | None = Field(None, description="accuracies (0..1) by scope; None: not measured")
    local_model: str = Field("", description="what acc.local is of")
    better_alone: StrictBool = False
    head: str = ""
    precision: str | None = None
    fingerprint: str | None = None
    runs: str = Field("", description="id of the bundle that it runs")
    rolled_back: AnyText | None = Field(None, description="why it does not run the bundle that the figures are of")
    about: str | None = Field(None, description="id of that bundle; None: trained on the device")
    release: Count = Field(0, description="number of the release by which it came; 0: by none")
    before: Number | None = Field(None, description="acc.personal of the pair that it has kept")
    one_class: StrictBool = False
    rss_mb: Number | None = None
    torch_loaded: StrictBool = False
    bytes_up: StrictInt = 0
    bytes_down: StrictInt = 0


class RunningFigures(Part):
    """Figures of the bundle that a device runs."""

    acc: dict[str, Number | None] | None = Field(None, description="accuracies (0..1) by scope")
    head: str = ""
    better_alone: StrictBool = False
    rss_mb: Number | None = None
    support: Count | None = None


class TriedBundle(Part):
    """A bundle that a device has tried and does not run."""

    bundle_id: str = ""
    run: str = ""
    release: Count = 0
    reason: AnyText = ""
    acc: dict[str, Number | None] | None = None


class InstallResult(Part):
    """What a device says of a release."""

    outcome: Outcome
    reason: AnyText = ""
    acc: Number | None = Field(None, description="acc.personal with the release's encoder")
    before: Number | None = Field(None, description="acc.personal with the pair before, on the same samples")
    support: Count = 0


class DeviceReported(Fact):
    """A device of tier head was heard, with the bundle that it runs, and what it says of a release."""

    kind = "device_reported"

    runs: str = Field("", description="id of the bundle that it runs; empty: none")
    channel: str = "stable"
    kept: AnyText = Field("", description="why it keeps that by its owner's choice")
    running: RunningFigures | None = None
    candidate: TriedBundle | None = None
    release: Count = Field(0, description="number of the release that the result is of; 0: none")
    result: InstallResult | None = None


class DevicePinned(Fact):
    """A device stays with one release."""

    kind = "device_pinned"

    release: Count
    reason: AnyText = ""
    until: str = Field("", description="moment (ISO 8601); empty: until it is unpinned")
    by: AnyText | None = None


class DeviceUnpinned(Fact):
    """A device follows its channel again."""

    kind = "device_unpinned"

    by: AnyText | None = None


class DeviceRetired(Fact):
    """A device counts no more until it is heard again."""

    kind = "device_retired"

    reason: AnyText = ""


# --- reading ---------------------------------------------------------------------------------------------------------


def _fact_classes(base: type[Fact]) -> dict[str, type[Fact]]:
    """Return the classes below ``base`` that have a kind, by that."""
    classes: dict[str, type[Fact]] = {}
    for below in base.__subclasses__():
        if "kind" in vars(below):
            classes[below.kind] = below
        classes |= _fact_classes(below)
    return classes


FACTS: Mapping[str, type[Fact]] = _fact_classes(Fact)
"""Kind -> the class of its facts."""


def fact_of(kind: str, body: Mapping[str, Any]) -> Fact | UnknownEntry:
    """Return what an entry says.

    Args:
        kind: Of the entry.
        body: The JSON object that is stored.

    Raises:
        StateError: A field lacks that every version has written, or has another form.
    """
    known = FACTS.get(kind)
    if known is None:
        return UnknownEntry(name=kind, content=dict(body))
    try:
        return known.model_validate(body)
    except ValidationError as error:
        return _read_patiently(known, body, error)


def _read_patiently(known: type[Fact], body: Mapping[str, Any], error: ValidationError) -> Fact:
    """Return the fact without the fields that this version does not know or whose values have another form.

    Raises:
        StateError: It cannot do without one of them.
    """
    readable: dict[str, Any] = json.loads(json.dumps(body))
    while True:
        # One at a time: the alternatives of a type are wrong each for itself, and the value goes only once.
        wrong = error.errors(include_url=False, include_input=False)[0]
        if not _remove(readable, wrong["loc"]):
            where = ".".join(map(str, wrong["loc"]))
            raise StateError(f"its body has no '{where}' that can be read ({wrong['msg']})") from error
        try:
            return known.model_validate(readable)
        except ValidationError as again:
            error = again


def _remove(body: dict[str, Any], location: tuple[int | str, ...]) -> bool:
    """Remove the value at a location that pydantic names; whether there was one.

    Within a list the whole list goes, because its other items would change their places. Names in ``location`` that are
    none of a key, such as those of the alternatives of a type, are after the last key.
    """
    holder = body
    for depth, name in enumerate(location):
        if not isinstance(name, str) or name not in holder:
            return False
        value = holder[name]
        following = location[depth + 1] if depth + 1 < len(location) else None
        if not isinstance(value, dict) or not isinstance(following, str) or following not in value:
            del holder[name]
            return True
        holder = value
    return False
