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

from typing import Literal

from pydantic import Field

from . import Choices, MethodParams, grades, searched
from .families import FineTuned


class FedAvgFTParams(MethodParams):
    """FedAvg's, and those of fine-tuning."""

    tune_epochs: int = searched(
        10, Choices((1, 5, 10, 20)), ge=0, description="passes of fine-tuning over local data; RepPer: 10"
    )
    tune_lr: float | None = Field(None, gt=0, description="step size of fine-tuning; none: lr, as FedPAC's code")
    tune: Literal["head", "all"] = Field("head", description="what is fine-tuned; RepPer and FedPAC's code: the head")


class FedAvgFT(FineTuned):
    """FedAvg whose devices test a fine-tuned copy."""

    Params = FedAvgFTParams
    source = "FedAvg (McMahan et al., AISTATS 2017) with local fine-tuning"
    exactness = grades(
        mlp=(
            "same form",
            "as fine-tuning trains it (tune = head), but from random weights, on standardised features, with own steps",
        ),
    )
