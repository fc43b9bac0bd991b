"""FedPick on a device: which cached features matter here is learned together with two local classifiers.

The method's losses with the encoder frozen; the global classifier, where the bundle has one, is the other side of the
distillation and of the answer. It is trained here first, as clients train it together with the rest: as it came, it
expects the classes as often as all clients have them, and distillation would pull the local classifier to that.
``selector = "fisher"`` trains no mask: it keeps the features of highest Fisher score and fits a logistic regression on
them, the paper's motivating experiment.
"""

from __future__ import annotations

import logging
import math
from typing import Literal

import numpy as np
from pydantic import Field

from ..core.graph import FLOAT, Graph, Value
from ..core.task import Tensors
from . import _layers as layers
from ._features import (
    ensemble,
    fisher_score,
    fit_norm,
    keep_top,
    mistake_of_share,
    normalise,
    shared_logits,
    write_ensemble,
    write_shared_logits,
)
from .base import FitData, Head, HeadParams
from .lr import LogisticRegressionParams, fit_logistic
from .tuned import SHARED_C, shared_rows_tuned

_log = logging.getLogger(__name__)
_ROWS = 512
"""The most rows that are predicted at once."""


class FedPickCommonParams(HeadParams):
    """The parameters that the method and its device head have in common."""

    mask: Literal["hard", "soft"] = Field("hard", description="zeros and ones (Eq. 10), or weights 0..1 (Eq. 21)")
    selector: Literal["learned", "fisher"] = Field(
        "learned",
        description="mask network (Eq. 9), or the features of highest Fisher score (Eq. 5), chosen in each round",
    )
    keep_ratio: float = Field(0.5, gt=0, le=1, description="share of features that selector fisher keeps")
    ensemble: Literal["probs", "logits", "none"] = Field(
        "probs", description="Eq. 14; none: the global classifier alone ('w/o Ensemble' in Table IV)"
    )
    relevant_weight: float = Field(1.0, ge=0, description="weight r in Eq. 15, of L_r; Digits-Five 10")
    irrelevant_weight: float = Field(
        0.001, ge=0, description="weight u in Eq. 15, of L_u; above 0.01 training exploded"
    )
    distillation_weight: float = Field(1.0, ge=0, description="weight d in Eq. 15, of L_d; Digits-Five 10")
    detach_targets: bool = Field(False, description="each Kullback-Leibler term of Eq. 13 trains its second side only")
    temperature: float = Field(1.0, gt=0, description="T in Eq. 9, of the mask; lost in the paper")
    threshold: float = Field(0.5, gt=0, lt=1, description="eta, above which a feature is picked")
    mask_width: int = Field(0, ge=0, le=8192, description="r, hidden units of the mask network; 0: d / 2, at least 16")


class FedPickHeadParams(FedPickCommonParams):
    """The parameters of the head: the method's, and ``epochs`` and ``c``, which the paper does not have."""

    epochs: int = Field(50, ge=1, le=10_000, description="passes over the local features; selector learned")
    lr: float = Field(0.01, gt=0, description="step size of SGD")
    momentum: float = Field(0.5, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    batch_size: int = Field(32, ge=1)
    shared_c: float | None = SHARED_C
    c: float = Field(1.0, gt=0, le=1e6, description="inverse strength of the L2 penalty; selector fisher")

    @property
    def cut(self) -> float:
        """The logit of the mask above which a feature is picked."""
        return self.temperature * math.log(self.threshold / (1.0 - self.threshold))


class FedPickHead(Head):
    """Mask, classifier of what it picks, and the global classifier of everything."""

    Params = FedPickHeadParams
    source = "Zhu et al., Take Your Pick (FedPick), arXiv 2307.13995, Eqs. 5-15"
    uses_shared = True

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        shared = shared_rows_tuned(data, classes, self.params.shared_c)
        if self.params.selector == "fisher":
            return {**self._fit_fisher(data, classes), **shared}
        params = self.params
        tensors = start(data.features.shape[1], len(classes), self.params, rng)
        inputs = np.ascontiguousarray(data.features, np.float32)
        labels = np.searchsorted(classes, data.labels)
        # The shared classifier is frozen from here on, so what it answers is computed once.
        logits = shared_logits(shared, inputs)
        log_shared = None
        if logits is not None:
            log_shared = layers.log_softmax(logits)
        trainer = Trainer(tensors, params, min(len(inputs), params.batch_size + 1))

        def step(rows: np.ndarray) -> float:
            noise = logistic_noise(np.empty((len(rows), inputs.shape[1]), np.float32), rng)
            log_targets = None
            if log_shared is not None:
                log_targets = log_shared[rows]
            return trainer.step(inputs[rows], labels[rows], log_targets, noise)

        suspects = {"lr": params.lr, "irrelevant_weight": params.irrelevant_weight}
        layers.train("fedpick", tensors, step, len(labels), params, rng, suspects=suspects)
        # A mask that picks nothing, or everything, is worth a warning; a soft one has no such share.
        if params.mask == "hard":
            _, share = predict_logits(tensors, inputs, params)
            mistake = mistake_of_share(share)
            if mistake:
                _log.warning("mask_extreme selected=%.4f: %s", share, mistake)
        return {**tensors, **shared}

    def _fit_fisher(self, data: FitData, classes: np.ndarray) -> Tensors:
        """Return a mask of the features of highest Fisher score, and a logistic regression on them."""
        # 1. The features that separate the classes best.
        is_kept = keep_top(fisher_score(data.features, data.labels), self.params.keep_ratio)
        kept_features = data.features[:, is_kept]
        # 2. A logistic regression on them.
        norm = fit_norm(kept_features, "standard")
        targets = np.eye(len(classes))[np.searchsorted(classes, data.labels)]
        options = LogisticRegressionParams(c=self.params.c)
        normal_weight, normal_bias = fit_logistic(normalise(kept_features, "standard", norm), targets, options)
        # 3. The classifier is stored for raw features: standardising becomes part of its weights.
        raw_weight = normal_weight / norm["feature_scale"]
        raw_bias = normal_bias - raw_weight @ norm["feature_mean"]
        weight = np.zeros((len(classes), len(is_kept)), np.float32)
        weight[:, is_kept] = raw_weight
        return {
            "mask.kept": is_kept.astype(np.float32),
            "relevant_head.weight": weight,
            "relevant_head.bias": raw_bias.astype(np.float32),
        }

    def _predict(self, features: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(features, np.float32)
        logits, _ = predict_logits(self.arrays, rows, self.params)
        return ensemble(logits, shared_logits(self.arrays, rows), self.params.ensemble)

    def _write(self, graph: Graph, features: Value) -> Value:
        arrays = self.arrays
        picked = graph.add("Mul", features, self._write_mask(graph, features))
        logits = graph.linear(picked, arrays["relevant_head.weight"], arrays["relevant_head.bias"])
        shared = write_shared_logits(graph, features, arrays, FLOAT)
        return write_ensemble(graph, logits, shared, self.params.ensemble)

    def _write_mask(self, graph: Graph, features: Value) -> Value:
        """Write what `predict_mask` computes: the mask (n, d) float32, or (d,) where it is the same for all inputs."""
        if "mask.kept" in self.arrays:
            return graph.constant(self.arrays["mask.kept"].astype(FLOAT))
        scores = layers.chain_of(self.arrays, "mask", 1).write(graph, features)
        if self.params.mask == "soft":
            return graph.add("Sigmoid", graph.add("Div", scores, np.array(self.params.temperature, FLOAT)))
        return graph.cast(graph.add("Greater", scores, np.array(self.params.cut, FLOAT)), FLOAT)


def predict_logits(arrays: Tensors, rows: np.ndarray, params: FedPickHeadParams) -> tuple[np.ndarray, float]:
    """Return logits (n, k) of the relevant classifier for ``rows`` (n, d) float32, and the mean of the mask (0..1)."""
    logits = []
    share = 0.0
    for begin in range(0, len(rows), _ROWS):
        piece = rows[begin : begin + _ROWS]
        mask = predict_mask(arrays, piece, params)
        logits.append((piece * mask) @ arrays["relevant_head.weight"].T + arrays["relevant_head.bias"])
        share += float(mask.sum())
    return np.concatenate(logits), share / rows.size


def predict_mask(arrays: Tensors, features: np.ndarray, params: FedPickHeadParams) -> np.ndarray:
    """Return the mask without noise, shaped like ``features`` (n, d) float32: 0 or 1, or weights 0..1 if it is soft."""
    if "mask.kept" in arrays:
        return np.broadcast_to(arrays["mask.kept"], features.shape)
    scores = layers.chain_of(arrays, "mask", len(features)).forward(features, train=False)
    if params.mask == "soft":
        return _sigmoid(scores / params.temperature)
    return (scores > params.cut).astype(np.float32)


class Trainer:
    """Trains the arrays ``mask.*``, ``relevant_head.*`` and ``irrelevant_head.*`` in place; ``rows``: largest batch."""

    def __init__(self, tensors: Tensors, params: FedPickHeadParams, rows: int) -> None:
        self._params = params
        self._mask = layers.chain_of(tensors, "mask", rows)
        self._relevant, self._irrelevant = (
            layers.Linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"], rows)
            for name in ("relevant_head", "irrelevant_head")
        )
        weight = tensors["relevant_head.weight"]
        self._soft, self._picked, self._rest = np.empty((3, rows, weight.shape[1]), weight.dtype)
        self._sgd = layers.Sgd([*self._mask.pairs(), *self._relevant.pairs(), *self._irrelevant.pairs()], params)

    def step(self, inputs: np.ndarray, labels: np.ndarray, log_targets: np.ndarray | None, noise: np.ndarray) -> float:
        """Take one step of SGD on the loss of Eq. 15, and return the loss before it.

        Args:
            inputs: Features (n, d) float32.
            labels: Positions (n,) of the classes, below k.
            log_targets: Log-softmax (n, k) of the global classifier; None where the bundle has none. That classifier
                is frozen, so the part of the loss that it alone depends on is left out.
            noise: Logistic noise (n, d) float32 of the mask.
        """
        params = self._params
        n = len(labels)
        soft = self._soft[:n]
        relevant = self._picked[:n]
        rest = self._rest[:n]
        # 1. The noisy mask divides the features into picked ones and the rest (Eqs. 9 and 10).
        noisy = np.add(self._mask.forward(inputs), noise, out=soft)
        if params.mask == "hard":
            np.multiply(inputs, noisy > params.cut, out=relevant)
        _sigmoid(noisy / params.temperature, out=soft)
        if params.mask == "soft":
            np.multiply(inputs, soft, out=relevant)
        np.subtract(inputs, relevant, out=rest)
        # 2. The local classifier of the picked features learns from labels and from the global classifier (Eq. 13).
        logits = self._relevant.forward(relevant)
        loss, error = layers.cross_entropy(logits, labels)
        loss *= params.relevant_weight
        error *= params.relevant_weight
        if log_targets is not None and params.distillation_weight:
            distance, pull = divergence(logits, log_targets, both=not params.detach_targets)
            pull *= params.distillation_weight
            error += pull
            loss += params.distillation_weight * distance
        # 3. The classifier of the rest is to be unsure, so that the rest holds nothing about the classes.
        entropy, error_rest = negative_entropy(self._irrelevant.forward(rest))
        error_rest *= params.irrelevant_weight
        # 4. The mask learns from both: a feature that one classifier gains is one that the other loses.
        slope = self._relevant.backward(error)
        slope -= self._irrelevant.backward(error_rest)
        slope *= inputs
        slope *= soft
        slope *= np.subtract(1, soft, out=soft)  # straight through: the gradient of the smooth mask, m (1 - m) / T
        slope /= params.temperature
        self._mask.backward(slope)
        self._sgd.step()
        return loss + params.irrelevant_weight * entropy


def start(size: int, classes: int, params: FedPickHeadParams, rng: np.random.Generator) -> Tensors:
    """Return fresh arrays of mask network and local classifiers, with the method's names."""
    width = params.mask_width
    if width == 0:
        width = max(16, size // 2)
    return {
        **layers.fresh_linear("mask.0", size, width, rng),
        **layers.fresh_linear("mask.2", width, size, rng),
        **layers.fresh_linear("relevant_head", size, classes, rng),
        **layers.fresh_linear("irrelevant_head", size, classes, rng),
    }


def logistic_noise(out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fill ``out`` with standard logistic noise, which is what the difference of two independent Gumbels is."""
    rng.random(out=out, dtype=np.float32)
    np.clip(out, 1e-9, 1 - 2.0**-24, out=out)
    other = np.log1p(-out)
    np.log(out, out=out)
    out -= other
    return out


def negative_entropy(logits: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the batch mean of sum_c q_c log q_c for q = softmax(logits), and its gradient (n, k) by ``logits``."""
    log_q = layers.log_softmax(logits)
    q = np.exp(log_q)
    values = (q * log_q).sum(axis=1, keepdims=True)
    return float(values.mean()), q * (log_q - values) / len(logits)


def divergence(logits: np.ndarray, log_targets: np.ndarray, *, both: bool) -> tuple[float, np.ndarray]:
    """Return the batch mean of KL(p || q) + KL(q || p), and its gradient (n, k) by ``logits``.

    Args:
        logits: Logits (n, k) of q, which learns.
        log_targets: Log probabilities (n, k) of p.
        both: Whether the second term has a gradient; it counts in the value in any case.
    """
    log_q = layers.log_softmax(logits)
    q = np.exp(log_q)
    p = np.exp(log_targets)
    ratio = log_q - log_targets
    backward = (q * ratio).sum(axis=1, keepdims=True)
    value = float((backward[:, 0] - (p * ratio).sum(axis=1)).mean())
    error = q - p
    if both:
        error += q * (ratio - backward)
    error /= len(logits)
    return value, error


def _sigmoid(logits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return 1 / (1 + exp(-logits)) by way of tanh, which cannot overflow."""
    half = np.tanh(logits * 0.5, out=out)
    half += 1
    half *= 0.5
    return np.asarray(half)
