"""What ``summary.json`` says of a run that is over, for those who show its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
