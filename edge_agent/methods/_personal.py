"""What methods share that keep a whole personal network beside the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..task import Task
from ..training.loops import features_of, predict_probabilities
from ..training.second import PERSONAL, second, two_networks
from .base import Client, Exactness
from .base import Method as Base

if TYPE_CHECKING:
    import torch

    from ..training.parts import Parts


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
