"""FedAdam: Adam at the server, with the mean change of each round in the place of a gradient.

Source: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: nothing but the batch counters of batch norm layers.
Server: m <- beta1 m + (1 - beta1) D, v <- beta2 v + (1 - beta2) D^2, w <- w + lr m / (sqrt(v) + tau), for the mean
change D; v starts at tau^2, and there is no correction of bias. Both moments never leave it.
Differs from the paper: batch norm statistics, which its networks have not, are averaged. The mean change is weighted
by sample counts, as in its experiments; Algorithm 2 prints an even mean.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.task import State, Tensors
from . import MethodParams, Range, grades, searched
from .families import ServerSteps


class FedAdamParams(MethodParams):
    """The paper's server over plain local SGD."""

    momentum: float = Field(0.0, ge=0, lt=1, description="of local SGD; the paper: none")
    server_lr: float = searched(
        0.01, Range(0.001, 10, log=True), gt=0, description="eta; the paper tunes it for each task, from 0.001 to 10"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="beta_1, share of the old mean; Sec. 5")
    beta2: float = Field(0.99, ge=0, lt=1, description="beta_2, share of the old mean square; Sec. 5")
    adaptivity: float = Field(1e-3, gt=0, description="tau: smaller adapts more; Sec. 5 finds 0.001 good for all tasks")


class FedAdam(ServerSteps):
    """FedAvg with Adam at the server."""

    Params = FedAdamParams
    source = "Reddi et al., ICLR 2021"
    exactness = grades(
        mlp=("approximate", "the paper has no personal part; one linear layer on the frozen shared encoder is ours"),
    )

    def step(self, state: State, name: str, change: np.ndarray) -> tuple[np.ndarray, Tensors]:
        """Return lr times the mean over the root of the mean square."""
        params = self.params
        mean = params.beta1 * self.moment(state, "mean", name) + (1 - params.beta1) * change
        square_before = self.moment(state, "square", name, params.adaptivity**2)
        square = params.beta2 * square_before + (1 - params.beta2) * change**2
        return params.server_lr * mean / (np.sqrt(square) + params.adaptivity), {"mean": mean, "square": square}
