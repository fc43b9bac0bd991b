"""A client's part of a run: the training session of one client, and of many clients at once.

This file holds the session that a device and a simulation share: it brings data, model and the client half of a method
together for one round. `stacked` trains many clients in one pass. Nothing here sends or receives messages.
"""

from __future__ import annotations

import functools
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..core.config import Precision
from ..core.errors import DataError
from ..core.storage import sha256_of
from ..core.task import RUNNING_STATISTICS, Task, Tensors
from ..methods.base import Method, require_arrays
from ..methods.values import Client, TrainingControl
from ..training import peft
from ..training.augment import AUGMENTATIONS
from ..training.loops import accuracy
from ..training.parts import (
    Parts,
    load_arrays,
    norm_names,
    own_layers,
    personal_names,
    statistics_of,
    take_statistics,
    to_arrays,
)
from ..training.precision import StepTimes, time_steps
from ..training.ranges import activation_ranges
from ..training.weights import put_weights
from ..wire.tensors import pieces


@dataclass(frozen=True)
class Arrays:
    """Labelled samples: inputs (n, ...) float32, labels (n,) int64."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class ClientState:
    """The state that a client keeps after a round: its personal tensors and its named memory."""

    personal: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of names and contents."""
        return sha256_of(*pieces(self.personal), *pieces(self.memory))


@dataclass(frozen=True)
class Outcome:
    """The result of a round: ``update`` travels, ``kept`` stays, ``metrics`` are reported.

    ``right`` (n,) bool, after the last round: which held-out samples the personal model answers right.
    """

    update: Tensors
    kept: ClientState
    metrics: dict[str, float]
    samples: int
    right: np.ndarray | None = None


@dataclass(frozen=True)
class Built:
    """A run's model with its fresh tensors. Clients that take turns in one process may share one."""

    model: Parts
    fresh: Tensors

    @classmethod
    def of(
        cls, method: Method, task: Task, *, seed: int, device: str = "auto", weights: Tensors | None = None
    ) -> Built:
        """Return the model that every client of a run with this seed starts from; ``weights``: what its encoder has.

        Raises:
            UnknownName: No encoder has this name.
            ConfigError: The encoder does not fit the task.
            DataError: The device does not exist.
        """
        torch.default_generator.manual_seed(seed)  # it is built on the CPU; `torch.manual_seed` takes 2 ms
        model = method.build(task)
        if weights:
            put_weights(model, weights)
        model = method.adapt(model, task).to(choose_device(device))
        return cls(model, to_arrays(model, model.state_dict()))


class Session:
    """A client of one run. Building the model is done once; each round gets what was kept, wherever it was kept.

    ``model`` is one that others use in turn: each round begins by loading all of it. ``evaluate_after`` repeats a
    round's evaluation after local training where the method does not do so anyway. Steps are done in ``precision``,
    which may be changed between rounds. ``augmentation`` is one of `augment.AUGMENTATIONS`, by which each batch is
    varied; empty: by none.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        client: str,
        train: Arrays,
        test: Arrays,
        *,
        seed: int,
        device: str = "auto",
        model: Built | None = None,
        evaluate_after: bool = False,
        precision: Precision = "float32",
        augmentation: str = "",
    ) -> None:
        if not len(train.labels):
            raise DataError(f"client '{client}' has no training samples; expected at least 1; check its data source")
        self.method = method
        self.task = task
        self.client = client
        self.seed = seed
        self.device = choose_device(device)
        self._evaluates_after = evaluate_after or method.evaluate_after
        self.precision = supported(precision, self.device)
        self._augment = AUGMENTATIONS[augmentation](task) if augmentation else None
        built = model or Built.of(method, task, seed=seed, device=device)
        self._model = built.model
        self._fresh = built.fresh
        self._shared = method.shared_names(self._model)
        self._returned = method.returned_names(self._model)
        self._personal = personal_names(self._model, self._shared)
        self._norms = own_layers(self._model, self._personal) if method.params.refresh_stats else []
        self._train = self._on_device(train)
        self._test = self._on_device(test)

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the model's tensors that are received."""
        return self._shared

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the model's tensors that an update carries."""
        return self._returned

    def train(
        self,
        received: Tensors,
        kept: ClientState,
        *,
        round_number: int,
        rounds: int,
        evaluate: bool,
        control: TrainingControl | None = None,
    ) -> Outcome:
        """Run one round: evaluate the received model if requested, train, and return what travels and what stays.

        Methods that do not train in `one_pass` are not shortened; those whose passes are not `resumable` only stop.

        Raises:
            TensorsError: The received tensors do not fit the model.
            TrainingFailed: Local training failed.
            TrainingCancelled: ``control`` has stopped the training.
        """
        client = self.before_round(received, kept, round_number=round_number, rounds=rounds)
        metrics = self.scores(client) if evaluate else {}
        if control is not None:
            client.control = self._within(control)
        update = require_arrays(
            f"{type(self.method).__name__}.local_update", self.method.local_update(client, received)
        )
        client.control = TrainingControl()  # evaluation may fine-tune a copy: that is another training
        return self.after_round(client, update, metrics, evaluate=evaluate)

    def _within(self, control: TrainingControl) -> TrainingControl:
        """Return what of it the method allows."""
        if self.method.one_pass():
            return control
        if control.checkpoint is None or not self.method.resumable:
            return TrainingControl(is_cancelled=control.is_cancelled)
        from ..training.loops import Passes

        return TrainingControl(1.0, control.is_cancelled, Passes(control.checkpoint))

    def finish(self, received: Tensors, kept: ClientState, *, rounds: int) -> Outcome:
        """Personalize to the received model after the last round, and evaluate; nothing travels."""
        client = self.before_round(received, kept, round_number=rounds, rounds=rounds, salt=1)
        take_statistics(self._norms, lambda rows: self.method.views(client, rows), client.train_inputs)
        self.method.personalize(client, received)
        scores, right = self._scored(client)
        return replace(self._outcome(client, {}, scores), right=right)

    def norm_tensors(self, kept: ClientState) -> Tensors:
        """Return the encoder's kept batch norm tensors, which otherwise stay here: an export for others pools them."""
        return {name: kept.personal.get(name, self._fresh[name]) for name in norm_names(self._model, self._shared)}

    def activation_ranges(self, received: Tensors) -> Tensors:
        """Return ``ranges`` (steps, 2) float32: those of the received encoder's activations on the training samples."""
        load_arrays(self._model, {**self._fresh, **received})
        # The exported encoder has no adapters: its steps are counted, and an int8 graph is made of them.
        encoder = peft.plain_encoder(self._model, self.task)
        return {"ranges": activation_ranges(encoder, self._train[0])}

    def step_times(self) -> StepTimes:
        """Return seconds of a training step in each precision, on this client's model and a batch of its samples."""
        return time_steps(self._model, self._train[0][: self.method.params.batch_size])

    @functools.cached_property
    def samples_digest(self) -> str:
        """SHA-256 (hex) of the training samples, which the result of a training depends on."""
        inputs, labels = (tensor.cpu().numpy() for tensor in self._train)
        return sha256_of(*pieces({"inputs": inputs, "labels": labels}))

    @functools.cached_property
    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the model, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

    @property
    def features(self) -> int:
        """Number of the encoder's features; 0 for a model whose encoder does not say it."""
        encoder = dict(self._model.named_children()).get("encoder")
        return int(getattr(encoder, "feature_dim", 0))

    @functools.cached_property
    def shared_buffers(self) -> frozenset[str]:
        """Names of the returned tensors that no gradient moves, and that are not batch norm's running statistics."""
        trained = dict(self._model.named_parameters())
        buffers = (name for name in self._returned if name not in trained)
        return frozenset(name for name in buffers if not name.endswith(RUNNING_STATISTICS))

    def announced_extras(self) -> Tensors:
        """Return what an update carries beside the model's tensors, as zeros of the very shapes and dtypes."""
        return self.method.sends(self._model, self.task)

    @property
    def nbytes(self) -> int:
        """Memory of the samples."""
        return sum(tensor.nbytes for tensor in (*self._train, *self._test))

    @property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The held-out inputs (n, ...) and labels (n,), on the device."""
        return self._test

    def after_round(self, client: Client, update: Tensors, metrics: dict[str, float], *, evaluate: bool) -> Outcome:
        """Return what came out of a round whose client has trained; its ``metrics`` are those from before."""
        if evaluate and self._evaluates_after:
            metrics = metrics | {
                name.replace("acc.", "acc.after."): score for name, score in self.scores(client).items()
            }
        return self._outcome(client, update, metrics)

    def sent(self) -> Tensors:
        """Return the tensors that travel back as they are now: the update of standard local training."""
        return to_arrays(self._model, self._returned)

    def before_round(
        self, received: Tensors, kept: ClientState, *, round_number: int, rounds: int, salt: int = 0
    ) -> Client:
        """Return the client as it begins a round: its model holds what was received and what was kept.

        ``salt`` tells tasks of one round apart for everything random.
        """
        shared = {name: array for name, array in received.items() if not name.startswith("extra.")}
        load_arrays(self._model, {**self._fresh, **kept.personal, **shared})
        seeds = np.random.SeedSequence([self.seed, zlib.crc32(self.client.encode()), round_number, salt])
        rng = np.random.default_rng(seeds)
        generator = torch.Generator(device=self.device)
        generator.manual_seed(int(rng.integers(1 << 62)))
        # For layers that draw from the global generator (dropout). `torch.manual_seed` would note a traceback for each
        # kind of GPU that may come to be, a millisecond for each client, also where there is none.
        seed_layers = torch.default_generator.manual_seed if self.device.type == "cpu" else torch.manual_seed
        seed_layers(int(rng.integers(1 << 62)))
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
            precision=self.precision,
            memory={name: array.copy() for name, array in kept.memory.items()},
            augment=self._augment,
        )

    def own_statistics(self, client: Client) -> AbstractContextManager[None]:
        """Give batch norm layers that stay here the statistics of the client's samples, as every evaluation has them.

        At the end of the context those from before are back, bit for bit.
        """
        return statistics_of(self._norms, lambda rows: self.method.views(client, rows), client.train_inputs)

    def scores(self, client: Client) -> dict[str, float]:
        """Return the accuracies on the held-out samples by name of the metric; empty without such samples."""
        return self._scored(client)[0]

    def _scored(self, client: Client) -> tuple[dict[str, float], np.ndarray | None]:
        """Return accuracies on the held-out samples, and which of them (n,) the personal model answers right.

        Both are empty, or None, without held-out samples.
        """
        inputs, labels = self._test
        if not len(labels):
            return {}, None
        with self.own_statistics(client):
            personal = self.method.predict(client, inputs)
            scores = {"acc.personal": accuracy(personal, labels)}
            # Where a method changes neither answer, the global model is the personal one: no second pass is needed.
            answers = (type(self.method).predict, type(self.method).predict_global)
            is_same = answers == (Method.predict, Method.predict_global) and self.method.shares_classifier
            shared = personal if is_same else self.method.predict_global(client, inputs)
            if shared is not None:
                scores["acc.global"] = accuracy(shared, labels)
        return scores, (personal.argmax(dim=1) == labels).cpu().numpy()

    def _outcome(self, client: Client, update: Tensors, metrics: dict[str, float]) -> Outcome:
        """Return the result of a round, with the metrics that the method has logged."""
        kept = ClientState(to_arrays(self._model, self._personal), client.memory)
        return Outcome(update, kept, {**metrics, **client.log}, client.samples)

    def _on_device(self, arrays: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (n, ...) float32 and labels (n,) int64 on the client's device."""
        inputs = torch.from_numpy(np.ascontiguousarray(arrays.inputs, dtype=np.float32)).to(self.device)
        return inputs, torch.from_numpy(np.ascontiguousarray(arrays.labels, dtype=np.int64)).to(self.device)


def supported(precision: Precision, device: torch.device) -> Precision:
    """Return the same, where the device has it at all; whether it is faster there is found by `time_steps`.

    Raises:
        DataError: This GPU has no bfloat16.
    """
    if precision == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise DataError(
            f"training.precision = 'bfloat16': {torch.cuda.get_device_name(device)} has none; use 'float32'"
        )
    return precision


def choose_device(requested: str) -> torch.device:
    """Return the device to compute on; ``auto`` takes CUDA, then Apple's GPU, then the CPU.

    Raises:
        DataError: The named device does not exist.
    """
    if requested != "auto":
        try:
            return torch.empty(0, device=requested).device
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise DataError(f"training.device = '{requested}' cannot be used ({first}); use 'auto' or 'cpu'") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
