"""One client's part in one run: model, data, what it keeps between rounds. The same on devices and in simulation.

A round starts from what was received and from what was kept after an earlier round, and everything random is drawn from
generators seeded by (run, client, round): doing a round again gives the same bits.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import DataError
from ..methods.base import Client, Method
from ..task import Task, Tensors
from .loops import accuracy
from .parts import load_arrays, personal_names, to_arrays


@dataclass(frozen=True)
class Arrays:
    """Labelled samples: inputs (n, ...) float32, labels (n,) int64."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Kept:
    """What a client keeps after a round: its personal tensors and its named memory."""

    personal: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came out of a round: ``update`` travels, ``kept`` stays, ``metrics`` are told."""

    update: Tensors
    kept: Kept
    metrics: dict[str, float]
    samples: int


class Session:
    """A client of one run. Building the model is done once; each round gets what was kept, wherever it was kept."""

    def __init__(
        self, method: Method, task: Task, client: str, train: Arrays, test: Arrays, *, seed: int, device: str = "auto"
    ) -> None:
        if not len(train.labels):
            raise DataError(f"client '{client}' has no training samples; expected at least 1; check its data source")
        self.method, self.task, self.client, self.seed = method, task, client, seed
        self.device = choose_device(device)
        torch.manual_seed(seed)
        self._model = method.build(task).to(self.device)
        self._fresh = to_arrays(self._model, self._model.state_dict())
        self._shared = method.shared_names(self._model)
        self._personal = personal_names(self._model, self._shared)
        self._train, self._test = self._place(train), self._place(test)

    def train(self, received: Tensors, kept: Kept, *, round_number: int, rounds: int, evaluate: bool) -> Outcome:
        """One round: evaluate what was received (where asked to), train, and say what travels and what stays.

        Raises:
            TensorsError: what was received does not fit the model.
            TrainingFailed: training stopped.
        """
        client = self._client(received, kept, round_number, rounds)
        metrics = self._evaluate(client) if evaluate else {}
        update = self.method.local_update(client, received)
        return Outcome(update, self._keep(client), {**metrics, **client.log}, client.samples)

    def finish(self, received: Tensors, kept: Kept, *, rounds: int) -> Outcome:
        """After the last round: personalize to what was received, and evaluate; nothing travels."""
        client = self._client(received, kept, rounds, rounds, salt=1)
        self.method.personalize(client, received)
        metrics = self._evaluate(client)
        return Outcome({}, self._keep(client), {**metrics, **client.log}, client.samples)

    def _client(self, received: Tensors, kept: Kept, round_number: int, rounds: int, salt: int = 0) -> Client:
        load_arrays(self._model, {**self._fresh, **kept.personal})
        load_arrays(self._model, {n: a for n, a in received.items() if not n.startswith("extra.")})
        seeds = np.random.SeedSequence([self.seed, zlib.crc32(self.client.encode()), round_number, salt])
        rng = np.random.default_rng(seeds)
        generator = torch.Generator(device=self.device)
        generator.manual_seed(int(rng.integers(1 << 62)))
        torch.manual_seed(int(rng.integers(1 << 62)))  # for layers that draw from the global generator (dropout)
        return Client(
            id=self.client,
            model=self._model,
            train_inputs=self._train[0],
            train_labels=self._train[1],
            task=self.task,
            device=self.device,
            rng=rng,
            generator=generator,
            round=round_number,
            rounds=rounds,
            memory={name: array.copy() for name, array in kept.memory.items()},
        )

    def _evaluate(self, client: Client) -> dict[str, float]:
        inputs, labels = self._test
        if not len(labels):
            return {}
        found = {"acc.personal": accuracy(self.method.predict(client, inputs), labels)}
        shared = self.method.predict_global(client, inputs)
        if shared is not None:
            found["acc.global"] = accuracy(shared, labels)
        return found

    def _keep(self, client: Client) -> Kept:
        return Kept(to_arrays(self._model, self._personal), client.memory)

    def _place(self, arrays: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.from_numpy(np.ascontiguousarray(arrays.inputs, dtype=np.float32)).to(self.device)
        return inputs, torch.from_numpy(np.ascontiguousarray(arrays.labels, dtype=np.int64)).to(self.device)


def choose_device(wish: str) -> torch.device:
    """The device to compute on; ``auto`` takes CUDA, then Apple's GPU, then the CPU.

    Raises:
        DataError: a device was named that is not there.
    """
    if wish != "auto":
        try:
            return torch.empty(0, device=wish).device
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise DataError(f"training.device = '{wish}' cannot be used ({first}); use 'auto' or 'cpu'") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
