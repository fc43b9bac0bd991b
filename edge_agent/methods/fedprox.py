"""FedProx: FedAvg whose local training is held back by a spring to the model that was received.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: nothing but the batch counters of batch norm layers.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: devices are drawn evenly and weighted by their samples, as usual, where the paper draws by
samples and weighs evenly. Every device does all E epochs; the paper's devices may stop early. The spring acts on
weights, not on running statistics. The loss that is told is the cross entropy alone.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..task import Tensors
from ..training.loops import cross_entropy, local_optimizer, train_epochs
from ..training.losses import pulled_back
from ..training.parts import to_arrays
from .base import Client, Exactness, MethodParams
from .fedavg import Method as FedAvg


class Params(MethodParams):
    """FedAvg's, and the spring."""

    mu: float = Field(0.01, ge=0, description="mu in Eq. 2; FedBN's code 0.01, the paper tries 0.001 to 1; 0: FedAvg")


class Method(FedAvg):
    """FedAvg with mu (w - w_received) added to each gradient."""

    Params = Params
    source = "Li et al., FedProx, MLSys 2020"
    exactness: ClassVar[Exactness] = {}

    def local_update(self, client: Client, received: Tensors) -> Tensors:  # noqa: ARG002 - loaded by the caller
        """E epochs of cross entropy plus mu / 2 times the squared distance to what was received."""
        params, weights = self.params, list(client.model.parameters())
        train_epochs(
            client,
            cross_entropy(client.model),
            local_optimizer(weights, params),
            epochs=params.local_epochs,
            batch_size=params.batch_size,
            before_step=pulled_back(weights, params.mu) if params.mu else None,
            weights={"mu": params.mu},
        )
        return to_arrays(client.model, self.shared_names(client.model))
