"""pFedMe: personal networks within Moreau envelopes around the shared one.

Source: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1;
official scripts for the numbers.
Travels: encoder and head of the shared network w, both ways, batch norm statistics included.
Stays: the personal network theta.
Server: w <- (1 - beta) w + beta (even mean of the updates).
Differs from the paper: a batch's minimum is sought by K steps of SGD, as in the authors' code, not to a given
accuracy. The batch norm statistics that are sent are those of theta, the only network that sees data; of them the
server takes the mean, whatever beta. The authors' optimizer also decays theta by 0.001, which ``weight_decay`` can do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from ..core.task import State, Tensors
from ..core.weighted_sum import WeightedSum
from ..training.finetune import copy_tensors, pairs, second
from ..training.loops import TrainingOptions, local_optimizer, train_by_steps
from ..training.losses import proximal_gradient
from . import Choices, Client, LocalWork, MethodParams, Range, Stage, searched
from .families import TwoNetworks, towards


class PFedMeParams(MethodParams):
    """The parameters of pFedMe, with the defaults of the official scripts."""

    lr: float = Field(0.005, gt=0, description="eta, step size of w; eta times lambda should be at most 1")
    optimizer: Literal["sgd"] = Field("sgd", description="the method is made of SGD steps")
    momentum: float = Field(0.0, ge=0, lt=1, description="of the steps of theta; the paper: none")
    batch_size: int = Field(20, ge=1, description="|D|")
    local_steps: int = Field(20, ge=0, description="R, batches in a round; 0: as many as local_epochs passes take")
    inner_steps: int = Field(5, ge=1, description="K, steps of theta for each batch")
    personal_lr: float = searched(
        0.05, Range(0.01, 0.1, log=True), gt=0, description="step size of theta; official scripts: 0.01 to 0.1"
    )
    proximal_weight: float = searched(15.0, Choices((10.0, 15.0, 30.0)), gt=0, description="lambda in Eq. 3")
    server_rate: float = Field(1.0, gt=0, description="beta in Algorithm 1; the paper tries 1 to 4")


class PFedMe(TwoNetworks):
    """theta minimises f + lambda / 2 |theta - w|^2; w follows it slowly."""

    Params = PFedMeParams
    weighting = "uniform"
    source = "Dinh, Tran, Nguyen, NeurIPS 2020"

    def next_state(self, state: State, total: WeightedSum) -> State:
        """Return beta of the way from the state to the even mean."""
        return {**state, **towards(state, total.mean(), self.params.server_rate)}

    def local_work(self) -> LocalWork:
        """Return the batches, or passes, each with several steps of the personal network."""
        params = self.params
        learns = f"both networks, {params.inner_steps} steps of the personal one each"
        stage = Stage(learns, steps=params.local_steps, lr=params.personal_lr)
        if not params.local_steps:
            stage = Stage(learns, params.local_epochs, lr=params.personal_lr)
        return LocalWork((stage,))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run R batches: K steps of theta, then one of w; returns w."""
        params = self.params
        model = client.model
        network = second(client.model)
        copy_tensors(model, network)
        personal, shared = zip(*pairs(model), strict=True)
        optimizer = local_optimizer(personal, params, lr=params.personal_lr)
        pull = proximal_gradient(personal, shared, params.proximal_weight)

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            values = []
            for _ in range(params.inner_steps):
                optimizer.zero_grad(set_to_none=True)
                values.append(F.cross_entropy(network(inputs), labels))
                torch.autograd.backward(values[-1])
                pull()
                optimizer.step()
            follow(shared, personal, params.lr * params.proximal_weight)
            return values[0]

        suspects = {"personal_lr": params.personal_lr, "proximal_weight (lambda)": params.proximal_weight}
        train_by_steps(client, step, params, options=TrainingOptions(steps=params.local_steps, suspects=suspects))
        for part in ("encoder", "head"):
            copy_tensors(network.part(part), model.part(part), buffers_only=True)
        return self.sent(client)


def follow(shared: Iterable[torch.Tensor], own: Iterable[torch.Tensor], rate: float) -> None:
    """Move w in place by -rate (w - theta): eta times lambda times the gradient of the envelope."""
    with torch.no_grad():
        for w, theta in zip(shared, own, strict=True):
            w.add_(theta - w, alpha=rate)
