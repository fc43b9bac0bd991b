"""One state of a run in numbers: separation, CKA, sparsity, selection, Fisher scores, overlap, mixing weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from edge_agent.heads._features import fisher_score

from ...report.figures import RunFigures, Scope, read_run
from . import measures
from .views import LeftOut, Look, Mixing, Settings

Matrix = list[list[float | None]]


def state_of(number: int, looks: Sequence[Look], settings: Settings, left_out: LeftOut) -> dict[str, Any]:
    """Measures of the clients' models after a round; keys are those of `analyze`."""
    if not looks:
        return {"round": number}
    left_out_of_state(looks, left_out)
    found: dict[str, Any] = {
        "round": number,
        "separation": _views(looks, lambda look, view: measures.class_separation(look.views[view], look.labels)),
        "sparsity": _views(looks, lambda look, view: measures.sparsity_ratio(look.views[view], settings.threshold)),
        "fisher": dict(_fisher(looks)),
    }
    later = [view for view in looks[0].views if view != "encoder"]
    if later:
        found["before_after"] = {view: _spread(looks, _before_after(view)) for view in later}
    if any(look.mask is not None for look in looks):
        found["selection"] = _spread(looks, lambda look: None if look.mask is None else float(look.mask.mean()))
    if len(looks) > 1:
        found |= _between_clients(looks, settings)
    return found


def left_out_of_state(looks: Sequence[Look], left_out: LeftOut) -> None:
    """Say what one client, or one class, does not allow."""
    if len(looks) == 1:
        left_out.note("client-wise CKA and overlap of important features", "there is one client only")
    for look in looks:
        if len(np.unique(look.labels)) < 2:
            left_out.note(f"separation and Fisher scores of client {look.client}", "its test samples are of one class")


def mixing_body(mixing: Mixing, groups: Mapping[str, str]) -> dict[str, Any]:
    """Weights of combined classifiers, and what falls on clients of the same group where groups are known."""
    found: dict[str, Any] = {"clients": list(mixing.clients), "weights": as_matrix(mixing.weights)}
    known = [groups.get(client) for client in mixing.clients]
    if all(group is not None for group in known):
        found["groups"] = known
        found |= measures.group_mass(mixing.weights, [str(group) for group in known])
    else:
        found["own"] = measures.group_mass(mixing.weights, list(mixing.clients))["own"]
    return found


def as_matrix(matrix: np.ndarray) -> Matrix:
    """As JSON: four digits, None for what is not defined."""
    return [[None if np.isnan(value) else round(float(value), 4) for value in row] for row in matrix]


# --- inside ----------------------------------------------------------------------------------------------------------


def _views(looks: Sequence[Look], measure: Callable[[Look, str], float | None]) -> dict[str, Any]:
    return {view: _spread(looks, partial(_of_view, measure, view)) for view in looks[0].views}


def _of_view(measure: Callable[[Look, str], float | None], view: str, look: Look) -> float | None:
    return measure(look, view)


def _spread(looks: Sequence[Look], measure: Callable[[Look], float | None]) -> dict[str, Any]:
    """A measure of each client, and its mean over those for whom it is defined."""
    clients = {look.client: measure(look) for look in looks}
    known = [value for value in clients.values() if value is not None]
    return {"mean": fmean(known) if known else None, "clients": clients}


def _before_after(view: str) -> Callable[[Look], float | None]:
    return lambda look: measures.linear_cka(look.features, look.views[view])


def _fisher(looks: Sequence[Look]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Mean Fisher score by kind of features; of those that a mask picks, only features that it ever picks."""
    kinds = {"encoder": lambda look: look.features, **{v: _view_of(v) for v in looks[0].views if v != "encoder"}}
    if looks[0].mask is not None:
        kinds |= {name: _used(name) for name in ("relevant", "irrelevant")}
    for name, pick in kinds.items():
        scores = {look.client: measures.mean_fisher(pick(look), look.labels) for look in looks}
        means = [score[0] for score in scores.values() if score is not None]
        yield (
            name,
            {
                "mean": fmean(means) if means else None,
                "clients": {client: None if score is None else score[0] for client, score in scores.items()},
                "infinite": {client: score[1] for client, score in scores.items() if score is not None and score[1]},
            },
        )


def _view_of(view: str) -> Callable[[Look], np.ndarray]:
    return lambda look: look.views[view]


def _used(name: str) -> Callable[[Look], np.ndarray]:
    def pick(look: Look) -> np.ndarray:
        found = look.drawn()[name]
        return found[:, (found != 0).any(axis=0)]

    return pick


def _between_clients(looks: Sequence[Look], settings: Settings) -> dict[str, Any]:
    names = [look.client for look in looks]
    choices = [measures.important(_importance(look), settings.important) for look in looks]
    found: dict[str, Any] = {"overlap": {"by": "mask" if looks[0].mask is not None else "fisher"}}
    found["overlap"] |= _pairs(names, measures.overlap_matrix(choices))
    if looks[0].probe:
        kinds = looks[0].probe
        found["cka"] = {v: _pairs(names, measures.cka_matrix([look.probe[v] for look in looks])) for v in kinds}
    return found


def _importance(look: Look) -> np.ndarray:
    """How often the mask picks each feature, or, without one, the features' Fisher scores."""
    return fisher_score(look.features, look.labels) if look.mask is None else look.mask.mean(axis=0)


def _pairs(names: Sequence[str], matrix: np.ndarray) -> dict[str, Any]:
    return {"mean": measures.mean_of_pairs(matrix), "clients": list(names), "matrix": as_matrix(matrix)}


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
