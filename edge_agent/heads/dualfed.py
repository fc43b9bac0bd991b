"""DualFed on a device: projector and personal classifier, trained on cached features, beside the shared classifier.

Stage one of the method with the encoder frozen: cross entropy plus lambda times the supervised contrastive loss, SGD
with momentum. Stage two trains the shared classifier here, too: as it came, it expects the classes as often as all
clients have them, and costs a device with other shares of them more than the personal one gains. Without a shared
classifier in the bundle the personal one answers alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from pydantic import Field

from ..core.graph import FLOAT, Graph, Value
from ..core.search_space import Choices
from ..core.task import Tensors
from . import _layers as layers
from ._features import ensemble, shared_logits, write_ensemble, write_shared_logits
from .base import FitData, Head, HeadParams
from .tuned import SHARED_C, shared_rows_tuned

_ROWS = 512
"""The most rows that are predicted at once."""


class DualFedCommonParams(HeadParams):
    """The parameters that the method and its device head have in common."""

    smallest_batch: int = Field(
        8,
        ge=2,
        description="a last batch of fewer joins the one before it: behind batch norm, two differ by sign; ours",
    )
    contrastive_weight: float = Field(
        1.0,
        ge=0,
        description="lambda in Eq. 8; ours; official scripts: PACS 40, Office-Home 2",
        json_schema_extra={"paper": 40.0, "search": Choices((1.0, 2.0, 10.0, 40.0))},
    )
    temperature: float = Field(0.2, gt=0, description="tau in Eq. 7; official scripts: PACS 0.2, Office-Home 0.05")
    ensemble: Literal["probs", "logits"] = Field(
        "probs", description="Eq. 5 adds probabilities; the official code adds logits"
    )
    projector_depth: int = Field(2, ge=1, le=8, description="D in Table 5: linear layers; 1 = d to d, without hidden")
    projector_width: int = Field(256, ge=1, le=8192, description="H in Table 5: units of the hidden layers")
    projector_norm: bool = Field(True, description="BN in Table 5: batch norm behind each layer of the projector")


class DualFedHeadParams(DualFedCommonParams):
    """The parameters of the head: the method's, and ``epochs``, which the paper does not have."""

    epochs: int = Field(50, ge=1, le=10_000, description="passes over the local features")
    lr: float = Field(0.01, gt=0, description="step size of SGD")
    momentum: float = Field(0.5, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    batch_size: int = Field(256, ge=2, description="batch norm needs two")
    shared_c: float | None = SHARED_C


class DualFedHead(Head):
    """Linear, ReLU, batch norm, linear, batch norm; then one linear layer."""

    Params = DualFedHeadParams
    source = "Zhu et al., DualFed, ACM Multimedia 2024, Eqs. 5-8"
    uses_shared = True

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        params = self.params
        tensors = start(data.features.shape[1], len(classes), params, rng)
        inputs = np.ascontiguousarray(data.features, np.float32)
        labels = np.searchsorted(classes, data.labels)
        # A last batch that is too small joins the one before it, so that one may be larger than the batch size.
        largest_batch = params.batch_size + params.smallest_batch - 1
        trainer = Trainer(tensors, params, min(len(inputs), largest_batch))
        layers.train(
            "dualfed",
            tensors,
            lambda rows: trainer.step(inputs[rows], labels[rows]),
            len(labels),
            params,
            rng,
            smallest=params.smallest_batch,
            suspects={"contrastive_weight (lambda)": params.contrastive_weight, "lr": params.lr},
        )
        return {**tensors, **shared_rows_tuned(data, classes, params.shared_c)}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(features, np.float32)
        arrays = self.arrays
        projector = layers.chain_of(arrays, "projector", min(len(rows), _ROWS))
        weight = arrays["personal_head.weight"]
        bias = arrays["personal_head.bias"]
        pieces = [rows[begin : begin + _ROWS] for begin in range(0, len(rows), _ROWS)]
        logits = np.concatenate([projector.forward(piece, train=False) @ weight.T + bias for piece in pieces])
        return ensemble(logits, shared_logits(arrays, rows), self.params.ensemble)

    def _write(self, graph: Graph, features: Value) -> Value:
        arrays = self.arrays
        projected = layers.chain_of(arrays, "projector", 1).write(graph, features)
        logits = graph.linear(projected, arrays["personal_head.weight"], arrays["personal_head.bias"])
        shared = write_shared_logits(graph, features, arrays, FLOAT)
        return write_ensemble(graph, logits, shared, self.params.ensemble)


class Trainer:
    """The training of ``projector.*`` and ``personal_head.*`` in place, by batches of at most ``rows`` samples."""

    def __init__(self, tensors: Tensors, params: DualFedHeadParams, rows: int) -> None:
        self._params = params
        self._projector = layers.chain_of(tensors, "projector", rows)
        self._head = layers.Linear(tensors["personal_head.weight"], tensors["personal_head.bias"], rows)
        self._sgd = layers.Sgd([*self._projector.pairs(), *self._head.pairs()], params)

    def step(self, inputs: np.ndarray, labels: np.ndarray) -> float:
        """Take one step on inputs (n, d) float32 and labels (n,) below k, and return the loss before it."""
        projected = self._projector.forward(inputs)
        loss, error = layers.cross_entropy(self._head.forward(projected), labels)
        back = self._head.backward(error)
        if self._params.contrastive_weight:
            contrast, pull = contrastive(projected, labels, self._params.temperature)
            pull *= self._params.contrastive_weight
            back += pull
            loss += self._params.contrastive_weight * contrast
        self._projector.backward(back)
        self._sgd.step()
        return loss


def start(size: int, classes: int, params: DualFedHeadParams, rng: np.random.Generator) -> Tensors:
    """Return fresh arrays of the projector (``size`` in and out) and the personal classifier, by the method's names."""
    sizes = [size, *[params.projector_width] * (params.projector_depth - 1), size]
    tensors: Tensors = {}
    for number, (before, outputs) in enumerate(pairwise(sizes)):
        # Each linear layer but the last is followed by a rectified one, and each by batch norm where there is any.
        layers_each = 2
        if params.projector_norm:
            layers_each = 3
        index = number * layers_each
        tensors |= layers.fresh_linear(f"projector.{index}", before, outputs, rng)
        if params.projector_norm:
            norm_index = index + 2
            if number == params.projector_depth - 1:
                norm_index = index + 1
            tensors |= layers.fresh_norm(f"projector.{norm_index}", outputs)
    return {**tensors, **layers.fresh_linear("personal_head", size, classes, rng)}


def contrastive(features: np.ndarray, labels: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
    """Return the mean supervised contrastive loss (logarithm inside the mean over positives) and its gradient.

    ``features`` (n, d), not of length 1 yet, ``labels`` (n,); the gradient has the shape of ``features``.
    For unit vectors z and S = z z' / temperature: logsumexp over all others of S, minus the mean of S over the others
    of the same label. Samples without such contribute 0 and count.
    """
    # 1. S: similarities of all pairs of unit vectors.
    lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", features, features)), 1e-12)[:, None]
    unit = features / lengths
    similarity = unit @ unit.T
    similarity /= temperature
    # 2. Weights (n, n) of the mean over an anchor's positives: the others of its label.
    alike = (labels[:, None] == labels[None, :]).astype(features.dtype)
    np.fill_diagonal(alike, 0)
    count = alike.sum(axis=1, keepdims=True)
    alike /= np.maximum(count, 1)
    # 3. The loss of each anchor.
    same = np.einsum("ij,ij->i", similarity, alike)
    np.fill_diagonal(similarity, -np.inf)
    log_odds = layers.log_softmax(similarity)
    # log_odds is S minus logsumexp, so the loss of an anchor is the mean of -log_odds over its positives.
    everyone = similarity.max(axis=1) - log_odds.max(axis=1)
    counts = (count[:, 0] > 0).astype(features.dtype)
    share = 1 / len(labels)
    # 4. The gradient by S, and from there by the unit vectors and by the features.
    slope = np.exp(log_odds, out=log_odds)
    slope -= alike
    slope *= counts[:, None] * (share / temperature)
    loss = float(((everyone - same) * counts).sum() * share)
    del similarity, alike  # a quarter of a megabyte each, at the peak
    pull = (slope + slope.T) @ unit
    unit *= np.einsum("ij,ij->i", unit, pull)[:, None]  # not needed any more
    pull -= unit
    pull /= lengths
    return loss, pull
