"""Fed-RoD: one generic head that learns as if classes were balanced, and a personal head that learns what it misses.

Source: Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022, with
a linear personal head. No official code was released.
Travels: encoder and generic head, both ways, batch norm statistics included.
Stays: the personal head; a device that misses rounds keeps the one it has.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: the variant with a hypernetwork for personal heads is left out. The step size is PFLlib's. A
last batch of one sample joins the batch before it.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.task import Task, Tensors
from ..training.loops import Loss, evaluate
from ..training.losses import balanced_softmax
from ..training.parts import Parts, encoder_and_head
from . import Client, Method, MethodParams


class FedRoDParams(MethodParams):
    """PFLlib's step size."""

    lr: float = Field(0.005, gt=0, description="step size of all parts; PFLlib: 0.005")


class FedRoD(Method):
    """Balanced softmax for what is shared, cross entropy of both heads' sum for what is personal."""

    Params = FedRoDParams
    source = "Chen, Chao, Fed-RoD, ICLR 2022"
    heads = ("lr", "svm", "mlp", "prototype", "knn")

    def build(self, task: Task) -> Parts:
        """Return the encoder, generic head and personal head, both linear."""
        return encoder_and_head(task, personal_head=lambda width: nn.Linear(width, task.num_classes))

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the sum of both heads' logits."""
        model = client.model

        def both(piece: torch.Tensor) -> torch.Tensor:
            features = model.features(piece)
            return torch.softmax(model.head(features) + model.part("personal_head")(features), dim=1)

        return evaluate(both, model, inputs)

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the sum of both losses, whose steps equal those in sequence, because they share no weight."""
        model = client.model
        personal = client.model.part("personal_head")
        counts = torch.bincount(client.train_labels, minlength=client.task.num_classes)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            generic = model.head(features)
            both_logits = generic.detach() + personal(features.detach())
            return balanced_softmax(generic, labels, counts) + F.cross_entropy(both_logits, labels)

        return loss
