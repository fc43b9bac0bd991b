"""What ``summary.json`` says of a run that is over, for those who show its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from edge_agent.core.errors import StateError
from edge_agent.core.next_steps import NextStep

from ..state.privacy_spent import PrivacySpent
from ..state.run_lines import AgentLine
from .result_notes import Bounded, CoordinatorMetrics, ResultWarning


@dataclass(frozen=True)
class LeftOutRounds:
    """The rounds that did not ask an agent, and the reason for the last of them."""

    rounds: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class SummaryBundle:
    """The bundle of a run."""

    bundle_id: str
    path: str
    """Of its file, from the folder of the command that started the coordinator."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run. What an earlier version did not write has its default."""

    run_id: str | None = None
    method: str | None = None
    rounds: int = 0
    seconds: float = 0.0
    agents: tuple[AgentLine, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    """Agent -> why it has no figures at the end, or no update."""

    left_out: Mapping[str, LeftOutRounds] = field(default_factory=dict)
    """Agent -> the rounds that left it out."""

    bounded: Mapping[str, Bounded] = field(default_factory=dict)
    """Agent -> the rounds in which its update was bounded."""

    without_update: frozenset[str] = frozenset()
    """Agents without an update in the last round, of which `incomplete` has the reason."""

    incomplete: str | None = None
    """How many updates the last round lacks, and why; None: none."""

    stopped: str | None = None
    """Why it has ended before its last round; None: it has not."""

    privacy: PrivacySpent | None = None
    """None: no noise was added."""

    warnings: tuple[ResultWarning, ...] = ()
    next_steps: tuple[NextStep, ...] = ()
    """What can be tried next where clients are worse than alone."""

    bundle: SummaryBundle | None = None
    bundle_why_not: str | None = "not exported"
    """Why there is no bundle; None: there is one."""

    metrics: CoordinatorMetrics = field(default_factory=CoordinatorMetrics)

    @classmethod
    def from_json(cls, summary: Mapping[str, Any]) -> RunSummary:
        """Return the summary in the JSON of its file.

        Raises:
            StateError: A value is of another form than any version has written.
        """
        try:
            return cls._from_json(summary)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"summary.json of {summary.get('run_id') or 'a run'} cannot be understood ({type(error).__name__}: "
                f"{error}); put it back from a backup, or remove it: the journal has what is needed to go on"
            ) from error

    @classmethod
    def _from_json(cls, summary: Mapping[str, Any]) -> RunSummary:
        """Return the summary, as `from_json` does where every value is of its form."""
        updates = summary.get("updates") or {}
        without_update: set[str] = set()
        for group in updates.get("left_out", ()):
            without_update |= {*group["agents"]}
        left_out = {}
        for agent, body in summary.get("left_out", {}).items():
            left_out[agent] = LeftOutRounds(tuple(body["rounds"]), body["reason"])
        bounded = {}
        for agent, body in summary.get("bounded", {}).items():
            bounded[agent] = Bounded(tuple(body["rounds"]), body["last"])
        bundle = summary.get("bundle")
        return cls(
            run_id=summary.get("run_id"),
            method=summary.get("method"),
            rounds=summary.get("rounds", 0),
            seconds=summary.get("seconds", 0.0),
            agents=tuple(map(AgentLine.from_json, summary.get("agents", ()))),
            faults=summary.get("faults", {}),
            left_out=left_out,
            bounded=bounded,
            without_update=frozenset(without_update),
            incomplete=summary.get("incomplete"),
            stopped=summary.get("stopped"),
            privacy=PrivacySpent.from_body(summary.get("privacy")),
            warnings=tuple(map(ResultWarning.from_json, summary.get("warnings", ()))),
            next_steps=tuple(map(NextStep.from_json, summary.get("next_steps", ()))),
            bundle=SummaryBundle(bundle["bundle_id"], bundle["path"]) if bundle else None,
            bundle_why_not=summary.get("bundle_why_not", "not exported"),
            metrics=CoordinatorMetrics.from_summary(summary),
        )


class AgentFigures(TypedDict):
    """What ``summary.json`` has of an agent at the end of a run; `AgentLine` says what each of it is."""

    id: str
    tier: str
    samples: int | None
    acc: dict[str, float | None]
    """Scope (local, global, personal) -> accuracy, 0..1; None: not measured."""

    local_model: str
    better_alone: bool
    head: str
    precision: str | None
    fingerprint: str | None
    runs: str
    rolled_back: str | None
    about: str | None
    release: int
    before: float | None
    support: int | None
    one_class: bool
    rss_mb: float | None
    torch_loaded: bool
    bytes_up: int
    bytes_down: int


class FederationSummary(TypedDict, total=False):
    """The content of ``summary.json``, for programs that read it by key; `RunSummary` says what is in it."""

    run_id: str
    id: str
    """The run's own id, which no other run has."""

    method: str
    params: dict[str, Any]
    """All parameters of the method, those that have their default included."""

    peft: str | None
    peft_params: dict[str, Any]
    rounds: int
    seed: int
    status: str
    updates: dict[str, Any]
    incomplete: str | None
    at: str
    """When it ended, in UTC."""

    seconds: float
    encoder_sha256: str
    """SHA-256 of the shared encoder (hex); empty: the method shares none."""

    agents: list[AgentFigures]
    """The agents, sorted by name."""

    left_out: dict[str, Any]
    bounded: dict[str, Any]
    warnings: list[dict[str, Any]]
    next_steps: list[dict[str, str]]
    faults: dict[str, str]
    stopped: str | None
    privacy: dict[str, Any] | None
    bundle: dict[str, Any] | None
    bundle_why_not: str | None
