"""An encoder that does not ship, in this one file: a plain ``torch.nn.Module``.

Run it:  python examples/07_my_own_encoder.py        (about 10 s)

Or:      headwater simulate --encoder examples/07_my_own_encoder.py:Perceptron --data digits:optdigits --clients 4

An encoder turns inputs (n, ...) into features (n, d); the method puts classifiers on top. Where its constructor has a
parameter ``task``, it gets the shape of the inputs there; all other parameters are ``encoder_params``.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

from coordinator import simulate
from edge_agent.core.task import Task

ROUNDS = 5


class Perceptron(nn.Module):
    """One hidden layer on the pixels."""

    def __init__(self, task: Task, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), width), nn.ReLU())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (n, width)."""
        features: torch.Tensor = self.layers(inputs)
        return features


def main() -> None:
    """Train it by FedPer, and export it for devices."""
    result = simulate(
        "fedper",
        encoder=Perceptron,
        encoder_params={"width": 32},
        data="digits:optdigits?n=800",
        clients=4,
        rounds=ROUNDS,
        params={"lr": 0.05, "local_epochs": 1},
    )
    print(f"accuracy of the clients: {result.accuracy:.3f}")
    with tempfile.TemporaryDirectory() as folder:
        bundle = result.export(Path(folder) / "encoder.hwb")
        print(f"bundle for devices: {bundle.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
