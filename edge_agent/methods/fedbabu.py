"""FedBABU: only the body is trained together, under a random head that nobody touches; then each device fine-tunes.

Source: Oh, Kim, Yun, "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022,
Algorithm 1, and options of the authors' code.
Travels: the encoder, both ways, batch norm statistics included; with it the frozen head, so that all devices hold the
same bits.
Stays: the tuned copy.
Server: mean of the updates, weighted by sample counts; equal heads leave the head as it is.
Differs from the paper: the head could stay away from uploads, it is K (d + 1) numbers. A last batch of one sample joins
the batch before it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ..task import Tensors
from ..training.loops import cross_entropy, local_optimizer, train_epochs
from ..training.parts import to_arrays
from .base import Client, Exactness, MethodParams, plain
from .families import Tuned


class Params(MethodParams):
    """The authors' code."""

    lr: float = Field(0.1, gt=0, description="step size; the authors' scripts: 0.1")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD; the authors' scripts: 0.9")
    tune_epochs: int = Field(5, ge=0, description="passes of fine-tuning; the authors' code: 5, PFLlib: 10")
    tune_lr: float | None = Field(
        0.01, gt=0, description="step size of fine-tuning, ours: at 0.1 a few hundred samples undo the model; none: lr"
    )
    tune: Literal["all", "head"] = Field("all", description="what is fine-tuned: the whole model, or the head alone")


class Method(Tuned):
    """FedAvg of the encoder under a frozen head; the tuned copy answers."""

    Params = Params
    source = "Oh, Kim, Yun, FedBABU, ICLR 2022"
    exactness: ClassVar[Exactness] = {
        "mlp": (
            "approximate",
            "fine-tuning of the head alone (tune = head), from weights of its own; the paper tunes all",
        ),
    }

    @property
    def tuned_parts(self) -> tuple[str, ...]:
        """All, or the head."""
        return ("encoder", "head") if self.params.tune == "all" else ("head",)

    @plain(frozen=("head",))
    def local_update(self, client: Client, received: Tensors) -> Tensors:  # noqa: ARG002 - loaded by the caller
        """E epochs of cross entropy on the encoder alone."""
        params, model = self.params, client.model
        train_epochs(
            client,
            cross_entropy(model),
            local_optimizer(model.encoder.parameters(), params),
            epochs=params.local_epochs,
            batch_size=params.batch_size,
            frozen=("head",),
        )
        return to_arrays(model, self.shared_names(model))

    def tune(self, client: Client) -> None:
        """``tune_epochs`` of SGD."""
        train = self._tune_all if self.params.tune == "all" else self._tune_head
        train(client, self.params.tune_epochs, self.params.tune_lr)
