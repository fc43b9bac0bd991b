"""What a run sent, and after how many rounds and bytes it reached an accuracy (DualFed, Table 8)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..report.figures import RunFigures, Scope, read_run

SCOPES: tuple[Scope, ...] = ("global", "personal")
"""What rounds change; ``local`` is there without any."""


@dataclass(frozen=True)
class _Standing:
    """A model that was there after so many rounds: its mean accuracy over agents."""

    rounds_done: int
    acc: float


def communication(run: str, metrics: Iterable[Mapping[str, Any]], targets: Sequence[float]) -> dict[str, Any] | None:
    """Bytes of a run, round by round and in all, and what each target took; None without a single round.

    What agents tell in round r is of the model that r - 1 rounds have made; what they tell at the end is of all rounds.
    """
    figures = read_run(run, {}, metrics)
    if not figures.rounds:
        return None
    rounds = list(_rounds(figures))
    agents = len({name for line in figures.rounds for name in line.agents} | {agent.id for agent in figures.agents})
    return {
        "agents": agents,
        "rounds": len(rounds),
        **{name: math.fsum(line[name] for line in rounds) for name in ("bytes_up", "bytes_down")},
        "by_round": rounds,
        "targets": [
            _reached(target, scope, list(_standings(figures, scope)), rounds, agents)
            for target in targets
            for scope in SCOPES
            if any(True for _ in _standings(figures, scope))
        ],
    }


def _rounds(figures: RunFigures) -> Iterator[dict[str, float]]:
    for line in figures.rounds:
        yield {"round": line.round, "bytes_up": line.bytes_up or 0.0, "bytes_down": line.bytes_down or 0.0}


def _standings(figures: RunFigures, scope: Scope) -> Iterator[_Standing]:
    for line in figures.rounds:
        mean = line.mean(scope)
        if mean is not None:
            yield _Standing(line.round - 1, mean)
    final = [agent.acc[scope] for agent in figures.agents if scope in agent.acc]
    if final:
        yield _Standing(figures.rounds[-1].round, fmean(final))


def _reached(
    target: float, scope: str, standings: Sequence[_Standing], rounds: Sequence[Mapping[str, float]], agents: int
) -> dict[str, Any]:
    """The first model whose mean accuracy is at least the target, and what it had cost; else the best there was."""
    first = next((standing for standing in standings if standing.acc >= target - 1e-12), None)
    found: dict[str, Any] = {"target": target, "scope": scope, "reached": first is not None}
    if first is None:
        return {**found, "best": max(standing.acc for standing in standings)}
    spent = [line for line in rounds if line["round"] <= first.rounds_done]
    up, down = (math.fsum(line[name] for line in spent) for name in ("bytes_up", "bytes_down"))
    costs = {"bytes_up": up, "bytes_down": down, "bytes_per_agent": (up + down) / (agents or 1)}
    return {**found, "rounds_done": first.rounds_done, "acc": first.acc, **costs}
