"""The numbers of an analysis: measures of one state, accuracies by class, traffic, t-SNE."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from edge_agent import heads
from edge_agent.core.errors import MissingCapability
from edge_agent.heads import FitData
from edge_agent.heads._features import fisher_score, keep_top

from ...report.figures import Scope, read_run
from . import measures
from .measures import LEAST_SAMPLES, bounded_perplexity, tsne
from .settings import Settings
from .targets import FeatureView, LeftOut, Mixing

Matrix = list[list[float | None]]


def state_of(number: int, views: Sequence[FeatureView], settings: Settings, left_out: LeftOut) -> dict[str, Any]:
    """Measures of the clients' models after a round; keys are those of `analyze`."""
    if not views:
        return {"round": number}
    if len(views) == 1:
        left_out.note("client-wise CKA and overlap of important features", "there is one client only")
    for view in views:
        if len(np.unique(view.labels)) < 2:
            left_out.note(f"separation and Fisher scores of client {view.client}", "its test samples are of one class")
    kinds = list(views[0].kinds)
    result: dict[str, Any] = {
        "round": number,
        "separation": {
            kind: _summary({view.client: measures.class_separation(view.kinds[kind], view.labels) for view in views})
            for kind in kinds
        },
        "sparsity": {
            kind: _summary(
                {view.client: measures.sparsity_ratio(view.kinds[kind], settings.threshold) for view in views}
            )
            for kind in kinds
        },
        "fisher": _fisher(views),
    }
    if len(kinds) > 1:
        result["before_after"] = {
            kind: _summary({view.client: measures.linear_cka(view.features, view.kinds[kind]) for view in views})
            for kind in kinds
            if kind != "encoder"
        }
    if any(view.mask is not None for view in views):
        result["selection"] = _summary(
            {view.client: None if view.mask is None else float(view.mask.mean()) for view in views}
        )
    if len(views) > 1:
        result |= _between_clients(views, settings)
    return result


def mixing_body(mixing: Mixing, groups: Mapping[str, str]) -> dict[str, Any]:
    """Weights of combined classifiers, and the share of clients of the same group where groups are known."""
    result: dict[str, Any] = {"clients": list(mixing.clients), "weights": as_matrix(mixing.weights)}
    known = [groups.get(client) for client in mixing.clients]
    if all(group is not None for group in known):
        result["groups"] = known
        result |= measures.group_mass(mixing.weights, [str(group) for group in known])
    else:
        result["own"] = measures.group_mass(mixing.weights, list(mixing.clients))["own"]
    return result


def as_matrix(matrix: np.ndarray) -> Matrix:
    """As JSON: four digits, None for what is not defined."""
    return [[None if np.isnan(value) else round(float(value), 4) for value in row] for row in matrix]


def _summary(clients: dict[str, float | None]) -> dict[str, Any]:
    """A measure of each client, and its mean over the clients for which it is defined."""
    return {"mean": _mean(list(clients.values())), "clients": clients}


def _fisher(views: Sequence[FeatureView]) -> dict[str, dict[str, Any]]:
    """Mean Fisher score by kind of features; with a mask also of the features that it ever picks, and of the others."""
    kinds = list(views[0].kinds)
    if views[0].mask is not None:
        kinds += ["relevant", "irrelevant"]
    result = {}
    for kind in kinds:
        scores = {}
        for view in views:
            features = view.kinds.get(kind)
            if features is None:
                features = view.drawn()[kind]
                features = features[:, (features != 0).any(axis=0)]
            scores[view.client] = measures.mean_fisher(features, view.labels)
        means = {client: None if score is None else score[0] for client, score in scores.items()}
        result[kind] = {
            "mean": _mean(list(means.values())),
            "clients": means,
            "infinite": {client: score[1] for client, score in scores.items() if score is not None and score[1]},
        }
    return result


def _between_clients(views: Sequence[FeatureView], settings: Settings) -> dict[str, Any]:
    names = [view.client for view in views]
    # How often the mask picks each feature, or, without one, the features' Fisher scores.
    importance = (fisher_score(v.features, v.labels) if v.mask is None else v.mask.mean(axis=0) for v in views)
    choices = [measures.important(scores, settings.important) for scores in importance]
    result: dict[str, Any] = {"overlap": {"by": "mask" if views[0].mask is not None else "fisher"}}
    result["overlap"] |= _pairs(names, measures.overlap_matrix(choices))
    if views[0].probe:
        kinds = views[0].probe
        result["cka"] = {k: _pairs(names, measures.cka_matrix([view.probe[k] for view in views])) for k in kinds}
    return result


def _pairs(names: Sequence[str], matrix: np.ndarray) -> dict[str, Any]:
    return {"mean": measures.mean_of_pairs(matrix), "clients": list(names), "matrix": as_matrix(matrix)}


SCOPES: tuple[Scope, ...] = ("global", "personal")
"""Scopes that rounds change; ``local`` does not depend on rounds."""


def communication(run: str, metrics: Iterable[Mapping[str, Any]], targets: Sequence[float]) -> dict[str, Any] | None:
    """Bytes of a run by round and in total, and what each target took; None without a single round.

    Accuracies that agents report in round r belong to the model after r - 1 rounds, those at the end to the last model.
    """
    figures = read_run(run, {}, metrics)
    if not figures.rounds:
        return None
    rounds = [
        {"round": line.round, "bytes_up": line.bytes_up or 0.0, "bytes_down": line.bytes_down or 0.0}
        for line in figures.rounds
    ]
    agents = len({name for line in figures.rounds for name in line.agents} | {agent.id for agent in figures.agents})
    reported: dict[Scope, list[tuple[int, float]]] = {}
    for scope in SCOPES:  # (rounds done, mean accuracy over agents) of each model that agents reported on
        models = [(line.round - 1, mean) for line in figures.rounds if (mean := line.mean(scope)) is not None]
        final = [agent.acc[scope] for agent in figures.agents if scope in agent.acc]
        models += [(figures.rounds[-1].round, fmean(final))] if final else []
        if models:
            reported[scope] = models
    return {
        "agents": agents,
        "rounds": len(rounds),
        **{name: math.fsum(line[name] for line in rounds) for name in ("bytes_up", "bytes_down")},
        "by_round": rounds,
        "targets": [
            {"target": target, "scope": scope, **_cost_of(target, models, rounds, agents)}
            for target in targets
            for scope, models in reported.items()
        ],
    }


def _cost_of(
    target: float, models: Sequence[tuple[int, float]], rounds: Sequence[Mapping[str, float]], agents: int
) -> dict[str, Any]:
    """Rounds and bytes up to the first model whose accuracy is at least ``target``; else the best accuracy."""
    reached = [(done, acc) for done, acc in models if acc >= target - 1e-12]
    if not reached:
        return {"reached": False, "best": max(acc for _, acc in models)}
    done, acc = reached[0]
    up, down = (
        math.fsum(line[name] for line in rounds if line["round"] <= done) for name in ("bytes_up", "bytes_down")
    )
    costs = {"bytes_up": up, "bytes_down": down, "bytes_per_agent": (up + down) / (agents or 1)}
    return {"reached": True, "rounds_done": done, "acc": acc, **costs}


RATIOS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 11))
"""Shares of the features that are kept for the probe."""

PROBE_HEAD = "knn"


def accuracies(views: Sequence[FeatureView], class_names: Sequence[str]) -> dict[str, Any]:
    """Accuracy of each class by scope and client and its training samples; head and tail classes (RepPer, Fig. 5)."""
    result = {}
    for scope in dict.fromkeys(scope for view in views for scope in view.answers):
        clients = {view.client: _classes(view, scope, class_names) for view in views if scope in view.answers}
        result[scope] = {
            "clients": clients,
            **{part: _mean([one[part] for one in clients.values()]) for part in ("all", "head", "tail")},
        }
    return result


def _classes(view: FeatureView, scope: str, class_names: Sequence[str]) -> dict[str, Any]:
    """One client's classes from most to fewest training samples; ``all`` counts samples alike, the others classes."""
    answers = view.answers[scope]
    by_class = measures.class_accuracies(answers, view.truth)
    tested = np.bincount(view.truth, minlength=len(class_names))
    order = np.argsort(-view.counts, kind="stable")
    groups = dict(zip(("head", "tail"), measures.head_and_tail(view.counts), strict=True))
    rows = [
        {
            "class": class_names[label],
            "train": int(view.counts[label]),
            "test": int(tested[label]),
            "acc": by_class.get(int(label)),
        }
        for label in order
        if view.counts[label] or tested[label]
    ]
    parts = {name: _mean([by_class.get(label) for label in labels]) for name, labels in groups.items()}
    return {"all": float((answers == view.truth).mean()), **parts, "classes": rows}


def probe(
    views: Sequence[FeatureView], num_classes: int, settings: Settings, left_out: LeftOut
) -> dict[str, Any] | None:
    """Test accuracy of nearest neighbours on the features of highest Fisher score (FedPick, Fig. 1), by share kept.

    Scores are of training samples. None where no client has two classes to train on.
    """
    clients = {}
    for view in views:
        if view.trained is None or len(np.unique(view.trained.labels)) < 2:
            left_out.note(f"accuracy by share of features of client {view.client}", "it trains on one class")
            continue
        features = view.trained.inputs
        labels = view.trained.labels
        clients[view.client] = accuracies = list[float]()
        for ratio in RATIOS:
            kept = keep_top(fisher_score(features, labels), ratio)
            head = heads.create(PROBE_HEAD)
            data = FitData(np.ascontiguousarray(features[:, kept]), labels, num_classes)
            head.fit(data, np.random.default_rng(settings.seed))
            answers = head.predict_proba(np.ascontiguousarray(view.features[:, kept])).argmax(axis=1)
            accuracies.append(float((answers == view.labels).mean()))
    if not clients:
        return None
    means = [fmean(values) for values in zip(*clients.values(), strict=True)]
    return {"head": PROBE_HEAD, "ratios": list(RATIOS), "mean": means, "clients": clients}


def drawings(views: Sequence[FeatureView], settings: Settings, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Points of the first clients' features by t-SNE, one drawing for each client and kind of features."""
    for view in views[: settings.tsne]:
        if len(view.labels) < LEAST_SAMPLES:
            left_out.note(f"t-SNE of client {view.client}", f"fewer than {LEAST_SAMPLES} test samples")
            continue
        for name, features in view.drawn().items():
            try:
                points = tsne(features, settings.perplexity, settings.seed)
            except MissingCapability as error:
                left_out.note("t-SNE", str(error))
                return
            if points is not None:
                yield {
                    "client": view.client,
                    "features": name,
                    "perplexity": bounded_perplexity(settings.perplexity, len(points)),
                    "labels": view.labels.tolist(),
                    "points": [[round(float(x), 3), round(float(y), 3)] for x, y in points],
                }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
