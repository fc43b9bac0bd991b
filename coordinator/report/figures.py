"""Figures of a run as its report shows them, read from ``summary.json`` and ``metrics.jsonl``.

Agents contributed to these files, so no value is trusted to have its form: a value of another form counts as absent.
A round or an agent may be recorded twice, where a coordinator was killed between figure and journal. The last record
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from ..state.run_lines import describe_notes
from ..views.values import as_number, as_text

Scope = Literal["local", "global", "personal"]
Curve = Literal["global", "personal", "after"]
"""Scopes that rounds change; ``after``: ``personal`` once more, after the round's local training."""

SCOPES: tuple[Scope, ...] = ("local", "global", "personal")
CURVES: tuple[Curve, ...] = ("global", "personal", "after")
Key = TypeVar("Key", int, str)
"""What records are sorted by: a round's number, or an agent's id."""

Record = TypeVar("Record")
_RECORDED = ("local", "global", "personal", "after")


def _texts(value: object) -> tuple[str, ...]:
    """Return the items of a list as texts; none for a value of another form."""
    if not isinstance(value, list):
        return ()
    return tuple(map(as_text, value))


def _numbers(value: object) -> dict[str, float]:
    """Return the entries of an object whose values are numbers; none for a value of another form."""
    numbers: dict[str, float] = {}
    if not isinstance(value, Mapping):
        return numbers
    for key, item in value.items():
        number = as_number(item)
        if number is not None:
            numbers[as_text(key)] = number
    return numbers


def _numbers_of_scopes(value: object) -> dict[str, dict[str, float]]:
    """Return the numbers of each scope that rounds record; no numbers for a scope that is missing."""
    by_scope = value if isinstance(value, Mapping) else {}
    return {scope: _numbers(by_scope.get(scope)) for scope in _RECORDED}


def _reasons(value: object) -> tuple[tuple[str, str], ...]:
    """Return (agent, reason) of each item of a list; both are empty for an item of another form."""
    items = value if isinstance(value, list) else []
    reasons = []
    for item in items:
        fields = item if isinstance(item, Mapping) else {}
        reasons.append((as_text(fields.get("agent")), as_text(fields.get("reason"))))
    return tuple(reasons)


def _notes(value: object) -> dict[str, str]:
    """Return the entries of an object as texts; none for a value of another form."""
    if not isinstance(value, Mapping):
        return {}
    return {as_text(key): as_text(item) for key, item in value.items()}


Number = Annotated[float | None, BeforeValidator(as_number)]
Flag = Annotated[bool | None, BeforeValidator(lambda value: value if isinstance(value, bool) else None)]
Text = Annotated[str, BeforeValidator(lambda value: as_text(value or ""))]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
Notes = Annotated[dict[str, str], BeforeValidator(_notes)]
Reasons = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_reasons)]


class Figures(BaseModel):
    """Figures of one record; None: not known."""

    model_config = ConfigDict(frozen=True)


class RoundFigures(Figures):
    """The figures of one round."""

    round: int
    seconds: Number = None
    """Seconds from sending the tasks to the end of the round."""

    waiting_s: Number = None
    """Seconds of waiting for agents before that."""

    agents: Texts = ()
    """The agents whose updates were accepted."""

    missing: Texts = ()
    """The members without an update when the round closed."""

    rejected: Reasons = ()
    """(Agent, reason) of each update that was rejected."""

    left_out: Reasons = ()
    """(Agent, reason) of each agent that was not asked."""

    bounded: Notes = {}
    """Agent -> what was done to its update."""

    bytes_up: Number = None
    bytes_down: Number = None
    acc: Annotated[dict[str, dict[str, float]], BeforeValidator(_numbers_of_scopes)] = {}
    """Scope -> agent -> accuracy in 0..1."""

    loss: Numbers = {}
    """Agent -> its training loss."""

    def mean(self, scope: Scope) -> float | None:
        """Return the mean over agents; None where no agent reported."""
        values = self.acc.get(scope, {}).values()
        if not values:
            return None
        return fmean(values)


class AgentFigures(Figures):
    """One agent at the end of the run."""

    id: Text
    tier: Text = ""
    samples: Number = None
    acc: Numbers = {}
    local_model: Text = ""
    head: Text = ""
    support: Number = None
    better_alone: Flag = None
    rss_mb: Number = None
    torch_loaded: Flag = None
    bytes_up: Number = None
    bytes_down: Number = None
    notes: tuple[str, ...] = ()


class ProxyFigures(Figures):
    """The shared model after a round, on samples of the coordinator."""

    round: int
    acc: float
    samples: Number = None
    by: Text = ""


@dataclass(frozen=True)
class RunFigures:
    """Everything that a report shows."""

    run: str
    summary: dict[str, Any]
    rounds: list[RoundFigures] = field(default_factory=list)
    agents: list[AgentFigures] = field(default_factory=list)
    proxy: list[ProxyFigures] = field(default_factory=list)
    proxy_failed: list[tuple[int, str]] = field(default_factory=list)
    """(Round, reason) of each reason for which a figure of the proxy could not be computed, with its first round."""

    @property
    def simulation(self) -> dict[str, Any]:
        """Data, partition and plan of a simulation; empty for a federation."""
        value = self.summary.get("simulation")
        return value if isinstance(value, dict) else {}

    @property
    def agent_count(self) -> int:
        """The number of agents at the end of the run; before it, of those in its rounds so far."""
        if self.agents:
            return len(self.agents)
        names = set[str]()
        for figures in self.rounds:
            names.update(figures.agents)
        return len(names)

    def final_mean(self, scope: Scope) -> float | None:
        """Return the mean over agents at the end; where none reported it, that of the last round that has it."""
        values = [agent.acc[scope] for agent in self.agents if scope in agent.acc]
        if values:
            return fmean(values)
        for figures in reversed(self.rounds):
            mean = figures.mean(scope)
            if mean is not None:
                return mean
        return None

    def curve(self, scope: Curve) -> list[tuple[int, dict[str, float]]]:
        """Return (rounds done, accuracy of each agent) of the models of a scope, in order.

        What agents report in round r of ``global`` and ``personal`` is of the model that they received, which has
        r - 1 rounds behind it; the last entry is the run's end.
        """
        scored = [figures for figures in self.rounds if figures.acc.get(scope)]
        if scope == "after":
            return [(figures.round, figures.acc[scope]) for figures in scored]
        models = [(figures.round - 1, figures.acc[scope]) for figures in scored]
        final = {agent.id: agent.acc[scope] for agent in self.agents if scope in agent.acc}
        if final and self.rounds:
            models.append((self.rounds[-1].round, final))
        return models

    def total(self, direction: Literal["bytes_up", "bytes_down"]) -> float | None:
        """Return the bytes of all rounds; where no round has any figure, those of all agents; None without either."""
        records: Sequence[RoundFigures | AgentFigures]
        for records in (self.rounds, self.agents):
            sizes = [getattr(record, direction) for record in records]
            known_sizes = [size for size in sizes if size is not None]
            if known_sizes:
                return math.fsum(known_sizes)
        return None


def read_run(run: str, summary: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> RunFigures:
    """Read the figures of a summary and of records of kinds ``round``, ``agent``, ``proxy`` and ``proxy_failed``.

    A record of another kind, or without what names it (an agent's id, a round's number), is passed over.
    """
    rounds: dict[int, RoundFigures] = {}
    agents: dict[str, AgentFigures] = {}
    proxy: dict[int, ProxyFigures] = {}
    failed: dict[str, int] = {}
    for record in metrics:
        kind = record.get("kind")
        # 1. Records of an agent have no round.
        if kind == "agent":
            if isinstance(record.get("id"), str):
                agents[record["id"]] = AgentFigures.model_validate({**record, "notes": notes_of(record)})
            continue
        # 2. All others are of a round; of two records of one round the last one counts, of two failures the first.
        number = as_number(record.get("round"))
        if number is None:
            continue
        round_number = int(number)
        if kind == "round":
            rounds[round_number] = RoundFigures.model_validate({**record, "round": round_number})
        elif kind == "proxy" and as_number(record.get("acc")) is not None:
            proxy[round_number] = ProxyFigures.model_validate({**record, "round": round_number})
        elif kind == "proxy_failed":
            failed.setdefault(str(record.get("reason")), round_number)
    return RunFigures(
        run,
        dict(summary),
        rounds=_in_order(rounds),
        agents=_in_order(agents),
        proxy=_in_order(proxy),
        proxy_failed=[(number, reason) for reason, number in failed.items()],
    )


def _in_order(records: Mapping[Key, Record]) -> list[Record]:
    """Return the records in the order of their keys."""
    return [records[key] for key in sorted(records)]


def notes_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a reader has to know about the figures in the record of one agent."""
    return describe_notes(
        rolled_back=record.get("rolled_back"),
        one_class=record.get("one_class") is True,
        better_alone=record.get("better_alone") is True,
        has_no_samples=record.get("samples") == 0,
    )
