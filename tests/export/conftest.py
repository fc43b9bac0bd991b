from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edge_agent.core.task import ImageInput, Task
from export.encoder import to_onnx


class NormAfterLinear(nn.Module):
    """Batch norm where only one of the two exporters folds it, and dropout that must not be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_dim = 6
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 16, 6), nn.BatchNorm1d(6))

    def forward(self, inputs):
        return self.last(self.conv(inputs))


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(
        input=ImageInput(channels=1, height=8, width=8),
        class_names=("a", "b", "c"),
        encoder="small_cnn",
        encoder_params={"feature_dim": 12, "width": 4},
    )


@pytest.fixture(scope="session")
def images(task) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(40, *task.input_shape)).astype(np.float32)


@pytest.fixture(scope="session")
def encoder(images) -> nn.Module:
    """An encoder whose running statistics are not those of the start."""
    torch.manual_seed(0)
    built = NormAfterLinear().train()
    for _ in range(20):
        built(2 * torch.from_numpy(images) + 1)
    return built


@pytest.fixture(scope="session")
def legacy(encoder, task):
    return to_onnx(encoder, task, "legacy")


@pytest.fixture(scope="session")
def dynamo(encoder, task):
    pytest.importorskip("onnxscript")
    return to_onnx(encoder, task, "dynamo")
