"""Ditto: a personal network that is held near the shared one while it learns from local data alone.

Source: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1.
Travels: encoder and head of the shared network, both ways, batch norm statistics included.
Stays: the personal network v.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: v takes as many steps as the shared network and on the same batches, as in the authors' code,
where Algorithm 1 has a separate number s. v starts as the shared network does.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..core.task import Tensors
from ..training.finetune import pairs, second
from ..training.loops import TrainingOptions, local_optimizer, train_by_steps
from ..training.losses import proximal_gradient
from . import Choices, Client, MethodParams, searched
from .families import TwoNetworks


class DittoParams(MethodParams):
    """The paper's defaults."""

    proximal_weight: float = searched(
        1.0, Choices((0.1, 1.0, 2.0)), ge=0, description="lambda in Eq. 1; the paper tries 0.1, 1 and 2; 0: Local"
    )


class Ditto(TwoNetworks):
    """FedAvg, and beside it local training with a pull to what was received."""

    Params = DittoParams
    source = "Li, Hu, Beirami, Smith, ICML 2021"

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Take, for each batch, one step of the shared network and one of the personal one."""
        model = client.model
        params = self.params
        personal, anchors = zip(*pairs(model), strict=True)
        pull = proximal_gradient(personal, [anchor.detach().clone() for anchor in anchors], params.proximal_weight)
        shared_optimizer = local_optimizer(anchors, params)
        own_optimizer = local_optimizer(personal, params)

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            shared_optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(F.cross_entropy(model(inputs), labels))
            shared_optimizer.step()
            own_optimizer.zero_grad(set_to_none=True)
            value = F.cross_entropy(second(model)(inputs), labels)
            torch.autograd.backward(value)
            if params.proximal_weight:
                pull()
            own_optimizer.step()
            return value

        suspects = {"lr": params.lr, "proximal_weight (lambda)": params.proximal_weight}
        train_by_steps(client, step, params, options=TrainingOptions(suspects=suspects))
        return self.sent(client)
