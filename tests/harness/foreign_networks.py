"""Networks as other projects export them, small and with random weights: what ``headwater bundle`` is tested on.

They have the structure of the real ones (operators, names, numbers of inputs and outputs, versions), and none of their
weights: tests have no network to fetch these from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from export.encoder import quiet


def seeded(network: nn.Module, seed: int = 0) -> nn.Module:
    """Return the network with random weights and batch norm statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.running_mean.copy_(0.3 * torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            parameter.data = torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5
    return network.eval()


class SmallResNet(nn.Module):
    """A residual network in the form of torchvision's: stem, two blocks, pooling, ``fc``; 16 features, 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(images)))
        x = torch.relu(x + self.block(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def export(network: nn.Module, path: Path, example: torch.Tensor, **options: Any) -> Path:
    """Export a network by torch's older exporter, with a free batch axis unless ``dynamic_axes`` says otherwise."""
    names = {"input_names": ["input"], "output_names": ["logits"], **options}
    axes = {name: {0: "batch"} for name in (*names["input_names"], *names["output_names"])}
    names.setdefault("dynamic_axes", axes)
    opset = names.pop("opset", 17)
    with quiet("torch.onnx"), torch.no_grad():
        torch.onnx.export(network, (example,), str(path), dynamo=False, opset_version=opset, **names)
    return path


def torchvision_export(folder: Path) -> Path:
    """A residual network with one output, as torchvision's models are exported."""
    return export(seeded(SmallResNet()), folder / "resnet.onnx", torch.zeros(1, 3, 32, 32))


def edited(path: Path, change: Any) -> Path:
    """Return a copy of an ONNX file, beside it, after ``change`` was called with its model."""
    model = onnx.load(path)
    change(model)
    target = path.with_name(f"edited-{path.name}")
    onnx.save(model, target)
    return target


__all__ = ["TensorProto", "edited", "export", "helper", "np", "numpy_helper", "seeded", "torchvision_export"]
