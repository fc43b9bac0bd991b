"""FedAvgM: the server adds momentum to the mean change of each round.

Source: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv 1909.06335 (2019), Sec. 4.3.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: nothing but the batch counters of batch norm layers.
Server: v <- beta v + (mean change, weighted by sample counts), w <- w + lr v; v never leaves it.
Differs from the paper: batch norm statistics, which its networks have not, are averaged without momentum; ``server_lr``
is fixed at 1 there.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.task import State, Tensors
from . import Choices, MethodParams, grades, searched
from .families import ServerSteps


class FedAvgMParams(MethodParams):
    """The paper's server over plain local SGD."""

    momentum: float = Field(0.0, ge=0, lt=1, description="of local SGD; the paper: none")
    server_momentum: float = searched(
        0.9, Choices((0.0, 0.7, 0.9, 0.97, 0.99, 0.997)), ge=0, lt=1, description="beta; the paper tries 0 to 0.997"
    )
    server_lr: float = Field(1.0, gt=0, description="factor of the server's step; the paper: 1")


class FedAvgM(ServerSteps):
    """FedAvg with momentum at the server."""

    Params = FedAvgMParams
    source = "Hsu, Qi, Brown, arXiv 1909.06335"
    exactness = grades(
        mlp=("approximate", "the paper has no personal part; one linear layer on the frozen shared encoder is ours"),
    )

    def step(self, state: State, name: str, change: np.ndarray) -> tuple[np.ndarray, Tensors]:
        """Return lr times the new velocity."""
        velocity = self.params.server_momentum * self.moment(state, "velocity", name) + change
        return self.params.server_lr * velocity, {"velocity": velocity}
