"""Single pieces of a device's work, each in a child process that never sees torch: an encoder, a session, a head.

The child prints what it timed and then waits, so that its parent can read from the kernel what it takes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RUNS = 30
SAMPLES, FEATURES, CLASSES = 600, 512, 10
SESSION_ENTRIES = {
    "session.load_model_format": "ORT",
    "session.use_memory_mapped_ort_model": "1",
    "session.use_ort_model_bytes_directly": "1",
    "session.use_ort_model_bytes_for_initializers": "1",
}


def main() -> None:
    """Measure one piece, print a JSON object, and stay until standard input ends."""
    pieces: dict[str, Callable[..., dict[str, float]]] = {"encoder": encoder, "session": session, "fit": fit}
    _, piece, *given = sys.argv  # from our own parent; a parser would add half a megabyte to what is measured
    sys.stdout.write(json.dumps(pieces[piece](*given)) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def least_seconds(work: Callable[[], Any], runs: int = RUNS) -> float:
    """Least seconds of so many runs, after one to warm up: the one that nobody disturbed."""
    work()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def encoder(folder: str, precision: str) -> dict[str, float]:
    """Seconds to load a bundle's encoder as the agent does, and of one input."""
    from edge_agent import bundle as bundles
    from edge_agent.encoder import Encoder

    begin = time.perf_counter()
    opened = Encoder.open(bundles.open_folder(Path(folder)), precision, 1)  # type: ignore[arg-type]
    load_s = time.perf_counter() - begin
    image = _image(opened.input_shape)
    return {"load_s": load_s, "seconds": least_seconds(lambda: opened.features(image))}


def session(file: str, height: str) -> dict[str, float]:
    """Seconds of one input with numpy and ONNX Runtime alone, on an .ort file that the agent has made."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    # By name: our own door to it brings the agent's modules along, which are not to be measured here.
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    for name, value in SESSION_ENTRIES.items():
        options.add_session_config_entry(name, value)
    running = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {running.get_inputs()[0].name: _image((3, int(height), int(height)))}
    return {"seconds": least_seconds(lambda: running.run(None, inputs))}


def fit(name: str) -> dict[str, float]:
    """Seconds to fit a head of that name on 600 features of size 512 in 10 classes, and its epochs where it has such.

    A shared classifier is there, as in the bundles of the methods that have one.
    """
    from edge_agent import heads

    rng = np.random.default_rng(0)
    labels = np.arange(SAMPLES) % CLASSES
    means = rng.standard_normal((CLASSES, FEATURES), np.float32)
    features = means[labels] + rng.standard_normal((SAMPLES, FEATURES), np.float32)
    shared = {"weight": means, "bias": np.zeros(CLASSES, np.float32)}
    data = heads.FitData(features, labels.astype(np.int64), CLASSES, shared)
    epochs = getattr(heads.create(name).params, "epochs", None)
    seconds = least_seconds(lambda: heads.create(name).fit(data, np.random.default_rng(0)), 3 if epochs else 10)
    return {"seconds": seconds, **({"epochs": epochs} if epochs else {})}


def _image(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, *shape), np.float32)


if __name__ == "__main__":
    main()
