"""What ``bench device`` works on: features of a trained encoder, and an exported ResNet18. Both are made once.

Heads are fitted on features of samples that the encoder was not trained on. Synthetic clusters would flatter every
head: logistic regression needs 24 steps of its solver on well separated ones, and some two hundred on the features of
a network.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_agent import __version__
from edge_agent.errors import HeadwaterError, MissingCapability
from edge_agent.storage import read_tensors, write_tensors
from edge_agent.task import ImageInput, Task

if TYPE_CHECKING:
    from edge_agent.bundle import Bundle
    from edge_agent.data import Samples
    from edge_agent.task import Tensors

FIT, EPOCHS = 600, 2
SIDE, CALIBRATION = 224, 16


def default_cache() -> Path:
    """Where features and the exported encoder are kept for the next time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "bench"


@dataclass(frozen=True)
class Features:
    """Features (n, 512) float32 and labels (n,) int64, and the encoder's own classifier."""

    features: np.ndarray
    labels: np.ndarray
    classifier: Tensors

    @classmethod
    def read(cls, path: Path) -> Features:
        """What `write` has written."""
        arrays = read_tensors(path)
        return cls(arrays["features"], arrays["labels"], {name: arrays[name] for name in ("weight", "bias")})

    def write(self, path: Path) -> None:
        """Write a tensor file, from which processes without torch read."""
        write_tensors(path, {"features": self.features, "labels": self.labels, **self.classifier})


def real_features(cache: Path) -> tuple[Path, Path]:
    """Files of `Features` below ``cache``, to fit on and to test on; computed the first time.

    The encoder is that of workload W1, trained for two epochs on 6,000 images of Fashion-MNIST; fitted on 600 of its
    test images and tested on 1,200. Without Fashion-MNIST: trained on rendered digits, fitted on handwritten ones.

    Raises:
        MissingCapability: they have to be computed and torch is not installed.
    """
    from .workloads import has_fashion

    data = "fashion-mnist" if has_fashion() else "digits"
    paths = (cache / f"fit-{data}-{__version__}.safetensors", cache / f"test-{data}-{__version__}.safetensors")
    try:
        for path in paths:
            Features.read(path)
    except (HeadwaterError, KeyError):  # not there, or not whole: computed again
        if importlib.util.find_spec("torch") is None:
            raise MissingCapability.package("torch", "train", "measuring heads on the features of an encoder") from None
        cache.mkdir(parents=True, exist_ok=True)
        for made, path in zip(make(*_samples(), FIT), paths, strict=True):
            made.write(path)
    return paths


def make(train: Samples, other: Samples, count: int) -> tuple[Features, Features]:
    """Features of ``other``, the first ``count`` of them to fit on, by an encoder trained on ``train``."""
    import torch

    from edge_agent import methods
    from edge_agent.methods.values import Client, MethodParams
    from edge_agent.training import loops

    from .workloads import register, w1_task

    register()
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = methods.create("fedavg").build(w1_task())
    client = Client(
        id="bench",
        model=model,
        train_inputs=torch.from_numpy(train.inputs),
        train_labels=torch.from_numpy(train.labels.astype(np.int64)),
        task=w1_task(),
        device=cpu,
        rng=np.random.default_rng(0),
        generator=torch.Generator(device=cpu).manual_seed(0),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bits on every number of cores
    try:
        params = MethodParams(lr=0.05, batch_size=50, local_epochs=EPOCHS)
        loops.train(client, loops.cross_entropy(client.model), params)
    finally:
        torch.set_num_threads(threads)
    model.eval()
    with torch.no_grad():
        batches = [torch.from_numpy(other.inputs[at : at + 256]) for at in range(0, len(other.inputs), 256)]
        result = torch.cat([model.encoder(batch) for batch in batches]).numpy()
    classifier = {name: tensor.detach().numpy() for name, tensor in model.head.named_parameters()}
    labels = other.labels.astype(np.int64)
    parts = (slice(count), slice(count, None))
    one, two = (Features(result[part], labels[part], classifier) for part in parts)
    return one, two


def _samples() -> tuple[Samples, Samples]:
    """Samples to train the encoder on, and 1,800 others (1,797 digits)."""
    from edge_agent import data

    from .workloads import FASHION, has_fashion, w1_task

    task, names = w1_task(), ("digits:rendered?n=3000", "digits:slanted")
    if has_fashion():
        names = (f"idx:{FASHION}?split=train&n=6000", f"idx:{FASHION}?split=test&n=1800&seed=1")
    one, other = (data.load(name, task.input, task.class_names) for name in names)
    return one, other


def resnet18(cache: Path) -> Bundle:
    """A ResNet18 with random weights for 224 x 224 images, unpacked below ``cache``; exported the first time.

    Raises:
        MissingCapability: it has to be exported and torch or onnx is not installed.
    """
    from edge_agent import bundle as bundles

    file = cache / f"resnet18-{__version__}-schema{bundles.SCHEMA}.hwb"
    if not file.exists():
        if importlib.util.find_spec("torch") is None:
            raise MissingCapability.package("torch", "export", "measuring an encoder")
        file.parent.mkdir(parents=True, exist_ok=True)
        _export_resnet18(file)
    return bundles.install(file, cache / "bundles", keep=2)


def _export_resnet18(file: Path) -> None:
    import torch

    from edge_agent import methods
    from export import bundle

    size = ImageInput(channels=3, height=SIDE, width=SIDE)
    task = Task(input=size, class_names=tuple("0123456789"), encoder="resnet18")
    method = methods.create("fedavg")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = method.build(task)
    images = np.random.default_rng(0).standard_normal((CALIBRATION, *task.input_shape), np.float32)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    # The older exporter takes seconds where the newer one takes a quarter of a minute.
    bundle(model, method, task, images, file, name="bench", created=created, exporter="legacy")
