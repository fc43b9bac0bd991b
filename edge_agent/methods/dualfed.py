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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.published import Published
from ..core.task import Task, Tensors
from ..heads.dualfed import DualFedCommonParams, DualFedHeadParams
from ..training.augment import flips_and_turns
from ..training.loops import Loss, OptimizerState, TrainingOptions, evaluate, train_parts
from ..training.losses import supervised_contrastive
from ..training.networks import ensemble
from ..training.parts import Parts, encoder_and_head
from . import Client, LocalWork, Method, MethodParams, Stage, grades, ours, refreshed_stats

Part = Literal["encoder", "projector", "personal_head", "head"]
PARTS: tuple[Part, ...] = ("encoder", "projector", "personal_head", "head")
"""f, g, h_p and h_s."""


class DualFedParams(DualFedCommonParams, MethodParams):
    """The paper's, and what it does not say as in the official code for PACS, but where a default is called ours."""

    batch_size: int = ours(32, paper=256, ge=2, description="ours; Sec. 5.3: 256. Batch norm needs two")
    schedule: Literal["stage_wise", "simultaneous"] = Field(
        "stage_wise", description="Eqs. 8 and 10 one after the other, all epochs of each; or their sum (Table 4)"
    )
    stage2_bn: Literal["train", "eval"] = Field(
        "train", description="mode of frozen batch norm in stage two: batch statistics (official code) or running ones"
    )
    optimizer_state: OptimizerState = Field(
        "reset", description="momentum: reset in each stage of each round (official code), or kept by the client"
    )
    global_classifier_at: Literal["pre", "post_personal", "post_shared"] = Field(
        "pre",
        description="features that h_s sees (Table 6): the encoder's; those behind a personal projector (DualFed-P); "
        "behind a shared one (DualFed-G)",
    )
    personal: tuple[Part, ...] = Field(
        ("projector", "personal_head"),
        description="parts that never travel (Table 7); with post_* above, that decides about the projector",
    )
    refresh_stats: bool = refreshed_stats()
    augment: bool = Field(False, description="random flips and rotations (Sec. 5.1); not for digits or sensors")

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "lr": (Published(0.01, "paper", "Sec. 5.3"),),
        "momentum": (Published(0.5, "paper", "Sec. 5.3"),),
        "batch_size": (Published(256, "paper", "Sec. 5.3"),),
        "local_epochs": (Published(1, "paper", "Sec. 5.3"),),
        "contrastive_weight": (
            Published(40.0, "authors' code", "script for PACS", data="pacs"),
            Published(2.0, "authors' code", "script for Office-Home, which is named DomainNet", data="officehome"),
            Published(None, "not published", "the script is cut off", data="domainnet"),
        ),
        "temperature": (
            Published(0.2, "authors' code", "script for PACS", data="pacs"),
            Published(0.05, "authors' code", "script for Office-Home", data="officehome"),
            Published(None, "not published", "the script is cut off", data="domainnet"),
        ),
        "ensemble": (Published("probs", "paper", "Eq. 5"), Published("logits", "authors' code")),
        "stage2_bn": (Published("train", "authors' code"),),
        "optimizer_state": (Published("reset", "authors' code"),),
        "augment": (Published(True, "paper", "Sec. 5.1; not taken by --paper: not for digits or sensors"),),
        "refresh_stats": (Published(False, "not published", "nothing says that statistics are computed again"),),
    }


class DualFed(Method):
    """Contrastive learning behind a projector, then the global classifier on the features before it."""

    Params = DualFedParams
    norm = "local_stats"
    weighting = "uniform"
    resumable = True
    source = "Zhu et al., DualFed, ACM Multimedia 2024"
    heads = ("dualfed", "lr", "svm", "mlp", "prototype", "knn")
    exactness = grades(
        dualfed=(
            "same form",
            "stage one from fresh weights on a frozen encoder, which the paper trains along; h_s as is",
        )
    )

    @property
    def shared(self) -> tuple[str, ...]:
        """All parts but the personal ones."""
        personal = set(self.params.personal)
        if self.params.global_classifier_at == "post_personal":
            personal.add("projector")
        elif self.params.global_classifier_at == "post_shared":
            personal.discard("projector")
        return tuple(part for part in PARTS if part not in personal)

    def build(self, task: Task) -> Parts:
        """Return the encoder, projector (d to d) and two linear classifiers."""
        project = partial(projector, params=self.params)
        return encoder_and_head(task, projector=project, personal_head=lambda width: nn.Linear(width, task.num_classes))

    def local_work(self) -> LocalWork:
        """Return the passes of both stages, or of their sum."""
        params = self.params
        stages: tuple[Stage, ...] = (
            Stage("encoder, projector and personal head", params.local_epochs),
            Stage("shared head", params.local_epochs),
        )
        if params.schedule == "simultaneous":
            stages = (Stage("all parts", params.local_epochs),)
        augmentation = "flips and rotations" if params.augment else "none"
        return LocalWork(stages, augmentation=augmentation, smallest_batch=params.smallest_batch)

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run stage one (all but h_s), then stage two (h_s alone); or train all parts at once."""
        if self.params.schedule == "simultaneous":
            self._train(client, PARTS, self.sum_of_losses(client))
        else:
            self._train(client, ("encoder", "projector", "personal_head"), self.personal_loss(client))
            self._train(client, ("head",), self.global_loss(client), log="loss.global")
        return self.sent(client)

    def _train(self, client: Client, trained: Sequence[Part], loss: Loss, log: str = "loss") -> None:
        """Train some parts while the others are frozen; moments are kept under the name of the first one."""
        params = self.params
        options = TrainingOptions(
            smallest_batch=params.smallest_batch,
            frozen=[part for part in PARTS if part not in trained],
            frozen_norm=params.stage2_bn,
            log=log,
            suspects={"contrastive_weight (lambda)": params.contrastive_weight},
        )
        train_parts(client, loss, params, trained, trained[0], options)

    def personal_loss(self, client: Client) -> Loss:
        """Return the loss of Eq. 8 behind the projector: cross entropy of h_p and lambda times the contrastive loss."""
        return lambda inputs, labels: self._eq8(client.model, self._features(client, inputs)[1], labels)

    def global_loss(self, client: Client) -> Loss:
        """Return the loss of Eq. 9: cross entropy of h_s on features that it cannot change."""

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():  # the whole network runs: what moves its statistics in the official code does so here
                features = self._features(client, inputs)
            return F.cross_entropy(self._global_logits(client.model, *features), labels)

        return loss

    def sum_of_losses(self, client: Client) -> Loss:
        """Return the loss of Eqs. 8 and 9 of the same features."""

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            before, projected = self._features(client, inputs)
            shared = F.cross_entropy(self._global_logits(client.model, before, projected), labels)
            return self._eq8(client.model, projected, labels) + shared

        return loss

    def _eq8(self, model: Parts, projected: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(model.part("personal_head")(projected), labels)
        if self.params.contrastive_weight:
            contrast = supervised_contrastive(projected, labels, self.params.temperature, "out")
            value = value + self.params.contrastive_weight * contrast
        return value

    def _features(self, client: Client, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.params.augment:
            inputs = flips_and_turns(client.task)(inputs, client.generator)
        return features(client.model, inputs)

    def _global_logits(self, model: Parts, before: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.head(before if self.params.global_classifier_at == "pre" else projected)
        return logits

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of both classifiers together, Eq. 5 (halved, so that rows sum to 1)."""
        model = client.model

        def both(piece: torch.Tensor) -> torch.Tensor:
            before, projected = features(model, piece)
            logits = self._global_logits(model, before, projected)
            return ensemble(model.part("personal_head")(projected), logits, self.params.ensemble)

        return evaluate(both, model, inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return class probabilities of h_s; None where h_s, or what lies below it, is personal."""
        below = {"encoder", "head"} | (set() if self.params.global_classifier_at == "pre" else {"projector"})
        if not below <= set(self.shared):
            return None
        model = client.model
        return evaluate(lambda x: self._global_logits(model, *features(model, x)).softmax(dim=1), model, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return features before and behind the projector."""
        views = super().views(client, inputs)
        return {**views, "projector": evaluate(client.model.part("projector"), client.model, views["encoder"])}

    def head_params(self, head: str) -> dict[str, Any]:
        """Return what this method has in common with its own device head; not the batch size.

        Small batches help while the encoder is trained; on frozen features they only take longer.
        """
        common = DualFedHeadParams.model_fields.keys() - {"batch_size"}
        return self.params.model_dump(include=common) if head == "dualfed" else {}

    def global_head(self, state: Tensors) -> Tensors | None:
        """Return h_s where it sits on the encoder's features, else None."""
        return super().global_head(state) if self.params.global_classifier_at == "pre" else None


def projector(size: int, params: DualFedCommonParams) -> nn.Sequential:
    """Return g (``size`` to ``size``): linear, ReLU, batch norm for each hidden layer, then linear, batch norm."""
    layers: list[nn.Module] = []
    inputs = size
    for width in [params.projector_width] * (params.projector_depth - 1):
        layers += [nn.Linear(inputs, width), nn.ReLU(), *([nn.BatchNorm1d(width)] if params.projector_norm else [])]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, size), *([nn.BatchNorm1d(size)] if params.projector_norm else []))


def features(model: Parts, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features (n, d) before and behind the projector: z and u."""
    before = model.features(inputs)
    return before, model.part("projector")(before)
