"""FedDBE: each client stores its own bias of the features, and the mean of the others' features stays that of all.

Source: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in Representation
Space", NeurIPS 2023 (arXiv 2311.14975), Eqs. 4-7, with FedAvg beneath; official code where the paper is silent.
Travels: encoder and head, both ways, batch norm statistics included; down the consensus, the mean feature (d,) of
all clients; up the client's mean feature.
Stays: the bias (d,) that is added to the features before the head.
Server: mean of the updates, weighted by sample counts; after the first round the consensus, by the same weights.
Differs from the paper: its consensus is of all clients, which train once before the first round. Here it is of the
first round's clients, and ``consensus = "every_round"`` renews it. The client's mean is over all its samples in eval
mode; in the code it is that of the last batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.task import State, Task, Tensors
from ..training.loops import Loss, TrainingOptions, evaluate, features_of, train
from ..training.parts import Parts, encoder_and_head
from . import Client, Method, MethodParams, Range, Update, grades, searched
from .families import LARGEST, require_finite

_MEAN = "extra.mean"
"""The name of a client's mean feature, and in the state of the consensus (d,)."""

_IS_KNOWN = "extra.is_known"
"""The name of a flag (1,) in the state: 1 once there is a consensus."""


class FedDBEParams(MethodParams):
    """The parameters of FedDBE, with the defaults of the official run script for Fashion-MNIST."""

    lr: float = Field(0.005, gt=0, description="eta; the paper: 0.005")
    batch_size: int = Field(10, ge=1, description="the paper: 10")
    mean_weight: float = searched(
        50.0, Range(0.1, 100, log=True), ge=0, description="kappa of the distance to the consensus; official script: 50"
    )
    momentum_of_mean: float = Field(
        1.0, gt=0, le=1, description="mu, the share of a batch in the running mean of features; official script: 1"
    )
    consensus: Literal["first_round", "every_round"] = Field(
        "first_round", description="when the consensus is taken: once (paper), or anew in every round"
    )


class FeatureBias(nn.Module):
    """The personal bias (d,) of features, zeros at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(size))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return features (n, d) plus the bias."""
        return features + self.value


class FedDBE(Method):
    """FedAvg on features without what is a client's own."""

    Params = FedDBEParams
    bounded_extras = MappingProxyType({_MEAN: "mean features"})
    source = "Zhang et al., NeurIPS 2023"
    exactness = grades(
        mlp=(
            "approximate",
            "one linear layer of the device's own; FedDBE adds a bias to the features of the shared one",
        )
    )

    def build(self, task: Task) -> Parts:
        """Return encoder, head and the personal bias."""
        return encoder_and_head(task, bias=FeatureBias)

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return the mean feature (d,)."""
        return {_MEAN: np.zeros(model.head.get_parameter("weight").shape[1], np.float32)}

    def to_noise(self, extras: Tensors) -> Tensors:
        """Return the mean feature."""
        return {_MEAN: extras[_MEAN].astype(np.float64)}

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to a mean feature of absurd size."""
        largest = float(np.abs(tensors[_MEAN]).max(initial=0.0))
        return f"the mean feature reaches {largest:g}, expected at most {LARGEST:g}" if largest > LARGEST else ""

    # --- coordinator -----------------------------------------------------------------------------------------------

    def start(self, tensors: Tensors) -> State:
        """Return the first state; there is no consensus yet."""
        size = tensors["head.weight"].shape[1]
        return {**tensors, _MEAN: np.zeros(size, np.float32), _IS_KNOWN: np.zeros(1, np.float32)}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean of the updates, and the consensus where there is none yet or it is renewed."""
        sums = np.zeros(state[_MEAN].shape)
        total = 0.0

        def add(update: Update, extras: Tensors) -> None:
            nonlocal total
            sums[:] += update.weight * extras["mean"]
            total += update.weight

        mean = self.mean(updates, add)
        after = {**state, **mean}
        if not state[_IS_KNOWN][0] or self.params.consensus == "every_round":
            after[_MEAN] = (sums / total).astype(np.float32)
            after[_IS_KNOWN] = np.ones(1, np.float32)
        return after

    # --- client ----------------------------------------------------------------------------------------------------

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of `loss`; returns the model and the mean of the client's features."""
        options = TrainingOptions(suspects={"mean_weight (kappa)": self.params.mean_weight})
        train(client, self.loss(client, received), self.params, options=options)
        features = features_of(client.model, client.train_inputs)
        mean = features.mean(dim=0, dtype=torch.float64).float().cpu().numpy()
        require_finite(client, "features", mean)
        return {**self.sent(client), _MEAN: mean}

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the loss of Equation 7: cross entropy on biased features, plus the distance of means to the consensus.

        The means are those of features without the bias. Without a consensus it is plain cross entropy, and the bias
        stays as it is.
        """
        model = client.model
        if not received[_IS_KNOWN][0]:
            return lambda inputs, labels: F.cross_entropy(model.head(model.features(inputs)), labels)
        consensus = torch.from_numpy(np.array(received[_MEAN])).to(client.device)
        share = self.params.momentum_of_mean
        running = torch.zeros_like(consensus)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            mean = (1.0 - share) * running + share * features.mean(dim=0)
            running.copy_(mean.detach())
            value = F.cross_entropy(model.head(model.part("bias")(features)), labels)
            distance = 0.5 * F.mse_loss(mean, consensus)
            total: torch.Tensor = value + self.params.mean_weight * distance
            return total

        return loss

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the head on biased features."""
        model = client.model
        bias = model.part("bias")
        return evaluate(lambda piece: torch.softmax(model.head(bias(model.features(piece))), dim=1), model, inputs)
