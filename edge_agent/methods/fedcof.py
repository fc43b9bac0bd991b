"""FedCOF: a classifier from class means alone; the scatter of the clients' means gives the covariance of features.

Source: Goswami, Magistri, Wang, Twardowski, Bagdanov, van de Weijer, "Covariances for Free: Exploiting Mean
Distributions for Training-free Federated Learning", NeurIPS 2025 (arXiv 2412.14326). No code was read.
Travels: down, the encoder, which stays as it is, and the shared classifier. Up, the mean feature of each class of the
client and its count. No tensor of the model.
Stays: the data.
Server: with mu_c the mean of class c over all clients, and n_kc, mu_kc those of client k, the covariance of the class
is S_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' / (K_c - 1) + shrinkage I over its K_c clients: a mean of n samples
scatters by 1 / n of the covariance. W = (sum_c (N_c - 1) S_c + ridge I)^-1 [N_c mu_c], each row of length 1. The
scatter between classes is left out, as in the paper.
Differs from the paper: class means of fewer than ``min_class_count`` samples are withheld (one sample's mean is that
sample). Shrinkage and ridge are in units of the mean variance of a feature, so that they suit any encoder; the paper
has fixed numbers for each. The estimate is unbiased where the samples of a client are drawn at random from the class;
clients of different cameras make it larger. A class of one client adds nothing to the scatter, so dozens of clients
for each class are needed. An update has K d numbers, that of `afl` d (d + 1) / 2 more. ``scale`` is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from ..core.errors import TrainingFailed
from ..core.published import Published
from ..core.search_space import Choices
from ..core.task import State, Task, Tensors
from ..heads.fedpac import class_means
from .base import CLASS_MEANS, Method
from .values import ClassStatistics, Client, LocalWork, MethodParams, Norm, Stage, Update, grades, ours, searched

if TYPE_CHECKING:
    from ..heads.base import FitData
    from ..training.parts import Parts

_log = logging.getLogger(__name__)

MEANS = "extra.means"
"""The name of the mean feature of each class (K, d), zeros for a class that the client lacks."""

COUNTS = "extra.counts"
"""The name of the sample count of each class (K,)."""

MOST_SAMPLES = 1_000_000_000
"""The most samples of a class that an honest client can have."""

LARGEST = 1e6
"""The largest number in an honest mean: features of unnormalised encoders reach some thousands."""


class FedCOFParams(MethodParams):
    """The parameters of FedCOF; those of local training have no effect."""

    not_searched: ClassVar[tuple[str, ...]] = ("lr",)

    norm: Norm | None = Field(
        None, description="what travels of batch norm: global = all; other values would give each client other features"
    )
    shrinkage: float = searched(
        0.1,
        Choices((0.01, 0.1, 1.0)),
        ge=0,
        le=1e6,
        description="gamma, added to each covariance, in units of the mean variance of a feature",
    )
    ridge: float = searched(
        0.01, Choices((0.0001, 0.01, 1.0)), ge=0, le=1e6, description="lambda, in the same units, for each sample"
    )
    scale: float = ours(
        10.0,
        paper=1.0,
        ge=1e-3,
        le=1e6,
        description="ours: factor of the scores in probabilities; changes no answer",
    )
    min_class_count: int = ours(2, paper=1, ge=1, description="ours: class means of fewer samples are withheld")

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "scale": (Published(1.0, "paper", "answers are the largest scores"),),
        "min_class_count": (Published(1, "paper", "all samples"),),
    }

    @field_validator("norm")
    @classmethod
    def _has_one_encoder(cls, norm: Norm | None) -> Norm | None:
        if norm not in {None, "global"}:
            raise ValueError(f"norm = '{norm}' gives each client other features, which have no common mean")
        return norm


class FedCOF(Method):
    """One exchange of class means, and one linear solve."""

    Params = FedCOFParams
    returned = ()
    own_norm = False
    bounded_extras = MappingProxyType({MEANS: CLASS_MEANS})
    class_statistics = ClassStatistics(means=(MEANS,), counts=COUNTS)
    source = "Goswami et al., FedCOF, NeurIPS 2025 (arXiv 2412.14326)"
    heads = ("shared_classifier", "lr", "svm", "mlp", "prototype", "knn")
    exactness = grades(
        shared_classifier=("same form", "the shared classifier itself, which answers only classes that the device has")
    )

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return class means (K, d) float32 and counts (K,) int64."""
        classes, size = model.head.get_parameter("weight").shape
        return {MEANS: np.zeros((classes, size), np.float32), COUNTS: np.zeros(classes, np.int64)}

    def to_noise(self, extras: Tensors) -> Tensors:
        """Return the means, and the counts as shares of the classes."""
        counts = extras[COUNTS]
        return {MEANS: extras[MEANS].astype(np.float64), COUNTS: counts / max(1, int(counts.sum()))}

    def from_noise(self, noisy: Tensors) -> Tensors:
        """Return counts rounded to thousandths, and no means of classes whose count is 0."""
        counts = np.maximum(0, np.rint(1000 * noisy[COUNTS])).astype(np.int64)
        return {MEANS: np.where(counts[:, None] > 0, noisy[MEANS], 0.0), COUNTS: counts}

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to counts and means that no client has; empty where one may."""
        counts = tensors[COUNTS]
        means = tensors[MEANS]
        if counts.min(initial=0) < 0 or counts.max(initial=0) > MOST_SAMPLES:
            return f"class counts from {counts.min()} to {counts.max()}, expected 0 to {MOST_SAMPLES}"
        if means[counts == 0].any():
            return f"'{MEANS}' has values for a class whose count is 0"
        if np.abs(means).max(initial=0.0) > LARGEST:
            return f"'{MEANS}' reaches {np.abs(means).max():g}, expected at most {LARGEST:g}"
        return ""

    # --- client ----------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return that nothing is trained: a client sums over its samples once."""
        return LocalWork((Stage("class means of features, without training"),))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Return the class means of the client on the encoder as it was received; nothing is trained.

        Raises:
            TrainingFailed: The client has no samples, or its features are not finite.
        """
        from ..training import feature_cache

        client.require_samples()
        features = feature_cache.of_process.features_of(client.model, client.train_inputs).cpu().numpy()
        labels = client.train_labels.cpu().numpy()
        return _statistics(features, labels, client.task.num_classes, self.params.model_dump())

    @staticmethod
    def contribute(  # type: ignore[override]  # a function, not bound to a method
        data: FitData,
        received: Tensors,  # noqa: ARG004 - nothing of the received classifier is needed
        rng: np.random.Generator,  # noqa: ARG004 - nothing is drawn
    ) -> Tensors:
        """Return the same on a device without torch, from features of the frozen encoder in the round's bundle."""
        return _statistics(data.features, data.labels, data.num_classes, data.method_params)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the state with the classifier of all class means; where there are none, it stays as it is.

        Raises:
            TrainingFailed: There is no update.
        """
        by_class: list[MeansOfClass] = []
        for update in updates:
            means = update.tensors[MEANS]
            if not by_class:
                by_class = [MeansOfClass(means.shape[1]) for _ in means]
            for label in np.flatnonzero(update.tensors[COUNTS]):
                by_class[label].add(means[label], int(update.tensors[COUNTS][label]))
        if not by_class:
            raise TrainingFailed("no update to aggregate; the round keeps its state")
        if not any(of_class.counts for of_class in by_class):
            _log.warning("no_means: no class has enough samples at any client (min_class_count)")
            return dict(state)
        weight = solve(by_class, self.params.shrinkage, self.params.ridge)
        scaled = (self.params.scale * weight).astype(np.float32)
        return {**state, "head.weight": scaled, "head.bias": np.zeros(len(scaled), np.float32)}


def _statistics(features: np.ndarray, labels: np.ndarray, num_classes: int, params: Mapping[str, Any]) -> Tensors:
    """Return the arrays of an update from features (n, d) and labels (n,).

    Raises:
        TrainingFailed: A feature is not finite.
    """
    if not np.isfinite(features).all():
        raise TrainingFailed(
            "features hold NaN or infinity, expected finite numbers; look for extreme values in the data",
            is_public=True,
        )
    means, counts = class_means(features, labels, num_classes, params["min_class_count"])
    return {MEANS: means.astype(np.float32), COUNTS: counts}


@dataclass
class MeansOfClass:
    """The means of one class, of the clients that have it: clients that lack the class take no memory."""

    size: int
    """d, the number of features of a mean."""

    means: list[np.ndarray] = field(default_factory=list)
    """The mean (d,) of each client, in the precision in which it was sent."""

    counts: list[int] = field(default_factory=list)
    """The number of samples of each mean, 1 or more."""

    def add(self, mean: np.ndarray, count: int) -> None:
        """Add a copy of the mean (d,) of a client with its sample count: the update's memory is released afterwards."""
        self.means.append(np.array(mean))
        self.counts.append(count)

    @property
    def total(self) -> int:
        """N_c, the number of samples of the class."""
        return sum(self.counts)

    @property
    def has_scatter(self) -> bool:
        """Whether two clients or more have the class: a single mean does not scatter."""
        return len(self.counts) > 1

    def sum(self) -> np.ndarray:
        """Return N_c mu_c, the sum of the features (d,) float64 of all samples."""
        if not self.counts:
            return np.zeros(self.size)
        return np.asarray(np.array(self.counts, np.float64) @ np.array(self.means, np.float64))

    def scatter(self) -> np.ndarray:
        """Return (N_c - 1) S_c (d, d) float64 without shrinkage, of a class that has scatter."""
        weights = np.array(self.counts, np.float64)
        centred = np.array(self.means, np.float64) - self.sum() / self.total
        scaled = centred * np.sqrt(weights)[:, None]
        return np.asarray((self.total - 1) / (len(self.counts) - 1) * (scaled.T @ scaled))


def within_class_scatter(by_class: Sequence[MeansOfClass]) -> tuple[np.ndarray, float]:
    """Return sum_c (N_c - 1) S_c (d, d) without shrinkage, and sum_c (N_c - 1), over the classes that have scatter."""
    scatter = np.zeros((by_class[0].size, by_class[0].size))
    samples = 0.0
    for of_class in by_class:
        if of_class.has_scatter:
            scatter += of_class.scatter()
            samples += of_class.total - 1
    return scatter, samples


def solve(by_class: Sequence[MeansOfClass], shrinkage: float, ridge: float) -> np.ndarray:
    """Return the classifier (K, d) float64, rows of length 1, zeros for classes without samples.

    Args:
        by_class: The clients' means of each class.
        shrinkage: gamma, in units of the mean variance of a feature.
        ridge: lambda, in the same units, for each sample.
    """
    size = by_class[0].size
    scatter, samples = within_class_scatter(by_class)
    total = float(sum(of_class.total for of_class in by_class))
    variance = float(np.trace(scatter)) / (size * samples) if samples > 0 else 0.0
    penalty = max((shrinkage + ridge) * variance, 1e-6) * total
    sums = np.stack([of_class.sum() for of_class in by_class])
    weight = np.linalg.solve(scatter + penalty * np.eye(size), sums.T).T
    lengths = np.linalg.norm(weight, axis=1, keepdims=True)
    return np.asarray(weight / np.where(lengths > 0, lengths, 1.0))
