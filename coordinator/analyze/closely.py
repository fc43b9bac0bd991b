"""The last state from close by: accuracies of classes, how many features a classifier needs, features drawn flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from edge_agent import heads
from edge_agent.errors import MissingCapability
from edge_agent.heads import FitData
from edge_agent.heads._selection import fisher_score, keep_top

from . import measures
from .embedding import LEAST_SAMPLES, bounded_perplexity, tsne
from .looks import LeftOut, Look, Part, Settings

RATIOS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 11))
"""Shares of the features that are kept for the probe."""

PROBE_HEAD = "knn"


def accuracies(looks: Sequence[Look], class_names: Sequence[str]) -> dict[str, Any]:
    """Accuracy of each class by scope and client and its training samples; head and tail classes (RepPer, Fig. 5)."""
    found = {}
    for scope in dict.fromkeys(scope for look in looks for scope in look.answers):
        clients = {look.client: _classes(look, scope, class_names) for look in looks if scope in look.answers}
        found[scope] = {
            "clients": clients,
            **{part: _mean([one[part] for one in clients.values()]) for part in ("all", "head", "tail")},
        }
    return found


def _classes(look: Look, scope: str, class_names: Sequence[str]) -> dict[str, Any]:
    """One client's classes from most to fewest training samples; ``all`` counts samples alike, the others classes."""
    answers = look.answers[scope]
    told = measures.class_accuracies(answers, look.truth)
    tested = np.bincount(look.truth, minlength=len(class_names))
    order = np.argsort(-look.counts, kind="stable")
    groups = dict(zip(("head", "tail"), measures.head_and_tail(look.counts), strict=True))
    rows = [
        {
            "class": class_names[label],
            "train": int(look.counts[label]),
            "test": int(tested[label]),
            "acc": told.get(int(label)),
        }
        for label in order
        if look.counts[label] or tested[label]
    ]
    parts = {name: _mean([told.get(label) for label in labels]) for name, labels in groups.items()}
    return {"all": float((answers == look.truth).mean()), **parts, "classes": rows}


def probe(looks: Sequence[Look], num_classes: int, settings: Settings, left_out: LeftOut) -> dict[str, Any] | None:
    """Test accuracy of nearest neighbours on the features of highest Fisher score (FedPick, Fig. 1), by share kept.

    Scores are of training samples. None where nobody has two classes to train on.
    """
    clients = {}
    for look in looks:
        if look.trained is None or len(np.unique(look.trained.labels)) < 2:
            left_out.note(f"accuracy by share of features of client {look.client}", "it trains on one class")
            continue
        clients[look.client] = [_probed(look, look.trained, ratio, num_classes, settings.seed) for ratio in RATIOS]
    if not clients:
        return None
    means = [fmean(values) for values in zip(*clients.values(), strict=True)]
    return {"head": PROBE_HEAD, "ratios": list(RATIOS), "mean": means, "clients": clients}


def _probed(look: Look, trained: Part, ratio: float, num_classes: int, seed: int) -> float:
    features, labels = trained.inputs, trained.labels
    kept = keep_top(fisher_score(features, labels), ratio)
    head = heads.create(PROBE_HEAD)
    head.fit(FitData(np.ascontiguousarray(features[:, kept]), labels, num_classes), np.random.default_rng(seed))
    answers = head.predict_proba(np.ascontiguousarray(look.features[:, kept])).argmax(axis=1)
    return float((answers == look.labels).mean())


def drawings(looks: Sequence[Look], settings: Settings, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """Points of the first clients' features by t-SNE, one drawing for each client and kind of features."""
    for look in looks[: settings.tsne]:
        if len(look.labels) < LEAST_SAMPLES:
            left_out.note(f"t-SNE of client {look.client}", f"fewer than {LEAST_SAMPLES} test samples")
            continue
        for name, features in look.drawn().items():
            try:
                points = tsne(features, settings.perplexity, settings.seed)
            except MissingCapability as error:
                left_out.note("t-SNE", str(error))
                return
            if points is not None:
                yield {
                    "client": look.client,
                    "features": name,
                    "perplexity": bounded_perplexity(settings.perplexity, len(points)),
                    "labels": look.labels.tolist(),
                    "points": [[round(float(x), 3), round(float(y), 3)] for x, y in points],
                }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
