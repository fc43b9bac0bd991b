"""APFL: the answer of a mixture, weight by weight, of a personal network and the shared one.

Source: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv 2003.13461 (2020), Algorithm 1 and Eq.
10 for the share.
Travels: encoder and head of the shared network, both ways, batch norm statistics included.
Stays: the personal network v, the share alpha of it in the mixture alpha v + (1 - alpha) w, and the mixture.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: updates are weighted, where Algorithm 1 prints an even mean. v starts as the shared network
does. The mixture takes the batch norm statistics of v, which are made when it runs. PFLlib's port trains v itself and
then overwrites it by the mixture, which is another method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from ..core.task import Task, Tensors
from ..training.finetune import pairs, probabilities_with, second
from ..training.loops import TrainingOptions, local_optimizer, train_by_steps
from . import Choices, Client, MethodParams, grades, searched
from .families import TwoNetworks

if TYPE_CHECKING:
    from ..training.parts import Parts


class APFLParams(MethodParams):
    """The paper's defaults."""

    optimizer: Literal["sgd"] = Field("sgd", description="alpha scales steps, which Adam would undo")
    alpha: float = searched(
        0.5,
        Choices((0.25, 0.5, 0.75)),
        ge=0,
        le=1,
        description="alpha at the start: 1 = local training; FedRep's code: 0.75",
    )
    adaptive: bool = Field(True, description="learn alpha by Eq. 10; false: it keeps its value")
    alpha_lr: float = Field(0.01, ge=0, description="step size of alpha in Eq. 10; the paper: that of the networks")


class APFL(TwoNetworks):
    """FedAvg of w, while v learns in a mixture with it."""

    Params = APFLParams
    source = "Deng, Kamani, Mahdavi, arXiv 2003.13461"
    exactness = grades(
        mlp=("approximate", "one linear layer on the shared encoder; the paper mixes two whole networks"),
    )

    def build(self, task: Task) -> Parts:
        """Return two networks of the same start, and alpha."""
        model = super().build(task)
        model.add_module("mixing", Share(self.params.alpha))
        return model

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Take, for each batch, one step of w, one of v and one of alpha, all from where the batch began."""
        model = client.model
        params = self.params
        alpha = share(model)
        optimizer = local_optimizer([weight for pair in pairs(model) for weight in pair], params)
        if params.adaptive:
            optimizer.add_param_group({"params": [alpha], "lr": params.alpha_lr, "momentum": 0.0, "weight_decay": 0.0})

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            value = mixture_loss(model, inputs, labels)
            torch.autograd.backward(value + F.cross_entropy(model(inputs), labels))
            optimizer.step()
            with torch.no_grad():
                alpha.clamp_(0.0, 1.0)
            return value

        train_by_steps(client, step, params, options=TrainingOptions(suspects={"lr": params.lr}))
        client.log["alpha"] = float(alpha.detach())
        return self.sent(client)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the mixture."""
        with torch.no_grad():
            return probabilities_with(second(client.model), mixture(client.model), inputs)


class Share(nn.Module):
    """alpha, as the part ``mixing`` of a model: one number that stays on the device with the personal network."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([alpha]))


def share(model: Parts) -> torch.Tensor:
    """Return alpha (1,), the share of the personal network."""
    alpha: torch.Tensor = model.part("mixing").get_parameter("alpha")
    return alpha


def mixture(model: Parts) -> dict[str, torch.Tensor]:
    """Return alpha v + (1 - alpha) w for each weight, by its name in the personal network; no gradient reaches w."""
    alpha = share(model)
    names = [name for name, _ in second(model).named_parameters()]
    return {name: alpha * v + (1 - alpha) * w.detach() for name, (v, w) in zip(names, pairs(model), strict=True)}


def mixture_loss(model: Parts, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the mixture; its gradients by v and alpha are those of Algorithm 1 and Eq. 10."""
    return F.cross_entropy(functional_call(second(model), mixture(model), (inputs,)), labels)
