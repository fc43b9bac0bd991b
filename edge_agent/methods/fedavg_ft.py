"""FedAvg-FT: FedAvg, and before each test every device fine-tunes a copy of the shared model on its own data.

Source: the baseline called FedAvg-FT or FedAvg+FT; as in "A Closer Look at Personalization in Federated Image
Classification" (RepPer): the classifier alone, 10 epochs. FedPAC's code fine-tunes the classifier alone, too,
with the step size of training.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: the tuned copy.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: fine-tuning the classifier runs on features that were computed once, with the encoder in eval
mode. A last batch of one sample joins the batch before it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .base import Client, Exactness, MethodParams
from .families import Tuned
from .fedavg import Method as FedAvg


class Params(MethodParams):
    """FedAvg's, and those of fine-tuning."""

    tune_epochs: int = Field(10, ge=0, description="passes of fine-tuning over local data; RepPer: 10")
    tune_lr: float | None = Field(None, gt=0, description="step size of fine-tuning; none: lr, as FedPAC's code")
    tune: Literal["head", "all"] = Field("head", description="what is fine-tuned; RepPer and FedPAC's code: the head")


class Method(Tuned, FedAvg):
    """FedAvg whose devices test a fine-tuned copy."""

    Params = Params
    source = "FedAvg (McMahan et al., AISTATS 2017) with local fine-tuning"
    exactness: ClassVar[Exactness] = {
        "mlp": (
            "same form",
            (
                "one linear layer on the frozen encoder, as fine-tuning trains it (tune = head); but from random "
                "weights on standardised features, not from the shared classifier on raw ones, and with step sizes "
                "of its own"
            ),
        ),
    }

    @property
    def tuned_parts(self) -> tuple[str, ...]:
        """The head, or all."""
        return ("encoder", "head") if self.params.tune == "all" else ("head",)

    def tune(self, client: Client) -> None:
        """``tune_epochs`` of SGD."""
        train = self._tune_all if self.params.tune == "all" else self._tune_head
        train(client, self.params.tune_epochs, self.params.tune_lr)
