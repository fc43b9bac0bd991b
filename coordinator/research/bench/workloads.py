"""The workloads of ``bench round`` and ``bench simulate``, and the two programs that know them.

``noop`` trains nothing, so that only the framework's own work is left. Every agent adds its own number to all that it
receives, so each round carries other bytes both ways, and nothing can come from a cache.

``w1`` trains: Fashion-MNIST, 600 training samples an agent, 5 epochs, batch 50, SGD with lr 0.05, a CNN of 281,034
weights. Where Fashion-MNIST is not installed (Debian: dataset-fashion-mnist), scikit-learn's digits take its place.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from edge_agent import methods, models
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.children import ThreadWorker
from edge_agent.core.config import AgentConfig, load
from edge_agent.core.task import ImageInput, Task, Tensors
from edge_agent.methods import Client, Method, MethodParams
from edge_agent.models import NoParams
from edge_agent.wire.messages.down import Job, job_key
from edge_agent.wire.messages.up import Report, UpdateManifest
from edge_agent.wire.mqtt import MqttTransport

if TYPE_CHECKING:
    from torch import nn

    from edge_agent.training.parts import Parts

NOOP = "noop"
NOOP_ARRAYS = 20
"""As many tensors as a small convolutional network has."""

W1_ENCODER = "w1_cnn"
W1_PARAMS: dict[str, Any] = {"local_epochs": 5, "batch_size": 50, "lr": 0.05, "momentum": 0.0}
SAMPLES = 900
TEST_FRACTION = 1 / 3
FASHION = Path("/usr/share/datasets/fashion-mnist")


class NoopParams(MethodParams):
    """The parameters of method ``noop``."""

    payload_bytes: int = Field(500_000, ge=4 * NOOP_ARRAYS, le=1 << 30, description="size of the model, each way")
    upload_bytes: int = Field(0, ge=0, le=1 << 30, description="size of an update; 0 = that of the model")


class NoopMethod(Method):
    """The mean of the received tensors; known only to processes that call `register`."""

    Params = NoopParams
    shared = ("encoder",)
    heads = ()

    @property
    def name(self) -> str:
        """The name under which it is registered; the module of its class may be ``__main__``."""
        return NOOP

    def build(self, task: Task) -> Parts:  # noqa: ARG002 - the same for every task
        """Return a network of `NOOP_ARRAYS` arrays of equal size."""
        import torch

        from edge_agent.training.parts import Parts

        size = self.params.payload_bytes // (4 * NOOP_ARRAYS)
        arrays = {f"array{number:02d}": torch.nn.Parameter(torch.rand(size)) for number in range(NOOP_ARRAYS)}
        return Parts(encoder=torch.nn.ParameterDict(arrays))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Return the received tensors plus the client's number."""
        return add(received, number_of(client.id))


class NoopTasks(TaskRunner):
    """Tasks of an agent that adds a number instead of training, and does not load torch."""

    def do(
        self,
        job: Job,
        received: Tensors,
        encoder: Path | None = None,  # noqa: ARG002 - as `TaskRunner.do`
    ) -> UpdateManifest | Report:
        """Return the received tensors plus a number (or an upload of another size), or an empty report."""
        if job.purpose == "personalize":
            return Report(run=job.run, samples=1)
        number = number_of(self.config.id)
        upload_bytes = int(job.params.get("upload_bytes", 0))
        update = add(received, number)
        if upload_bytes:
            update = {"array": np.full(upload_bytes // 4, number + job.round, np.float32)}
        return self.outbox.put(update, job_key(job), 1, {})


def w1_encoder(task: Task, _: NoParams | None = None) -> nn.Module:
    """Return the CNN of workload W1: conv 5x5 (16), conv 5x5 (32), each halved, then 512 features."""
    from torch import nn

    from edge_agent.models.base import Layers

    channels, *sides = task.input_shape
    # A convolution takes four pixels from each side, and pooling halves what is left; both are done twice.
    height, width = [((side - 4) // 2 - 4) // 2 for side in sides]
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(32 * height * width, 512), nn.ReLU()]
    return Layers(512, layers)


def register() -> None:
    """Add the benchmark's method and encoder to the registries of this process."""
    methods.registry.add(NOOP, NoopMethod)
    models.registry.add(W1_ENCODER, models.Encoder(w1_encoder, accepts=("image",), smallest=16))


def number_of(client: str) -> int:
    """Return the number that a client adds, 1 to 97, which follows from its id."""
    return 1 + zlib.crc32(client.encode()) % 97


def add(received: Tensors, number: int) -> Tensors:
    """Return all arrays plus ``number``."""
    return {name: array + number for name, array in received.items()}


def w1_task() -> Task:
    """Return the task of workload W1: images of 28 x 28 grey pixels, of ten classes."""
    size = ImageInput(channels=1, height=28, width=28)
    return Task(input=size, class_names=tuple("0123456789"), encoder=W1_ENCODER)


def w1_source(client: int, clients: int) -> str:
    """Return the data source of one agent."""
    if has_fashion():
        return f"idx:{FASHION}?split=train&n={SAMPLES}&seed={client}"
    return f"digits:optdigits?client={client}&clients={clients}"


def has_fashion() -> bool:
    """Return whether Fashion-MNIST is installed."""
    return any(FASHION.glob("train-images*"))


def main() -> None:
    """Run ``coordinator|agent --config FILE [--train]``: the real programs with the benchmark's method and encoder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=("coordinator", "agent"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="train instead of adding a number")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if arguments.program == "agent":
        _run_agent(load(AgentConfig, arguments.config), trains=arguments.train)
        return
    from edge_agent.core.children import stop_on_signals

    from ...config import load_config
    from ...processes.compute import ComputeProcess
    from ...processes.supervisor import Limits
    from ...service.app import coordinator
    from .measuring import send_line

    config = load_config(arguments.config)
    setup = (f"{__package__}.workloads:register",)
    compute = ComputeProcess(config.state / "compute.log", Limits(threads=1), setup)
    with coordinator(config, compute=compute) as service, stop_on_signals() as stop:
        send_line("ready")
        service.serve(stop)


def _run_agent(config: AgentConfig, *, trains: bool) -> None:
    """Run an agent until SIGTERM; ``trains``: whether it trains, or adds a number instead."""
    stop = threading.Event()
    boot = secrets.token_hex(8)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if trains:
        register()
    tasks = TaskRunner(config, "train") if trains else NoopTasks(config, "train")
    transport = MqttTransport(config.broker, config.id, will=will_of(config, boot))
    agent = Agent(config, transport, tasks, AgentRuntime(worker=ThreadWorker(transport.wake), boot=boot))
    agent.start()
    agent.serve(stop)
    agent.close()


if __name__ == "__main__":
    main()
