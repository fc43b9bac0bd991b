"""What the passes over the updates of a round cost, beside a copy of the same bytes: ``python yardstick_passes.py``.

CPU time of one thread, updates mapped from a folder in memory, so that no disk is measured. The bounds are the default
ones, so each update is read four times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from coordinator.config import AggregationConfig
from coordinator.rounds.aggregation import combine
from coordinator.rounds.passes import Origin
from coordinator.state.store import BlobStore
from edge_agent import methods
from edge_agent.core.storage import mapped
from edge_agent.methods import Update
from edge_agent.wire.tensors import decode, encode

ARRAYS = 20


def main() -> None:
    """Print a line for each pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--weights", type=int, default=125_000, help="float32 numbers of an update")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    size = options.weights // ARRAYS
    state = {f"encoder.a{number:02d}": rng.standard_normal(size).astype(np.float32) for number in range(ARRAYS)}
    start = {name: array - np.float32(0.1) for name, array in state.items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        blobs = BlobStore(Path(folder))
        stored = []
        for number in range(options.updates):
            noise = {name: rng.standard_normal(size).astype(np.float32) for name in state}
            changed = {name: array + np.float32(0.01) * (1 + noise[name]) for name, array in state.items()}
            stored.append((f"agent-{number:05d}", blobs.put(encode(changed))))

        def updates():
            for agent, digest in stored:
                yield Update(agent, 10.0, decode(mapped(blobs.path(digest))))

        seconds: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for name, took in once(state, start, updates):
                seconds.setdefault(name, []).append(took / options.updates)
            seconds.setdefault("copy", []).append(copied(updates) / options.updates)
    nbytes = 4 * size * ARRAYS
    print(f"{options.updates} updates of {nbytes / 1e6:.2f} MB, {options.repeats} repeats")
    for name, times in seconds.items():
        spread = stdev(times) if len(times) > 1 else 0.0
        print(f"{name:20} {1e3 * mean(times):7.3f} +- {1e3 * spread:.3f} ms, {nbytes / mean(times) / 1e9:6.2f} GB/s")


def once(state, start, updates):
    """Yield name and CPU seconds of each pass of one round."""
    method = methods.create("fedavg", {})
    reading = combine(Origin(method, state, start), state, updates, AggregationConfig())
    answer = None
    try:
        while True:
            one_pass, origin = reading.send(answer)
            begin = time.process_time()
            answer = one_pass.over(origin, updates())
            yield one_pass.name, time.process_time() - begin
    except StopIteration:
        return


def copied(updates):
    """CPU seconds to copy all numbers of all updates once."""
    begin = time.process_time()
    for update in updates():
        for array in update.tensors.values():
            np.array(array)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
