"""Analytic federated learning, measured: the same classifier from any division, beside FedAvg from the same encoder.

``python tests/bench/yardstick_afl.py [--seeds N]`` trains an encoder on 6,000 images of Fashion-MNIST that no client
has, divides 6,000 others among clients in several ways, and prints one JSON object. FedAvg starts from the same
encoder. Accuracies are those of the shared model on the 10,000 test images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator import simulate
from coordinator.api import SimulationResult, TrainedModel
from coordinator.research.bench.workloads import FASHION
from edge_agent.core.storage import write_tensors
from edge_agent.data import partition
from edge_agent.data.idx import read_idx
from edge_agent.training.loops import features_of

EACH = 6000
SPLITS = (
    "one place",
    "20 clients, alike",
    "20 clients, Dirichlet 0.5",
    "20 clients, Dirichlet 0.05",
    "20 clients, one class each",
    "1,000 clients, alike",
)
FEDAVG = {"local_epochs": 2, "batch_size": 20, "lr": 0.02, "momentum": 0.9}
ROUNDS = 10


def fashion(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 28, 28) uint8 and labels (n,) of Fashion-MNIST."""
    images, labels = (FASHION / f"{split}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
    return read_idx(images, 3), read_idx(labels, 1).astype(np.int64)


def divide(split: str, labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each client; each row has one."""
    if split == "one place":
        return [np.arange(len(labels))]
    clients = 1000 if split.startswith("1,000") else 20
    if split.endswith("alike"):
        return list(np.array_split(rng.permutation(len(labels)), clients))
    if split.endswith("one class each"):
        by_class = [np.array_split(rng.permutation(np.flatnonzero(labels == label)), 2) for label in range(10)]
        return [part for parts in by_class for part in parts]
    alpha = float(split.rpartition(" ")[2])
    return list(partition.dirichlet(labels, clients, alpha, rng, min_size=2))


def model_after(result: SimulationResult) -> TrainedModel:
    """The model and the state that a simulation has ended with."""
    return TrainedModel.of(result.folder, result.summary["run_id"])


def accuracy_of(result: SimulationResult, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of the test images that the shared model answers right."""
    trained = model_after(result)
    spec = trained.request.task.input
    inputs = (images[:, None].astype(np.float32) / 255 - np.float32(spec.mean[0])) / np.float32(spec.std[0])
    head = trained.method.global_head(trained.state)
    features = features_of(trained.model.eval(), torch.from_numpy(inputs)).numpy()
    return float(np.mean((features @ head["weight"].T + head["bias"]).argmax(axis=1) == labels))


def pretrained(folder: Path, seed: int, images: np.ndarray, labels: np.ndarray) -> Path:
    """A file of weights of an encoder that was trained at one place."""
    params = {**FEDAVG, "local_epochs": 1}
    data = {"all": (images, labels)}
    result = simulate("fedavg", data=data, rounds=8, seed=seed, params=params, encoder="small_cnn", local=False)
    state = model_after(result).state
    path = folder / f"encoder-{seed}.safetensors"
    prefix = "encoder."
    write_tensors(path, {name: array for name, array in state.items() if name.startswith(prefix)})
    return path


def rows_of(seed: int, folder: Path) -> list[dict[str, Any]]:
    """One row for each division of one seed."""
    images, labels = fashion("train")
    order = np.random.default_rng(seed).permutation(len(labels))
    apart = order[:EACH]
    mine = order[EACH : 2 * EACH]
    weights = pretrained(folder, seed, images[apart], labels[apart])
    test = fashion("t10k")
    common = {"weights": weights, "encoder": "small_cnn", "seed": seed, "local": False}
    rows = []
    reference = None
    for name in SPLITS:
        parts = divide(name, labels[mine], np.random.default_rng(seed))
        held_out = (test[0][:2], test[1][:2])
        data = {f"c{i:04d}": (images[mine[part]], labels[mine[part]], *held_out) for i, part in enumerate(parts)}
        begin = time.perf_counter()
        afl = simulate("afl", data=data, rounds=1, params={"min_class_count": 1}, **common)
        seconds = time.perf_counter() - begin
        state = model_after(afl).state
        row = {"seed": seed, "split": name, "afl": accuracy_of(afl, *test), "seconds": round(seconds, 1)}
        if reference is None:
            reference = state["head.weight"]
        row["difference"] = float(np.abs(state["head.weight"] - reference).max() / np.abs(reference).max())
        row["bytes"] = sum(a.nbytes for key, a in state.items() if key.startswith("server.extra."))
        if len(parts) == 20:
            fedavg = simulate("fedavg", data=data, rounds=ROUNDS, params=FEDAVG, **common)
            row["fedavg"] = accuracy_of(fedavg, *test)
            row["fedavg_bytes"] = ROUNDS * sum(a.nbytes for a in model_after(fedavg).state.values())
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Print the rows of all seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for seed in range(parser.parse_args().seeds) for row in rows_of(seed, Path(folder))]
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
