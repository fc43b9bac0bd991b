"""A small perceptron trained by SGD in numpy; by default one linear layer and 10 epochs, RepPer's head.

``hidden`` puts one layer of rectified units in front. Weights start uniform in +-1/sqrt(inputs), as torch's do.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from pydantic import Field

from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from . import _layers as layers
from ._features import NormedHead, NormedParams
from .base import softmax


class PerceptronParams(NormedParams):
    """The parameters of the perceptron and of SGD with momentum on the mean cross entropy of a batch."""

    hidden: int = Field(0, ge=0, le=4096, description="rectified units; 0 = one linear layer; RepPer's option is 128")
    epochs: int = Field(10, ge=1, le=10_000)
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    batch_size: int = Field(16, ge=1)


class PerceptronHead(NormedHead):
    """One linear layer, or two with rectified units between; the generator decides start and order."""

    Params = PerceptronParams
    source = "RepPer (PCL stage): MLP head, one linear layer, 10 local epochs of SGD"

    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        params = self.params
        arrays = dict[str, np.ndarray]()
        sizes = [inputs.shape[1], classes]
        if params.hidden:
            sizes.insert(1, params.hidden)
        for number, (size, outputs) in enumerate(pairwise(sizes)):
            arrays[f"weight{number}"], arrays[f"bias{number}"] = layers.uniform(size, outputs, rng)
        chain = perceptron(arrays, min(len(inputs), params.batch_size))
        sgd = layers.Sgd(chain.pairs(), params)

        def step(rows: np.ndarray) -> None:
            propagate(chain, inputs[rows], labels[rows])
            sgd.step()

        layers.train(self.name, arrays, step, len(labels), params, rng, smallest=1, suspects={"lr": params.lr})
        return arrays

    def _logits(self, inputs: np.ndarray) -> np.ndarray:
        return perceptron(self.arrays, len(inputs)).forward(inputs)

    def _write_logits(self, graph: Graph, inputs: Value) -> Value:
        wide = {name: array.astype(DOUBLE) for name, array in self.arrays.items()}
        return perceptron(wide, 1).write(graph, inputs)


def perceptron(arrays: Tensors, rows: int) -> layers.Chain:
    """Return the network of ``weight0``, ``bias0`` and, with a hidden layer, ``weight1``, ``bias1``.

    ``rows`` is the size of the largest batch.
    """
    first = layers.Linear(arrays["weight0"], arrays["bias0"], rows)
    if "weight1" not in arrays:
        return layers.Chain([first])
    return layers.Chain([first, layers.Rectify(), layers.Linear(arrays["weight1"], arrays["bias1"], rows)])


def propagate(chain: layers.Chain, inputs: np.ndarray, labels: np.ndarray) -> None:
    """Store in ``chain`` the gradients of the mean cross entropy of a batch: inputs (n, d), labels (n,) below k."""
    probabilities = softmax(chain.forward(inputs))
    chain.backward((probabilities - np.eye(probabilities.shape[1])[labels]) / len(inputs))
