"""The child process in which scikit-learn fits a machine: ``in.safetensors`` here in, ``out.safetensors`` out.

The only place of this package that imports scikit-learn. Options come as one JSON argument.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..store import read_tensors, write_tensors
from ..task import Tensors


def main(arguments: list[str]) -> int:
    """Exit status of the child: 0 when ``out.safetensors`` has been written."""
    options = json.loads(arguments[0])
    data = read_tensors(Path("in.safetensors"))
    fit = _linear if options["kernel"] == "linear" else _rbf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a machine that has not quite converged is still a good head
        write_tensors(Path("out.safetensors"), fit(data["inputs"], data["labels"], options))
    return 0


def _linear(inputs: np.ndarray, labels: np.ndarray, options: Mapping[str, Any]) -> Tensors:
    from sklearn.svm import LinearSVC

    # dual="auto" takes the primal where n > d, and 9.5 s instead of 0.3 s for 600 x 512.
    machine = LinearSVC(
        C=options["c"], dual=True, max_iter=options["max_iterations"], random_state=options["seed"]
    ).fit(inputs, labels)
    weight, bias = machine.coef_, machine.intercept_
    if len(weight) == 1:  # two classes have one decision value; its negative is that of class 0
        weight, bias = np.concatenate([-weight, weight]), np.concatenate([-bias, bias])
    return {"weight": np.asarray(weight, np.float64), "bias": np.asarray(bias, np.float64)}


def _rbf(inputs: np.ndarray, labels: np.ndarray, options: Mapping[str, Any]) -> Tensors:
    """One machine for each class against the rest; support vectors are shared between them."""
    from sklearn.svm import SVC

    classes = int(labels.max()) + 1
    dual, bias = np.zeros((classes, len(inputs))), np.zeros(classes)
    for label in range(classes):
        machine = SVC(C=options["c"], kernel="rbf", gamma=options["gamma"]).fit(inputs, labels == label)
        dual[label, machine.support_] = machine.dual_coef_[0]
        bias[label] = machine.intercept_[0]
    used = np.flatnonzero(np.any(dual != 0, axis=0))
    gamma = np.array([options["gamma"]], np.float64)
    return {"support": inputs[used], "dual": np.ascontiguousarray(dual[:, used]), "bias": bias, "gamma": gamma}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
