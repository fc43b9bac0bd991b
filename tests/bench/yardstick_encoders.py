"""What the encoders of this project cost a device: weights, size of file, memory and milliseconds, in fp32 and int8.

``python tests/bench/yardstick_encoders.py --folder DIR`` builds each encoder with random weights, makes its bundle
through all gates, and measures each graph in a process of its own, on one thread: the median of ten single images, and
the peak of resident memory above that of ONNX Runtime alone. It prints the table of examples/results/encoders.md.

Costs do not depend on the weights. What int8 costs in accuracy does: that is measured where a run's bundle is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from coordinator.research.bench.measuring import usage
from edge_agent import methods
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.personal.personalizer import load_bundle
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle

IMAGES = 10


@dataclass(frozen=True)
class Row:
    """One encoder of the table, and what it takes."""

    title: str
    encoder: str
    side: int
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The task for which it is built."""
        spec: ImageInput | WindowInput = ImageInput(channels=3, height=self.side, width=self.side)
        if self.encoder == "cnn1d":
            spec = WindowInput(channels=6, length=self.side)
        return Task(input=spec, class_names=("a", "b"), encoder=self.encoder, encoder_params=self.params)


ROWS = (
    Row("small_cnn", "small_cnn", 32),
    Row("starter_cnn", "starter_cnn", 64),
    Row("mobilenet_v3_small", "mobilenet_v3_small", 224),
    Row("mobilenet_v3_large", "mobilenet_v3_large", 224),
    Row("mobilenet_v2", "mobilenet_v2", 224),
    Row("efficientnet_b0", "efficientnet_b0", 224),
    Row("resnet18", "resnet18", 224),
    Row("resnet50", "resnet50", 224),
    Row("vit, DeiT-tiny", "vit", 224),
    Row("vit, DeiT-small", "vit", 224, {"width": 384, "heads": 6}),
    Row("cnn1d", "cnn1d", 100),
)


def measure(row: Row, folder: Path) -> dict[str, Any]:
    """Return the costs of one encoder."""
    method = methods.create("fedavg")
    torch.manual_seed(0)
    model = method.build(row.task)
    images = np.random.default_rng(0).standard_normal((16, *row.task.input_shape), np.float32)
    file = folder / f"{row.title}.hwb"
    trained = TrainedEncoder(model, method, row.task)
    report = build_bundle(trained, Calibration.from_inputs(images), file, BundleOptions(row.title, exporter="legacy"))
    bundle = load_bundle(file, folder / "cache")
    result: dict[str, Any] = {
        "weights": sum(parameter.numel() for parameter in model.encoder.parameters()),
        "features": report.manifest.feature_dim,
        "int8_note": report.int8_note,
        "int8_cosine": report.manifest.parity.int8_cosine,
    }
    for precision, variant in bundle.manifest.variants.items():
        graph = bundle.folder / variant.file
        command = [sys.executable, __file__, "--graph", str(graph), "--shape", *map(str, row.task.input_shape)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result[precision] = {"mb": graph.stat().st_size / 1e6, **json.loads(done.stdout)}
    file.unlink()
    return result


def run_graph(graph: Path, shape: list[int]) -> dict[str, float]:
    """Return milliseconds for one input, and the peak of memory, MB, above that of the runtime alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    before = usage(os.getpid()).peak_mb
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    image = np.random.default_rng(1).standard_normal((1, *shape), np.float32)
    session.run(None, {name: image})
    seconds = []
    for _ in range(IMAGES):
        begin = time.thread_time()
        session.run(None, {name: image})
        seconds.append(time.thread_time() - begin)
    return {"ms": 1000 * statistics.median(seconds), "peak_mb": usage(os.getpid()).peak_mb - before}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table, Markdown."""
    lines = [
        "| encoder | input | weights | features | file, MB | int8 | memory, MB | int8 | ms | int8 | cosine of int8 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        costs = results[row.title]
        sides = [costs.get(name) for name in ("fp32", "int8")]
        cells = [
            f"{side[key]:.{places}f}" if side else "–"
            for key, places in (("mb", 1), ("peak_mb", 0), ("ms", 1))
            for side in sides
        ]
        weights = f"{costs['weights'] / 1e6:.2f} M"
        size = f"{row.side}" if row.encoder == "cnn1d" else f"{row.side} x {row.side}"
        cosine = "–" if costs["int8_cosine"] is None else f"{costs['int8_cosine']:.4f}"
        lines.append(f"| {row.title} | {size} | {weights} | {costs['features']} | {' | '.join(cells)} | {cosine} |")
    return lines


def main() -> None:
    """Measure what is not in the folder yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--graph", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.graph is not None:
        print(json.dumps(run_graph(arguments.graph, arguments.shape)))
        return
    results = {}
    for row in ROWS:
        path = arguments.folder / f"{row.title}.json"
        if not path.exists():
            path.write_text(json.dumps(measure(row, arguments.folder), indent=1))
        results[row.title] = json.loads(path.read_text())
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
