"""FedBABU: only the encoder is trained together, under a fixed random head; then each device fine-tunes.

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

from typing import Literal

from pydantic import Field

from . import MethodParams, Range, grades, searched
from .families import FineTuned


class FedBABUParams(MethodParams):
    """The authors' code."""

    lr: float = Field(0.1, gt=0, description="step size; the authors' scripts: 0.1")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD; the authors' scripts: 0.9")
    tune_epochs: int = Field(5, ge=0, description="passes of fine-tuning; the authors' code: 5, PFLlib: 10")
    tune_lr: float | None = searched(
        0.01,
        Range(0.001, 0.1, log=True),
        gt=0,
        description="step size of fine-tuning, ours: at 0.1 a few hundred samples undo the model; none: lr",
    )
    tune: Literal["all", "head"] = Field("all", description="what is fine-tuned: the whole model, or the head alone")


class FedBABU(FineTuned):
    """FedAvg of the encoder under a frozen head; the tuned copy answers."""

    Params = FedBABUParams
    frozen = ("head",)
    source = "Oh, Kim, Yun, FedBABU, ICLR 2022"
    exactness = grades(
        mlp=("approximate", "fine-tuning of the head alone (tune = head), from its own weights; the paper tunes all")
    )
