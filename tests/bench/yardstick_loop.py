"""The work of a round without any framework: a plain loop over the clients of one worker, one thread, channels last.

Nothing here is our training code; only the shape of the network is the same. Nothing is sent, averaged over workers or
saved to disk, so this is the hardest yardstick that a round can have. The file is also the worker's program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.research.bench import workloads
from coordinator.research.bench.measuring import Measured, lines, module, send_line, usage
from edge_agent.core.limits import keep_freed_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

FEATURES = 512
CLASSES = 10
BATCH_AT_ONCE = 512
HEAD_LR, WEIGHT_DECAY = 0.1, 5e-4
"""FedPAC's own, beside those of the workload."""


def main() -> None:
    """Train the named clients each time a line comes in: ``FILE METHOD [--keep] CLIENT...``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("method", choices=("fedavg", "fedpac"))
    parser.add_argument("--keep", action="store_true", help="keep freed memory, as our workers do")
    parser.add_argument("mine", nargs="+")
    arguments = parser.parse_args()
    if arguments.keep:
        keep_freed_memory()
    import torch

    torch.set_num_threads(1)
    with np.load(arguments.file, allow_pickle=False) as arrays:
        data = {name: tuple(torch.from_numpy(arrays[f"{name}.{kind}"]) for kind in "xy") for name in arguments.mine}
    train = fedavg if arguments.method == "fedavg" else fedpac
    start = fresh_model().state_dict()
    mean = {name: tensor.clone() for name, tensor in start.items()}
    send_line("ready")
    for _ in lines():
        mean = one_round(train, mean, data)
        send_line("done")


def one_round(train: Any, received: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Each client from what was received, on the device where that is; the mean of all."""
    sums = {name: tensor * 0 for name, tensor in received.items()}
    model = fresh_model().to(next(iter(received.values())).device)
    for inputs, labels in data.values():
        model.load_state_dict(received)
        train(model, inputs, labels)
        for name, tensor in model.state_dict().items():
            sums[name] += tensor / len(data)
    return sums


def fresh_model() -> Any:
    """The network of the workload."""
    import torch
    from torch import nn

    model = nn.Sequential(workloads.w1_encoder(workloads.w1_task()), nn.Linear(FEATURES, CLASSES))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def fedavg(model: nn.Sequential, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Five epochs of SGD."""
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.SGD(model.parameters(), lr=workloads.W1_PARAMS["lr"], fused=True)
    for _ in range(workloads.W1_PARAMS["local_epochs"]):
        for rows in torch.split(torch.randperm(len(labels), device=labels.device), workloads.W1_PARAMS["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def fedpac(model: nn.Sequential, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Features, statistics, one epoch of the classifier on them, five of the encoder drawn to centroids, features."""
    import torch
    from torch.nn import functional as F

    encoder = model[0]
    head = model[1]
    before = features_of(encoder, inputs)
    centroids = class_means(before, labels)
    (before * before).sum(dim=1)
    optimizer = torch.optim.SGD(head.parameters(), lr=HEAD_LR, weight_decay=WEIGHT_DECAY, fused=True)
    for rows in torch.split(torch.randperm(len(labels)), workloads.W1_PARAMS["batch_size"]):
        optimizer.zero_grad()
        F.cross_entropy(head(before[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    head.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(
        encoder.parameters(), lr=workloads.W1_PARAMS["lr"], weight_decay=WEIGHT_DECAY, fused=True
    )
    for _ in range(workloads.W1_PARAMS["local_epochs"]):
        for rows in torch.split(torch.randperm(len(labels)), workloads.W1_PARAMS["batch_size"]):
            optimizer.zero_grad()
            features = encoder(inputs[rows])
            loss = F.cross_entropy(head(features), labels[rows]) + F.mse_loss(features, centroids[labels[rows]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    head.requires_grad_(requires_grad=True)
    class_means(features_of(encoder, inputs), labels)


def features_of(encoder: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        found = torch.cat([encoder(piece) for piece in torch.split(inputs, BATCH_AT_ONCE)])
    return found.clone()


def class_means(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    import torch

    sums = torch.zeros(CLASSES, features.shape[1]).index_add_(0, labels, features)
    return sums / torch.bincount(labels, minlength=CLASSES).clamp(min=1)[:, None]


@dataclass(frozen=True)
class BareWorkers:
    """Processes that run the loop, each over its own clients."""

    workers: tuple[Measured, ...]

    @classmethod
    def start(
        cls,
        stack: contextlib.ExitStack,
        method: str,
        data: dict[str, tuple[np.ndarray, np.ndarray]],
        count: int,
        folder: Path,
        *,
        keeps_memory: bool = False,
    ) -> BareWorkers:
        """``count`` workers that have loaded the inputs and labels of their clients."""
        path = folder / "clients.npz"
        clients = sorted(data)
        np.savez(
            path, **{f"{name}.{kind}": array for name in clients for kind, array in zip("xy", data[name], strict=True)}
        )
        keep = ["--keep"] if keeps_memory else []
        started = [
            stack.enter_context(
                module(
                    f"bare-{number}{'-keeping' * keeps_memory}",
                    [path, method, *keep, *clients[number::count]],
                    folder,
                    module="yardstick_loop",
                    environment={"PYTHONPATH": str(Path(__file__).parent)},
                )
            )
            for number in range(count)
        ]
        for worker in started:
            worker.answer()
        return cls(tuple(started))

    def timed_round(self) -> tuple[float, float]:
        """(wall, CPU) seconds until all clients have trained once."""
        begin = time.perf_counter()
        cpu = self._cpu_s()
        for worker in self.workers:
            worker.send()
        for worker in self.workers:
            worker.answer()
        return time.perf_counter() - begin, self._cpu_s() - cpu

    def _cpu_s(self) -> float:
        return sum(usage(worker.pid).cpu_s for worker in self.workers)


def bare_seconds(clients: int, folder: Path, repeats: int = 5) -> float:
    """Least seconds to train every agent of workload W1 once, on all cores."""
    from edge_agent import data

    task = workloads.w1_task()
    shards = {}
    for client in range(clients):
        samples = data.load(workloads.w1_source(client, clients), task.input, task.class_names)
        train, _ = data.split(samples, workloads.TEST_FRACTION, 0)
        shards[f"agent-{client}"] = (train.inputs, train.labels)
    with contextlib.ExitStack() as stack:
        count = min(clients, len(os.sched_getaffinity(0)))
        workers = BareWorkers.start(stack, "fedavg", shards, count, folder)
        return min(workers.timed_round()[0] for _ in range(repeats + 1))


if __name__ == "__main__":
    main()
