"""FedPer: a shared encoder under personal heads, both trained together.

Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818
(2019).
Travels: the encoder, both ways, batch norm statistics included.
Stays: the head; a device that misses rounds keeps the one it has.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: one linear layer is personal (the paper also tries more layers).
"""

from __future__ import annotations

from typing import ClassVar

from .base import Exactness
from .fedavg import Method as FedAvg


class Method(FedAvg):
    """FedAvg of the encoder alone."""

    source = "Arivazhagan et al., arXiv 1912.00818"
    exactness: ClassVar[Exactness] = {
        "mlp": (
            "same form",
            (
                "one linear layer, trained on the frozen encoder from random weights; FedPer trains it with the "
                "encoder in every round"
            ),
        )
    }

    @property
    def shared(self) -> tuple[str, ...]:
        """The encoder."""
        return ("encoder",)
