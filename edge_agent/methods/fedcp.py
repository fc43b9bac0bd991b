"""FedCP: for each sample a gate divides the features between a personal head and the shared one.

Source: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: Separating Feature Information for Personalized Federated
Learning via Conditional Policy", KDD 2023, Algorithm 1; official code where the paper is silent.
Travels: encoder, gate and head, both ways, batch norm statistics included; up goes half the received head and half the
personal one.
Stays: the personal head by itself.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: at the test the gate is without noise, ``test_noise`` turns it on as in the official code. For
the alignment the received encoder runs in train mode, as the trained one does: two kinds of batch norm are no
difference of knowledge. The personal head starts as the shared one does.
"""

from __future__ import annotations

import copy

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.task import Task, Tensors
from ..training.loops import Loss, TrainingOptions, evaluate, train
from ..training.networks import gumbel
from ..training.parts import Parts, encoder_and_head, to_arrays
from . import Client, Method, MethodParams, Range, grades, searched

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""The bandwidths of the kernels in the alignment, as in the official code."""


class FedCPParams(MethodParams):
    """The parameters of FedCP, with the defaults of the official run script."""

    lr: float = Field(0.005, gt=0, description="eta; official script: 0.005")
    batch_size: int = Field(10, ge=1, description="official script: 10")
    alignment_weight: float = searched(
        5.0,
        Range(0.1, 10, log=True),
        ge=0,
        description="lambda in Eq. 8; official script: 5. Bandwidths are fixed: where features lie close together "
        "it can hold the encoder fast, and much less is better",
    )
    temperature: float = Field(1.0, gt=0, description="tau of the gate's Gumbel softmax; official code: 1")
    test_noise: bool = Field(False, description="draw the gate's noise at the test, too; official code: true")


class FedCP(Method):
    """FedCP: two heads on gated features."""

    Params = FedCPParams
    shared = ("encoder", "gate", "head")
    frozen = ("head",)
    resumable = True
    source = "Zhang et al., KDD 2023"
    exactness = grades(
        mlp=("approximate", "one linear layer on all features of the shared encoder, without the gate"),
    )

    def build(self, task: Task) -> Parts:
        """Return the encoder, gate, and two linear heads of the same start."""
        model = encoder_and_head(task, gate=Gate)
        model.add_module("personal_head", copy.deepcopy(model.head))
        return model

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the loss of Eq. 8: cross entropy of both heads, and alignment with the received encoder's features."""
        model = client.model
        params = self.params
        before = copy.deepcopy(model.encoder).train().requires_grad_(requires_grad=False)
        direction = context(model)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            logits = gated_logits(model, features, direction, params.temperature, client.generator)
            value = F.cross_entropy(logits, labels)
            if params.alignment_weight:
                value = value + params.alignment_weight * discrepancy(features, before(inputs))
            return value

        return loss

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of encoder, gate and personal head; returns the mean of both heads as the head."""
        weights = {"alignment_weight (lambda)": self.params.alignment_weight}
        train(
            client,
            self.loss(client, received),
            self.params,
            options=TrainingOptions(frozen=self.frozen, suspects=weights),
        )
        sent = self.sent(client)
        heads = list(client.model.head.state_dict())
        personal = to_arrays(client.model, [f"personal_head.{name}" for name in heads])
        for name in heads:
            sent[f"head.{name}"] = (personal[f"personal_head.{name}"] + sent[f"head.{name}"]) / 2
        return sent

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of both heads together."""
        model = client.model
        params = self.params
        noise = torch.Generator(device=client.device).manual_seed(client.round) if params.test_noise else None
        direction = context(model)

        def both(piece: torch.Tensor) -> torch.Tensor:
            logits = gated_logits(model, model.features(piece), direction, params.temperature, noise)
            return torch.softmax(logits, dim=1)

        return evaluate(both, model, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return features, and the personal head's share of each of them."""
        model = client.model
        views = super().views(client, inputs)
        direction = context(model)
        gate = model.part("gate")
        mask = evaluate(lambda z: gate(z * direction, self.params.temperature, None)[0], model, views["encoder"])
        return {**views, "mask": mask}


class Gate(nn.Module):
    """The conditional policy network: for each feature the shares of both heads, which sum to 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())

    def forward(
        self, inputs: torch.Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shares (n, d) of the personal and the shared head; with a ``generator`` under Gumbel noise."""
        logits = self.layers(inputs).view(len(inputs), 2, -1)
        if generator is not None:
            uniform = torch.rand(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)
            logits = logits + gumbel(uniform)
        personal, shared = torch.softmax(logits / temperature, dim=1).unbind(dim=1)
        return personal, shared


def context(model: Parts) -> torch.Tensor:
    """Return v (d,): the sum of the personal head's weights over classes, of length 1; what the client looks for."""
    summed = model.part("personal_head").get_parameter("weight").detach().sum(dim=0)
    return F.normalize(summed, dim=0)


def gated_logits(
    model: Parts,
    features: torch.Tensor,
    direction: torch.Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return logits (n, K): of the personal head on its share of each feature, plus of the shared head on the rest."""
    personal, shared = model.part("gate")(features * direction, temperature, generator)
    logits: torch.Tensor = model.part("personal_head")(features * personal) + model.head(features * shared)
    return logits


def discrepancy(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the squared maximum mean discrepancy of two sets of vectors (n, d), summed over Gaussian kernels."""
    rows = torch.cat([first, other])
    squares = rows.square().sum(dim=1)
    distances = squares[:, None] + squares[None, :] - 2 * rows @ rows.T
    kernel = torch.stack([torch.exp(-0.5 * distances / width) for width in BANDWIDTHS]).sum(dim=0)
    n = len(first)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
