"""Workload W1: Fashion-MNIST, 600 training samples an agent, E = 5, batch 50, SGD lr 0.05, a CNN of 281,034 weights.

Where Fashion-MNIST is not installed (Debian: dataset-fashion-mnist), scikit-learn's handwritten digits stand in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_agent.task import Frozen, ImageInput, Task

ENCODER = "w1_cnn"
FASHION = Path("/usr/share/datasets/fashion-mnist")
SAMPLES, TEST_FRACTION = 900, 1 / 3
PARAMS: dict[str, Any] = {"local_epochs": 5, "batch_size": 50, "lr": 0.05, "momentum": 0.0}


class NoParams(Frozen):
    """This encoder has none."""


class Encoder:
    """What a file in ``edge_agent/models`` would hold; found by name in processes that call `register`."""

    Params = NoParams
    ACCEPTS = ("image",)
    SMALLEST = 16

    @staticmethod
    def build(task: Task) -> Any:
        """conv 5x5 (16), conv 5x5 (32), each halved, then 512 features."""
        from torch import nn

        from edge_agent.models.base import Layers

        channels, *sides = task.input_shape
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(32 * height * width, 512), nn.ReLU()]
        return Layers(512, layers)


def has_fashion() -> bool:
    """Whether the real data are here."""
    return any(FASHION.glob("train-images*"))


def source(client: int, clients: int) -> str:
    """The data source of one agent."""
    if has_fashion():
        return f"idx:{FASHION}?split=train&n={SAMPLES}&seed={client}"
    return f"digits:optdigits?client={client}&clients={clients}"


def task() -> Task:
    """28 x 28 grey pixels, ten classes."""
    return Task(input=ImageInput(channels=1, height=28, width=28), class_names=tuple("0123456789"), encoder=ENCODER)


def register() -> None:
    """Make the encoder known to this process."""
    from edge_agent import models

    models.registry.add(ENCODER, Encoder)
