"""One state of a run in numbers: separation, CKA, sparsity, selection, Fisher scores, overlap, mixing weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from edge_agent.heads._selection import fisher_score

from . import measures
from .looks import LeftOut, Look, Mixing, Settings

Matrix = list[list[float | None]]


def state_of(number: int, looks: Sequence[Look], settings: Settings, left_out: LeftOut) -> dict[str, Any]:
    """What can be said of the clients' models after a round, by measure; keys are those of `coordinator.analyze`."""
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
