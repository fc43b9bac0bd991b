"""What groups of methods share: server optimizers, second networks, tuned copies, fitted heads, arrays per client."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import heads
from ..core.errors import TrainingFailed
from ..core.task import State, Task, Tensors
from ..core.weighted_sum import WeightedSum
from ..heads import FitData, Head
from ..training import feature_cache
from ..training.finetune import (
    PERSONAL,
    fingerprint,
    has_copy,
    make_copy,
    on_features,
    second,
    two_networks,
    with_copy_loaded,
)
from ..training.loops import TrainingOptions, cross_entropy, features_of, predict_probabilities, train
from . import Client, LocalWork, Method, Stage, grades
from .base import SERVER_ONLY, is_learned

if TYPE_CHECKING:
    import torch

    from ..training.parts import Parts


def packed(names: Sequence[str]) -> np.ndarray:
    """Names as the rows of a uint8 array, padded with zeros: tensors hold no text, and their names are limited."""
    text = np.array([name.encode() for name in names])
    return text.view(np.uint8).reshape(len(names), -1)


def names_in(state: State, which: str) -> tuple[str, ...]:
    """Return names out of a `packed` array of the state; none where there is no such array."""
    rows = state.get(which)
    return () if rows is None else tuple(row.tobytes().rstrip(b"\0").decode() for row in rows)


def with_rows(state: State, names: str, fresh: Mapping[str, Tensors]) -> Tensors:
    """Return arrays with one row for each client, sorted by id, and the `packed` ids as ``names``.

    ``fresh`` holds the rows of some clients, by client and array; the rows of all others are those of the state.
    """
    before = {client: row for row, client in enumerate(names_in(state, names))}
    clients = sorted({*before, *fresh})
    arrays = {
        name: np.stack([fresh[c][name] if c in fresh else state[name][before[c]] for c in clients])
        for name in next(iter(fresh.values()))
    }
    return {names: packed(clients), **arrays}


MOST_SAMPLES = 1_000_000_000
"""The most samples of a class that an honest client can have."""

LARGEST = 1e6
"""The largest number in an honest statistic: features of unnormalised encoders reach some thousands."""


def objection_to(counts: np.ndarray, means: Tensors) -> str:
    """Return why class counts (K,) and arrays (K, ...) of these classes cannot be honest; empty where they can."""
    if counts.min(initial=0) < 0 or counts.max(initial=0) > MOST_SAMPLES:
        return f"class counts from {counts.min()} to {counts.max()}, expected 0 to {MOST_SAMPLES}"
    for name, array in means.items():
        if array[counts == 0].any():
            return f"'{name}' has values for a class whose count is 0"
        if np.abs(array).max(initial=0.0) > LARGEST:
            return f"'{name}' reaches {np.abs(array).max():g}, expected at most {LARGEST:g}"
    return ""


def require_finite(client: Client, what: str, array: np.ndarray) -> None:
    """Require that all numbers are finite.

    Raises:
        TrainingFailed: A number is NaN or infinite.
    """
    if not np.isfinite(array).all():
        raise TrainingFailed(
            f"client '{client.id}': {what} hold NaN or infinity in round {client.round}; expected finite numbers; "
            "lower lr or alignment_weight (lambda), or look for extreme values in the data",
            is_public=True,
        )


def rng_of(client: str, *salt: int) -> np.random.Generator:
    """Return random numbers that are the client's own in every run: they depend on its id and ``salt`` alone."""
    return np.random.default_rng([zlib.crc32(client.encode()), *salt])


def changes(state: State, mean: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each learned array and ``mean`` minus ``state``, float64."""
    for name, array in mean.items():
        if is_learned(name, array):
            yield name, array.astype(np.float64) - state[name]


def towards(state: State, mean: Tensors, rate: float) -> Tensors:
    """Return ``state + rate * (mean - state)``; arrays that are not learned are the mean. ``rate`` 1 gives the mean."""
    if rate == 1.0:
        return mean
    moved = {name: (state[name] + rate * change).astype(mean[name].dtype) for name, change in changes(state, mean)}
    return {**mean, **moved}


class ServerSteps(Method, ABC):
    """FedAvg whose server makes its own step from the mean change of a round."""

    def server_step_is_mean(self) -> bool:
        """Return True: the step is made from the mean alone."""
        return self.server_step_is_sum() and type(self).next_state is ServerSteps.next_state

    def next_state(self, state: State, total: WeightedSum) -> State:
        """Return the state after one step; running statistics of batch norm are the mean."""
        mean = total.mean()
        new = {**state, **mean}
        for name, change in changes(state, mean):
            step, moments = self.step(state, name, change)
            new[name] = (state[name] + step).astype(mean[name].dtype)
            new |= {f"{SERVER_ONLY}{kind}.{name}": array.astype(np.float32) for kind, array in moments.items()}
        return new

    @abstractmethod
    def step(self, state: State, name: str, change: np.ndarray) -> tuple[np.ndarray, Tensors]:
        """Return what is added to the array ``name``, and the moments to keep by kind; ``change``: mean minus state."""

    @staticmethod
    def moment(state: State, kind: str, name: str, start: float = 0.0) -> np.ndarray | float:
        """Return the kept moment of an array, or ``start`` in the first round."""
        return state.get(f"{SERVER_ONLY}{kind}.{name}", start)


class TwoNetworks(Method):
    """The personal network answers; the shared one is what travels."""

    exactness = grades(mlp=("approximate", "one linear layer on the shared encoder; the personal network is whole"))
    no_peft = "has a second network on each device, whose frozen weights no device would get"

    def local_work(self) -> LocalWork:
        """Return passes of both networks, on the same batches."""
        return LocalWork((Stage("both networks", self.params.local_epochs),))

    def build(self, task: Task) -> Parts:
        """Return two networks of the same start."""
        return two_networks(task)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the personal network."""
        return predict_probabilities(second(client.model), inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return features of both encoders."""
        return {**super().views(client, inputs), PERSONAL: features_of(second(client.model), inputs)}


class Tuned(Method, ABC):
    """A method whose clients fine-tune a copy before each test; subclasses say how, and which parts change."""

    tuned_parts: Any = ("encoder", "head")
    """Parts that fine-tuning changes."""

    @abstractmethod
    def tune(self, client: Client) -> None:
        """Train ``client.model``, which is put back afterwards.

        Raises:
            TrainingFailed: The loss is not finite, or the data do not allow a step.
        """

    def personalize(self, client: Client, received: Tensors) -> None:
        """Make the tuned copy and keep it in memory."""
        make_copy(client, self.tune, self.tuned_parts)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the tuned copy, which is made first if the shared model has changed since."""
        if not has_copy(client):
            self.personalize(client, {})
        with with_copy_loaded(client):
            return super().predict(client, inputs)


class FineTuned(Tuned):
    """`Tuned` by ``tune_epochs`` of the optimizer of training with step size ``tune_lr``."""

    def local_work(self) -> LocalWork:
        """Return the work of training, and the passes of fine-tuning."""
        params = self.params
        learns = "all parts" if params.tune == "all" else "head"
        return replace(super().local_work(), end=(Stage(learns, params.tune_epochs, lr=params.tune_lr),))

    @property
    def tuned_parts(self) -> tuple[str, ...]:
        """All, or the head, as ``tune`` says."""
        return ("encoder", "head") if self.params.tune == "all" else ("head",)

    def tune(self, client: Client) -> None:
        """Tune by SGD all parts, or the head alone on features that the encoder computes once in eval mode."""
        params = self.params
        tuned = client if self.params.tune == "all" else on_features(client)
        model = tuned.model if params.tune == "all" else tuned.model.head
        train(
            tuned, cross_entropy(model), params, lr=params.tune_lr, options=TrainingOptions(epochs=params.tune_epochs)
        )


class FittedHead(Method):
    """Methods whose clients fit a device head on the features of the frozen encoder.

    The parameters ``head`` and ``head_params`` name it. It is fitted again whenever the encoder has changed.
    """

    _STAMP = "personal.encoder"
    _HEAD = "personal.head."

    def local_work(self) -> LocalWork:
        """Return the work of training, and the fit of the head."""
        return replace(super().local_work(), end=(Stage(f"head '{self.params.head}', fitted to features"),))

    @property
    def head_name(self) -> str:
        """The personal head that ``personalize`` fits."""
        return str(self.params.head)

    def personalize(self, client: Client, received: Tensors) -> None:
        """Fit the head on the client's own inputs as they are, with the encoder frozen in eval mode."""
        stamp = fingerprint(client.model.encoder, with_counters=True)
        head = self._head()
        features = feature_cache.of_process.features_of(client.model, client.train_inputs, stamp).cpu().numpy()
        # Seeded by the encoder: an evaluation that fits a head between rounds must not shift training's random numbers.
        rng = np.random.default_rng(int.from_bytes(stamp[:8].tobytes(), "little"))
        head.fit(FitData(features, client.train_labels.cpu().numpy(), client.task.num_classes), rng)
        for name in [name for name in client.memory if name.startswith(self._HEAD)]:
            del client.memory[name]
        fitted = {self._HEAD + name: array for name, array in head.arrays.items()}
        client.memory.update({self._STAMP: stamp, **fitted})

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the personal head, which is fitted first if the encoder has changed since."""
        import torch

        head = self.fitted(client)  # of the encoder with the stamp that is in memory now
        stamp = client.memory[self._STAMP]
        features = feature_cache.of_process.features_of(client.model, inputs, stamp).cpu().numpy()
        probabilities = head.predict_proba(features)
        return torch.from_numpy(probabilities.astype(np.float32)).to(inputs.device)

    def fitted(self, client: Client) -> Head:
        """Return the client's personal head, which is fitted first if the encoder has changed since."""
        stamp = fingerprint(client.model.encoder, with_counters=True)
        if not np.array_equal(client.memory.get(self._STAMP, ()), stamp):
            self.personalize(client, {})
        arrays = {}
        for name, array in client.memory.items():
            if name.startswith(self._HEAD):
                arrays[name.removeprefix(self._HEAD)] = array
        head = self._head()
        head.load(arrays, client.task.num_classes)
        return head

    def head_params(self, head: str) -> dict[str, Any]:
        """Return ``head_params`` for the method's own head, and the defaults of all others."""
        return dict(self.params.head_params) if head == self.params.head else {}

    def _head(self) -> Head:
        return heads.create(self.params.head, self.head_params(self.params.head))
