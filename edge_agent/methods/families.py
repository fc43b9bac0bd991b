"""What groups of methods share: server optimizers, personal second networks, fine-tuned copies, arrays per client."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..task import State, Task, Tensors
from ..training.finetune import PERSONAL, has_copy, make_copy, on_features, second, two_networks, wearing_copy
from ..training.loops import cross_entropy, features_of, local_optimizer, predict_probabilities, train_epochs
from .base import Client, Exactness, Update, weighted_mean
from .base import Method as Base
from .fedavg import Method as FedAvg

if TYPE_CHECKING:
    import torch

    from ..training.parts import Parts
if TYPE_CHECKING:
    import torch


def packed(names: Sequence[str]) -> np.ndarray:
    """Names as the rows of a uint8 array, filled up with zeros: tensors hold no text, and their names are limited."""
    text = np.array([name.encode() for name in names])
    return text.view(np.uint8).reshape(len(names), -1)


def names_in(state: State, which: str) -> tuple[str, ...]:
    """Names out of a `packed` array of the state; none where there is no such array."""
    rows = state.get(which)
    return () if rows is None else tuple(row.tobytes().rstrip(b"\0").decode() for row in rows)


def numbers_for(client: str, *salt: int) -> np.random.Generator:
    """Random numbers that are the client's own in every run: they depend on its id and ``salt`` alone."""
    return np.random.default_rng([zlib.crc32(client.encode()), *salt])


AT_HOME = "server."
"""Arrays of the state with names like this are the coordinator's own."""

_STATISTICS = (".running_mean", ".running_var")


def is_learned(name: str, array: np.ndarray) -> bool:
    """Whether an array of a state is a weight that gradients move.

    Not so extras, counters, and batch norm's running statistics: a step beyond their mean can make a variance negative.
    """
    return array.dtype.kind == "f" and not name.startswith(("extra.", AT_HOME)) and not name.endswith(_STATISTICS)


def changes(state: State, mean: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Of each learned array its name and ``mean`` minus ``state``, float64."""
    for name, array in mean.items():
        if is_learned(name, array):
            yield name, array.astype(np.float64) - state[name]


def towards(state: State, mean: Tensors, rate: float) -> Tensors:
    """Arrays ``state + rate * (mean - state)``; those that are not learned are the mean. ``rate`` 1 gives the mean."""
    if rate == 1.0:
        return mean
    moved = {name: (state[name] + rate * change).astype(mean[name].dtype) for name, change in changes(state, mean)}
    return {**mean, **moved}


class ServerSteps(FedAvg):
    """FedAvg whose server makes a step of its own from the mean change of a round."""

    def broadcast(self, state: State) -> Tensors:
        """Encoder and head."""
        return {name: array for name, array in state.items() if not name.startswith(AT_HOME)}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """The state after one step; running statistics of batch norm are the mean."""
        mean = weighted_mean(self._weighted(updates))
        found = {**state, **mean}
        for name, change in changes(state, mean):
            step, moments = self.step(state, name, change)
            found[name] = (state[name] + step).astype(mean[name].dtype)
            found |= {f"{AT_HOME}{key}.{name}": array.astype(np.float32) for key, array in moments.items()}
        return found

    @abstractmethod
    def step(self, state: State, name: str, change: np.ndarray) -> tuple[np.ndarray, Tensors]:
        """What is added to the array ``name``, and the moments to keep, by kind; ``change`` is mean minus state."""

    @staticmethod
    def moment(state: State, kind: str, name: str, start: float = 0.0) -> np.ndarray | float:
        """The kept moment of an array, or ``start`` in the first round."""
        return state.get(f"{AT_HOME}{kind}.{name}", start)


class TwoNetworks(Base):
    """The personal network answers; the shared one is what travels."""

    exactness: ClassVar[Exactness] = {
        "mlp": ("approximate", "one linear layer on the shared encoder; the paper's personal network is whole"),
    }

    def build(self, task: Task) -> Parts:
        """Two networks of the same start."""
        return two_networks(task)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities of the personal network."""
        return predict_probabilities(second(client.model), inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Class probabilities of the shared network."""
        return predict_probabilities(client.model, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Features of both encoders."""
        return {**super().views(client, inputs), PERSONAL: features_of(second(client.model), inputs)}


class Tuned(Base):
    """A method whose clients fine-tune a copy before each test; subclasses say how, and which parts change."""

    @property
    def tuned_parts(self) -> tuple[str, ...]:
        """Parts that fine-tuning changes."""
        return ("head",)

    @abstractmethod
    def tune(self, client: Client) -> None:
        """Train ``client.model``, which is put back afterwards.

        Raises:
            TrainingFailed: the loss is not finite, or the data do not allow a step.
        """

    def personalize(self, client: Client, received: Tensors) -> None:  # noqa: ARG002 - loaded by the caller
        """Make the tuned copy and keep it in memory."""
        make_copy(client, self.tune, self.tuned_parts)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities of the tuned copy, which is made first if the shared model has changed since."""
        if not has_copy(client):
            self.personalize(client, {})
        with wearing_copy(client):
            return super().predict(client, inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities of the shared model as it was received."""
        return super().predict(client, inputs)

    def _tune_head(self, client: Client, epochs: int, lr: float | None) -> None:
        """SGD on the linear classifier alone; the encoder is frozen in eval mode. ``lr`` None: that of training."""
        above = on_features(client)
        optimizer = local_optimizer(above.model.head.parameters(), self.params, lr=lr)
        loss = cross_entropy(above.model.head)
        train_epochs(above, loss, optimizer, epochs=epochs, batch_size=self.params.batch_size)

    def _tune_all(self, client: Client, epochs: int, lr: float | None) -> None:
        """SGD on every part, batch norm in train mode."""
        optimizer = local_optimizer(client.model.parameters(), self.params, lr=lr)
        loss = cross_entropy(client.model)
        train_epochs(client, loss, optimizer, epochs=epochs, batch_size=self.params.batch_size)
