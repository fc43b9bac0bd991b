"""Nearest class mean: the cheapest head, and a good one for a handful of samples for each class.

Probabilities are ``softmax(-distance^2 / scale)``, where ``scale`` is the mean squared distance of training samples
from their own class mean: they rank classes and are not calibrated.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.graph import Graph, Value
from ..core.task import Tensors
from ._features import FeatureNorm, NormedHead, NormedParams


class PrototypeParams(NormedParams):
    """Plain Euclidean distance unless features are normalised."""

    feature_norm: FeatureNorm = Field("none", description="none, l2 (cosine distance) or standard")


class PrototypeHead(NormedHead):
    """Class means of the features; nothing is iterated."""

    Params = PrototypeParams
    source = "Snell et al., Prototypical Networks, NeurIPS 2017; FedProto, AAAI 2022 (nearest prototype)"

    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        one_hot = np.eye(classes)[labels]
        means = one_hot.T @ inputs / one_hot.sum(axis=0)[:, None]
        scale = float(np.mean(np.sum((inputs - one_hot @ means) ** 2, axis=1)))
        # Samples that are all equal to their class mean have no scatter to divide by.
        if scale == 0.0:
            scale = 1.0
        return {"means": means, "scale": np.array([scale])}

    def _logits(self, inputs: np.ndarray) -> np.ndarray:
        means = self.arrays["means"]
        # |x|^2 is the same for all classes, and softmax does not see what all classes share.
        return np.asarray((2 * inputs @ means.T - np.sum(means**2, axis=1)) / self.arrays["scale"])

    def _write_logits(self, graph: Graph, inputs: Value) -> Value:
        means = self.arrays["means"]
        return graph.add("Div", graph.linear(inputs, 2 * means, -np.sum(means**2, axis=1)), self.arrays["scale"])
