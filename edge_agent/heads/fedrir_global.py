"""FedRIR's head for devices without torch: one linear layer on the shared features g, trained by Adam in numpy.

This is the paper's ablation "w/o MCSL" with the encoder frozen: the client-specific features of the full method need
gradients through convolutions. Step size and batch are FedRIR's; weights start uniform in +-1/sqrt(d), as torch's do.
"""

from __future__ import annotations

import itertools

import numpy as np
from pydantic import Field

from ..core.task import Tensors
from . import _layers as layers
from ._features import FeatureNorm, NormedHead, NormedParams
from .base import softmax

_DECAY1 = 0.9
"""Adam's decay of the mean gradient, the usual one."""

_DECAY2 = 0.999
"""Adam's decay of the mean squared gradient, the usual one."""

_EPSILON = 1e-8
"""Adam's addition to the root of the mean squared gradient, the usual one."""


class FedRIRGlobalParams(NormedParams):
    """The parameters of Adam on the mean cross entropy of a batch."""

    feature_norm: FeatureNorm = Field("none", description="none: g as FedRIR's head sees it; l2; standard")
    epochs: int = Field(1000, ge=1, le=10_000, description="passes over the data: FedRIR's 1000 rounds have one each")
    lr: float = Field(5e-4, gt=0, description="step size of Adam (FedRIR, 4.2)")
    batch_size: int = Field(100, ge=1, description="FedRIR, 4.2; the last batch of an epoch may be smaller")


class FedRIRGlobalHead(NormedHead):
    """One linear layer on frozen shared features; the generator decides start and order."""

    Params = FedRIRGlobalParams
    source = "FedRIR, WWW 2025: ablation w/o MCSL, encoder frozen"

    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        weight, bias = layers.uniform(inputs.shape[1], classes, rng)
        layer = {"weight": weight, "bias": bias}
        train(layer, inputs, np.eye(classes)[labels], self.params, rng)
        return layer


def train(
    layer: Tensors, inputs: np.ndarray, targets: np.ndarray, params: FedRIRGlobalParams, rng: np.random.Generator
) -> None:
    """Train ``weight`` (k, d) and ``bias`` (k,) in place by Adam; ``targets`` (n, k) are one-hot.

    Raises:
        TrainingFailed: A weight is no longer finite.
    """
    moments = {name: (np.zeros_like(array), np.zeros_like(array)) for name, array in layer.items()}
    numbers = itertools.count(1)

    def step(rows: np.ndarray) -> None:
        number = next(numbers)
        error = softmax(inputs[rows] @ layer["weight"].T + layer["bias"]) - targets[rows]
        gradients = {"weight": error.T @ inputs[rows] / len(rows), "bias": error.mean(axis=0)}
        for name, gradient in gradients.items():
            first, second = moments[name]
            first += (1 - _DECAY1) * (gradient - first)
            second += (1 - _DECAY2) * (gradient**2 - second)
            # Both moments are corrected for their start at zero.
            scale = np.sqrt(second / (1 - _DECAY2**number)) + _EPSILON
            layer[name] -= params.lr * (first / (1 - _DECAY1**number) / scale)

    layers.train("fedrir_global", layer, step, len(inputs), params, rng, smallest=1, suspects={"lr": params.lr})
