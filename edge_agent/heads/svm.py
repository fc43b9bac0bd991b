"""Support vector machine, one against the rest: linear with squared hinge loss, or with an RBF kernel.

Fitted by scikit-learn in a child process, so that an agent stays at its 40 to 60 MB (importing scikit-learn costs 80 MB
and 0.7 s); predicted in numpy, where scikit-learn need not be installed. A machine of this kind has no probabilities of
its own: what is given is the softmax of its decision values, which ranks classes and is not calibrated.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from ..errors import MissingCapability, TrainingFailed
from ..store import read_tensors, write_tensors
from ..task import Tensors
from ._features import NormedParams, fit_norm, normalise
from .base import FitData, softmax
from .base import Head as BaseHead

_ROWS = 1024
"""Rows for which the kernel is held at once: 1024 x 2000 support vectors are 16 MB."""


class Params(NormedParams):
    """Names as in scikit-learn."""

    kernel: Literal["linear", "rbf"] = "linear"
    c: float = Field(1.0, gt=0, le=1e6, description="C, inverse strength of the L2 penalty")
    gamma: float | None = Field(None, gt=0, description="RBF width; None = 1 / (d * variance), scikit-learn's 'scale'")
    max_iterations: int = Field(5000, ge=1)
    timeout_s: float = Field(600.0, gt=0, description="longest fit before it is given up")


class Head(BaseHead):
    """Linear or RBF support vector machine."""

    Params = Params
    source = "RepPer (PCL stage): SVM head; linear, C = 1, squared hinge, one against the rest"

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        if importlib.util.find_spec("sklearn") is None:
            raise MissingCapability.package("sklearn", "heads", "fitting head 'svm'")
        norm = fit_norm(data.features, self.params.feature_norm)
        inputs = normalise(data.features, self.params.feature_norm, norm)
        options = {
            "kernel": self.params.kernel,
            "c": self.params.c,
            "gamma": self.params.gamma or 1.0 / (inputs.shape[1] * (float(inputs.var()) or 1.0)),
            "max_iterations": self.params.max_iterations,
            "seed": int(rng.integers(2**31)),
        }
        labels = np.searchsorted(classes, data.labels).astype(np.int64)
        return {**norm, **_fit_in_child({"inputs": inputs, "labels": labels}, options, self.params.timeout_s)}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        inputs = normalise(features, self.params.feature_norm, self.arrays)
        if self.params.kernel == "linear":
            return softmax(inputs @ self.arrays["weight"].T + self.arrays["bias"])
        blocks = [self._kernel(inputs[begin : begin + _ROWS]) for begin in range(0, len(inputs), _ROWS)]
        return softmax(np.concatenate(blocks) @ self.arrays["dual"].T + self.arrays["bias"])

    def _kernel(self, inputs: np.ndarray) -> np.ndarray:
        support = self.arrays["support"]
        squares = np.sum(inputs**2, axis=1)[:, None] - 2 * inputs @ support.T + np.sum(support**2, axis=1)
        return np.asarray(np.exp(-self.arrays["gamma"] * np.maximum(squares, 0)))


def _fit_in_child(arrays: Tensors, options: dict[str, float | int | str], timeout_s: float) -> Tensors:
    """Arrays of the fitted machine; the child sees nothing but its own folder."""
    with tempfile.TemporaryDirectory(prefix="headwater-svm-") as name:
        folder = Path(name)
        write_tensors(folder / "in.safetensors", arrays)
        command = [sys.executable, "-m", "edge_agent.heads._sklearn_fit", json.dumps(options)]
        # The working folder comes first on a child's import path: nobody else may write there.
        try:
            done = subprocess.run(
                command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TrainingFailed(
                f"head 'svm' was not fitted within {timeout_s:g} s; raise timeout_s, or take lr"
            ) from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise TrainingFailed(f"scikit-learn could not fit head 'svm': {reason}")
        fitted = read_tensors(folder / "out.safetensors")
        return {key: array.copy() for key, array in fitted.items()}


def _environment() -> dict[str, str]:
    # The child must find this very package, also where it is not installed but on a path that was set up by hand.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
