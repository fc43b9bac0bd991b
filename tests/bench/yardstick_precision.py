"""Training steps in bfloat16 and in another memory layout, over those of our loops as they are by default, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from coordinator.research.bench.measuring import Row
from edge_agent import methods
from edge_agent.client import choose_device, supported
from edge_agent.core.config import Precision
from edge_agent.core.limits import keep_freed_memory
from edge_agent.core.task import ImageInput, Task
from edge_agent.methods.values import Client, MethodParams
from edge_agent.training.loops import cross_entropy, train
from edge_agent.training.parts import Parts

NETWORKS = {"fedpac_cnn": (1, 28), "small_cnn": (3, 32), "resnet18": (3, 64)}
"""Encoder -> channels and side of its images."""

SAMPLES = 200
BATCH = 50


def report(repeats: int, wish: str, threads: int) -> dict[str, Any]:
    """The figures, on one device.

    Raises:
        DataError: no such device, or a GPU without bfloat16.
    """
    device = choose_device(wish)
    supported("bfloat16", device)
    torch.set_num_threads(threads)
    keep_freed_memory()
    rows = [row for encoder in NETWORKS for row in _rows(encoder, device, repeats)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "threads": threads, "rows": rows}


def _rows(encoder: str, device: torch.device, repeats: int) -> Iterator[Row]:
    usual = _client(encoder, device, "float32")
    mixed = _client(encoder, device, "bfloat16")
    other = _client(encoder, device, "float32", layout=torch.contiguous_format)
    turns = [[_epoch_s(client) for client in (usual, mixed, other)] for _ in range(repeats + 1)][1:]
    size = f"{encoder}, {NETWORKS[encoder][1]} pixels"
    yield Row(f"{size}: {SAMPLES} images in float32, channels last", median([turn[0] for turn in turns]), "s")
    yield Row(f"{size}: bfloat16 over that", median([turn[1] / turn[0] for turn in turns]), "x")
    yield Row(f"{size}: channel after channel over that", median([turn[2] / turn[0] for turn in turns]), "x")


def _client(
    encoder: str, device: torch.device, precision: Precision, layout: torch.memory_format = torch.channels_last
) -> Client:
    channels, side = NETWORKS[encoder]
    spec = ImageInput(channels=channels, height=side, width=side)
    task = Task(input=spec, class_names=tuple("0123456789"), encoder=encoder)
    torch.manual_seed(0)
    model: Parts = methods.create("fedavg").build(task).to(device).to(memory_format=layout)  # type: ignore[call-overload]
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((SAMPLES, channels, side, side), np.float32)
    return Client(
        id="bench",
        model=model,
        train_inputs=torch.from_numpy(inputs).to(device),
        train_labels=torch.from_numpy(rng.integers(0, 10, SAMPLES)).to(device),
        task=task,
        device=device,
        rng=rng,
        generator=torch.Generator(device=device),
        precision=precision,
    )


def _epoch_s(client: Client) -> float:
    """Seconds of one pass over all images; the loss is read at its end, so a GPU has done its work."""
    begin = time.perf_counter()
    train(client, cross_entropy(client.model), MethodParams(lr=0.01, batch_size=BATCH, local_epochs=1))
    return time.perf_counter() - begin
