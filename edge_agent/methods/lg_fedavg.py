"""LG-FedAvg: everybody's own encoder under one shared head, the opposite of FedPer.

Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated
Learning with Local and Global Representations", arXiv 2001.01523 (2020), Algorithm 1.
Travels: the head, both ways.
Stays: the encoder, all of it; so there is nothing to export for devices without torch.
Server: mean of the heads, weighted by sample counts.
Differs from the paper: one linear layer is shared. Training starts from scratch, as in the comparisons of DualFed and
FedPAC; the authors' scripts start from a FedAvg checkpoint, for which there is ``--weights``, with the encoder that
``headwater export --state SIMULATION --out encoder.safetensors`` takes out of one of FedAvg; the head starts fresh. A
new device is not answered by an ensemble of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..task import State, Tensors
from .base import Client, Exactness
from .fedavg import Method as FedAvg

if TYPE_CHECKING:
    import torch


class Method(FedAvg):
    """FedAvg of the head alone."""

    source = "Liang et al., LG-FedAvg, arXiv 2001.01523"
    heads = ()
    exactness: ClassVar[Exactness] = {}

    @property
    def shared(self) -> tuple[str, ...]:
        """The head."""
        return ("head",)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002 - contract
        """None: the shared head means nothing without somebody's encoder."""
        return None

    def global_head(self, state: State) -> Tensors | None:  # noqa: ARG002 - part of the contract
        """None, for the same reason."""
        return None
