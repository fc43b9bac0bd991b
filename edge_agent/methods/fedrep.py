"""FedRep: each round first the personal head on the received encoder, then the encoder under that head.

Source: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1, and the authors' code.
Travels: the encoder, both ways, batch norm statistics included.
Stays: the head; a device that misses rounds keeps the one it has.
Server: mean of the updates, weighted by sample counts as in the authors' code (the paper's devices have equally many).
Differs from the paper: the encoder is in eval mode while the head trains, so its features are computed once; with
``frozen_norm = "train"`` batch norm goes on taking statistics, as usual code does. One linear layer is personal.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ..task import Tensors
from ..training.finetune import on_features
from ..training.loops import cross_entropy, local_optimizer, train_epochs
from ..training.parts import to_arrays
from .base import Client, Exactness, MethodParams
from .fedper import Method as FedPer


class Params(MethodParams):
    """The authors' code for CIFAR-10."""

    batch_size: int = Field(10, ge=1, description="B; the authors' code: 10")
    local_epochs: int = Field(1, ge=0, description="passes of the encoder")
    head_epochs: int = Field(
        10, ge=0, description="tau, passes of the head before; the authors' code: 10, DualFed's: 4"
    )
    head_lr: float | None = Field(None, gt=0, description="step size of the head; none: lr")
    frozen_norm: Literal["eval", "train"] = Field(
        "eval", description="batch norm of the encoder while the head trains: running statistics, or the batch's"
    )


class Method(FedPer):
    """Head, then encoder."""

    Params = Params
    source = "Collins et al., FedRep, ICML 2021"
    exactness: ClassVar[Exactness] = {
        "mlp": (
            "same form",
            (
                "one linear layer on the frozen encoder; but from random weights on standardised features with step "
                "sizes of its own, where FedRep's goes on from round to round on raw ones"
            ),
        ),
    }

    def local_update(self, client: Client, received: Tensors) -> Tensors:  # noqa: ARG002 - loaded by the caller
        """``head_epochs`` of the head with the encoder frozen, then E epochs the other way round."""
        self._train_head(client)
        params, model = self.params, client.model
        optimizer = local_optimizer(model.encoder.parameters(), params)
        loss = cross_entropy(model)
        epochs, size = params.local_epochs, params.batch_size
        train_epochs(client, loss, optimizer, epochs=epochs, batch_size=size, frozen=("head",))
        return to_arrays(model, self.shared_names(model))

    def _train_head(self, client: Client) -> None:
        params, head = self.params, client.model.head
        optimizer = local_optimizer(head.parameters(), params, lr=params.head_lr)
        epochs, size = params.head_epochs, params.batch_size
        if params.frozen_norm == "eval":
            train_epochs(
                on_features(client), cross_entropy(head), optimizer, epochs=epochs, batch_size=size, log="loss.head"
            )
            return
        train_epochs(
            client,
            cross_entropy(client.model),
            optimizer,
            epochs=epochs,
            batch_size=size,
            frozen=("encoder",),
            frozen_norm="train",
            log="loss.head",
        )
