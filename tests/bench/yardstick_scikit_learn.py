"""scikit-learn's logistic regression on the features of ``bench device``, in its own process."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.research.bench.device import Features
from coordinator.research.bench.device_child import least_seconds
from coordinator.research.bench.measuring import module, send_line


def measure(features: tuple[Path, Path], folder: Path) -> dict[str, float]:
    """CPU seconds of a fit, accuracy, and peak memory of the process in MB."""
    environment = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with module("scikit-learn", features, folder, module="yardstick_scikit_learn", environment=environment) as child:
        found: dict[str, float] = json.loads(child.answer())
        return found


def fit(file: str, test: str) -> dict[str, Any]:
    """Fit with scikit-learn's defaults on standardised features, score on ``test``."""
    linear_model = importlib.import_module("sklearn.linear_model")
    preprocessing = importlib.import_module("sklearn.preprocessing")
    known = Features.read(Path(file))
    other = Features.read(Path(test))
    scaler = preprocessing.StandardScaler().fit(known.features)
    model = linear_model.LogisticRegression(max_iter=1000)
    inputs = scaler.transform(known.features)
    seconds = least_seconds(lambda: model.fit(inputs, known.labels), 10, clock=time.process_time)
    status = Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2]
    peak_mb = int(status.split()[0]) * 1024 / 1e6
    accuracy = np.mean(model.predict(scaler.transform(other.features)) == other.labels)
    return {"seconds": seconds, "accuracy": float(accuracy), "peak_mb": peak_mb}


if __name__ == "__main__":
    send_line(json.dumps(fit(*sys.argv[1:])))
    sys.stdin.read()
