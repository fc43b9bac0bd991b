"""Multinomial logistic regression with an L2 penalty, in numpy. 600 x 512 x 10 fits in about 0.1 s on one thread.

Same objective as scikit-learn's ``LogisticRegression``: the sum of log losses plus ``|W|^2 / (2 C)``, biases free; with
two classes one decision vector is penalised, as there.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.task import Tensors
from ._features import NormedHead, NormedParams
from ._layers import minimise

MOST_IN_SPAN = 1000
"""The most samples for which `fit_in_span` is used: the principal axes of n samples take time with the cube of n.

On one core of an x86 server they take 0.2 s for 1,000 samples and 4 s for 3,000, more than the search saves.
"""


class LogisticRegressionParams(NormedParams):
    """The parameters of logistic regression; C is that of scikit-learn, the inverse of the penalty's weight."""

    c: float = Field(1.0, gt=0, le=1e6, description="C, inverse strength of the L2 penalty")
    max_iterations: int = Field(1000, ge=1, le=100_000)
    # scikit-learn's own rule. On features of real encoders 1e-6 takes four times as long and is no more accurate; at
    # 1e-3 accuracy begins to suffer.
    tolerance: float = Field(1e-4, gt=0, description="largest entry of the mean loss's gradient at which to stop")
    in_span: bool = Field(
        default=False,
        description="with fewer samples than features, and not too many, search among the weighted sums of the samples "
        "alone: the same optimum, found sooner",
    )


class LogisticRegressionHead(NormedHead):
    """Logistic regression: convex, so the result does not depend on the generator."""

    Params = LogisticRegressionParams
    source = "RepPer (PCL stage): LR head; L2, C = 1"

    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        targets = np.eye(classes)[labels]
        if self.params.in_span and len(inputs) < min(inputs.shape[1], MOST_IN_SPAN + 1):
            weight, bias = fit_in_span(inputs, targets, self.params)
        else:
            weight, bias = fit_logistic(inputs, targets, self.params)
        return {"weight": weight, "bias": bias}


def fit_in_span(
    inputs: np.ndarray, targets: np.ndarray, params: LogisticRegressionParams
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `fit_logistic` does, for fewer samples than features; the time grows with the samples alone.

    With the penalty the best weights are weighted sums of the samples. In coordinates along the principal axes of the
    samples, as many as there are samples, both the loss and the length of the weights stay what they are.
    """
    values, vectors = np.linalg.eigh(inputs @ inputs.T)
    is_kept = values > max(float(values[-1]), 1e-30) * 1e-12
    scale = np.sqrt(values[is_kept])
    axes = vectors[:, is_kept]
    coordinates = np.asarray(axes * scale, np.float32).astype(np.float64)
    weight, bias = fit_logistic(coordinates, targets, params)
    return (weight / scale) @ axes.T @ inputs, bias


def fit_logistic(
    inputs: np.ndarray, targets: np.ndarray, params: LogisticRegressionParams, towards: Tensors | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (k, d) and biases (k,) float64 for ``inputs`` (n, d) float64 and one-hot ``targets`` (n, k).

    With ``towards``, a ``weight`` (k, d) and ``bias`` (k,), the penalty is |W - weight|^2 / (2 C), and the solver
    starts there.
    """
    (count, size) = inputs.shape
    classes = targets.shape[1]
    # Softmax over two opposite vectors w/2 and -w/2 is the sigmoid of w, but has half of its squared length.
    strength = 1.0 / (params.c * count)
    if towards is None and classes == 2:
        strength = 2.0 / (params.c * count)
    # The solver starts at the centre of the penalty: it is near the optimum where samples are few.
    if towards is None:
        center = np.zeros((classes, size))
        bias_start = np.zeros(classes)
    else:
        center = towards["weight"].astype(np.float64)
        bias_start = towards["bias"].astype(np.float64)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = flat[: classes * size].reshape(classes, size)
        bias = flat[classes * size :]
        logits = inputs @ weight.T
        logits += bias
        logits -= logits.max(axis=1, keepdims=True)
        chosen = np.einsum("nk,nk->", logits, targets)
        np.exp(logits, out=logits)
        sums = logits.sum(axis=1, keepdims=True)
        moved = weight - center
        loss = (float(np.log(sums).sum()) - float(chosen)) / count + 0.5 * strength * float(np.vdot(moved, moved))
        logits /= sums
        logits -= targets
        logits /= count
        return loss, np.concatenate([(logits.T @ inputs + strength * moved).ravel(), logits.sum(axis=0)])

    start = np.concatenate([center.ravel(), bias_start])
    solution = minimise(objective, start, max_iterations=params.max_iterations, tolerance=params.tolerance)
    return solution[: classes * size].reshape(classes, size), solution[classes * size :]
