"""FedAS: the received encoder first learns what the client knew, and clients count by how much they have learned.

Source: Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024, and the authors'
code.
Travels: the encoder, both ways, batch norm statistics included; up the trace of the Fisher information.
Stays: the head, and the class means of the client's features by its own encoder after its last training.
Server: mean of the updates, weighted by the traces: an encoder that its client has trained too little has a small one.
Differs from the paper: the client keeps the class means instead of its whole encoder, from which the code computes them
when the next round begins; on the same data they are the same, but for eval mode. Batch norm statistics travel. Clients
that take no part in a round compute no trace.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from ..core.task import Task, Tensors
from ..core.weighted_sum import WeightedSum
from ..heads.fedpac import class_means
from ..training.loops import Loss, TrainingOptions, cross_entropy, features_of, train
from ..training.parts import Parts
from . import Client, LocalWork, MethodParams, Range, Stage, Update, grades, searched
from .families import require_finite
from .fedper import FedPer

_TRACE = "extra.fisher"
_MEANS = "class_means"
_COUNTS = "class_counts"

LARGEST_TRACE = 1e12
"""The largest honest trace: those of trained networks are below some thousands."""


class FedASParams(MethodParams):
    """The parameters of FedAS, with the defaults of the authors' code."""

    lr: float = Field(0.005, gt=0, description="eta; the authors' script: 0.005")
    batch_size: int = Field(16, ge=1, description="the authors' code: 16 for the alignment")
    alignment_epochs: int = Field(1, ge=0, description="passes in which the received encoder learns the class means")
    alignment_lr: float = searched(
        0.01, Range(0.001, 0.1, log=True), gt=0, description="step size of these passes; the authors' code: 0.01"
    )
    weights: Literal["fisher", "samples"] = Field(
        "fisher", description="clients count by the trace of their Fisher information (paper), or by their samples"
    )


class FedAS(FedPer):
    """FedPer with an encoder that is aligned first, and a mean by Fisher information."""

    Params = FedASParams
    resumable = True
    bounded_extras = MappingProxyType({_TRACE: "traces"})
    source = "Yang, Huang, Ye, CVPR 2024"
    exactness = grades(mlp=("same form", "one linear layer from random weights; FedAS trains it with the encoder"))

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return the trace (1,)."""
        return {_TRACE: np.zeros(1)}

    def to_noise(self, extras: Tensors) -> Tensors:
        """Return the logarithm of 1 plus the trace: traces differ by orders of magnitude."""
        return {_TRACE: np.log1p(extras[_TRACE].astype(np.float64))}

    def from_noise(self, noisy: Tensors) -> Tensors:
        """Return a trace that is no negative number."""
        return {_TRACE: np.expm1(np.clip(noisy[_TRACE], 0.0, np.log(LARGEST_TRACE)))}

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to a trace that no network has."""
        trace = float(tensors[_TRACE][0])
        if 0.0 <= trace <= LARGEST_TRACE:
            return ""
        return f"the trace of the Fisher information is {trace:g}, expected 0 to {LARGEST_TRACE:g}"

    # --- coordinator -----------------------------------------------------------------------------------------------

    def fold(self, total: WeightedSum, update: Update) -> None:
        """Add the encoder, weighted by its trace or by samples."""
        tensors = {name: array for name, array in update.tensors.items() if name != _TRACE}
        weight = update.weight
        if self.params.weights == "fisher":
            weight = float(update.tensors[_TRACE][0])
        total.add(weight, tensors)

    # --- client ----------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return the passes of the alignment, from the second round on, and those of training."""
        params = self.params
        aligning = Stage("encoder to class means", params.alignment_epochs, lr=params.alignment_lr)
        return LocalWork((aligning, Stage("all parts", params.local_epochs)))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Align the received encoder, train it with the head, and measure what was learned."""
        params = self.params
        counts = client.memory.get(_COUNTS)
        if counts is not None and counts.any():
            options = TrainingOptions(epochs=params.alignment_epochs, frozen=("head",), log="loss.alignment")
            loss = aligned_loss(client.model, client.memory[_MEANS], counts, client.device)
            train(client, loss, params, options=options, lr=params.alignment_lr)
        train(client, cross_entropy(client.model), params)
        features = features_of(client.model, client.train_inputs).cpu().numpy()
        require_finite(client, "features", features)
        means, counts = class_means(features, client.train_labels.cpu().numpy(), client.task.num_classes)
        client.memory.update({_MEANS: means.astype(np.float32), _COUNTS: counts})
        return {**self.sent(client), _TRACE: np.array([fisher_trace(client, params.batch_size)])}


def aligned_loss(model: Parts, means: np.ndarray, counts: np.ndarray, device: torch.device) -> Loss:
    """Return the sum, over the classes of a batch, of the mean squared distance of their features to the class mean.

    Args:
        model: The model whose encoder is trained.
        means: The class means (K, d).
        counts: The samples of each class (K,); classes with 0 have no mean.
        device: The device of the model.
    """
    targets = torch.from_numpy(means.astype(np.float32)).to(device)
    has_mean = torch.from_numpy(counts > 0).to(device)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = model.features(inputs)
        terms = [
            F.mse_loss(features[labels == label], targets[label].expand(int((labels == label).sum()), -1))
            for label in torch.unique(labels)
            if has_mean[label]
        ]
        return torch.stack(terms).sum() if terms else 0.0 * features.sum()

    return loss


def fisher_trace(client: Client, batch_size: int) -> float:
    """Return the sum, over batches, of the squared length of the gradient of the mean negative log likelihood.

    This is the authors' estimate of the trace of the Fisher information, of all weights, in eval mode. The batches are
    in the order of the samples, so that equal models have equal traces.
    """
    model = client.model
    was_training = model.training
    model.eval()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    total = 0.0
    for rows in np.array_split(np.arange(client.samples), max(1, -(-client.samples // batch_size))):
        picked = torch.from_numpy(rows).to(client.device)
        value = F.cross_entropy(model(client.train_inputs[picked]), client.train_labels[picked])
        for gradient in torch.autograd.grad(value, weights):
            total += float(gradient.double().square().sum())
    model.train(was_training)
    return total
