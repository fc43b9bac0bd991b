"""The numbers of an analysis: measures of one state, accuracies by class, traffic, t-SNE."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from edge_agent import heads
from edge_agent.core.errors import MissingCapability
from edge_agent.heads import FitData
from edge_agent.heads._features import fisher_score, keep_top

from ...report.figures import RunFigures, Scope, read_run
from . import measures
from .measures import LEAST_SAMPLES, bounded_perplexity, tsne
from .settings import Settings
from .targets import FeatureView, LabelledSamples, LeftOut, Mixing

Matrix = list[list[float | None]]


def state_of(number: int, views: Sequence[FeatureView], settings: Settings, left_out: LeftOut) -> dict[str, Any]:
    """Return measures of the clients' models after a round as JSON; keys are those of `analyze`."""
    if not views:
        return {"round": number}
    # 1. What cannot be measured is noted first: where a value is missing, a reader finds why.
    _note_undefined(views, left_out)
    # 2. Measures of each client's features, by their kind.
    kinds = list(views[0].kinds)
    result: dict[str, Any] = {
        "round": number,
        "separation": {kind: _separation(views, kind) for kind in kinds},
        "sparsity": {kind: _sparsity(views, kind, settings.threshold) for kind in kinds},
        "fisher": _fisher(views),
    }
    # 3. What a method makes of the encoder's features, beside these.
    if len(kinds) > 1:
        result["before_after"] = {kind: _similarity_to_encoder(views, kind) for kind in kinds if kind != "encoder"}
    has_masks = any(view.mask is not None for view in views)
    if has_masks:
        result["selection"] = _summary({view.client: _selected_share(view) for view in views})
    # 4. Measures of pairs of clients.
    if len(views) > 1:
        result |= _between_clients(views, settings)
    return result


def _note_undefined(views: Sequence[FeatureView], left_out: LeftOut) -> None:
    """Note the measures that are not defined for these clients, each with its reason."""
    if len(views) == 1:
        left_out.note("client-wise CKA and overlap of important features", "there is one client only")
    for view in views:
        if len(np.unique(view.labels)) < 2:
            left_out.note(f"separation and Fisher scores of client {view.client}", "its test samples are of one class")


def _separation(views: Sequence[FeatureView], kind: str) -> dict[str, Any]:
    """Return the class separation of each client's features of a kind."""
    return _summary({view.client: measures.class_separation(view.kinds[kind], view.labels) for view in views})


def _sparsity(views: Sequence[FeatureView], kind: str, threshold: float) -> dict[str, Any]:
    """Return the sparsity ratio of each client's features of a kind."""
    return _summary({view.client: measures.sparsity_ratio(view.kinds[kind], threshold) for view in views})


def _similarity_to_encoder(views: Sequence[FeatureView], kind: str) -> dict[str, Any]:
    """Return the linear CKA of each client's encoder features and of those of another kind."""
    return _summary({view.client: measures.linear_cka(view.features, view.kinds[kind]) for view in views})


def _selected_share(view: FeatureView) -> float | None:
    """Return the share of features that the client's mask picks; None without a mask."""
    if view.mask is None:
        return None
    return float(view.mask.mean())


def mixing_body(mixing: Mixing, groups: Mapping[str, str]) -> dict[str, Any]:
    """Return the weights of combined classifiers as JSON, with the shares of `measures.group_mass`.

    Args:
        mixing: The weights.
        groups: Client -> name of its group. Where that of a client is not known, only its own share is computed.
    """
    result: dict[str, Any] = {"clients": list(mixing.clients), "weights": as_matrix(mixing.weights)}
    are_groups_known = all(client in groups for client in mixing.clients)
    if not are_groups_known:
        result["own"] = measures.group_mass(mixing.weights, list(mixing.clients))["own"]
        return result
    result["groups"] = [groups[client] for client in mixing.clients]
    return result | measures.group_mass(mixing.weights, result["groups"])


def as_matrix(matrix: np.ndarray) -> Matrix:
    """Return a matrix as JSON: four digits, None for what is not defined."""
    return [_row(values) for values in matrix]


def _row(values: np.ndarray) -> list[float | None]:
    """Return a row of a matrix as JSON, see `as_matrix`."""
    return [_four_digits(value) for value in values]


def _four_digits(value: float) -> float | None:
    """Return a number rounded to four decimals; None for NaN."""
    if np.isnan(value):
        return None
    return round(float(value), 4)


def _summary(clients: dict[str, float | None]) -> dict[str, Any]:
    """Return a measure of each client, and its mean over the clients for which it is defined."""
    return {"mean": _mean(list(clients.values())), "clients": clients}


def _fisher(views: Sequence[FeatureView]) -> dict[str, dict[str, Any]]:
    """Return the mean Fisher score by kind of features.

    Where clients have a mask, the features that it picks and the others are kinds as well.
    """
    kinds = list(views[0].kinds)
    if views[0].mask is not None:
        kinds += ["relevant", "irrelevant"]
    return {kind: _fisher_of_kind(views, kind) for kind in kinds}


def _fisher_of_kind(views: Sequence[FeatureView], kind: str) -> dict[str, Any]:
    """Return the mean Fisher score of each client's features of a kind, and how many features are left out of it."""
    means: dict[str, float | None] = {}
    infinite: dict[str, int] = {}
    for view in views:
        score = measures.mean_fisher(_features_of_kind(view, kind), view.labels)
        if score is None:
            means[view.client] = None
            continue
        mean, infinite_count = score
        means[view.client] = mean
        if infinite_count:
            infinite[view.client] = infinite_count
    return {**_summary(means), "infinite": infinite}


def _features_of_kind(view: FeatureView, kind: str) -> np.ndarray:
    """Return the features (n, d) of a kind; of a mask's kinds only the columns that are not 0 for all samples."""
    if kind in view.kinds:
        return view.kinds[kind]
    masked = view.features_to_draw()[kind]
    return masked[:, (masked != 0).any(axis=0)]


def _between_clients(views: Sequence[FeatureView], settings: Settings) -> dict[str, Any]:
    """Return the overlap of important features, and the CKA of features of the same samples, for pairs of clients."""
    names = [view.client for view in views]
    choices = [measures.important(_importance(view), settings.important) for view in views]
    criterion = "fisher" if views[0].mask is None else "mask"
    result: dict[str, Any] = {"overlap": {"by": criterion, **_pairs(names, measures.overlap_matrix(choices))}}
    if views[0].probe:
        result["cka"] = {}
        for kind in views[0].probe:
            similarities = measures.cka_matrix([view.probe[kind] for view in views])
            result["cka"][kind] = _pairs(names, similarities)
    return result


def _importance(view: FeatureView) -> np.ndarray:
    """Return how often the mask picks each feature (d,), or, without one, the features' Fisher scores."""
    if view.mask is None:
        return fisher_score(view.features, view.labels)
    return np.asarray(view.mask.mean(axis=0))


def _pairs(names: Sequence[str], matrix: np.ndarray) -> dict[str, Any]:
    """Return a measure of pairs of clients as JSON, with its mean over pairs."""
    return {"mean": measures.mean_of_pairs(matrix), "clients": list(names), "matrix": as_matrix(matrix)}


SCOPES: tuple[Scope, ...] = ("global", "personal")
"""Scopes that rounds change; ``local`` does not depend on rounds."""


def communication(run: str, metrics: Iterable[Mapping[str, Any]], targets: Sequence[float]) -> dict[str, Any] | None:
    """Return bytes of a run by round and in total, and what each target took, as JSON; None without a single round.

    Accuracies that agents report in round r belong to the model after r - 1 rounds, those at the end to the last model.
    """
    figures = read_run(run, {}, metrics)
    if not figures.rounds:
        return None
    # 1. What each round moved, and how many agents took part.
    traffic = list[Traffic]()
    agent_ids = {agent.id for agent in figures.agents}
    for one_round in figures.rounds:
        traffic.append(Traffic(one_round.round, one_round.bytes_up or 0.0, one_round.bytes_down or 0.0))
        agent_ids.update(one_round.agents)
    # 2. What each accuracy took, for every scope that agents have reported.
    reported_models = {scope: _reported_models(figures, scope) for scope in SCOPES}
    reported_scopes = [scope for scope in SCOPES if reported_models[scope]]
    costs = []
    for target, scope in itertools.product(targets, reported_scopes):
        cost = _cost_of(target, reported_models[scope], traffic, len(agent_ids))
        costs.append({"target": target, "scope": scope, **cost})
    return {
        "agents": len(agent_ids),
        "rounds": len(traffic),
        "bytes_up": math.fsum(moved.bytes_up for moved in traffic),
        "bytes_down": math.fsum(moved.bytes_down for moved in traffic),
        "by_round": [moved._asdict() for moved in traffic],
        "targets": costs,
    }


class Traffic(NamedTuple):
    """Bytes of one round from and to all agents."""

    round: int
    bytes_up: float
    bytes_down: float


def _reported_models(figures: RunFigures, scope: Scope) -> list[tuple[int, float]]:
    """Return (rounds done, mean accuracy over agents) of each model that agents have reported on."""
    models = []
    for one_round in figures.rounds:
        mean = one_round.mean(scope)
        if mean is not None:
            models.append((one_round.round - 1, mean))
    final = [agent.acc[scope] for agent in figures.agents if scope in agent.acc]
    if final:
        models.append((figures.rounds[-1].round, fmean(final)))
    return models


def _cost_of(
    target: float, models: Sequence[tuple[int, float]], traffic: Sequence[Traffic], agents: int
) -> dict[str, Any]:
    """Return the rounds and bytes up to the first model whose accuracy is at least ``target``, as JSON.

    Args:
        target: The accuracy, 0..1.
        models: (Rounds done, accuracy) of each model.
        traffic: The bytes of each round.
        agents: The number of agents that the bytes are divided by.

    Returns:
        The cost; where no model has reached the target, the best accuracy instead.
    """
    reached = [(done, acc) for done, acc in models if acc >= target - 1e-12]
    if not reached:
        return {"reached": False, "best": max(acc for _, acc in models)}
    done, acc = reached[0]
    needed = [moved for moved in traffic if moved.round <= done]
    up = math.fsum(moved.bytes_up for moved in needed)
    down = math.fsum(moved.bytes_down for moved in needed)
    return {
        "reached": True,
        "rounds_done": done,
        "acc": acc,
        "bytes_up": up,
        "bytes_down": down,
        "bytes_per_agent": (up + down) / max(1, agents),
    }


RATIOS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 11))
"""Shares of the features that the head of the probe sees."""

PROBE_HEAD = "knn"


def accuracies(views: Sequence[FeatureView], class_names: Sequence[str]) -> dict[str, Any]:
    """Return accuracies by scope and client as JSON: of all, head and tail classes, and of each (RepPer, Fig. 5)."""
    # Scopes in the order in which clients have them.
    scopes = dict[str, None]()
    for view in views:
        scopes.update(dict.fromkeys(view.answers))
    result: dict[str, Any] = {}
    for scope in scopes:
        clients = {view.client: _classes(view, scope, class_names) for view in views if scope in view.answers}
        result[scope] = {"clients": clients}
        for part in ("all", "head", "tail"):
            result[scope][part] = _mean([of_client[part] for of_client in clients.values()])
    return result


def _classes(view: FeatureView, scope: str, class_names: Sequence[str]) -> dict[str, Any]:
    """Return one client's classes from most to fewest training samples, as JSON.

    ``all`` counts samples alike; ``head`` and ``tail`` count classes alike.
    """
    answers = view.answers[scope]
    by_class = measures.class_accuracies(answers, view.truth)
    tested = np.bincount(view.truth, minlength=len(class_names))
    head, tail = measures.head_and_tail(view.counts)
    rows = []
    for label in np.argsort(-view.counts, kind="stable"):
        train_count = int(view.counts[label])
        test_count = int(tested[label])
        if train_count or test_count:
            acc = by_class.get(int(label))
            rows.append({"class": class_names[label], "train": train_count, "test": test_count, "acc": acc})
    return {
        "all": float((answers == view.truth).mean()),
        "head": _mean([by_class.get(label) for label in head]),
        "tail": _mean([by_class.get(label) for label in tail]),
        "classes": rows,
    }


def probe(
    views: Sequence[FeatureView], num_classes: int, settings: Settings, left_out: LeftOut
) -> dict[str, Any] | None:
    """Return test accuracies of nearest neighbours on the features of highest Fisher score, by share kept, as JSON.

    This is FedPick's Fig. 1. Scores are of training samples. None where no client has two classes to train on.
    """
    clients = {}
    for view in views:
        if view.trained is None or len(np.unique(view.trained.labels)) < 2:
            left_out.note(f"accuracy by share of features of client {view.client}", "it trains on one class")
            continue
        scores = fisher_score(view.trained.inputs, view.trained.labels)
        clients[view.client] = [
            _probe_accuracy(view, view.trained, keep_top(scores, ratio), num_classes, settings.seed) for ratio in RATIOS
        ]
    if not clients:
        return None
    means = [fmean(values) for values in zip(*clients.values(), strict=True)]
    return {"head": PROBE_HEAD, "ratios": list(RATIOS), "mean": means, "clients": clients}


def _probe_accuracy(
    view: FeatureView, trained: LabelledSamples, kept: np.ndarray, num_classes: int, seed: int
) -> float:
    """Return the test accuracy (0..1) of nearest neighbours that see only some features of a client's samples.

    Args:
        view: The client's features, with the labels of its test samples.
        trained: The features (m, d) of its training samples, with their labels.
        kept: The features that the neighbours see, (d,) bool.
        num_classes: The number of classes of the task.
        seed: Seed of the head.
    """
    head = heads.create(PROBE_HEAD)
    data = FitData(np.ascontiguousarray(trained.inputs[:, kept]), trained.labels, num_classes)
    head.fit(data, np.random.default_rng(seed))
    answers = head.predict_proba(np.ascontiguousarray(view.features[:, kept])).argmax(axis=1)
    return float((answers == view.labels).mean())


def drawings(views: Sequence[FeatureView], settings: Settings, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Yield the points of the first clients' features by t-SNE as JSON, one drawing for each client and kind."""
    for view in views[: settings.tsne]:
        if len(view.labels) < LEAST_SAMPLES:
            left_out.note(f"t-SNE of client {view.client}", f"fewer than {LEAST_SAMPLES} test samples")
            continue
        for name, features in view.features_to_draw().items():
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
    """Return the mean of the values that are defined; None where none is."""
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    return fmean(defined)
