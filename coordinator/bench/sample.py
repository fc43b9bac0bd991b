"""Single pieces of a device's work, each in a child process of its own that never sees torch: an encoder, a head."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from .processes import usage

RUNS = 30
SAMPLES, FEATURES, CLASSES = 600, 512, 10


def main() -> None:
    """Measure one piece and print a JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("piece", choices=("encoder", "fit"))
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("precision", nargs="?", default="fp32")
    given = parser.parse_args()
    found = _encoder(given.bundle, given.precision) if given.piece == "encoder" else _fit()
    print(json.dumps({**found, "torch_loaded": "torch" in sys.modules}))


def least_seconds(work: Callable[[], Any], runs: int = RUNS) -> float:
    """Least seconds of so many runs, after one to warm up: the one that nobody disturbed."""
    work()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _encoder(folder: Path, precision: str) -> dict[str, Any]:
    from edge_agent import bundle as bundles
    from edge_agent.encoder import Encoder

    begin = time.perf_counter()
    encoder = Encoder.open(bundles.open_folder(folder), precision, 1)  # type: ignore[arg-type]
    load_s = time.perf_counter() - begin
    image = np.random.default_rng(0).standard_normal((1, *encoder.input_shape), np.float32)
    seconds = least_seconds(lambda: encoder.features(image))
    return {"load_s": load_s, "seconds": seconds, "peak_mb": usage(os.getpid()).peak_mb, "format": encoder.format}


def _fit() -> dict[str, Any]:
    from edge_agent import heads

    rng = np.random.default_rng(0)
    labels = np.arange(SAMPLES) % CLASSES
    means = rng.standard_normal((CLASSES, FEATURES))
    features = (means[labels] + rng.standard_normal((SAMPLES, FEATURES))).astype(np.float32)
    data = heads.FitData(features, labels.astype(np.int64), CLASSES)
    seconds = least_seconds(lambda: heads.create("lr").fit(data, np.random.default_rng(0)), 10)
    return {"seconds": seconds, "peak_mb": usage(os.getpid()).peak_mb}


def export_resnet18(file: Path) -> None:
    """A bundle of ResNet18 with random weights, 224 x 224 images, by the older exporter."""
    import torch

    from edge_agent import methods
    from edge_agent.task import ImageInput, Task
    from export.bundle import export_bundle

    task = Task(
        input=ImageInput(channels=3, height=224, width=224), class_names=tuple("0123456789"), encoder="resnet18"
    )
    method = methods.create("fedavg")
    torch.manual_seed(0)
    images = np.random.default_rng(0).standard_normal((16, 3, 224, 224), np.float32)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    export_bundle(method.build(task), method, task, images, file, name="bench", created=created, exporter="legacy")


if __name__ == "__main__":
    main()
