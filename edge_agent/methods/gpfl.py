"""GPFL: features are conditioned once on what is common to all clients and once on a client's own mix of classes.

Source: Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and Personalized Feature
Information for Personalized Federated Learning", ICCV 2023 (arXiv 2308.10279), and the official code.
Travels: the encoder, batch norm statistics included, the conditional valve (CoV) and one embedding (d,) of each class
(GCE), both ways.
Stays: the head, and the two conditions that the valve gets.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: read in the official code, which takes the conditions from the embeddings that the client has
trained in its last round (zeros before the first one). ``conditions = "received"`` takes them from the embeddings of
all, which a client has that misses rounds, too. Batches are drawn at random and a last small one counts; in the code
they come in one order, and what is left of them is dropped.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.task import Task, Tensors
from ..training.loops import Loss, TrainingOptions, evaluate, local_optimizer, train
from ..training.parts import Parts, encoder_and_head
from . import Client, Method, MethodParams, Range, grades, searched

_GENERIC = "condition.generic"
_PERSONAL = "condition.personal"
_EMBEDDINGS = "categories.weight"


class GPFLParams(MethodParams):
    """The parameters of GPFL, with the defaults of the official code and its run script for a CNN."""

    lr: float = Field(0.005, gt=0, description="eta; official code: 0.005")
    momentum: float = Field(0.0, ge=0, lt=1, description="official code: none")
    batch_size: int = Field(10, ge=1, description="official code: 10")
    magnitude_weight: float = searched(
        0.01,
        Range(0.0001, 0.1, log=True),
        ge=0,
        description="lambda of the distance to the class's embedding; official script: 0.01",
    )
    valve_decay: float = Field(0.1, ge=0, description="mu, weight decay of valve and embeddings; official script: 0.1")
    conditions: Literal["own", "received"] = Field(
        "own",
        description="embeddings that conditions are taken from: those of the client's last training (official "
        "code), or the received ones",
    )


class Branch(nn.Sequential):
    """One half of the valve: a condition (d,) to a scale or a shift (d,)."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))


class Valve(nn.Module):
    """The conditional valve: features, scaled and shifted as a condition says."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = Branch(size)
        self.shift = Branch(size)

    def forward(self, features: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Return features (n, d) under a condition (d,): ReLU((scale + 1) * features + shift)."""
        return F.relu((self.scale(condition) + 1.0) * features + self.shift(condition))


class GPFL(Method):
    """A personal head on features of the client's own condition; shared embeddings of classes on generic ones."""

    Params = GPFLParams
    shared = ("encoder", "valve", "categories")
    resumable = True
    source = "Zhang et al., ICCV 2023"
    exactness = grades(
        mlp=("approximate", "one linear layer on the features of the encoder, without the valve before it")
    )

    def build(self, task: Task) -> Parts:
        """Return encoder, personal head, valve, and an embedding of each class."""
        return encoder_and_head(task, valve=Valve, categories=lambda width: nn.Embedding(task.num_classes, width))

    # --- client ----------------------------------------------------------------------------------------------------

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of `loss`; then the conditions are those of the embeddings as they are now."""
        params = self.params
        model = client.model
        own_decay = [*model.part("valve").parameters(), *model.part("categories").parameters()]
        optimizer = local_optimizer([*model.encoder.parameters(), *model.head.parameters()], params)
        optimizer.add_param_group({"params": own_decay, "weight_decay": params.valve_decay})
        options = TrainingOptions(suspects={"magnitude_weight (lambda)": params.magnitude_weight})
        train(client, self.loss(client, received), params, optimizer=optimizer, options=options)
        if params.conditions == "own":
            generic, personal = conditions_of(_embeddings(model), class_shares(client))
            client.memory.update({_GENERIC: generic.cpu().numpy(), _PERSONAL: personal.cpu().numpy()})
        return self.sent(client)

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the sum of three losses of a batch.

        Cross entropy of the head on personal features; on generic ones cross entropy of the cosines to the embeddings;
        and lambda times the distance of all generic features of the batch to the received embeddings of their classes.
        """
        model = client.model
        params = self.params
        valve = model.part("valve")
        generic, personal = self._conditions(client)
        frozen = torch.from_numpy(np.array(received[_EMBEDDINGS])).to(client.device)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            value = F.cross_entropy(model.head(valve(features, personal)), labels)
            common = valve(features, generic)
            value = value + F.cross_entropy(cosines(common, model.part("categories").get_parameter("weight")), labels)
            distance = torch.linalg.vector_norm(common - frozen[labels])
            total: torch.Tensor = value + params.magnitude_weight * distance
            return total

        return loss

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the head on personal features."""
        model = client.model
        valve = model.part("valve")
        _, personal = self._conditions(client)
        return evaluate(
            lambda piece: torch.softmax(model.head(valve(model.features(piece), personal)), dim=1), model, inputs
        )

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return class probabilities by the cosines of generic features to the embeddings, from shared parts alone."""
        model = client.model
        valve = model.part("valve")
        embeddings = _embeddings(model)
        generic = embeddings.mean(dim=0)
        return evaluate(
            lambda piece: torch.softmax(cosines(valve(model.features(piece), generic), embeddings), dim=1),
            model,
            inputs,
        )

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the encoder's features, and what the valve makes of them under both conditions."""
        model = client.model
        valve = model.part("valve")
        generic, personal = self._conditions(client)
        return {
            **super().views(client, inputs),
            "generic": evaluate(lambda piece: valve(model.features(piece), generic), model, inputs),
            "personal": evaluate(lambda piece: valve(model.features(piece), personal), model, inputs),
        }

    def _conditions(self, client: Client) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the generic and the personal condition (d,) that the client has now."""
        embeddings = _embeddings(client.model)
        if self.params.conditions == "received":
            return conditions_of(embeddings, class_shares(client))
        if _GENERIC not in client.memory:
            zeros = torch.zeros_like(embeddings[0])
            return zeros, zeros
        generic, personal = (torch.from_numpy(client.memory[name].copy()) for name in (_GENERIC, _PERSONAL))
        return generic.to(client.device), personal.to(client.device)


def cosines(features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the cosine (n, K) of each row of features (n, d) and each embedding (K, d)."""
    return F.linear(F.normalize(features), F.normalize(embeddings))


def conditions_of(embeddings: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean (d,) of the embeddings (K, d), and their mean weighted by the shares (K,) of the classes."""
    return embeddings.mean(dim=0), shares @ embeddings


def class_shares(client: Client) -> torch.Tensor:
    """Return the share (K,) of each class in the client's training samples; zeros without samples."""
    counts = torch.bincount(client.train_labels, minlength=client.task.num_classes)
    return counts.to(torch.float32) / max(1, client.samples)


def _embeddings(model: Parts) -> torch.Tensor:
    """Return the embeddings (K, d) of the classes as they are now, without a gradient."""
    return model.part("categories").get_parameter("weight").detach().clone()
