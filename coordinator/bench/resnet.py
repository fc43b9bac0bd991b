"""A ResNet18 with random weights for 224 x 224 images, exported to a bundle once and kept for the next time."""

from __future__ import annotations

import importlib.util
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent import __version__
from edge_agent.errors import MissingCapability
from edge_agent.task import ImageInput, Task

if TYPE_CHECKING:
    from edge_agent.bundle import Bundle

SIDE = 224
CALIBRATION = 16


def resnet18(cache: Path) -> Bundle:
    """The bundle, unpacked below ``cache``.

    Raises:
        MissingCapability: it has to be exported and torch or onnx is not installed.
    """
    from edge_agent import bundle as bundles

    file = cache / f"resnet18-{__version__}-schema{bundles.SCHEMA}.hwb"
    if not file.exists():
        if importlib.util.find_spec("torch") is None:
            raise MissingCapability.package("torch", "export", "measuring an encoder")
        file.parent.mkdir(parents=True, exist_ok=True)
        _export(file)
    return bundles.install(file, cache / "bundles", keep=2)


def _export(file: Path) -> None:
    """Write the bundle; the older exporter takes seconds where the newer takes a quarter of a minute."""
    import numpy as np
    import torch

    from edge_agent import methods
    from export.bundle import export_bundle

    size = ImageInput(channels=3, height=SIDE, width=SIDE)
    task = Task(input=size, class_names=tuple("0123456789"), encoder="resnet18")
    method = methods.create("fedavg")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = method.build(task)
    images = np.random.default_rng(0).standard_normal((CALIBRATION, *task.input_shape), np.float32)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    export_bundle(model, method, task, images, file, name="bench", created=created, exporter="legacy")
