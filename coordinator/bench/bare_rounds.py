"""The work of a round without any framework: a plain loop over the clients of one worker, one thread, channels last.

Nothing here is our training code; only the shape of the network is the same. Nothing is sent, averaged over workers or
kept on disk, so this is the hardest yardstick that a round can have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.limits import keep_freed_memory

from . import w1
from .processes import say

if TYPE_CHECKING:
    import torch
    from torch import nn

FEATURES, CLASSES = 512, 10
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
    train = fedavg if arguments.method == "fedavg" else _fedpac
    start = fresh_model().state_dict()
    mean = {name: tensor.clone() for name, tensor in start.items()}
    say("ready")
    for _ in sys.stdin:
        mean = one_round(train, mean, data)
        say("done")


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

    model = nn.Sequential(w1.Encoder.build(w1.task()), nn.Linear(FEATURES, CLASSES))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def fedavg(model: nn.Sequential, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Five epochs of SGD."""
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.SGD(model.parameters(), lr=w1.PARAMS["lr"], fused=True)
    for _ in range(w1.PARAMS["local_epochs"]):
        for rows in torch.split(torch.randperm(len(labels), device=labels.device), w1.PARAMS["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _fedpac(model: nn.Sequential, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Features, statistics, one epoch of the classifier on them, five of the encoder drawn to centroids, features."""
    import torch
    from torch.nn import functional as F

    encoder, head = model[0], model[1]
    before = _features(encoder, inputs)
    centroids = _means(before, labels)
    (before * before).sum(dim=1)
    optimizer = torch.optim.SGD(head.parameters(), lr=HEAD_LR, weight_decay=WEIGHT_DECAY, fused=True)
    for rows in torch.split(torch.randperm(len(labels)), w1.PARAMS["batch_size"]):
        optimizer.zero_grad()
        F.cross_entropy(head(before[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    head.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=w1.PARAMS["lr"], weight_decay=WEIGHT_DECAY, fused=True)
    for _ in range(w1.PARAMS["local_epochs"]):
        for rows in torch.split(torch.randperm(len(labels)), w1.PARAMS["batch_size"]):
            optimizer.zero_grad()
            features = encoder(inputs[rows])
            loss = F.cross_entropy(head(features), labels[rows]) + F.mse_loss(features, centroids[labels[rows]])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    head.requires_grad_(requires_grad=True)
    _means(_features(encoder, inputs), labels)


def _features(encoder: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        found = torch.cat([encoder(piece) for piece in torch.split(inputs, BATCH_AT_ONCE)])
    return found.clone()


def _means(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    import torch

    sums = torch.zeros(CLASSES, features.shape[1]).index_add_(0, labels, features)
    return sums / torch.bincount(labels, minlength=CLASSES).clamp(min=1)[:, None]


if __name__ == "__main__":
    main()
