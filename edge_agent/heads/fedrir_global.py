"""FedRIR's head for devices without torch: one linear layer on the shared features g, trained by Adam in numpy.

This is the paper's ablation "w/o MCSL" with the encoder frozen: the client-specific features of the full method need
gradients through convolutions. Step size and batch are FedRIR's; weights start uniform in +-1/sqrt(d), as torch's do.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..errors import TrainingFailed
from ..task import Tensors
from ._features import FeatureNorm, NormedParams, fit_norm, normalise, one_hot
from .base import FitData, Head, softmax

_DECAY1, _DECAY2, _EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, as everywhere."""


class FedRIRGlobalParams(NormedParams):
    """Adam on the mean cross entropy of a batch."""

    feature_norm: FeatureNorm = Field("none", description="none: g as FedRIR's head sees it; l2; standard")
    epochs: int = Field(1000, ge=1, le=10_000, description="passes over the data: FedRIR's 1000 rounds have one each")
    lr: float = Field(5e-4, gt=0, description="step size of Adam (FedRIR, 4.2)")
    batch_size: int = Field(100, ge=1, description="FedRIR, 4.2; the last batch of an epoch may be smaller")


class FedRIRGlobalHead(Head):
    """One linear layer on frozen shared features; the generator decides start and order."""

    Params = FedRIRGlobalParams
    source = "FedRIR, WWW 2025: ablation w/o MCSL, encoder frozen"

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        norm = fit_norm(data.features, self.params.feature_norm)
        inputs = normalise(data.features, self.params.feature_norm, norm)
        bound = 1.0 / np.sqrt(inputs.shape[1])
        layer = {
            "weight": rng.uniform(-bound, bound, (len(classes), inputs.shape[1])),
            "bias": rng.uniform(-bound, bound, len(classes)),
        }
        train(layer, inputs, one_hot(data.labels, classes), self.params, rng)
        if not all(np.isfinite(array).all() for array in layer.values()):
            lr = self.params.lr
            raise TrainingFailed(f"weights of head 'fedrir_global' became infinite with lr {lr}; choose a smaller one")
        return {**norm, **layer}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        inputs = normalise(features, self.params.feature_norm, self.arrays)
        return softmax(inputs @ self.arrays["weight"].T + self.arrays["bias"])


def train(
    layer: Tensors, inputs: np.ndarray, targets: np.ndarray, params: FedRIRGlobalParams, rng: np.random.Generator
) -> None:
    """Adam on ``weight`` (k, d) and ``bias`` (k,) in place; ``targets`` (n, k) are one-hot."""
    moments = {name: (np.zeros_like(array), np.zeros_like(array)) for name, array in layer.items()}
    steps = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(params.epochs):
            order = rng.permutation(len(inputs))
            for begin in range(0, len(order), params.batch_size):
                batch, steps = order[begin : begin + params.batch_size], steps + 1
                error = softmax(inputs[batch] @ layer["weight"].T + layer["bias"]) - targets[batch]
                gradients = {"weight": error.T @ inputs[batch] / len(batch), "bias": error.mean(axis=0)}
                for name, gradient in gradients.items():
                    layer[name] -= params.lr * _direction(*moments[name], gradient, steps)


def _direction(first: np.ndarray, second: np.ndarray, gradient: np.ndarray, steps: int) -> np.ndarray:
    """Adam's step for a gradient; both moments (updated in place) are corrected for their start at zero."""
    first += (1 - _DECAY1) * (gradient - first)
    second += (1 - _DECAY2) * (gradient**2 - second)
    scale = np.sqrt(second / (1 - _DECAY2**steps)) + _EPSILON
    return np.asarray(first / (1 - _DECAY1**steps) / scale)
