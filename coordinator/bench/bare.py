"""Workload W1 without any framework: as many workers as cores, one thread each, a plain loop over each client's data.

This is what the machine can do: channels last, fused SGD, nothing sent anywhere. It is measured in the same run as the
rounds, because only the ratio of the two says something.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import w1
from .processes import answer, module, say, tell

if TYPE_CHECKING:
    import torch

REPEATS = 5


def bare_seconds(clients: int, folder: Path, repeats: int = REPEATS) -> float:
    """Least seconds to train every client once, on all cores: the hardest yardstick for a round.

    Raises:
        MeasuringFailed: a worker ended.
    """
    workers = min(clients, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                module(f"bare-{n}", [clients, *range(n, clients, workers)], folder, module="coordinator.bench.bare")
            )
            for n in range(workers)
        ]
        for worker in started:
            answer(worker)  # "ready": data loaded, one epoch done
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            for worker in started:
                tell(worker)
            for worker in started:
                answer(worker)
            seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    """Train the clients named on the command line each time a line comes in."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", type=int)
    parser.add_argument("mine", type=int, nargs="+")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    shards = [_shard(client, arguments.clients) for client in arguments.mine]
    _train(*shards[0], epochs=1)
    say("ready")
    for _ in sys.stdin:
        for inputs, labels in shards:
            _train(inputs, labels, epochs=w1.PARAMS["local_epochs"])
        say("done")


def _shard(client: int, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training inputs and labels of one client, the same samples that its agent has."""
    import torch

    from edge_agent import data

    task = w1.task()
    samples = data.load(w1.source(client, clients), task.input, task.class_names)
    train, _ = data.split(samples, w1.TEST_FRACTION, 0)
    return torch.from_numpy(train.inputs), torch.from_numpy(train.labels)


def _train(inputs: torch.Tensor, labels: torch.Tensor, *, epochs: int) -> None:
    """What ten lines of PyTorch do; the model is built anew, as nobody keeps it."""
    import torch
    from torch import nn

    model = nn.Sequential(w1.Encoder.build(w1.task()), nn.Linear(512, 10))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=w1.PARAMS["lr"], fused=True)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(labels)), w1.PARAMS["batch_size"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
