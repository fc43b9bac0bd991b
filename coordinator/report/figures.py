"""Figures of a run as its report shows them, read from ``summary.json`` and ``metrics.jsonl``.

Agents contributed to these files, so nothing is taken for what it should be: a value of another form counts as absent.
Rounds and agents that were recorded twice (a coordinator was killed between figure and journal) count once, as recorded
last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, TypeVar

Scope = Literal["local", "global", "personal"]
Key = TypeVar("Key", int, str)
Figure = TypeVar("Figure")
_LARGEST = 1e300
"""Leaves room for sums and axes; NaN and infinity do not lie within."""

SCOPES: tuple[Scope, ...] = ("local", "global", "personal")


@dataclass(frozen=True)
class RoundFigures:
    """One round. ``acc`` is scope -> agent -> value in 0..1; ``rejected`` and ``left_out`` are agent -> reason."""

    round: int
    seconds: float | None
    agents: tuple[str, ...]
    missing: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]
    bytes_up: float | None
    bytes_down: float | None
    acc: dict[str, dict[str, float]]
    loss: dict[str, float]
    left_out: tuple[tuple[str, str], ...] = ()

    def mean(self, scope: Scope) -> float | None:
        """Mean over agents; None where no agent reported."""
        values = self.acc.get(scope, {}).values()
        return fmean(values) if values else None

    def worst(self, scope: Scope) -> float | None:
        """Value of the agent that fares worst; None where no agent reported."""
        return min(self.acc.get(scope, {}).values(), default=None)


@dataclass(frozen=True)
class AgentFigures:
    """One agent at the end of the run; None: not known."""

    id: str
    tier: str
    samples: float | None
    acc: dict[str, float]
    head: str
    rss_mb: float | None
    torch_loaded: bool | None
    bytes_up: float | None
    bytes_down: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProxyFigure:
    """The shared model after a round, on samples of the coordinator."""

    round: int
    acc: float
    samples: float | None
    by: str


@dataclass(frozen=True)
class RunFigures:
    """Everything that a report shows."""

    run: str
    summary: dict[str, Any]
    rounds: list[RoundFigures] = field(default_factory=list)
    agents: list[AgentFigures] = field(default_factory=list)
    proxy: list[ProxyFigure] = field(default_factory=list)
    proxy_failed: list[tuple[int, str]] = field(default_factory=list)
    """Why a figure of the proxy could not be computed, and the round when that was first so."""

    def final_mean(self, scope: Scope) -> float | None:
        """Mean over agents at the end; where none reported it, that of the last round that has it."""
        values = [agent.acc[scope] for agent in self.agents if scope in agent.acc]
        if values:
            return fmean(values)
        return next((mean for line in reversed(self.rounds) if (mean := line.mean(scope)) is not None), None)

    def total(self, direction: Literal["bytes_up", "bytes_down"]) -> float | None:
        """Bytes over all rounds; where rounds have none, over all agents."""
        for lines in (self.rounds, self.agents):
            known = [value for line in lines if (value := getattr(line, direction)) is not None]
            if known:
                return math.fsum(known)
        return None


def read_run(run: str, summary: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> RunFigures:
    """The figures in a summary and in records of kinds ``round``, ``agent``, ``proxy`` and ``proxy_failed``."""
    rounds: dict[int, RoundFigures] = {}
    agents: dict[str, AgentFigures] = {}
    proxy: dict[int, ProxyFigure] = {}
    failed: dict[str, int] = {}
    for record in metrics:
        number = as_number(record.get("round"))
        if record.get("kind") == "round" and number is not None:
            rounds[int(number)] = _round(int(number), record)
        elif record.get("kind") == "agent" and isinstance(record.get("id"), str):
            agents[record["id"]] = _agent(record)
        elif record.get("kind") == "proxy" and number is not None and (acc := as_number(record.get("acc"))) is not None:
            by = str(record.get("by") or "")
            proxy[int(number)] = ProxyFigure(int(number), acc, as_number(record.get("samples")), by)
        elif record.get("kind") == "proxy_failed" and number is not None:
            failed.setdefault(str(record.get("reason")), int(number))
    why = [(number, reason) for reason, number in failed.items()]
    return RunFigures(run, dict(summary), _in_order(rounds), _in_order(agents), _in_order(proxy), why)


def _in_order(found: Mapping[Key, Figure]) -> list[Figure]:
    return [found[key] for key in sorted(found)]


def as_number(value: object) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def _round(number: int, record: Mapping[str, Any]) -> RoundFigures:
    return RoundFigures(
        round=number,
        seconds=as_number(record.get("seconds")),
        agents=_names(record.get("agents")),
        missing=_names(record.get("missing")),
        rejected=_reasons(record.get("rejected")),
        left_out=_reasons(record.get("left_out")),
        bytes_up=as_number(record.get("bytes_up")),
        bytes_down=as_number(record.get("bytes_down")),
        acc={scope: _numbers(_of(record.get("acc"), scope)) for scope in SCOPES},
        loss=_numbers(record.get("loss")),
    )


def _agent(record: Mapping[str, Any]) -> AgentFigures:
    torch_loaded = record.get("torch_loaded")
    return AgentFigures(
        id=record["id"],
        tier=str(record.get("tier") or ""),
        samples=as_number(record.get("samples")),
        acc=_numbers(record.get("acc")),
        head=str(record.get("head") or ""),
        rss_mb=as_number(record.get("rss_mb")),
        torch_loaded=torch_loaded if isinstance(torch_loaded, bool) else None,
        bytes_up=as_number(record.get("bytes_up")),
        bytes_down=as_number(record.get("bytes_down")),
        notes=notes_of(record),
    )


def notes_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What a reader has to know about the figures of one agent, each in half a sentence."""
    result = []
    if record.get("rolled_back"):
        result.append(f"rolled back, {record['rolled_back']}; figures are of the new encoder")
    if record.get("one_class") is True:
        result.append("its data have one class only, so its accuracies are meaningless")
    if record.get("samples") == 0:
        result.append("has no samples")
    return tuple(result)


def _of(value: object, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _reasons(value: object) -> tuple[tuple[str, str], ...]:
    return tuple((str(_of(item, "agent")), str(_of(item, "reason"))) for item in _list(value))


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(name) for name in _list(value))


def _numbers(value: object) -> dict[str, float]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {str(key): number for key, item in pairs if (number := as_number(item)) is not None}
