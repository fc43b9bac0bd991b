"""The lines of a run's ``metrics.jsonl``: one for each closed round, each release and each agent at the end.

`coordinator.rounds` and `coordinator.runs` write these lines and read them again; a line that lacks a field, as of an
earlier version, has its default. The page of a run and the web view read the file by themselves, because they take
nothing in it for what it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..journal.entries import LateUpdate, Restored

Accuracies = Mapping[str, float | None]
"""Scope (local, global, personal) -> accuracy, 0..1; None: not measured."""


@dataclass(frozen=True)
class Excluded:
    """An agent without an update in a round, and why."""

    agent: str
    reason: str


@dataclass(frozen=True)
class RoundLine:
    """A closed round."""

    round: int
    agents: tuple[str, ...] = ()
    """Agents whose update is in the aggregate, sorted."""

    missing: tuple[str, ...] = ()
    """Agents that were asked and did not answer before the round closed."""

    rejected: tuple[Excluded, ...] = ()
    """Agents whose update was rejected."""

    left_out: tuple[Excluded, ...] = ()
    """Agents that were not asked, or refuse by their own policy."""

    seconds: float | None = None
    """From the tasks to the new state; None: not recorded."""

    waiting_s: float | None = None
    """Waiting for agents before the tasks."""

    bytes_up: int | None = None
    bytes_down: int | None = None
    late: tuple[LateUpdate, ...] | None = None
    """Updates of earlier rounds that came during this one; None: not noted."""

    working: tuple[str, ...] = ()
    """Agents of a buffered round that are still at work; their updates are in a later one."""

    work: Mapping[str, float] = field(default_factory=dict)
    """Agent -> the share of the local training that it has done."""

    staleness: Mapping[str, int] = field(default_factory=dict)
    """Agent -> rounds between the state that it began with and this one, where they differ."""

    added: tuple[str, ...] = ()
    """Agents that joined the open round."""

    bounded: Mapping[str, str] = field(default_factory=dict)
    """Agent -> what was done to its update."""

    restored: Restored | None = None
    """Why an earlier state was restored; None: the round has the state that its updates give."""

    acc: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Scope (global, personal, after) -> agent -> accuracy, 0..1."""

    loss: Mapping[str, float] = field(default_factory=dict)
    """Agent -> training loss."""

    epsilon: Mapping[str, float] = field(default_factory=dict)
    """Agent -> what its own policy has spent."""

    noise_multiplier: float | None = None
    """Of the sum, by differential privacy; None: no noise."""

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RoundLine:
        """Return the round of a line of the file."""
        late = line.get("late")
        restored = line.get("restored")
        return cls(
            round=int(line.get("round", 0)),
            agents=tuple(line.get("agents", ())),
            missing=tuple(line.get("missing", ())),
            rejected=_excluded(line.get("rejected", ())),
            left_out=_excluded(line.get("left_out", ())),
            seconds=line.get("seconds"),
            waiting_s=line.get("waiting_s"),
            bytes_up=line.get("bytes_up"),
            bytes_down=line.get("bytes_down"),
            late=None if late is None else tuple(LateUpdate.model_validate(update) for update in late),
            working=tuple(line.get("working", ())),
            work=line.get("work", {}),
            staleness=line.get("staleness", {}),
            added=tuple(line.get("added", ())),
            bounded=line.get("bounded", {}),
            restored=None if not restored else Restored.model_validate(restored),
            acc=line.get("acc", {}),
            loss=line.get("loss", {}),
            epsilon=line.get("epsilon", {}),
            noise_multiplier=line.get("noise_multiplier"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the line of the file."""
        return {
            "kind": "round",
            "round": self.round,
            "seconds": self.seconds,
            "waiting_s": self.waiting_s,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "late": None if self.late is None else [update.model_dump() for update in self.late],
            "agents": [*self.agents],
            "missing": [*self.missing],
            "working": [*self.working],
            "rejected": [asdict(excluded) for excluded in self.rejected],
            "left_out": [asdict(excluded) for excluded in self.left_out],
            "work": self.work,
            "staleness": self.staleness,
            "added": [*self.added],
            "bounded": self.bounded,
            "restored": None if self.restored is None else self.restored.model_dump(),
            "acc": self.acc,
            "loss": self.loss,
            "epsilon": self.epsilon,
            "noise_multiplier": self.noise_multiplier,
        }


def _excluded(items: Iterable[Mapping[str, Any]]) -> tuple[Excluded, ...]:
    return tuple(Excluded(item["agent"], str(item["reason"])) for item in items)


@dataclass(frozen=True)
class ReleaseLine:
    """A bundle that was released between two rounds, and what devices scored with it."""

    round: int
    """The round after which it was exported."""

    bundle_id: str = ""
    bytes: int | None = None
    """Of its file."""

    acc: Accuracies = field(default_factory=dict)
    """Device -> acc.personal, 0..1; None: not measured."""

    rolled_back: tuple[str, ...] = ()
    """Devices that went back from it."""

    mean: float | None = None
    """Of acc.personal over the devices that report it; None: none does."""

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> ReleaseLine:
        """Return the release of a line of the file."""
        return cls(
            round=line["round"],
            bundle_id=line.get("bundle_id", ""),
            bytes=line.get("bytes"),
            acc=line.get("acc", {}).get("personal", {}),
            rolled_back=tuple(line.get("rolled_back", ())),
            mean=line.get("mean"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the line of the file."""
        return {
            "kind": "release",
            "round": self.round,
            "bundle_id": self.bundle_id,
            "bytes": self.bytes,
            "acc": {"personal": self.acc},
            "rolled_back": [*self.rolled_back],
            "mean": self.mean,
        }


@dataclass(frozen=True)
class AgentLine:
    """What an agent reports at the end of a run; all is of the run's encoder, also where it now runs another one."""

    id: str
    tier: str = ""
    samples: int | None = None
    acc: Accuracies = field(default_factory=dict)
    local_model: str = ""
    """What acc.local is of."""

    better_alone: bool = False
    """Whether acc.local is above acc.personal by more than noise."""

    head: str = ""
    precision: str | None = None
    fingerprint: str | None = None
    runs: str = ""
    """Id of the bundle that it runs."""

    rolled_back: str | None = None
    """Why it does not run the bundle that the figures are of; None: it does."""

    about: str | None = None
    """Id of that bundle; None: trained on the device."""

    release: int = 0
    """Number of the release by which it came; 0: by none."""

    before: float | None = None
    """acc.personal of the pair that it has kept."""

    support: int | None = None
    """Held-out samples behind the accuracies."""

    one_class: bool = False
    """Whether its data have one class only."""

    rss_mb: float | None = None
    torch_loaded: bool = False
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know about the figures, each in half a sentence."""
        return describe_notes(
            rolled_back=self.rolled_back,
            one_class=self.one_class,
            better_alone=self.better_alone,
            has_no_samples=self.samples == 0,
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> AgentLine:
        """Return the agent of a line of the file, or of the list in the summary of a run; unknown keys are ignored."""
        names = cls.__dataclass_fields__.keys()
        return cls(**{name: value for name, value in body.items() if name in names})

    def to_json(self) -> dict[str, Any]:
        """Return the agent as the summary has it; its line in the file has ``kind`` as well."""
        return dict(vars(self))


def describe_notes(
    *, rolled_back: object, one_class: bool, better_alone: bool, has_no_samples: bool
) -> tuple[str, ...]:
    """Return what a reader has to know about the figures of one agent, each in half a sentence."""
    notes = []
    if rolled_back:
        notes.append(f"rolled back, {rolled_back}; figures are of the new encoder")
    if one_class:
        notes.append("its data have one class only, so its accuracies are meaningless")
    if better_alone:
        notes.append("better off alone")
    if has_no_samples:
        notes.append("has no samples")
    return tuple(notes)
