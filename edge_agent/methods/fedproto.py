"""FedProto: clients exchange the means of their classes' features, and nothing else.

Source: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, Algorithm 1, and the authors' code.
Travels: prototypes (K, d) and counts (K), both ways; no weights.
Stays: the whole model; so there is nothing to export for devices without torch.
Server: for each class the uniform mean over the clients that have sent one, as in the authors' code and PFLlib; the
paper weighs by samples.
Differs from the paper: prototypes of fewer than ``min_class_count`` samples are withheld (one sample's mean is that
sample). A class without prototypes in a round keeps the last one. Counts come back as the largest of one client.
Models start equal, not each at random. Before there is any prototype the client's own head answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.published import Published
from ..core.task import State, Task, Tensors
from ..heads.fedpac import class_means
from ..training.loops import Loss, TrainingOptions, evaluate, features_of, optimizer_of, train
from ..training.parts import Parts, encoder_and_head
from . import Choices, Client, Method, MethodParams, Update, searched
from .families import objection_to, require_finite
from .values import ClassStatistics

_MEANS = "prototypes.means"
_COUNTS = "prototypes.counts"


class FedProtoParams(MethodParams):
    """The authors' code."""

    batch_size: int = Field(32, ge=1, description="B; the authors' code: 4 to 32")
    alignment_weight: float = searched(
        1.0, Choices((0.1, 1.0, 10.0)), ge=0, description="lambda of the distance to prototypes; MNIST 1, CIFAR-10 0.1"
    )
    prototypes: Literal["last_epoch", "after"] = Field(
        "last_epoch",
        description="means of features as they come by in the last epoch (authors' code), or in eval mode after it",
    )
    prototype_weighting: Literal["uniform", "samples"] = Field(
        "uniform", description="clients in a prototype count alike (authors' code), or by their samples (paper)"
    )
    inference: Literal["prototypes", "head"] = Field(
        "prototypes", description="nearest prototype answers (paper), or the client's own head (code reports it, too)"
    )
    min_class_count: int = Field(2, ge=1, description="prototypes of fewer samples are withheld; the paper: 1")

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "lr": (Published(0.01, "authors' code"),),
        "momentum": (Published(0.5, "authors' code"),),
        "local_epochs": (Published(1, "authors' code"),),
        "alignment_weight": (
            Published(1.0, "authors' code", data="mnist"),
            Published(0.1, "authors' code", data="cifar-10"),
        ),
        "prototype_weighting": (Published("uniform", "authors' code"), Published("samples", "paper")),
        "inference": (Published("prototypes", "paper"),),
        "min_class_count": (Published(1, "paper", "all samples; not taken by --paper, as it shows single samples"),),
    }


class Prototypes(nn.Module):
    """A mean (d,) for each of K classes, and of how many samples; count 0: no client has the class."""

    means: torch.Tensor
    counts: torch.Tensor

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, size))
        self.register_buffer("counts", torch.zeros(classes, dtype=torch.int64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return minus the squared distances (n, K) of features (n, d) to the prototypes.

        -inf for classes without one.
        """
        return (-torch.cdist(features, self.means).square()).masked_fill(self.counts == 0, -math.inf)


class FedProto(Method):
    """Features drawn to common prototypes, each client with its own model."""

    Params = FedProtoParams
    shared = ("prototypes",)
    source = "Tan et al., FedProto, AAAI 2022"
    class_statistics = ClassStatistics(means=(_MEANS,), counts=_COUNTS)
    heads = ()

    def build(self, task: Task) -> Parts:
        """Return the encoder, head, and room for the prototypes."""
        return encoder_and_head(task, prototypes=lambda width: Prototypes(task.num_classes, width))

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to negative counts, absurd sizes, and prototypes of classes whose count is 0."""
        return objection_to(tensors[_COUNTS], {_MEANS: tensors[_MEANS]})

    # --- coordinator -----------------------------------------------------------------------------------------------

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean of each class over the clients that have sent one."""
        sums = np.zeros(state[_MEANS].shape)
        total = np.zeros(len(state[_COUNTS]))
        most = np.zeros_like(state[_COUNTS])
        for update in updates:
            counts = update.tensors[_COUNTS]
            # By samples a client counts for no more than those that its update was trained on.
            by_samples = counts * min(1.0, update.weight / max(float(counts.sum()), 1.0))
            share = by_samples if self.params.prototype_weighting == "samples" else counts > 0
            sums += share[:, None] * update.tensors[_MEANS]
            total += share
            most = np.maximum(most, counts)
        is_known = total > 0
        means = (sums / np.where(is_known, total, 1.0)[:, None]).astype(np.float32)
        return {
            _MEANS: np.where(is_known[:, None], means, state[_MEANS]),
            _COUNTS: np.where(is_known, most, state[_COUNTS]),
        }

    # --- client ----------------------------------------------------------------------------------------------------

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of cross entropy and of the distance to prototypes; returns the client's own prototypes."""
        params = self.params
        batches = list[tuple[torch.Tensor, torch.Tensor]]()
        optimizer = optimizer_of(client.model, ("encoder", "head"), params)
        loss = self.aligned_loss(client.model, batches)
        weights = {"alignment_weight (lambda)": params.alignment_weight}
        for epochs in (max(params.local_epochs - 1, 0), min(params.local_epochs, 1)):
            batches.clear()
            train(client, loss, params, optimizer=optimizer, options=TrainingOptions(epochs=epochs, suspects=weights))
        features, labels = (
            (features_of(client.model, client.train_inputs), client.train_labels)
            if params.prototypes == "after" or not batches
            else (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        )
        classes = client.task.num_classes
        least = params.min_class_count
        means, counts = class_means(features.cpu().numpy(), labels.cpu().numpy(), classes, least)
        require_finite(client, "prototypes", means)
        return {_MEANS: means.astype(np.float32), _COUNTS: counts}

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return the softmax of minus the squared distances to the prototypes; or the own head's answer."""
        model = client.model
        prototypes = client.model.part("prototypes")
        if self.params.inference == "head" or not prototypes.get_buffer("counts").any():
            return super().predict(client, inputs)
        return evaluate(lambda piece: torch.softmax(prototypes(model.features(piece)), dim=1), model, inputs)

    def aligned_loss(self, model: Parts, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Loss:
        """Return cross entropy plus lambda times the distance to prototypes, and extend ``batches``."""
        means, counts = (model.part("prototypes").get_buffer(name).clone() for name in ("means", "counts"))
        weight = self.params.alignment_weight if counts.any() else 0.0

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            batches.append((features.detach().float(), labels))
            value = F.cross_entropy(model.head(features), labels)
            if not weight:
                return value
            # Where there is no prototype a feature is its own target: no pull, but it counts in the mean.
            targets = torch.where(counts[labels, None] > 0, means[labels], features.detach())
            return value + weight * F.mse_loss(features, targets)

        return loss
