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

from coordinator import SimulationResult, simulate
from coordinator.research.bench.workloads import FASHION
from coordinator.simulation.trained import TrainedModel
from edge_agent import heads
from edge_agent.core.storage import write_tensors
from edge_agent.data import partition
from edge_agent.data.idx import read_idx
from edge_agent.heads import FitData
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
        if len(parts) > 1:
            fedcof = simulate("fedcof", data=data, rounds=1, params={"min_class_count": 1}, **common)
            row["fedcof"] = accuracy_of(fedcof, *test)
        if len(parts) == 20:
            fedavg = simulate("fedavg", data=data, rounds=ROUNDS, params=FEDAVG, **common)
            row["fedavg"] = accuracy_of(fedavg, *test)
            row["fedavg_bytes"] = ROUNDS * sum(a.nbytes for a in model_after(fedavg).state.values())
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


HEADS = ("lr", "ridge", "shared_classifier", "ridge_prior")
SAMPLES = (2, 5, 10, 50)
DEVICES = 20


def personal_rows(seed: int, folder: Path) -> list[dict[str, Any]]:
    """Accuracy of heads on new devices with few samples of four classes, whose camera is like the others, or not."""
    images, labels = fashion("train")
    order = np.random.default_rng(seed).permutation(len(labels))
    weights = pretrained(folder, seed, images[order[:EACH]], labels[order[:EACH]])
    mine = order[EACH : 2 * EACH]
    data = {"all": (images[mine], labels[mine], images[mine][:2], labels[mine][:2])}
    settings = {"weights": weights, "encoder": "small_cnn", "seed": seed, "local": False}
    trained = model_after(simulate("afl", data=data, rounds=1, params={"min_class_count": 1}, **settings))
    known = trained.method.shared_statistics(trained.state)
    spec = trained.request.task.input

    def features_from(pictures: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
        seen = np.clip(pictures[:, None] / 255.0 * (1 - noise) + noise * rng.random((len(pictures), 1, 28, 28)), 0, 1)
        inputs = ((seen - spec.mean[0]) / spec.std[0]).astype(np.float32)
        return features_of(trained.model.eval(), torch.from_numpy(inputs)).numpy()

    test_images, test_labels = fashion("t10k")
    rows = []
    for camera, noise in (("alike", 0.0), ("noisy", 0.5)):
        for each in SAMPLES:
            right: dict[str, list[float]] = {name: [] for name in HEADS}
            for device in range(DEVICES):
                rng = np.random.default_rng([seed, each, device])
                classes = rng.permutation(10)[:4]
                drawn = [rng.permutation(np.flatnonzero(labels[order[2 * EACH :]] == c))[:each] for c in classes]
                own = order[2 * EACH :][np.concatenate(drawn)]
                test = np.flatnonzero(np.isin(test_labels, classes))[:400]
                fitted_on = features_from(images[own], noise, rng)
                tested_on = features_from(test_images[test], noise, rng)
                mean = known["sums"].sum(axis=0)
                given = FitData(
                    fitted_on, labels[own], 10, trained.method.global_head(trained.state), {}, {**known, "mean": mean}
                )
                for name in HEADS:
                    head = heads.create(name)
                    head.fit(given, np.random.default_rng(0))
                    answers = head.predict_proba(tested_on).argmax(axis=1)
                    right[name].append(float(np.mean(answers == test_labels[test])))
            row = {"seed": seed, "camera": camera, "each": each, **{name: np.mean(r) for name, r in right.items()}}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Print the rows of all seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("splits", "personal"), default=None)
    arguments = parser.parse_args()
    made: dict[str, list[dict[str, Any]]] = {"splits": [], "personal": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            if arguments.only != "personal":
                made["splits"] += rows_of(seed, Path(folder))
            if arguments.only != "splits":
                made["personal"] += personal_rows(seed, Path(folder))
    print(json.dumps(made))


if __name__ == "__main__":
    main()
