"""FedPAC's steps on cached features: the statistics, the epoch of the linear classifier, the class means; no torch.

As a personal head: the classifier that came with the bundle, trained on. A client of a run trains its classifier for
one epoch in each of many rounds; a new device has one fit, and one epoch of a few steps from a mean of classifiers is
far from enough. So it is trained until it converges, with a pull to where it starts in the place of few steps. In a
round of FedPAC, `FedPACHead.contribute` gives what an update carries beside the encoder, with Eq. 6 as it is, so that a
device which cannot train an encoder takes part in the combination of classifiers all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from . import _layers as layers
from .base import FitData, Head, HeadParams, softmax
from .tuned import fit_towards

SETTINGS = {
    "head_epochs": "epochs",
    "head_lr": "lr",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
    "batch_size": "batch_size",
}
"""Parameters of the method -> those of the head that mean the same."""


class FedPACHeadParams(HeadParams):
    """The parameters of the head: those of the paper's code for the classifier's epoch, and ``c``, which is ours."""

    c: float | None = Field(
        0.3,
        gt=0,
        le=1e6,
        description="C, inverse strength of the pull to the start, until convergence; none: the epochs of Eq. 6 alone",
    )
    epochs: int = Field(1, ge=0, le=10_000, description="passes over the local features")
    lr: float = Field(0.1, gt=0, description="eta_g in Eq. 6")
    momentum: float = Field(0.5, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    batch_size: int = Field(50, ge=1)


class FedPACHead(Head):
    """One linear layer, trained on from the shared one; from zeros where the bundle has none."""

    Params = FedPACHeadParams
    source = "Xu, Tong, Huang, FedPAC, ICLR 2023: step 1 of local training (Eq. 6)"
    uses_shared = True

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        start = _start(data, {})
        if self.params.c is None:
            return train(start, data.features, data.labels, self.params, rng)
        personal = {name: np.array(array, np.float32) for name, array in start.items()}
        center = {name: array[classes] for name, array in personal.items()}
        moved = fit_towards(data, center, self.params.c)
        for name, rows in moved.items():
            personal[name][classes] = rows
        return personal

    def _predict(self, features: np.ndarray) -> np.ndarray:
        logits = features.astype(np.float64) @ self.arrays["weight"].T + self.arrays["bias"]
        return softmax(logits[:, self.arrays["classes"]])

    def _write(self, graph: Graph, features: Value) -> Value:
        # The rows of the classes that the device has are enough.
        classes = self.arrays["classes"]
        weight = self.arrays["weight"][classes].astype(DOUBLE)
        bias = self.arrays["bias"][classes].astype(DOUBLE)
        return graph.softmax(graph.linear(graph.cast(features, DOUBLE), weight, bias))

    @staticmethod
    def contribute(  # type: ignore[override]  # a function, not bound to a head
        data: FitData, received: Tensors, rng: np.random.Generator
    ) -> Tensors:
        """Return the ``extra.`` arrays of an update of FedPAC, from features (n, d) of the encoder that was received.

        ``data.method_params`` holds the method's parameters. The classifier starts from ``head.weight`` and
        ``head.bias`` in ``received``, else from ``data.global_head``, else from zeros. The encoder stays as it is, so
        class means are those of ``data.features``.

        Raises:
            TrainingFailed: The classifier diverged.
        """
        params = data.method_params
        head = train(_start(data, received), data.features, data.labels, settings(params), rng)
        heads = {f"head.{name}": array for name, array in head.items()}
        return extras(heads, data.features, data.features, data.labels, params)


def settings(method_params: Mapping[str, Any]) -> FedPACHeadParams:
    """Return the head's parameters, taken from the method's."""
    values: dict[str, object] = {}
    for method_name, head_name in SETTINGS.items():
        if method_name in method_params:
            values[head_name] = method_params[method_name]
    return FedPACHeadParams.model_validate(values)


def extras(
    head: Tensors, before: np.ndarray, after: np.ndarray, labels: np.ndarray, method_params: Mapping[str, Any]
) -> Tensors:
    """Return the arrays that an update carries beside the encoder.

    ``head`` holds ``head.weight`` (K, d) and ``head.bias`` (K,); ``before`` and ``after`` are the features (n, d) as
    they are before and after local training. Classes of fewer than ``min_class_count`` samples have count 0.
    """
    num_classes = len(head["head.bias"])
    least = int(method_params.get("min_class_count", 2))
    means, counts = class_means(after, labels, num_classes, least)
    arrays = {"centroids": means.astype(np.float32), "counts": counts, **head}
    if method_params.get("weights", "qp") == "qp":
        variance, weighted = statistics(before, labels, num_classes, least)
        arrays |= {"variance": np.array([variance]), "weighted_means": weighted.astype(np.float32)}
    return {f"extra.{name}": array for name, array in arrays.items()}


def statistics(features: np.ndarray, labels: np.ndarray, num_classes: int, least: int = 1) -> tuple[float, np.ndarray]:
    """Return V_i and h_i (K, d) float64 of ``features`` (n, d) and ``labels`` (n,), n >= 1.

    With the class shares p_k = n_k / n and class means mu_k: h[k] = p_k mu_k, and V = (1 / n) sum_k (p_k mean_k |z|^2 -
    p_k^2 |mu_k|^2) >= 0. n V is the trace of the covariance of onehot(y) (x) z, of which h is the mean. Classes of
    fewer than ``least`` samples are left out of both sums.
    """
    means, counts = class_means(features, labels, num_classes, least)
    shares = counts / len(labels)
    squares = np.einsum("ij,ij->i", features, features, dtype=np.float64)
    lengths = np.bincount(labels, weights=squares, minlength=num_classes) / np.maximum(counts, 1)
    spread = shares * np.where(counts > 0, lengths, 0.0) - shares**2 * np.einsum("ij,ij->i", means, means)
    return max(0.0, float(spread.sum())) / len(labels), shares[:, None] * means


def class_means(
    features: np.ndarray, labels: np.ndarray, num_classes: int, least: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each class (K, d) float64 and its count (K,) int64; 0 for classes below ``least`` samples."""
    counts = np.bincount(labels, minlength=num_classes).astype(np.int64)
    counts[counts < least] = 0
    means = np.zeros((num_classes, features.shape[1]))
    for label in np.flatnonzero(counts):
        means[label] = features[labels == label].mean(axis=0, dtype=np.float64)
    return means, counts


def train(
    head: Tensors, features: np.ndarray, labels: np.ndarray, params: FedPACHeadParams, rng: np.random.Generator
) -> Tensors:
    """Train copies of ``weight`` (K, d) and ``bias`` (K,) by SGD on the cross entropy, and return them as float32.

    Raises:
        TrainingFailed: A weight is no longer finite.
    """
    weight = np.array(head["weight"], np.float32)
    bias = np.array(head["bias"], np.float32)
    inputs = np.ascontiguousarray(features, np.float32)
    layer = layers.Linear(weight, bias, min(len(inputs), params.batch_size + 1))
    sgd = layers.Sgd(layer.pairs(), params)

    def step(rows: np.ndarray) -> float:
        loss, error = layers.cross_entropy(layer.forward(inputs[rows]), labels[rows])
        layer.backward(error, to_inputs=False)
        sgd.step()
        return loss

    trained = {"weight": weight, "bias": bias}
    layers.train("fedpac", trained, step, len(labels), params, rng, suspects={"lr": params.lr})
    return trained


def _start(data: FitData, received: Tensors) -> Tensors:
    """Return ``weight`` (K, d) and ``bias`` (K,) from which the classifier is trained.

    They are those that were received in a round, else those of the bundle's shared classifier, else zeros.
    """
    if "head.weight" in received:
        return {name: received[f"head.{name}"] for name in ("weight", "bias")}
    if data.global_head is not None:
        return data.global_head
    size = data.features.shape[1]
    return {"weight": np.zeros((data.num_classes, size), np.float32), "bias": np.zeros(data.num_classes, np.float32)}
