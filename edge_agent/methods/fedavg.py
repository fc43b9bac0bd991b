"""FedAvg: one model for all, the mean of what every device has trained.

Source: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: nothing but the batch counters of batch norm layers.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: a last batch of one sample joins the batch before it.
"""

from __future__ import annotations

from typing import ClassVar

from ..task import Tensors
from ..training.loops import train_all_parts
from ..training.parts import to_arrays
from .base import Client, Exactness, plain
from .base import Method as Base


class Method(Base):
    """E epochs of SGD on everything, then the mean weighted by sample counts."""

    source = "McMahan et al., AISTATS 2017"
    exactness: ClassVar[Exactness] = {
        "mlp": (
            "approximate",
            "FedAvg has no personal part; one linear layer of the device's own on its frozen encoder",
        ),
    }

    @plain()
    def local_update(self, client: Client, received: Tensors) -> Tensors:  # noqa: ARG002 - loaded by the caller
        """E epochs of cross entropy on all parts; returns those that travel."""
        train_all_parts(client, self.params)
        return to_arrays(client.model, self.shared_names(client.model))
