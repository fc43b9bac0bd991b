"""AFL: one classifier by ridge regression for all clients, in closed form and one round, on a frozen encoder.

Source: He, Tong, Fang, Sun, Li, Chen, Zeng, Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with
Pre-trained Models", CVPR 2025; sums of statistics in place of solutions as in Fani et al., "Accelerating Heterogeneous
Federated Learning with Closed-form Classifiers" (Fed3R), ICML 2024.
Travels: down, the encoder, which stays as it is, and the shared classifier. Up, for each sample on average: z z' of its
features z (the upper triangle alone), the sum of z of each class, and the share of each class. No tensor of the model.
Stays: the data. With ``remember`` each client's statistics stay at the coordinator, so that later rounds add clients,
and one that returns replaces what it sent before.
Server: the mean of all statistics by sample counts, which is G = sum z z' and Q = sum of z by class, each divided by
the number n of all samples. W = Q (G + ridge I)^-1, in float64. How the samples are divided among clients changes no
sum, so it does not change W; clients that are late or drop out are as if they had no samples.
Differs from the paper: clients send statistics where the paper's send solutions W_k and C_k = G_k + gamma I, from which
its server takes the gamma again: W = (sum C_k - K gamma I)^-1 sum C_k W_k, the same numbers. Here no gamma is added,
and none has to be removed. ``ridge`` and ``intercept`` are ours (the paper: 0, none); both depend on the sums alone.
``scale`` is ours: regression onto 0 and 1 ranks classes, and probabilities need larger differences. Samples of a class
of which a client has fewer than ``min_class_count`` are left out, as one sample's sum is its features; the paper: 1,
with which the result is that of all samples at one place. Bounds of [aggregation] on sample counts and sizes apply as
to any method. A device without torch computes the same from the frozen encoder of the round's bundle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from ..core.errors import TrainingFailed
from ..core.published import Published
from ..core.search_space import Choices
from ..core.task import State, Task, Tensors
from ..core.weighted_sum import WeightedSum
from .base import SERVER_ONLY, Method
from .values import Client, LocalWork, MethodParams, Norm, Stage, Update, grades, ours

if TYPE_CHECKING:
    from ..heads.base import FitData
    from ..training.parts import Parts

_log = logging.getLogger(__name__)

GRAM = "extra.gram"
"""The name of the mean of z z' over samples: the upper triangle (d (d + 1) / 2,), row by row."""

SUMS = "extra.sums"
"""The name of the sums of z by class (K, d), divided by the number of samples."""

SHARES = "extra.shares"
"""The name of the shares of samples that each class has (K,)."""

_ARRAYS = (GRAM, SUMS, SHARES)

GRID = 2.0**24
"""Each client's sums are rounded to multiples of 1 / GRID, as in a secure sum, so that both add up to the same bits.

Sums of float64 numbers on this grid are exact up to 2^29, in any order.
"""

LEAST_EIGENVALUE = 1e-12
"""Eigenvalues below so much of the largest one are rounding: nobody's features have that direction."""

ROUNDING = 1e-6
"""What an honest client's statistics may be off by, relative to their size: those of float32 are off by 1e-7."""

LARGEST = 1e12
"""The largest mean square of an honest feature: unnormalised encoders reach some thousands."""


class AFLParams(MethodParams):
    """The parameters of AFL; those of local training have no effect."""

    not_searched: ClassVar[tuple[str, ...]] = ("lr",)

    norm: Norm | None = Field(
        None, description="what travels of batch norm: global = all; other values would give each client other features"
    )
    ridge: float = ours(
        1e-4,
        paper=0.0,
        search=Choices((0.0, 1e-6, 1e-4, 1e-2, 1.0)),
        ge=0,
        le=1e6,
        description="ours: added to the diagonal of G / n, in mean squares of a feature; 0: the pseudo-inverse",
    )
    intercept: bool = ours(
        default=True,
        paper=False,
        description="ours: an intercept for each class, not penalised, which takes no more bytes",
    )
    scale: float = ours(
        10.0,
        paper=1.0,
        ge=1e-3,
        le=1e6,
        description="ours: factor of the scores in probabilities; changes no answer",
    )
    min_class_count: int = ours(
        2,
        paper=1,
        ge=1,
        description="ours: classes of fewer samples at a client are left out; 1: exact for any division",
    )
    sent_as: Literal["float64", "float32"] = Field(
        "float64", description="float32 halves the bytes, and costs digits where G is nearly singular"
    )
    remember: bool = Field(
        default=False,
        description="keep each client's statistics at the coordinator: later rounds add clients, and one that returns "
        "replaces its own; not with secure sums",
    )

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "ridge": (Published(0.0, "paper", "what is added is taken away again"),),
        "intercept": (Published(False, "paper", "W alone"),),
        "scale": (Published(1.0, "paper", "answers are the largest scores"),),
        "min_class_count": (Published(1, "paper", "all samples"),),
    }

    @field_validator("norm")
    @classmethod
    def _has_one_encoder(cls, norm: Norm | None) -> Norm | None:
        if norm not in {None, "global"}:
            raise ValueError(f"norm = '{norm}' gives each client other features, which do not add up; use 'global'")
        return norm


class AFL(Method):
    """One exchange of statistics, and one linear solve."""

    Params = AFLParams
    returned = ()
    bounded_extras = MappingProxyType({GRAM: "second moments", SUMS: "second moments"})
    source = "He et al., AFL, CVPR 2025 (arXiv 2405.16240); Fani et al., Fed3R, ICML 2024"
    own_norm = False  # the statistics in the bundle are those of features with its own batch norm
    heads = ("shared_classifier", "ridge_prior", "lr", "svm", "mlp", "prototype", "knn")
    exactness = grades(
        shared_classifier=("same form", "the shared classifier itself, which answers only classes that the device has")
    )

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return the upper triangle of z z' (d (d + 1) / 2,), sums (K, d) and shares of classes (K,)."""
        classes, size = model.head.get_parameter("weight").shape
        dtype = np.dtype(self.params.sent_as)
        return {
            GRAM: np.zeros(size * (size + 1) // 2, dtype),
            SUMS: np.zeros((classes, size), dtype),
            SHARES: np.zeros(classes, dtype),
        }

    def to_noise(self, extras: Tensors) -> Tensors:
        """Return all statistics: their means over samples are of the same size for each client."""
        return {name: array.astype(np.float64) for name, array in extras.items()}

    def from_noise(self, noisy: Tensors) -> Tensors:
        """Return statistics that some samples have: shares of 0 to 1, and enough on the diagonal of z z'.

        Noise makes negative eigenvalues. What has to be added to the diagonal against them acts like more ``ridge``.
        """
        shares = np.clip(noisy[SHARES], 0.0, None)
        shares /= max(1.0, float(shares.sum()))
        # A share that the noise has all but removed would make its class's mean as long as it likes. Clipping has
        # shortened all arrays alike, so that is a matter of the other shares.
        shares[shares < shares.sum() / (10 * len(shares))] = 0.0
        if not shares.any():
            return {name: np.zeros_like(array) for name, array in noisy.items()}
        sums = np.where(shares[:, None] > 0, noisy[SUMS], 0.0)
        gram = unpack(noisy[GRAM], sums.shape[1])
        lacking = -float(np.linalg.eigvalsh(_within(gram, sums, shares))[0])
        if lacking > 0:
            gram = gram + 1.001 * lacking * np.eye(len(gram))
        return {GRAM: pack(gram), SUMS: sums, SHARES: shares}

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to statistics that no samples have; empty where some do.

        With one-hot rows of Y, [Z Y]'[Z Y] has no negative eigenvalue: neither has z z' minus what the classes' own
        means account for.
        """
        gram, sums, shares = (tensors[name].astype(np.float64) for name in _ARRAYS)
        if shares.min() < 0 or shares.sum() > 1 + ROUNDING:
            return f"'{SHARES}' has values from {shares.min():g} with a sum of {shares.sum():g}, expected shares of 1"
        if sums[shares == 0].any():
            return f"'{SUMS}' has features of a class whose share is 0"
        matrix = unpack(gram, sums.shape[1])
        squares = np.diag(matrix)
        if squares.min() < 0 or squares.max() > LARGEST:
            return f"'{GRAM}' has mean squares from {squares.min():g} to {squares.max():g}, expected 0 to {LARGEST:g}"
        total = float(squares.sum())
        if not shares.any() and total > 0:
            return f"'{GRAM}' has features, and '{SHARES}' says that no class has samples"
        within = _within(matrix, sums, shares)
        try:
            np.linalg.cholesky(within + max(ROUNDING * total, 1e-300) * np.eye(len(within)))
        except np.linalg.LinAlgError:
            return (
                f"'{GRAM}', '{SUMS}' and '{SHARES}' cannot be of the same samples: z z' is less than its classes' part"
            )
        return ""

    # --- client ------------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return that nothing is trained: a client sums over its samples once."""
        return LocalWork((Stage("sums over features, without training"),))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Return the statistics of the client's samples on the encoder as it was received; nothing is trained.

        Raises:
            TrainingFailed: The client has no samples, or its features are not finite.
        """
        from ..training import feature_cache

        client.require_samples()
        features = feature_cache.of_process.features_of(client.model, client.train_inputs).cpu().numpy()
        labels = client.train_labels.cpu().numpy()
        return statistics(features, labels, client.task.num_classes, self.params.model_dump())

    @staticmethod
    def contribute(  # type: ignore[override]  # a function, not bound to a method
        data: FitData,
        received: Tensors,  # noqa: ARG004 - nothing of the received classifier is needed
        rng: np.random.Generator,  # noqa: ARG004 - nothing is drawn
    ) -> Tensors:
        """Return the same on a device without torch, from features of the frozen encoder in the round's bundle."""
        return statistics(data.features, data.labels, data.num_classes, data.method_params)

    # --- coordinator -------------------------------------------------------------------------------------------------

    def server_step_is_mean(self) -> bool:
        """Return whether the classifier follows from the mean statistics: not where each client's are remembered."""
        return self.server_step_is_sum()

    def server_step_is_sum(self) -> bool:
        """Return whether the classifier follows from the sum of the round's statistics alone."""
        return type(self).aggregate is AFL.aggregate and not self.params.remember

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the state with the classifier of all statistics; where there are none, it stays as it is.

        Raises:
            TrainingFailed: There is no update.
        """
        if not self.params.remember:
            return super().aggregate(state, updates)
        remembered = _with_clients(state, updates)
        return {**super().aggregate(state, clients_in(remembered)), **remembered}

    def fold(self, total: WeightedSum, update: Update) -> None:
        """Add the sums of a client, rounded to the `GRID`: the result is bit for bit that of a secure sum."""
        tensors = {name: update.tensors[name].astype(np.float64) for name in _ARRAYS}
        products = {name: np.rint(array * update.weight * GRID) / GRID for name, array in tensors.items()}
        total.add_products(update.weight, tensors, products)

    def next_state(self, state: State, total: WeightedSum) -> State:
        """Return the state with the classifier of the summed statistics; where there are none, it stays as it is.

        Raises:
            TrainingFailed: There is no update.
        """
        total.require_weight()
        # A secure sum arrives as one update, whose statistics are used as they are.
        mean = total.mean() if total.only is None else total.only
        if not mean[SHARES].any():
            _log.warning("no_statistics: no class has enough samples at any client (min_class_count)")
            return dict(state)
        kept = {f"{SERVER_ONLY}{name}": array for name, array in mean.items()}
        return {**state, **kept, **self.classifier(mean)}

    def classifier(self, total: Tensors) -> Tensors:
        """Return ``head.weight`` (K, d) and ``head.bias`` (K,) float32 of the mean statistics of all samples."""
        params = self.params
        sums = total[SUMS]
        gram = unpack(total[GRAM], sums.shape[1])
        weight, bias = solve(gram, sums, total[SHARES], params.ridge, has_intercept=params.intercept)
        scaled = {"head.weight": params.scale * weight, "head.bias": params.scale * bias}
        return {name: array.astype(np.float32) for name, array in scaled.items()}

    def without(self, state: State, clients: Sequence[str]) -> State:
        """Return the state as it were if these clients had never taken part; only with ``remember``.

        Raises:
            TrainingFailed: The state does not know one of them, or no client would be left.
        """
        known = {update.client: update for update in clients_in(state)}
        missing = sorted({*clients} - known.keys())
        if missing:
            raise TrainingFailed(f"no statistics of {', '.join(missing)} are kept; a run with remember=true keeps them")
        left = {name: array for name, array in state.items() if not name.startswith(_CLIENTS)}
        return self.aggregate(left, [update for name, update in known.items() if name not in clients])

    def with_classes(self, state: State, columns: Sequence[int], num_classes: int) -> State:
        """Return a state of ``num_classes`` classes, in which class i of ``state`` is class ``columns[i]``.

        A new class has no samples yet: clients that have some add them in the next round, and nobody is asked again.
        """
        wider = dict(state)
        for name, array in state.items():
            axis = 1 if name in {f"{_CLIENTS}{SUMS}", f"{_CLIENTS}{SHARES}"} else 0
            if name.startswith("head.") or name.endswith((SUMS, SHARES)):
                shape = (*array.shape[:axis], num_classes, *array.shape[axis + 1 :])
                wider[name] = np.zeros(shape, array.dtype)
                wider[name][(slice(None),) * axis + (list(columns),)] = array
        return wider

    def shared_statistics(self, state: State) -> Tensors | None:
        """Return the mean statistics of all samples, for the bundle; None before the first round."""
        if f"{SERVER_ONLY}{GRAM}" not in state:
            return None
        return {name.removeprefix("extra."): state[f"{SERVER_ONLY}{name}"] for name in _ARRAYS}


# --- statistics ------------------------------------------------------------------------------------------------------


def statistics(features: np.ndarray, labels: np.ndarray, num_classes: int, params: Mapping[str, Any]) -> Tensors:
    """Return the arrays of an update: sums over samples, float64, divided by the number of samples.

    Args:
        features: Features (n, d) float32, n >= 1.
        labels: Their classes (n,) int64 in 0..num_classes-1.
        num_classes: K.
        params: The method's parameters, by name.

    Raises:
        TrainingFailed: A feature is not finite.
    """
    counts = np.bincount(labels, minlength=num_classes)
    is_counted = (counts >= params["min_class_count"])[labels]
    rows = features[is_counted].astype(np.float64)
    if not np.isfinite(rows).all():
        raise TrainingFailed(
            "features hold NaN or infinity, expected finite numbers; look for extreme values in the data",
            is_public=True,
        )
    by_class = np.zeros((num_classes, features.shape[1]))
    shares = np.zeros(num_classes)
    for label in np.unique(labels[is_counted]):
        by_class[label] = rows[labels[is_counted] == label].sum(axis=0)
        shares[label] = counts[label]
    # By all samples, those that are left out as well: the update's weight is their number.
    arrays = {GRAM: pack(rows.T @ rows), SUMS: by_class, SHARES: shares}
    return {name: (array / len(labels)).astype(params["sent_as"]) for name, array in arrays.items()}


def solve(
    gram: np.ndarray, sums: np.ndarray, shares: np.ndarray, ridge: float, *, has_intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (K, d) and biases (K,) float64 of the regression of one-hot labels on features.

    Args:
        gram: The mean of z z' (d, d).
        sums: The sums of z by class (K, d), over the number of samples.
        shares: The shares of samples that each class has (K,), in sum at most 1 and more than 0.
        ridge: What is added to the diagonal, in units of the mean square of a feature.
        has_intercept: Whether each class has an intercept, which is not penalised.
    """
    penalty = ridge * float(np.trace(gram)) / len(gram)
    share = float(shares.sum())
    mean = sums.sum(axis=0) / share
    middle = shares / share
    centred_gram = gram
    centred_sums = sums
    if has_intercept:
        # Around the means of features and labels a regression needs no intercept.
        centred_gram = gram - share * np.outer(mean, mean)
        centred_sums = sums - np.outer(shares, mean)
    values, vectors = np.linalg.eigh(centred_gram)
    is_solved = values + penalty > LEAST_EIGENVALUE * max(float(values[-1]), 0.0) + 1e-300
    inverse = np.where(is_solved, 1.0 / np.where(is_solved, values + penalty, 1.0), 0.0)
    weight = (centred_sums @ vectors * inverse) @ vectors.T
    smallest = float((values + penalty)[is_solved].min(initial=np.inf))
    about = (len(gram), int(is_solved.sum()), float(values[-1] + penalty) / smallest)
    _log.info("ridge_solved features=%d rank=%d condition=%.3g", *about)
    if not has_intercept:
        return weight, np.zeros(len(sums))
    return weight, middle - weight @ mean


def pack(matrix: np.ndarray) -> np.ndarray:
    """Return the upper triangle (d (d + 1) / 2,) of a symmetric matrix (d, d), row by row."""
    return np.ascontiguousarray(matrix[np.triu_indices(len(matrix))])


def unpack(packed: np.ndarray, size: int) -> np.ndarray:
    """Return the symmetric matrix (size, size) float64 of an upper triangle."""
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = packed
    return np.asarray(upper + np.triu(upper, 1).T)


def _within(gram: np.ndarray, sums: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the part (d, d) of z z' that the classes' own means do not account for: the scatter within classes."""
    present = shares > 0
    return np.asarray(gram - (sums[present].T / shares[present]) @ sums[present])


# --- clients that are remembered -------------------------------------------------------------------------------------

_CLIENTS = f"{SERVER_ONLY}clients."
_NAMES = f"{_CLIENTS}names"
_WEIGHTS = f"{_CLIENTS}weights"


def _with_clients(state: State, updates: Iterable[Update]) -> State:
    """Return the rows of all clients in the state, with those of ``updates`` in the place of earlier ones.

    Raises:
        TrainingFailed: There are none.
    """
    from .families import with_rows

    fresh = {}
    for update in updates:
        rows = {f"{_CLIENTS}{name}": np.array(update.tensors[name]) for name in _ARRAYS}
        fresh[update.client] = {_WEIGHTS: np.array(update.weight), **rows}
    if not fresh:
        raise TrainingFailed("no update to add up; the round keeps its state")
    return with_rows(state, _NAMES, fresh)


def clients_in(state: State) -> list[Update]:
    """Return what clients have sent last, by name, from a state with ``remember``; empty where it has nothing."""
    from .families import names_in

    clients: list[Update] = []
    for row, client in enumerate(names_in(state, _NAMES)):
        tensors = {name: state[f"{_CLIENTS}{name}"][row] for name in _ARRAYS}
        clients.append(Update(client, float(state[_WEIGHTS][row]), tensors))
    return clients
