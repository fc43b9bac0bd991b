"""The child process in which scikit-learn fits a machine: ``in.safetensors`` here in, ``out.safetensors`` out.

The only place of this package that imports scikit-learn. Options come as one JSON argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..storage import read_tensors, write_tensors
from ..task import Tensors


def main(arguments: list[str]) -> int:
    """Exit status of the child: 0 when ``out.safetensors`` has been written."""
    data = read_tensors(Path("in.safetensors"))
    write_tensors(Path("out.safetensors"), _rbf(data["inputs"], data["labels"], json.loads(arguments[0])))
    return 0


def _rbf(inputs: np.ndarray, labels: np.ndarray, options: Mapping[str, float]) -> Tensors:
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
