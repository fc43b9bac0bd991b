"""Per-FedAvg: a shared start from which one gradient step on local data leads to a good personal model.

Source: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1, in its two approximations FO and HF.
Travels: encoder and head of the start, both ways, batch norm statistics included.
Stays: the copy that a device adapts before each test.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: updates are weighted, where Algorithm 1 prints an even mean. D and D' are the halves of one
batch of twice ``batch_size`` samples, and the Hessian is that of D, where the paper draws a third batch D''; fewer
than four samples serve as D and D' alike. The copy is adapted by ``adapt_steps`` batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch.func import functional_call
from torch.nn import functional as F

from ..core.task import Tensors
from ..training.loops import TrainingOptions, cross_entropy, local_optimizer, train, train_by_steps
from ..training.optimizers import SGD
from . import Client, LocalWork, MethodParams, Range, Stage, grades, searched
from .families import Tuned

if TYPE_CHECKING:
    from ..training.parts import Parts

Weights = Sequence[torch.Tensor]
Slope = Callable[[Weights], tuple[torch.Tensor, Weights]]
"""Loss and gradient of some data at given weights."""


class PerFedAvgParams(MethodParams):
    """Step sizes of PFLlib: the paper's are for its own networks."""

    lr: float = Field(0.005, gt=0, description="beta, step size of the start; paper: 0.001; PFLlib: 0.005")
    optimizer: Literal["sgd"] = Field("sgd", description="the method is made of SGD steps")
    momentum: float = Field(0.0, ge=0, lt=1, description="of the start's steps; the paper: none")
    adapt_lr: float = searched(
        0.005,
        Range(0.001, 0.1, log=True),
        gt=0,
        description="alpha, step size of the adaptation; paper: 0.01; PFLlib: 0.005",
    )
    adapt_steps: int = Field(1, ge=1, description="batches of the adaptation before a test; the paper: 1")
    order: Literal["first", "hessian_free"] = Field(
        "first", description="FO leaves the Hessian out; HF takes it from a difference of gradients (Sec. 5)"
    )
    difference: float = Field(1e-3, gt=0, description="delta in HF: length of the way that gradients are compared over")


class PerFedAvg(Tuned):
    """FedAvg of the start of one step."""

    Params = PerFedAvgParams
    source = "Fallah, Mokhtari, Ozdaglar, NeurIPS 2020"
    exactness = grades(
        mlp=(
            "approximate",
            "one linear layer fitted on the shared encoder; the paper adapts all weights by one step",
        ),
    )

    def local_work(self) -> LocalWork:
        """Return the passes of meta steps, each with two batches, and the steps of adaptation."""
        params = self.params
        return LocalWork(
            (Stage("all parts, half of each batch for the look ahead", params.local_epochs),),
            end=(Stage("all parts", steps=params.adapt_steps, lr=params.adapt_lr),),
            batch_size=2 * params.batch_size,
            smallest_batch=4,
        )

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of meta steps."""
        model = client.model
        params = self.params
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = local_optimizer(weights, params)

        def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            first, last = halves(len(labels))
            slopes = [slope_of(model, inputs[part], labels[part]) for part in (first, last)]
            length = params.difference if params.order == "hessian_free" else 0.0
            value, gradient = meta_gradient(slopes[0], slopes[1], weights, params.adapt_lr, length)
            for weight, direction in zip(weights, gradient, strict=True):
                weight.grad = direction
            optimizer.step()
            return value

        train_by_steps(
            client,
            step,
            params,
            options=TrainingOptions(
                batch_size=2 * params.batch_size,
                smallest_batch=4,
                suspects={"lr": params.lr, "adapt_lr": params.adapt_lr},
            ),
        )
        model.zero_grad(set_to_none=True)
        return self.sent(client)

    def tune(self, client: Client) -> None:
        """Take one step, or some, of plain SGD with alpha."""
        params = self.params
        model = client.model
        optimizer = SGD(model.parameters(), lr=params.adapt_lr)
        weights = {"adapt_lr": params.adapt_lr}
        steps = params.adapt_steps
        train(
            client,
            cross_entropy(model),
            params,
            optimizer=optimizer,
            options=TrainingOptions(epochs=1, steps=steps, suspects=weights),
        )


def halves(samples: int) -> tuple[slice, slice]:
    """Return D and D' of a batch; a batch of fewer than four samples is both, because batch norm needs two."""
    if samples < 4:
        return slice(None), slice(None)
    return slice(samples // 2), slice(samples // 2, None)


def slope_of(model: Parts, inputs: torch.Tensor, labels: torch.Tensor) -> Slope:
    """Return cross entropy of one batch and its gradient as a function of the weights that learn, in their order."""
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]

    def slope(weights: Weights) -> tuple[torch.Tensor, Weights]:
        here = [weight.detach().requires_grad_() for weight in weights]
        value = F.cross_entropy(functional_call(model, dict(zip(names, here, strict=True)), (inputs,)), labels)
        return value.detach(), torch.autograd.grad(value, here)

    return slope


def meta_gradient(
    first: Slope, last: Slope, weights: Weights, adapt_lr: float, difference: float = 0.0
) -> tuple[torch.Tensor, Weights]:
    """Return the loss after one step of adaptation, and its gradient by the weights before that step.

    With g the gradient of ``last`` at w - alpha grad first(w): g itself, or with a ``difference`` above 0 the whole
    (I - alpha H) g, H g being the change of the gradient of ``first`` over a way of that length along g.
    """
    _, down = first(weights)
    value, gradient = last([weight.detach() - adapt_lr * slope for weight, slope in zip(weights, down, strict=True)])
    length = torch.stack([part.square().sum() for part in gradient]).sum().sqrt()
    if not difference or not length:
        return value, gradient
    (_, ahead), (_, behind) = (
        first([w.detach() + side * difference / length * g for w, g in zip(weights, gradient, strict=True)])
        for side in (1.0, -1.0)
    )
    scale = adapt_lr * length / (2 * difference)
    return value, [g - scale * (a - b) for g, a, b in zip(gradient, ahead, behind, strict=True)]
