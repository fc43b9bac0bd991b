"""What an analysis looks at: samples of clients, and what one client's model makes of them at one state of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from edge_agent import heads
from edge_agent.errors import MissingCapability, UsageError
from edge_agent.heads import FitData
from edge_agent.heads._features import fisher_score, keep_top

from . import measures
from .measures import LEAST_SAMPLES, bounded_perplexity, tsne

Kind = Literal["simulation", "run", "bundle"]


@dataclass(frozen=True)
class Settings:
    """What may be chosen. All but ``targets`` and ``head`` concern features."""

    targets: tuple[float, ...] = ()
    """Accuracies, 0..1, for the rounds and bytes that it took to reach them."""

    samples: int = 300
    """Test samples of each client whose features are looked at; accuracies are of all of them."""

    probe: int = 256
    """Samples, taken evenly from all clients, on which the features of different clients are compared."""

    threshold: float = 0.01
    """Of the sparsity ratio; ours, for the paper's is lost."""

    important: float = 0.5
    """Share of the features that count as a client's important ones (FedPick, Sec. VIII-B)."""

    tsne: int = 4
    """Clients whose features are drawn by t-SNE; 0 = none."""

    perplexity: float = 30.0
    head: str = "lr"
    """Device head that is fitted where personal parts are not to be had."""

    test_fraction: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise UsageError("; ".join(mistakes))

    def _mistakes(self) -> Iterator[str]:
        rules = {
            "--samples": (self.samples, self.samples >= 1, "1 or more"),
            "--probe": (self.probe, self.probe >= 2, "2 or more"),
            "--threshold": (self.threshold, 0 < self.threshold <= 1, "above 0 and at most 1"),
            "--important": (self.important, 0 < self.important <= 1, "above 0 and at most 1"),
            "--tsne": (self.tsne, self.tsne >= 0, "0 or more"),
            "--perplexity": (self.perplexity, 1 <= self.perplexity < 1e6, "1 or more"),
            "--test-fraction": (self.test_fraction, 0 < self.test_fraction < 1, "above 0 and below 1"),
            "--seed": (self.seed, 0 <= self.seed < 1 << 32, "0 to 4294967295"),
        }
        yield from (
            f"{o} {value:g}: expected {expected}" for o, (value, is_fine, expected) in rules.items() if not is_fine
        )
        yield from (f"--target {t:g}: expected a share above 0 and at most 1" for t in self.targets if not 0 < t <= 1)

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "targets": list(self.targets)}


@dataclass(frozen=True)
class Part:
    """Labelled samples: inputs (n, ...) float32, labels (n,) int64."""

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int, seed: int) -> Part:
        """At most ``count`` of them, drawn at random and left in their order."""
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        return Part(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True)
class Holding:
    """One client's samples."""

    train: Part
    test: Part


@dataclass(frozen=True)
class Look:
    """What one client's model makes of its samples, and of those that all clients are compared on.

    ``labels`` (n,) belong to the rows of ``views`` (n, d) and ``mask`` (n, d), ``truth`` (t,) to ``answers`` (t,) of
    each scope; ``counts`` (K,) are training samples; ``trained`` are training features (m, d) with their labels.
    Where nobody looks closely there are no answers and nothing is trained on.
    """

    client: str
    labels: np.ndarray
    views: Mapping[str, np.ndarray]
    probe: Mapping[str, np.ndarray]
    answers: Mapping[str, np.ndarray]
    truth: np.ndarray
    counts: np.ndarray
    trained: Part | None = None
    mask: np.ndarray | None = None

    @property
    def features(self) -> np.ndarray:
        """The encoder's features (n, d)."""
        return self.views["encoder"]

    def drawn(self) -> dict[str, np.ndarray]:
        """Features worth drawing by name: with a mask, those that it picks and those that it leaves."""
        if self.mask is None:
            return dict(self.views)
        return {"relevant": self.features * self.mask, "irrelevant": self.features * (1 - self.mask)}

    def is_finite(self) -> bool:
        """Whether all features are numbers."""
        return all(np.isfinite(found).all() for group in (self.views, self.probe) for found in group.values())


@dataclass
class LeftOut:
    """What could not be analyzed, and why; each thing once."""

    reasons: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, why: str) -> None:
        """Say it, unless it has been said."""
        self.reasons.setdefault(what, why)

    def body(self) -> list[dict[str, str]]:
        """As JSON."""
        return [{"what": what, "why": why} for what, why in self.reasons.items()]


@dataclass(frozen=True)
class Mixing:
    """By what weights (m, m) the classifiers of m clients were combined; row i is for client i."""

    clients: tuple[str, ...]
    weights: np.ndarray


class Subject(ABC):
    """What is analyzed. Subclasses say where states, samples and models come from."""

    kind: Kind

    def __init__(self, name: str, run: str, method: str, class_names: tuple[str, ...]) -> None:
        self.name, self.run, self.method, self.class_names = name, run, method, class_names
        self.left_out = LeftOut()

    @property
    @abstractmethod
    def clients(self) -> tuple[str, ...]:
        """Names of clients whose samples are known, sorted."""

    @property
    @abstractmethod
    def rounds(self) -> tuple[int, ...]:
        """Rounds whose states are there, ascending; the last one is looked at most closely."""

    @abstractmethod
    def holding(self, client: str) -> Holding:
        """One client's samples."""

    @abstractmethod
    def looks(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[Look]:
        """One look after another at the clients' models as they stand after a round; ``probe`` (p, ...) inputs.

        Closely at those of the last round.
        """

    def mixing(self, number: int) -> Mixing | None:  # noqa: ARG002 - for those that have such
        """How classifiers were combined in a round; None where they are not."""
        return None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's figures; none where there is no run."""
        return []

    def groups(self) -> dict[str, str]:
        """Client -> name of the group of clients that are alike; empty where nobody knows."""
        return {}

    def tested(self) -> tuple[str, ...]:
        """Clients that have test samples; what cannot be said of the others is noted."""
        found = []
        for client in self.clients:
            if len(self.holding(client).test):
                found.append(client)
            else:
                self.left_out.note(f"client {client}", "it has no test samples")
        return tuple(found)

    def probe(self, settings: Settings) -> np.ndarray:
        """Inputs (p, ...) on which clients are compared: as many of each client's test samples."""
        names = self.tested()
        sizes = measures.spread_evenly({name: len(self.holding(name).test) for name in names}, settings.probe)
        return np.concatenate([self.holding(name).test.some(sizes[name], settings.seed).inputs for name in names])


def masked(look: Look) -> Look:
    """The same look with the mask apart from the features."""
    views, probe = dict(look.views), {name: found for name, found in look.probe.items() if name != "mask"}
    mask = views.pop("mask", None)
    return replace(look, views=views, probe=probe, mask=mask)


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
