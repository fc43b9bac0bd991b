"""A small perceptron trained by SGD in numpy; by default one linear layer and 10 epochs, RepPer's head.

``hidden`` puts one layer of rectified units in front. Weights start uniform in +-1/sqrt(inputs), as torch's do.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from pydantic import Field

from ..errors import TrainingFailed
from ..task import Tensors
from ._features import NormedParams, fit_norm, normalise, one_hot
from .base import FitData, Head, softmax


class PerceptronParams(NormedParams):
    """SGD with momentum on the mean cross-entropy of a batch."""

    hidden: int = Field(0, ge=0, le=4096, description="rectified units; 0 = one linear layer; RepPer's option is 128")
    epochs: int = Field(10, ge=1, le=10_000)
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    batch_size: int = Field(16, ge=1)


class PerceptronHead(Head):
    """One linear layer, or two with rectified units between; the generator decides start and order."""

    Params = PerceptronParams
    source = "RepPer (PCL stage): MLP head, one linear layer, 10 local epochs of SGD"

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        norm = fit_norm(data.features, self.params.feature_norm)
        inputs = normalise(data.features, self.params.feature_norm, norm)
        layers = _start([inputs.shape[1], *([self.params.hidden] if self.params.hidden else []), len(classes)], rng)
        _train(layers, inputs, one_hot(data.labels, classes), self.params, rng)
        if not all(np.isfinite(layer).all() for layer in layers.values()):
            raise TrainingFailed(
                f"weights of head 'mlp' became infinite with lr {self.params.lr}; choose a smaller one"
            )
        return {**norm, **layers}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        inputs = normalise(features, self.params.feature_norm, self.arrays)
        return softmax(_forward(self.arrays, inputs)[-1])


def _start(sizes: list[int], rng: np.random.Generator) -> Tensors:
    layers: Tensors = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        bound = 1.0 / np.sqrt(inputs)
        layers[f"weight{number}"] = rng.uniform(-bound, bound, (outputs, inputs))
        layers[f"bias{number}"] = rng.uniform(-bound, bound, outputs)
    return layers


def _forward(layers: Tensors, inputs: np.ndarray) -> list[np.ndarray]:
    """Activations before each layer, logits last."""
    activations = [inputs]
    depth = 2 if "weight1" in layers else 1
    for number in range(depth):
        outputs = activations[-1] @ layers[f"weight{number}"].T + layers[f"bias{number}"]
        activations.append(np.maximum(outputs, 0) if number + 1 < depth else outputs)
    return activations


def _train(
    layers: Tensors, inputs: np.ndarray, targets: np.ndarray, params: PerceptronParams, rng: np.random.Generator
) -> None:
    speed = {name: np.zeros_like(layer) for name, layer in layers.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(params.epochs):
            order = rng.permutation(len(inputs))
            for begin in range(0, len(order), params.batch_size):
                batch = order[begin : begin + params.batch_size]
                _step(layers, speed, _gradients(layers, inputs[batch], targets[batch]), params)


def _gradients(layers: Tensors, inputs: np.ndarray, targets: np.ndarray) -> Tensors:
    """Gradients of the mean cross-entropy, by hand."""
    activations = _forward(layers, inputs)
    error = (softmax(activations[-1]) - targets) / len(inputs)
    gradients: Tensors = {}
    for number in reversed(range(len(activations) - 1)):
        gradients[f"weight{number}"] = error.T @ activations[number]
        gradients[f"bias{number}"] = error.sum(axis=0)
        error = (error @ layers[f"weight{number}"]) * (activations[number] > 0)
    return gradients


def _step(layers: Tensors, speed: Tensors, gradients: Tensors, params: PerceptronParams) -> None:
    for name, layer in list(layers.items()):
        speed[name] *= params.momentum
        speed[name] += gradients[name] + params.weight_decay * layer
        layers[name] = layer - params.lr * speed[name]
