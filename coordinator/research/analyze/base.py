"""What an analysis works on: settings, samples of clients, and the features that a client's model computes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from edge_agent.config import mistakes_of
from edge_agent.errors import DataError, UsageError
from edge_agent.task import Frozen, State

from . import measures

Kind = Literal["simulation", "run", "bundle"]


Accuracy = Annotated[float, Field(gt=0, le=1)]


class Settings(Frozen):
    """Settings of an analysis. All but ``targets`` and ``head`` concern features."""

    targets: tuple[Accuracy, ...] = Field((), description="accuracies, 0..1, to find the rounds and bytes for")
    samples: int = Field(
        300, ge=1, description="test samples of each client whose features are analyzed; accuracies are of all of them"
    )
    probe: int = Field(256, ge=2, description="samples, evenly from all clients, on which two clients are compared")
    threshold: float = Field(0.01, gt=0, le=1, description="of the sparsity ratio; the paper does not state its own")
    important: float = Field(
        0.5, gt=0, le=1, description="share of the features that count as important (FedPick, Sec. VIII-B)"
    )
    tsne: int = Field(4, ge=0, description="clients whose features are drawn by t-SNE; 0 = none")
    perplexity: float = Field(30.0, ge=1, lt=1e6, description="of t-SNE; at most a third of the samples")
    head: str = Field("lr", description="device head to fit where personal parts are not available")
    test_fraction: float = Field(0.25, gt=0, lt=1, description="share of the samples of --data held out for testing")
    seed: int = Field(0, ge=0, lt=1 << 32, description="for random samples, t-SNE and fits")

    @classmethod
    def of(cls, **given: Any) -> Settings:
        """Settings from options.

        Raises:
            UsageError: values out of bounds; all of them are listed.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise UsageError("; ".join(mistakes_of(error, cls))) from error


@dataclass(frozen=True)
class LabelledSamples:
    """Labelled samples: inputs (n, ...) float32, labels (n,) int64."""

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int, seed: int) -> LabelledSamples:
        """At most ``count`` of them, drawn at random and left in their order."""
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        return LabelledSamples(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True)
class ClientSamples:
    """One client's samples."""

    train: LabelledSamples
    test: LabelledSamples


@dataclass(frozen=True)
class FeatureView:
    """Features that one client's model computes of its samples, and of those that all clients are compared on.

    ``labels`` (n,) belong to the rows of ``kinds`` (n, d) and ``mask`` (n, d), ``truth`` (t,) to ``answers`` (t,) of
    each scope; ``counts`` (K,) are training samples; ``trained`` are training features (m, d) with their labels.
    ``answers`` and ``trained`` are details, which only the last round has.
    """

    client: str
    labels: np.ndarray
    kinds: Mapping[str, np.ndarray]
    probe: Mapping[str, np.ndarray]
    answers: Mapping[str, np.ndarray]
    truth: np.ndarray
    counts: np.ndarray
    trained: LabelledSamples | None = None
    mask: np.ndarray | None = None

    @property
    def features(self) -> np.ndarray:
        """The encoder's features (n, d)."""
        return self.kinds["encoder"]

    def drawn(self) -> dict[str, np.ndarray]:
        """Features to draw, by name: with a mask, those that it picks and those that it leaves."""
        if self.mask is None:
            return dict(self.kinds)
        return {"relevant": self.features * self.mask, "irrelevant": self.features * (1 - self.mask)}

    def is_finite(self) -> bool:
        """Whether all features are numbers."""
        return all(np.isfinite(result).all() for group in (self.kinds, self.probe) for result in group.values())


@dataclass
class LeftOut:
    """What could not be analyzed, and why; each thing once."""

    reasons: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, why: str) -> None:
        """Record the first reason for ``what``."""
        self.reasons.setdefault(what, why)

    def body(self) -> list[dict[str, str]]:
        """As JSON."""
        return [{"what": what, "why": why} for what, why in self.reasons.items()]


@dataclass(frozen=True)
class Mixing:
    """The weights (m, m) that combined the classifiers of m clients; row i is for client i."""

    clients: tuple[str, ...]
    weights: np.ndarray


def mixing_of(method: Any, state: State) -> Mixing | None:
    """The weights in a state of a method with ``combination``; None for other methods and before the first round."""
    if not hasattr(method, "combination"):
        return None
    names, weights = method.combination(state)
    return Mixing(tuple(names), np.asarray(weights, np.float64)) if names else None


class AnalysisTarget(ABC):
    """What is analyzed. Subclasses define where states, samples and models come from."""

    kind: Kind

    def __init__(
        self,
        name: str,
        run: str,
        method: str,
        class_names: Sequence[str],
        *,
        clients: Iterable[str],
        rounds: Iterable[int],
    ) -> None:
        """``clients``: those whose samples are known, sorted. ``rounds``: those whose states are available, ascending.

        The last round is analyzed in detail.
        """
        self.name, self.run, self.method, self.class_names = name, run, method, tuple(class_names)
        self.clients, self.rounds = tuple(clients), tuple(rounds)
        self.left_out = LeftOut()

    @abstractmethod
    def samples_of(self, client: str) -> ClientSamples:
        """One client's samples."""

    @abstractmethod
    def feature_views(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[FeatureView]:
        """Yield the view of each client after a round, with details for the last round; ``probe`` (p, ...) inputs."""

    def mixing(self, number: int) -> Mixing | None:  # noqa: ARG002 - for methods that combine classifiers
        """How classifiers were combined in a round; None where they are not."""
        return None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's ``metrics.jsonl``; none for a bundle."""
        return []

    def groups(self) -> dict[str, str]:
        """Client -> name of its group of similar clients; empty where groups are not known."""
        return {}

    def tested(self) -> tuple[str, ...]:
        """Clients that have test samples; the others are noted as left out."""
        result = []
        for client in self.clients:
            if len(self.samples_of(client).test):
                result.append(client)
            else:
                self.left_out.note(f"client {client}", "it has no test samples")
        return tuple(result)

    def probe(self, settings: Settings) -> np.ndarray:
        """Inputs (p, ...) on which clients are compared: equally many of each client's test samples.

        Raises:
            DataError: no client has a test sample.
        """
        names = self.tested()
        if not names:
            raise DataError(f"none of {len(self.clients)} clients has test samples; give more data")
        sizes = measures.spread_evenly({name: len(self.samples_of(name).test) for name in names}, settings.probe)
        return np.concatenate([self.samples_of(name).test.some(sizes[name], settings.seed).inputs for name in names])


def split_mask(view: FeatureView) -> FeatureView:
    """The same view with the mask apart from the features."""
    kinds, probe = dict(view.kinds), {name: result for name, result in view.probe.items() if name != "mask"}
    mask = kinds.pop("mask", None)
    return replace(view, kinds=kinds, probe=probe, mask=mask)
