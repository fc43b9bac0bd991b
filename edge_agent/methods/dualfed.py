"""DualFed: a personal projector between shared features and a personal classifier; both kinds of features answer.

Source: Zhu et al., "DualFed: Enjoying both Generalization and Personalization in Federated Learning via Hierarchical
Representations", ACM Multimedia 2024, Eqs. 3-11 and Tables 4-7; official code where the paper is silent.
Travels: encoder and global classifier, both ways, batch norm's gamma and beta included.
Stays: projector, personal classifier, running statistics of every batch norm layer.
Server: uniform mean over the clients of the round.
Differs from the paper: losses are means with a minus sign, where Eqs. 6 and 9 print sums with a plus. Weights start at
random, not from ImageNet; random flips and rotations are off unless ``augment`` asks for them. A last batch of
fewer than ``smallest_batch`` samples joins the batch before it: two samples behind batch norm are plus and minus the
same, and one such step can undo a run. In ``stage2_bn = "train"``, the default, the frozen network keeps its running
statistics moving in stage two, as the official code does and the paper does not say. Batch size, lambda and
``refresh_stats`` have defaults of ours, for small data and skewed labels; ``--paper`` takes the published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..task import Task, Tensors
from ..training.augment import Augment, flips_and_turns
from ..training.loops import Loss, evaluate, local_optimizer, train_epochs
from ..training.losses import supervised_contrastive
from ..training.networks import Ensemble, ensemble
from ..training.optimizers import OptimizerState, lasting
from ..training.parts import encoder_and_head, feature_dim, to_arrays
from .base import Client, Exactness, MethodParams, ours, refreshed_stats
from .base import Method as Base

if TYPE_CHECKING:
    from ..training.parts import Parts

Part = Literal["encoder", "projector", "personal_head", "head"]
PARTS: tuple[Part, ...] = ("encoder", "projector", "personal_head", "head")
"""f, g, h_p and h_s."""


class Params(MethodParams):
    """The paper's, and what it does not say as in the official code for PACS, but where a default is called ours."""

    batch_size: int = ours(32, paper=256, ge=2, description="ours; Sec. 5.3: 256. Batch norm needs two")
    smallest_batch: int = Field(
        8,
        ge=2,
        description="a last batch of fewer joins the one before it: behind batch norm, two differ by its sign; ours",
    )
    contrastive_weight: float = ours(
        1.0, paper=40.0, ge=0, description="lambda in Eq. 8; ours; official scripts: PACS 40, Office-Home 2"
    )
    temperature: float = Field(0.2, gt=0, description="tau in Eq. 7; official scripts: PACS 0.2, Office-Home 0.05")
    schedule: Literal["stage_wise", "simultaneous"] = Field(
        "stage_wise",
        description="Eqs. 8 and 10 one after the other, all epochs of each; or one sum of losses (Table 4)",
    )
    stage2_bn: Literal["train", "eval"] = Field(
        "train", description="mode of frozen batch norm in stage two: batch statistics (official code) or running ones"
    )
    optimizer_state: OptimizerState = Field(
        "reset", description="momentum: reset in each stage of each round (official code), or kept by the client"
    )
    ensemble: Ensemble = Field("probs", description="Eq. 5 adds probabilities; the official code adds logits")
    global_classifier_at: Literal["pre", "post_personal", "post_shared"] = Field(
        "pre",
        description="features that h_s sees (Table 6): the encoder's; those behind a personal projector (DualFed-P); "
        "behind a shared one (DualFed-G)",
    )
    personal: tuple[Part, ...] = Field(
        ("projector", "personal_head"),
        description="parts that never travel (Table 7); with post_* above, that decides about the projector",
    )
    projector_depth: int = Field(2, ge=1, le=8, description="D in Table 5: linear layers; 1 = d to d, without hidden")
    projector_width: int = Field(256, ge=1, le=8192, description="H in Table 5: units of the hidden layers")
    projector_norm: bool = Field(True, description="BN in Table 5: batch norm behind each layer of the projector")
    refresh_stats: bool = refreshed_stats()
    augment: bool = Field(False, description="random flips and rotations (Sec. 5.1); not for digits or sensors")


class Method(Base):
    """Contrastive learning behind a projector, then the global classifier on the features before it."""

    Params = Params
    norm = "local_stats"
    weighting = "uniform"
    source = "Zhu et al., DualFed, ACM Multimedia 2024"
    heads = ("dualfed", "lr", "svm", "mlp", "prototype", "knn")
    exactness: ClassVar[Exactness] = {
        "dualfed": (
            "same form",
            (
                "projector, personal classifier and loss of stage one, from fresh weights on a frozen encoder, which "
                "the paper trains along; the global classifier is the run's"
            ),
        )
    }

    @property
    def shared(self) -> tuple[str, ...]:
        """All parts but the personal ones."""
        stays = set(self.params.personal)
        if self.params.global_classifier_at == "post_personal":
            stays.add("projector")
        elif self.params.global_classifier_at == "post_shared":
            stays.discard("projector")
        return tuple(part for part in PARTS if part not in stays)

    def build(self, task: Task) -> Parts:
        """Encoder, projector (d to d) and two linear classifiers."""
        model = encoder_and_head(task)
        size = feature_dim(model.encoder)
        model.add_module("projector", projector(size, self.params))
        model.add_module("personal_head", nn.Linear(size, task.num_classes))
        return model

    def local_update(self, client: Client, received: Tensors) -> Tensors:  # noqa: ARG002 - loaded by the caller
        """Stage one (all but h_s), then stage two (h_s alone); or all parts at once."""
        if self.params.schedule == "simultaneous":
            self._train(client, PARTS, self._all_losses(client))
        else:
            self._train(client, ("encoder", "projector", "personal_head"), self._personal_loss(client))
            self._train(client, ("head",), self._global_loss(client), log="loss.global")
        return to_arrays(client.model, self.shared_names(client.model))

    def _train(self, client: Client, trained: Sequence[Part], loss: Loss, log: str = "loss") -> None:
        weights = [weight for part in trained for weight in client.model.part(part).parameters()]
        optimizer = local_optimizer(weights, self.params)
        with lasting(client, optimizer, trained[0], self.params.optimizer_state):
            train_epochs(
                client,
                loss,
                optimizer,
                epochs=self.params.local_epochs,
                batch_size=self.params.batch_size,
                smallest_batch=self.params.smallest_batch,
                frozen=[part for part in PARTS if part not in trained],
                frozen_norm=self.params.stage2_bn,
                weights={"contrastive_weight (lambda)": self.params.contrastive_weight},
                log=log,
            )

    def _personal_loss(self, client: Client) -> Loss:
        """Eq. 8: cross entropy of h_p plus lambda times the contrastive loss, both behind the projector."""
        view = self._view(client)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            _, projected = _features(client.model, view(inputs, client.generator))
            return self._behind_projector(client.model, projected, labels)

        return loss

    def _global_loss(self, client: Client) -> Loss:
        """Eq. 9: cross entropy of h_s on features that it cannot change."""
        view = self._view(client)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():  # the whole network runs: what moves its statistics in the official code does so here
                before, projected = _features(client.model, view(inputs, client.generator))
            return F.cross_entropy(self._global_logits(client.model, before, projected), labels)

        return loss

    def _all_losses(self, client: Client) -> Loss:
        view = self._view(client)

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            before, projected = _features(client.model, view(inputs, client.generator))
            shared = F.cross_entropy(self._global_logits(client.model, before, projected), labels)
            return self._behind_projector(client.model, projected, labels) + shared

        return loss

    def _behind_projector(self, model: Parts, projected: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(model.part("personal_head")(projected), labels)
        if self.params.contrastive_weight:
            contrast = supervised_contrastive(projected, labels, self.params.temperature, "out")
            value = value + self.params.contrastive_weight * contrast
        return value

    def _global_logits(self, model: Parts, before: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.head(before if self.params.global_classifier_at == "pre" else projected)
        return logits

    def _view(self, client: Client) -> Augment:
        return flips_and_turns(client.task) if self.params.augment else lambda inputs, _: inputs

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities of both classifiers together, Eq. 5 (halved, so that rows sum to 1)."""
        model = client.model

        def both(piece: torch.Tensor) -> torch.Tensor:
            before, projected = _features(model, piece)
            logits = self._global_logits(model, before, projected)
            return ensemble(model.part("personal_head")(projected), logits, self.params.ensemble)

        return evaluate(both, model, inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Class probabilities of h_s; None where h_s, or what lies below it, is personal."""
        below = {"encoder", "head"} | (set() if self.params.global_classifier_at == "pre" else {"projector"})
        if not below <= set(self.shared):
            return None
        model = client.model
        return evaluate(lambda x: torch.softmax(self._global_logits(model, *_features(model, x)), dim=1), model, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Features before and behind the projector."""
        found = super().views(client, inputs)
        return {**found, "projector": evaluate(client.model.part("projector"), client.model, found["encoder"])}

    def head_params(self, head: str) -> dict[str, Any]:
        """What this method has in common with its own device head."""
        return self.params.model_dump(include=set(_HEAD_PARAMS)) if head == "dualfed" else {}

    def global_head(self, state: Tensors) -> Tensors | None:
        """h_s where it sits on the encoder's features, else None."""
        return super().global_head(state) if self.params.global_classifier_at == "pre" else None


# Not the batch size: small batches help while the encoder is trained, on frozen features they only take longer.
_HEAD_PARAMS = (
    *(
        "lr",
        "momentum",
        "weight_decay",
        "smallest_batch",
        "contrastive_weight",
        "temperature",
        "ensemble",
    ),
    *("projector_depth", "projector_width", "projector_norm"),
)


def projector(size: int, params: Params) -> nn.Sequential:
    """g: ``size`` features in and out; linear, ReLU, batch norm for each hidden layer, then linear, batch norm."""
    layers: list[nn.Module] = []
    before = size
    for _ in range(params.projector_depth - 1):
        layers += [nn.Linear(before, params.projector_width), nn.ReLU(), *_norm(params.projector_width, params)]
        before = params.projector_width
    return nn.Sequential(*layers, nn.Linear(before, size), *_norm(size, params))


def _norm(size: int, params: Params) -> list[nn.Module]:
    return [nn.BatchNorm1d(size)] if params.projector_norm else []


def _features(model: Parts, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (n, d) before and behind the projector: z and u."""
    before = model.features(inputs)
    return before, model.part("projector")(before)
