"""Single pieces of a device's work, each in a child process that never sees torch: an encoder, a head.

The child prints what it timed and then waits, so that its parent can read from the kernel what it takes.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RUNS = 30


def main() -> None:
    """Measure one piece, print a JSON object, and stay until standard input ends."""
    pieces: dict[str, Callable[..., dict[str, float]]] = {
        "encoder": encoder,
        "fit": fit,
        "scikit-learn": scikit_learn,
    }
    _, piece, *given = sys.argv  # from our own parent; a parser would add half a megabyte to what is measured
    sys.stdout.write(json.dumps(pieces[piece](*given)) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def least_seconds(work: Callable[[], Any], runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """Least seconds of so many runs, after one to warm up: the one that nobody disturbed."""
    work()
    seconds = []
    for _ in range(runs):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return min(seconds)


def encoder(folder: str, precision: str) -> dict[str, float]:
    """Seconds to load a bundle's encoder as the agent does, and of one input; all code of an agent is loaded."""
    importlib.import_module("edge_agent.agent.app")
    importlib.import_module("edge_agent.agent.event_loop.install")
    from edge_agent import bundle as bundles
    from edge_agent.encoder import Encoder

    begin = time.perf_counter()
    opened = Encoder.open(bundles.open_folder(Path(folder)), precision, 1)  # type: ignore[arg-type]
    load_s = time.perf_counter() - begin
    image = _image(opened.input_shape)
    return {"load_s": load_s, "seconds": least_seconds(lambda: opened.features(image))}


def fit(name: str, file: str, test: str) -> dict[str, float]:
    """CPU seconds to fit a head on the features in ``file``, its accuracy on those in ``test``, and epochs if any.

    The encoder's own classifier is there, as in the bundles of the methods that share one.
    """
    from edge_agent import heads

    from .features import Features

    found = Features.read(Path(file))
    data = heads.FitData(found.features, found.labels, len(found.classifier["bias"]), found.classifier)
    epochs = getattr(heads.create(name).params, "epochs", None)
    head = heads.create(name)
    # Processor time: what other programs do meanwhile does not count. A head fits in this one process and thread.
    seconds = least_seconds(
        lambda: head.fit(data, np.random.default_rng(0)), 3 if epochs else 10, clock=time.process_time
    )
    peak_mb = _peak_mb()  # before more samples are scored than a device has
    other = Features.read(Path(test))
    accuracy = float(np.mean(head.predict_proba(other.features).argmax(axis=1) == other.labels))
    return {"seconds": seconds, "accuracy": accuracy, "peak_mb": peak_mb, **({"epochs": epochs} if epochs else {})}


def scikit_learn(file: str, test: str) -> dict[str, float]:
    """The same of scikit-learn's logistic regression with its defaults, on standardised features."""
    linear_model = importlib.import_module("sklearn.linear_model")
    preprocessing = importlib.import_module("sklearn.preprocessing")
    from .features import Features

    found = Features.read(Path(file))
    scaler = preprocessing.StandardScaler().fit(found.features)
    model = linear_model.LogisticRegression(max_iter=1000)
    inputs = scaler.transform(found.features)
    seconds = least_seconds(lambda: model.fit(inputs, found.labels), 10, clock=time.process_time)
    peak_mb = _peak_mb()
    other = Features.read(Path(test))
    accuracy = float(model.score(scaler.transform(other.features), other.labels))
    return {"seconds": seconds, "accuracy": accuracy, "peak_mb": peak_mb}


def _peak_mb() -> float:
    """The most memory that this process has had so far, in MB (10^6 bytes)."""
    fields = Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2].split()
    return int(fields[0]) * 1024 / 1e6


def _image(shape: tuple[int, ...]) -> np.ndarray:
    # numpy.random would be 3 MB that an agent does without.
    return np.linspace(-2, 2, int(np.prod(shape)), dtype=np.float32).reshape(1, *shape)


if __name__ == "__main__":
    main()
