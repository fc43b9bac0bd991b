"""Support vector machine, one against the rest: linear with squared hinge loss, or with an RBF kernel.

The linear one, which is the default, is fitted in numpy, 600 x 512 x 10 in about 0.1 s. The one with a kernel is fitted
by scikit-learn in a child process, so that an agent stays small (importing scikit-learn costs 80 MB and a second); its
predictions are computed in numpy, where scikit-learn need not be installed. It computes no probabilities:
`predict_proba` gives the softmax of its decision values, which ranks classes and is not calibrated.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from ..core.child_process import Child, function_command
from ..core.errors import MissingCapability, TrainingFailed
from ..core.graph import Graph, Value
from ..core.storage import read_tensors, write_tensors
from ..core.task import Tensors
from ._features import FeatureNorm, NormedHead, NormedParams
from ._layers import minimise
from ._time import at_most

_ROWS = 1024
"""The most rows whose kernel is in memory at once: for 1024 rows and 2000 support vectors it takes 16 MB."""


class SVMParams(NormedParams):
    """The parameters of the machine; the defaults are the most accurate over eleven sets of features of real encoders.

    There the linear machine is as accurate as the one with a kernel, without scikit-learn.
    """

    feature_norm: FeatureNorm = Field("l2", description="none; l2: rows of length 1; standard: as for other heads")
    kernel: Literal["linear", "rbf"] = "linear"
    c: float = Field(10.0, gt=0, le=1e6, description="C, inverse strength of the L2 penalty, for inputs of length 1")
    gamma: float | None = Field(None, gt=0, description="RBF width; None = 1 / (d * variance), scikit-learn's 'scale'")
    max_iterations: int = Field(1000, ge=1, le=100_000, description="linear: steps of the solver")
    tolerance: float = Field(1e-4, gt=0, description="linear: largest entry of the mean loss's gradient to stop at")
    timeout_s: float = Field(600.0, gt=0, description="rbf: longest fit before it is given up")


class SVMHead(NormedHead):
    """Linear or RBF support vector machine."""

    Params = SVMParams
    source = "RepPer (PCL stage): SVM head; kernel and C are not stated there"

    def _fit_inputs(self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator) -> Tensors:
        params = self.params
        if params.kernel == "linear":
            signs = np.where(np.arange(classes) == labels[:, None], 1.0, -1.0)
            weight, bias = fit_linear(inputs, signs, params)
            return {"weight": weight, "bias": bias}
        if importlib.util.find_spec("sklearn") is None:
            raise MissingCapability.package("sklearn", "heads", "fitting head 'svm' with kernel rbf")
        gamma = params.gamma
        if gamma is None:
            variance = float(inputs.var())
            if variance == 0.0:
                variance = 1.0
            gamma = 1.0 / (inputs.shape[1] * variance)
        arrays = {"inputs": inputs, "labels": labels.astype(np.int64)}
        return _fit_in_child(arrays, {"c": params.c, "gamma": gamma}, at_most(params.timeout_s))

    def _logits(self, inputs: np.ndarray) -> np.ndarray:
        if self.params.kernel == "linear":
            return super()._logits(inputs)
        support = self.arrays["support"]
        kernels = []
        for begin in range(0, len(inputs), _ROWS):
            block = inputs[begin : begin + _ROWS]
            squares = np.sum(block**2, axis=1)[:, None] - 2 * block @ support.T + np.sum(support**2, axis=1)
            kernels.append(np.exp(-self.arrays["gamma"] * np.maximum(squares, 0)))
        return np.asarray(np.concatenate(kernels) @ self.arrays["dual"].T + self.arrays["bias"])

    def _write_logits(self, graph: Graph, inputs: Value) -> Value:
        if self.params.kernel == "linear":
            return super()._write_logits(graph, inputs)
        support = self.arrays["support"]
        products = graph.add("MatMul", inputs, np.ascontiguousarray(-2 * support.T))
        squares = graph.add("Add", graph.squared_lengths(inputs), products)
        squares = graph.add("Add", squares, np.sum(support**2, axis=1))
        above_zero = graph.add("Max", squares, np.zeros(1))
        kernels = graph.add("Exp", graph.add("Mul", above_zero, -self.arrays["gamma"]))
        return graph.linear(kernels, self.arrays["dual"], self.arrays["bias"])


def fit_linear(inputs: np.ndarray, signs: np.ndarray, params: SVMParams) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (k, d) and biases (k,) float64 for ``inputs`` (n, d) float64 and ``signs`` (n, k), 1 or -1.

    Each class minimises ``|w|^2 / 2 + C sum max(0, 1 - y (w x + b))^2``, the bias free. The ``x`` are the inputs over
    their root mean square length, so that C means the same whatever the unit of the features.
    """
    (count, size) = inputs.shape
    classes = signs.shape[1]
    length = float(np.sqrt(np.mean(np.sum(inputs**2, axis=1)))) or 1.0
    inputs = inputs / length
    strength = 1.0 / (params.c * count)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = flat[: classes * size].reshape(classes, size)
        bias = flat[classes * size :]
        short = inputs @ weight.T
        short += bias
        short *= signs
        np.subtract(1.0, short, out=short)
        np.maximum(short, 0.0, out=short)
        loss = float(np.vdot(short, short)) / count + 0.5 * strength * float(np.vdot(weight, weight))
        short *= signs
        short *= -2.0 / count
        return loss, np.concatenate([(short.T @ inputs + strength * weight).ravel(), short.sum(axis=0)])

    start = np.zeros(classes * size + classes)
    solution = minimise(objective, start, max_iterations=params.max_iterations, tolerance=params.tolerance)
    return solution[: classes * size].reshape(classes, size) / length, solution[classes * size :]


def _fit_in_child(arrays: Tensors, options: dict[str, float], timeout_s: float) -> Tensors:
    """Return arrays of the fitted machine; the child sees nothing but its own folder."""
    with tempfile.TemporaryDirectory(prefix="headwater-svm-") as name:
        folder = Path(name)
        write_tensors(folder / "in.safetensors", arrays)
        command = function_command(__name__, _main.__name__, json.dumps(options))
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            finished = Child(command, folder=folder, environment=one_thread).finish(limit_s=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TrainingFailed(
                f"head 'svm' was not fitted within {timeout_s:g} s; raise timeout_s, or take kernel linear"
            ) from error
        if finished.code != 0:
            reason = f"exit status {finished.code}"
            error_lines = finished.errors.strip().splitlines()
            if error_lines:
                reason = error_lines[-1]
            raise TrainingFailed(f"scikit-learn could not fit head 'svm': {reason}")
        fitted = read_tensors(folder / "out.safetensors")
        return {key: array.copy() for key, array in fitted.items()}


def _main(options: str) -> None:
    """Fit in the child process: read ``in.safetensors`` and ``options`` (JSON), and write ``out.safetensors``."""
    from sklearn.svm import SVC

    data = read_tensors(Path("in.safetensors"))
    settings = json.loads(options)
    inputs = data["inputs"]
    labels = data["labels"]
    classes = int(labels.max()) + 1
    dual = np.zeros((classes, len(inputs)))
    bias = np.zeros(classes)
    for label in range(classes):
        machine = SVC(C=settings["c"], kernel="rbf", gamma=settings["gamma"]).fit(inputs, labels == label)
        dual[label, machine.support_] = machine.dual_coef_[0]
        bias[label] = machine.intercept_[0]
    # Support vectors are shared between the machines, one for each class against the rest.
    used = np.flatnonzero(np.any(dual != 0, axis=0))
    fitted = {"support": inputs[used], "dual": np.ascontiguousarray(dual[:, used]), "bias": bias}
    write_tensors(Path("out.safetensors"), {**fitted, "gamma": np.array([settings["gamma"]], np.float64)})
