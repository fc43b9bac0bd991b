"""A federation in one process, written as plainly as possible: the twin that the real round loop is compared with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.task import ImageInput, Task, Tensors, WindowInput
from edge_agent.methods.base import Method
from edge_agent.methods.values import Client, Update
from edge_agent.training.parts import Parts, load_arrays, personal_names, to_arrays
from edge_agent.wire.tensors import decode, encode

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("left", "middle", "right"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 12, "width": 4},
)

TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 3},
)


def stripes(labels: Iterable[int], seed: int, task: Task = TASK) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images with a bright stripe whose place is the label."""
    wanted = torch.as_tensor(list(labels), dtype=torch.int64)
    images = 0.3 * torch.randn(len(wanted), *task.input_shape, generator=torch.Generator().manual_seed(seed))
    for row, label in enumerate(wanted.tolist()):
        images[row, :, :, 2 * label + 1] += 1.5
    return images, wanted


class Federation:
    """A method, its clients and its state. Only arrays that went through the codec pass between the halves."""

    def __init__(self, method: Method, task: Task = TASK, *, seed: int = 0, rounds: int = 3) -> None:
        self.method = method
        self.task = task
        self.seed = seed
        self.rounds = rounds
        model = self.fresh_model(0)
        self.shared = method.shared_names(model)
        self.returned = method.returned_names(model)
        self.state = method.start(to_arrays(model, self.shared))
        self.clients: dict[str, Client] = {}
        self.round = 0

    def fresh_model(self, salt: int) -> Parts:
        # `torch.manual_seed` would note a traceback for each device that is not there: 0.6 ms.
        torch.default_generator.manual_seed(1000 * self.seed + salt)
        return self.method.adapt(self.method.build(self.task), self.task)

    def join(self, name: str, labels: Iterable[int]) -> Client:
        salt = len(self.clients) + 1
        inputs, wanted = stripes(labels, seed=salt, task=self.task)
        self.clients[name] = Client(
            id=name,
            model=self.fresh_model(salt),
            train_inputs=inputs,
            train_labels=wanted,
            task=self.task,
            device=torch.device("cpu"),
            rng=np.random.default_rng([self.seed, salt]),
            generator=torch.Generator().manual_seed(1000 * self.seed + salt),
            rounds=self.rounds,
        )
        return self.clients[name]

    def download(self, name: str) -> Tensors:
        client = self.clients[name]
        received = decode(encode({**self.method.broadcast(self.state), **self.method.downlink(self.state, name)}))
        load_arrays(client.model, {key: array for key, array in received.items() if not key.startswith("extra.")})
        return received

    def personal(self, name: str) -> Tensors:
        model = self.clients[name].model
        return to_arrays(model, personal_names(model, self.shared))

    def update(self, name: str) -> Update:
        client = self.clients[name]
        client.round = self.round
        sent = self.method.local_update(client, self.download(name))
        return Update(name, float(client.samples), decode(encode(sent)))

    def run_round(self, names: Iterable[str] | None = None) -> list[Update]:
        self.round += 1
        updates = [self.update(name) for name in sorted(self.clients if names is None else names)]
        self.state = self.method.aggregate(self.state, updates)
        return updates

    def run(self) -> Federation:
        for _ in range(self.rounds):
            self.run_round()
        return self


def small_steps(name: str, **params) -> Method:
    """The method with parameters that suit a dozen tiny images."""
    fields = methods.get(name).Params.model_fields
    quick = {"local_epochs": 1, "local_steps": 2, "batch_size": 4, "tune_epochs": 2, "tune_rounds": 2}
    return methods.create(name, {**{k: v for k, v in quick.items() if k in fields}, **params})


@pytest.fixture
def task() -> Task:
    return TASK


@pytest.fixture
def make_method():
    return small_steps


@pytest.fixture
def federation():
    """``federation(method)``: three clients that hold different classes."""

    def build(method: Method | str, task: Task = TASK, *, seed: int = 0, rounds: int = 3, labels=None) -> Federation:
        made = small_steps(method) if isinstance(method, str) else method
        found = Federation(made, task, seed=seed, rounds=rounds)
        for name, own in (labels or {"a": [0, 1] * 5, "b": [1, 2] * 4, "c": [0, 1, 2] * 2}).items():
            found.join(name, own)
        return found

    return build


@pytest.fixture
def tiny():
    """``tiny(name, labels, **params)``: clients with noise of four values under a network of two linear layers."""

    def build(name: str, labels: dict[str, list[int]], *, rounds: int = 3, **params) -> Federation:
        fed = Federation(small_steps(name, **params), TINY, rounds=rounds)
        for salt, (client, own) in enumerate(labels.items()):
            joined = fed.join(client, [])
            noise = torch.randn(len(own), 1, 4, generator=torch.Generator().manual_seed(salt))
            joined.train_inputs = noise
            joined.train_labels = torch.tensor(own, dtype=torch.int64)
        return fed

    return build


@pytest.fixture
def images():
    return stripes
