"""What methods share that answer with a fine-tuned copy of the shared model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from ..task import Tensors
from ..training.loops import cross_entropy, local_optimizer, train_epochs
from ..training.tuning import has_copy, make_copy, on_features, wearing_copy
from .base import Client
from .base import Method as Base

if TYPE_CHECKING:
    import torch


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
