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
    # The arguments come from our own parent; a parser would add half a megabyte to what is measured.
    _, part, *arguments = sys.argv
    timed = encoder(*arguments) if part == "encoder" else fit(*arguments)
    owner_pipe().send("line", json.dumps(timed).encode())
    sys.stdin.read()


def least_seconds(work: Callable[[], Any], runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the least seconds of so many runs, of the run that was disturbed least; one before warms up.

    Args:
        work: What is timed.
        runs: The number of timed runs.
        clock: Returns the time in seconds.
    """
    work()
    seconds = []
    for _ in range(runs):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return min(seconds)


def encoder(folder: str, precision: str) -> dict[str, float]:
    """Return the seconds that it takes to load a bundle's encoder as the agent does, and to compute one input.

    All code of an agent is loaded before, because it is part of the memory that the parent reads.

    Args:
        folder: The folder of the bundle.
        precision: The variant of its encoder.
    """
    importlib.import_module("edge_agent.agent.app")
    importlib.import_module("edge_agent.agent.head_tier")
    from edge_agent.bundle import unpacked
    from edge_agent.personal.encoder import Encoder

    begin = time.perf_counter()
    opened = Encoder.open(unpacked.open_folder(Path(folder)), precision, 1)  # type: ignore[arg-type]
    load_s = time.perf_counter() - begin
    # Not random numbers: numpy.random takes 3 MB that an agent does not need.
    image = np.linspace(-2, 2, int(np.prod(opened.input_shape)), dtype=np.float32).reshape(1, *opened.input_shape)
    return {"load_s": load_s, "seconds": least_seconds(lambda: opened.features(image))}


def fit(name: str, file: str, test: str) -> dict[str, float]:
    """Return the CPU seconds of a head's fit, its accuracy, its epochs if it has any, and peak memory in MB.

    The encoder's own classifier is available, as in the bundles of methods that share one.

    Args:
        name: The head.
        file: The file of the features that it is fitted on.
        test: The file of the features that its accuracy is measured on.
    """
    from edge_agent import heads
    from edge_agent.core.storage import read_tensors

    # 1. The fit. CPU time: what other programs do meanwhile does not count. A head fits in this one process and thread.
    arrays = read_tensors(Path(file))
    classifier = {name: arrays[name] for name in ("weight", "bias")}
    data = heads.FitData(arrays["features"], arrays["labels"], len(classifier["bias"]), classifier)
    head = heads.create(name)
    epochs = getattr(head.params, "epochs", None)
    runs = 3 if epochs else 10
    seconds = least_seconds(lambda: head.fit(data, np.random.default_rng(0)), runs, clock=time.process_time)
    # 2. Peak memory, before more samples are scored than a device has.
    peak_mb = _peak_mb()
    # 3. The accuracy.
    test_arrays = read_tensors(Path(test))
    answers = head.predict_proba(test_arrays["features"]).argmax(axis=1)
    accuracy = float(np.mean(answers == test_arrays["labels"]))
    figures = {"seconds": seconds, "accuracy": accuracy, "peak_mb": peak_mb}
    if epochs:
        figures["epochs"] = epochs
    return figures


def _peak_mb() -> float:
    """Return the peak memory of this process so far, in MB (10^6 bytes)."""
    _, _, status = Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")
    return int(status.split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
