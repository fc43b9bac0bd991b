"""Linear probe: every device fits a head of its own on the encoder as it is, and nothing is exchanged.

Source: the baseline called "linear probing", or "head on a frozen encoder": what a pretrained encoder is worth to each
client alone, which training it together has to beat.
Travels: down, the encoder, which stays as it is. Up, nothing; a round only counts who took part.
Stays: the personal head, and the features that it is fitted on.
Server: nothing to combine.
Differs from the paper: nothing known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from ..core.task import State, Task, Tensors
from ..training.parts import Parts, encoder_alone
from . import Choices, Client, LocalWork, MethodParams, grades, searched
from .families import FittedHead


class LinearProbeParams(MethodParams):
    """The head; parameters of training are without effect, as nothing is trained."""

    not_searched: ClassVar[tuple[str, ...]] = ("lr",)

    head: str = searched(
        "lr",
        Choices(("lr", "svm", "mlp", "prototype", "knn")),
        description="personal head, a file name in edge_agent/heads",
    )
    head_params: dict[str, Any] = Field(default_factory=dict, description="parameters of that head")


class LinearProbe(FittedHead):
    """A personal head on an encoder that nobody trains."""

    Params = LinearProbeParams
    shared = ("encoder",)
    returned = ()
    source = "baseline without training of the encoder"
    heads = ("lr", "svm", "mlp", "prototype", "knn")
    exactness = grades(
        lr=("exact", "logistic regression on the frozen encoder, as the method fits it"),
        svm=("exact", "the method with this head"),
        mlp=("exact", "the method with this head"),
        prototype=("exact", "the method with this head"),
        knn=("exact", "the method with this head"),
    )

    def build(self, task: Task) -> Parts:
        """Return the encoder alone."""
        return encoder_alone(task)

    def local_work(self) -> LocalWork:
        """Return no training, and the fit of the head."""
        return replace(super().local_work(), rounds=())

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Return nothing: the head is fitted after the last round, by `personalize`.

        Raises:
            TrainingFailed: The client has no samples.
        """
        client.require_samples()
        return {}

    def global_head(self, state: State) -> Tensors | None:
        """Return None: there is no shared classifier."""
        return None
