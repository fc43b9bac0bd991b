"""One part of a device's work in a child process that never loads torch: an encoder or a head.

The child sends what it has timed and then waits, so that its parent can read its memory use from the kernel.
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

from ...processes.pipe import owner_pipe

RUNS = 30


def main() -> None:
    """Measure one part, send a JSON object, and stay until standard input ends."""
    _, part, *given = sys.argv  # from our own parent; a parser would add half a megabyte to what is measured
    timed = encoder(*given) if part == "encoder" else fit(*given)
    owner_pipe().send("line", json.dumps(timed).encode())
    sys.stdin.read()


def least_seconds(work: Callable[[], Any], runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """Least seconds of so many runs after one to warm up: the run that was disturbed least."""
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
    importlib.import_module("edge_agent.agent.head_tier")
    from edge_agent.bundle import unpacked
    from edge_agent.personal.encoder import Encoder

    begin = time.perf_counter()
    opened = Encoder.open(unpacked.open_folder(Path(folder)), precision, 1)  # type: ignore[arg-type]
    load_s = time.perf_counter() - begin
    # numpy.random would be 3 MB that an agent does without.
    image = np.linspace(-2, 2, int(np.prod(opened.input_shape)), dtype=np.float32).reshape(1, *opened.input_shape)
    return {"load_s": load_s, "seconds": least_seconds(lambda: opened.features(image))}


def fit(name: str, file: str, test: str) -> dict[str, float]:
    """CPU seconds to fit a head on the features in ``file``, its accuracy on those in ``test``, epochs, peak memory.

    The encoder's own classifier is available, as in the bundles of methods that share one.
    """
    from edge_agent import heads
    from edge_agent.core.storage import read_tensors

    known = read_tensors(Path(file))
    classifier = {name: known[name] for name in ("weight", "bias")}
    data = heads.FitData(known["features"], known["labels"], len(classifier["bias"]), classifier)
    head = heads.create(name)
    epochs = getattr(head.params, "epochs", None)
    # CPU time: what other programs do meanwhile does not count. A head fits in this one process and thread.
    seconds = least_seconds(
        lambda: head.fit(data, np.random.default_rng(0)), 3 if epochs else 10, clock=time.process_time
    )
    status = Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2]
    peak_mb = int(status.split()[0]) * 1024 / 1e6  # read before more samples are scored than a device has
    other = read_tensors(Path(test))
    accuracy = float(np.mean(head.predict_proba(other["features"]).argmax(axis=1) == other["labels"]))
    return {"seconds": seconds, "accuracy": accuracy, "peak_mb": peak_mb, **({"epochs": epochs} if epochs else {})}


if __name__ == "__main__":
    main()
