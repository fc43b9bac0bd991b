"""FedRep: each round first the personal head on the received encoder, then the encoder under that head.

Source: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1, and the authors' code.
Travels: the encoder, both ways, batch norm statistics included.
Stays: the head; a device that misses rounds keeps the one it has.
Server: mean of the updates, weighted by sample counts as in the authors' code (the paper's devices have equally many).
Differs from the paper: the encoder is in eval mode while the head trains, so its features are computed once; with
``frozen_norm = "train"`` batch norm continues to take statistics, as usual code does. One linear layer is personal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from ..core.task import Tensors
from ..training.finetune import on_features
from ..training.loops import TrainingOptions, cross_entropy, train
from . import Choices, Client, LocalWork, MethodParams, Stage, grades, searched
from .fedper import FedPer


class FedRepParams(MethodParams):
    """The authors' code for CIFAR-10."""

    batch_size: int = Field(10, ge=1, description="B; the authors' code: 10")
    local_epochs: int = Field(1, ge=0, description="passes of the encoder")
    head_epochs: int = searched(
        10, Choices((1, 4, 10)), ge=0, description="tau, passes of the head before; the authors' code: 10, DualFed's: 4"
    )
    head_lr: float | None = Field(None, gt=0, description="step size of the head; none: lr")
    frozen_norm: Literal["eval", "train"] = Field(
        "eval", description="batch norm of the encoder while the head trains: running statistics, or the batch's"
    )


class FedRep(FedPer):
    """Head, then encoder."""

    Params = FedRepParams
    resumable = True
    source = "Collins et al., FedRep, ICML 2021"
    exactness = grades(
        mlp=(
            "same form",
            (
                "one linear layer on the frozen encoder; but from random weights on standardised features with step "
                "its own sizes, where FedRep's goes on from round to round on raw ones"
            ),
        ),
    )

    def local_work(self) -> LocalWork:
        """Return the passes of the head, and the encoder's."""
        params = self.params
        return LocalWork((Stage("head", params.head_epochs, lr=params.head_lr), Stage("encoder", params.local_epochs)))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Train the head for ``head_epochs`` with a frozen encoder, then the encoder for E epochs, the head frozen."""
        self.train_head(client)
        train(client, cross_entropy(client.model), self.params, options=TrainingOptions(frozen=("head",)))
        return self.sent(client)

    def train_head(self, client: Client) -> None:
        """Train the head, on features that are computed once, or behind an encoder in train mode."""
        params = self.params
        options = TrainingOptions(epochs=params.head_epochs, log="loss.head")
        if params.frozen_norm == "eval":
            on_head = on_features(client)
            train(on_head, cross_entropy(client.model.head), params, options=options, lr=params.head_lr)
            return
        # In train mode the encoder's features change with each batch: they cannot be computed once.
        options = replace(options, frozen=("encoder",), frozen_norm="train")
        train(client, cross_entropy(client.model), params, options=options, lr=params.head_lr)
