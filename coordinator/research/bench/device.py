"""The needs of a head-tier device: memory while idle and with an encoder, CPU time until it is ready, time of a head.

Heads are fitted on features of samples that the encoder was not trained on. Synthetic clusters would flatter every
head: logistic regression needs 24 steps of its solver on well separated ones, and some two hundred on the features of
a network. Features and the measured encoder are made once, and kept for later measurements.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from edge_agent import __version__
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import HeadwaterError, MeasuringFailed, MissingCapability
from edge_agent.core.storage import read_tensors, write_tensors
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

from ...broker import find_mosquitto
from ...state.status_file import read_status
from .measuring import Measured, Row, Usage, module, usage, wait_for
from .rounds import FEDERATION, agent_file, broker

if TYPE_CHECKING:
    from edge_agent.bundle.manifest import EncoderPrecision
    from edge_agent.bundle.unpacked import Bundle
    from edge_agent.core.task import Tensors
    from edge_agent.data import Samples

HEADS = {"lr": "LR", "svm": "SVM", "dualfed": "DualFed", "fedpick": "FedPick"}
LIMIT_S = 60.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def rows(folder: Path, cache: Path, repeats: int = 5) -> Iterator[Row]:
    """Yield all figures of a device.

    Args:
        folder: Where processes have their files.
        cache: Keeps features and the exported encoder for the next time.
        repeats: How many idle agents are measured.

    Raises:
        MissingCapability: A package is not installed that exporting an encoder, or running one, needs.
        MeasuringFailed: A process ended, or did not answer.
    """
    yield from idle_rows(folder, repeats)
    bundle = resnet18(cache)
    for precision in bundle.manifest.variants:
        yield from encoder_rows(bundle, precision, folder)
    features = real_features(cache)
    for head in HEADS:
        yield from head_rows(head, features, folder)


def idle_rows(folder: Path, repeats: int) -> Iterator[Row]:
    """Yield the figures of a head-tier agent that is connected and has no bundle yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with broker("mosquitto" if find_mosquitto() else "amqtt") as running:
        agents = [_idle_agent(folder, f"device-{number}", running.config()) for number in range(1 + repeats)]
    # The first one compiles the modules, as an installation does once.
    cpu_s = []
    rss_mb = []
    own_mb = []
    for ready, idle in agents[1:]:
        cpu_s.append(ready.cpu_s)
        rss_mb.append(idle.rss_mb)
        own_mb.append(idle.own_mb)
    yield Row("idle agent", median(rss_mb), "MB")
    yield Row("idle agent, its own pages", median(own_mb), "MB")
    yield Row("CPU until ready", min(cpu_s), "s")
    yield Row("CPU until ready, median", median(cpu_s), "s")


def encoder_rows(bundle: Bundle, precision: EncoderPrecision, folder: Path) -> Iterator[Row]:
    """Yield the figures of ResNet18 in a process with all of the agent's code, one thread, one image at a time."""
    # The first child makes the .ort file, which the second only maps into memory.
    _child(folder, "encoder", bundle.folder, precision)
    timed, its_usage = _child(folder, "encoder", bundle.folder, precision)
    name = f"ResNet18 {precision}"
    yield Row(f"{name} loaded and run", its_usage.rss_mb, "MB")
    yield Row(f"{name}, of it not pages of files", its_usage.own_mb, "MB")
    yield Row(f"{name}, the most while loading", its_usage.peak_mb, "MB")
    yield Row(f"{name}, load", timed["load_s"], "s")
    yield Row(f"{name}, one {SIDE} x {SIDE} image", 1000 * timed["seconds"], "ms")


def head_rows(head: str, features: tuple[Path, Path], folder: Path) -> Iterator[Row]:
    """Yield the figures of fitting one head on the features of 600 samples: CPU time, accuracy, memory of the process.

    Args:
        head: The name of the head.
        features: The files of features to fit on, and to test on.
        folder: Where the process has its files.
    """
    timed, _ = _child(folder, "fit", head, *features)
    name = f"{HEADS[head]} head, 600 x 512 x 10"
    if "epochs" in timed:
        name += f", {timed['epochs']:.0f} epochs"
    yield Row(f"{name}, CPU", timed["seconds"], "s")
    yield Row(f"{name}, accuracy", timed["accuracy"], "")
    yield Row(f"{name}, the process", timed["peak_mb"], "MB")


def _child(folder: Path, *arguments: object) -> tuple[dict[str, float], Usage]:
    """Return what a child process without torch has timed, and its usage."""
    folder.mkdir(parents=True, exist_ok=True)
    with module(
        "child", arguments, folder, module="coordinator.research.bench.device_child", environment=ONE_THREAD
    ) as child:
        timed: dict[str, float] = json.loads(child.answer())
        return timed, usage(child.pid)


def _idle_agent(folder: Path, name: str, at: BrokerConfig) -> tuple[Usage, Usage]:
    """Return the usage of ``edge-agent run`` when its hello arrives, and while it is idle.

    Args:
        folder: Where the agent has its files.
        name: Its id.
        at: The broker.

    Raises:
        MeasuringFailed: The agent ended, or sent no hello.
    """
    # 1. The agent's data, which it checks before it connects, and its settings.
    _write_images(folder / "images")
    path = agent_file(folder, name, at.names, f"images:{folder / 'images'}", tier="head")
    # Compiled modules go to a folder of ours, also where the caller has forbidden to write any.
    compiled = {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
    # 2. We stand in for the coordinator: the agent is ready when its hello arrives, and idle once it is welcomed.
    topics = Topics(FEDERATION)
    host = MqttTransport(at, "bench")
    with contextlib.closing(host):
        host.subscribe(*topics.for_coordinator())
        host.start()
        with module(name, ["run", "--config", path], folder, module="edge_agent", environment=compiled) as agent:
            _wait_for_hello(host, agent)
            ready = usage(agent.pid)
            welcome = down.Welcome(
                software=__version__, lease_s=LIMIT_S, boot="bench", seq=1, federation=fields.new_id(), epoch=1
            )
            host.publish(topics.down(name), codec.encode(welcome))
            wait_for(
                lambda: bool(read_status(folder / name).content.get("welcomed")),
                [agent],
                what="the agent to be welcomed",
                limit_s=LIMIT_S,
            )
            return ready, usage(agent.pid)


def _write_images(folder: Path) -> None:
    """Write a hundred small images of each of two classes, in a folder for each class."""
    for label in ("left", "right"):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(100):
            image = b"P5 32 32 255\n" + bytes([number]) * 32 * 32
            (folder / label / f"{number}.pgm").write_bytes(image)


def _wait_for_hello(host: MqttTransport, agent: Measured) -> None:
    """Return when the hello of an agent has arrived.

    Raises:
        MeasuringFailed: The agent ended, or sent no hello within `LIMIT_S`.
    """
    for _ in range(int(LIMIT_S)):
        event = host.receive(1.0)
        agent.check()
        if not isinstance(event, Message) or not event.topic.endswith("/up"):
            continue
        if isinstance(codec.parse_from_agent(event.payload), up.Hello):
            return
    raise MeasuringFailed(f"{agent.name} sent no hello within {LIMIT_S:.0f} s; {agent.stopped()}")


FIT = 600
"""The number of samples that heads are fitted on."""

EPOCHS = 2
"""The epochs that the encoder of the features is trained for."""

SIDE = 224
"""The side of the images of the measured encoder, in pixels."""

CALIBRATION = 16
"""The number of images that the measured encoder is quantized with."""


def default_cache() -> Path:
    """Return the folder where features and the exported encoder are kept for the next time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "bench"


@dataclass(frozen=True)
class Features:
    """Features (n, 512) float32 and labels (n,) int64, and the encoder's own classifier."""

    features: np.ndarray
    labels: np.ndarray
    classifier: Tensors

    @classmethod
    def read(cls, path: Path) -> Features:
        """Read features that `write` has written."""
        arrays = read_tensors(path)
        return cls(arrays["features"], arrays["labels"], {name: arrays[name] for name in ("weight", "bias")})

    def write(self, path: Path) -> None:
        """Write a tensor file, from which processes without torch read."""
        write_tensors(path, {"features": self.features, "labels": self.labels, **self.classifier})


def real_features(cache: Path) -> tuple[Path, Path]:
    """Return the files of `Features` below ``cache``, to fit on and to test on; they are computed the first time.

    The encoder is that of workload W1, trained for two epochs on 6,000 images of Fashion-MNIST. Heads are fitted on 600
    of the test images and tested on 1,200. Without Fashion-MNIST the encoder is trained on rendered digits, and heads
    are fitted on handwritten ones.

    Raises:
        MissingCapability: The features have to be computed, and torch is not installed.
    """
    from .workloads import has_fashion

    data = "fashion-mnist" if has_fashion() else "digits"
    paths = (cache / f"fit-{data}-{__version__}.safetensors", cache / f"test-{data}-{__version__}.safetensors")
    try:
        for path in paths:
            Features.read(path)
    except (HeadwaterError, KeyError):  # not there, or not whole: computed again
        if importlib.util.find_spec("torch") is None:
            purpose = "measuring heads on the features of an encoder"
            raise MissingCapability.package("torch", "research", purpose) from None
        cache.mkdir(parents=True, exist_ok=True)
        train, other = _samples()
        for features, path in zip(make(train, other, FIT), paths, strict=True):
            features.write(path)
    return paths


def make(train: Samples, other: Samples, count: int) -> tuple[Features, Features]:
    """Return features to fit on and features to test on, computed by an encoder that is trained here.

    Args:
        train: The samples that the encoder is trained on.
        other: The samples whose features are computed.
        count: How many of these, from the first one, are to fit on.
    """
    import torch

    from edge_agent import methods
    from edge_agent.methods.values import Client, MethodParams
    from edge_agent.training import loops

    from .workloads import register, w1_task

    # 1. Train the encoder, with one thread: the same bits on every number of cores.
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
    torch.set_num_threads(1)
    try:
        params = MethodParams(lr=0.05, batch_size=50, local_epochs=EPOCHS)
        loops.train(client, loops.cross_entropy(client.model), params)
    finally:
        torch.set_num_threads(threads)
    # 2. The features of the other samples, in batches.
    model.eval()
    with torch.no_grad():
        batches = [torch.from_numpy(other.inputs[at : at + 256]) for at in range(0, len(other.inputs), 256)]
        features = torch.cat([model.encoder(batch) for batch in batches]).numpy()
    classifier = {name: tensor.detach().numpy() for name, tensor in model.head.named_parameters()}
    labels = other.labels.astype(np.int64)
    to_fit = Features(features[:count], labels[:count], classifier)
    to_test = Features(features[count:], labels[count:], classifier)
    return to_fit, to_test


def _samples() -> tuple[Samples, Samples]:
    """Return samples to train the encoder on, and 1,800 others (1,797 digits)."""
    from edge_agent import data

    from .workloads import FASHION, has_fashion, w1_task

    task = w1_task()
    train_source = "digits:rendered?n=3000"
    other_source = "digits:slanted"
    if has_fashion():
        train_source = f"idx:{FASHION}?split=train&n=6000"
        other_source = f"idx:{FASHION}?split=test&n=1800&seed=1"
    train = data.load(train_source, task.input, task.class_names)
    other = data.load(other_source, task.input, task.class_names)
    return train, other


def resnet18(cache: Path) -> Bundle:
    """Return a ResNet18 with random weights for 224 x 224 images, unpacked below ``cache``; exported the first time.

    Raises:
        MissingCapability: It has to be exported, and torch or onnx is not installed.
    """
    from edge_agent.bundle import installed, manifest

    file = cache / f"resnet18-{__version__}-schema{manifest.SCHEMA}.hwb"
    if not file.exists():
        if importlib.util.find_spec("torch") is None:
            raise MissingCapability.package("torch", "research", "measuring an encoder")
        import torch

        from edge_agent import methods
        from export import BundleOptions, Calibration, TrainedEncoder, build_bundle

        file.parent.mkdir(parents=True, exist_ok=True)
        size = ImageInput(channels=3, height=SIDE, width=SIDE)
        task = Task(input=size, class_names=tuple("0123456789"), encoder="resnet18")
        method = methods.create("fedavg")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = method.build(task)
        images = np.random.default_rng(0).standard_normal((CALIBRATION, *task.input_shape), np.float32)
        # The older exporter takes seconds where the newer one takes a quarter of a minute.
        options = BundleOptions("bench", exporter="legacy")
        build_bundle(TrainedEncoder(model, method, task), Calibration.from_inputs(images), file, options)
    return installed.install(file, cache / "bundles", keep=2)
