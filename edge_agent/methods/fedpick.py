"""FedPick: shared features, of which each client picks those that matter for its own task.

Source: Zhu, Liu, Tang, Niu, "Take Your Pick: Enabling Effective Personalized Federated Learning within Low-dimensional
Feature Space", arXiv 2307.13995 (2023), Eqs. 5-16 and Tables III-IV. No official code was found.
Travels: encoder without batch norm, and the global classifier, both ways.
Stays: the feature selection module (mask network, both local classifiers) and all of batch norm.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: its inline numbers are lost. Step size and momentum are those of the same authors' DualFed, the
batch size that of FedBN's code for the same data; mask width d / 2, temperature 1, gradients of the distillation into
both sides and an entropy loss of minus the entropy are our reading. Loss weights are read as (g, r, u, d). A last batch
of one sample joins the batch before it. ``selector = "fisher"`` turns the paper's motivating experiment into a mask.
Batch size and ``refresh_stats`` have defaults of ours, for small data and skewed labels; ``--paper`` takes theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from ..core.published import Published
from ..core.task import Task, Tensors
from ..heads._features import fisher_score, keep_top, mistake_of_share
from ..heads.fedpick import FedPickCommonParams, FedPickHeadParams
from ..training.loops import TrainingOptions, evaluate, features_of, train
from ..training.losses import negative_entropy, symmetric_divergence
from ..training.networks import ensemble, feature_mask, mask_noise
from ..training.parts import Parts, encoder_and_head
from . import Choices, Client, Method, MethodParams, grades, ours, refreshed_stats, searched

_log = logging.getLogger(__name__)


class FedPickParams(FedPickCommonParams, MethodParams):
    """The paper's values where they are known: Table III for Office-Caltech-10 and DomainNet, threshold 0.5."""

    batch_size: int = ours(
        16, paper=32, ge=1, description="ours; lost in the paper, FedBN's code for the same data: 32"
    )
    refresh_stats: bool = refreshed_stats()
    global_weight: float = searched(
        1.0, Choices((1.0, 5.0, 10.0)), ge=0, description="weight g in Eq. 15, of L_g; Digits-Five 10"
    )
    share_mask: bool = Field(False, description="the mask network travels ('Share PFSM' in Table IV)")
    share_local_heads: bool = Field(False, description="h_r and h_u travel: 'PFSM' may mean them, too")
    share_norm: bool = Field(False, description="batch norm travels ('Share BN' in Table IV)")

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "lr": (Published(None, "not published", "lost in the paper's text; no code"),),
        "momentum": (Published(None, "not published", "lost in the paper's text; no code"),),
        "batch_size": (Published(32, "others' code", "FedBN's, for the same data; lost in the paper's text"),),
        "local_epochs": (Published(None, "not published", "lost in the paper's text; no code"),),
        **dict.fromkeys(
            ("global_weight", "relevant_weight", "distillation_weight"),
            (
                Published(10.0, "paper", "Table III", data="digits5"),
                Published(1.0, "paper", "Table III", data="officecaltech"),
                Published(1.0, "paper", "Table III", data="domainnet"),
            ),
        ),
        "irrelevant_weight": (Published(0.001, "paper", "Table III"),),
        "temperature": (Published(None, "not published", "T in Eq. 9, lost in the paper's text"),),
        "mask_width": (Published(None, "not published", "lost in the paper's text"),),
        "refresh_stats": (Published(False, "not published", "nothing says that statistics are computed again"),),
    }

    @model_validator(mode="after")
    def _mask_can_travel(self) -> FedPickParams:
        if self.share_mask and self.selector == "fisher":
            raise ValueError("share_mask with selector 'fisher': that mask has no weights to share; choose one of them")
        return self


class FedPick(Method):
    """Global, relevant and irrelevant features trained together, in every batch."""

    Params = FedPickParams
    resumable = True
    source = "Zhu et al., Take Your Pick (FedPick), arXiv 2307.13995"
    heads = ("fedpick", "lr", "svm", "mlp", "prototype", "knn")
    exactness = grades(
        fedpick=("same form", "mask, local classifiers and losses on a frozen encoder, which the paper trains along")
    )

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        if self.params.norm is None:
            self.norm = "global" if self.params.share_norm else "local_all"

    @property
    def shared(self) -> tuple[str, ...]:
        """Encoder and global classifier; what the ablations share."""
        mask = ("mask",) if self.params.share_mask else ()
        local = ("relevant_head", "irrelevant_head") if self.params.share_local_heads else ()
        return ("encoder", "head", *mask, *local)

    def build(self, task: Task) -> Parts:
        """Return the encoder, mask and three linear classifiers h_g, h_r and h_u."""

        def classifier(width: int) -> nn.Module:
            return nn.Linear(width, task.num_classes)

        mask = partial(mask_network, params=self.params)
        return encoder_and_head(task, mask=mask, relevant_head=classifier, irrelevant_head=classifier)

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of Eq. 15 on all parts together; with selector fisher the mask is chosen before."""
        params = self.params
        model = client.model
        if params.selector == "fisher" and client.samples:
            scores = fisher_score(
                features_of(client.model, client.train_inputs).cpu().numpy(), client.train_labels.cpu().numpy()
            )
            kept = torch.from_numpy(keep_top(scores, params.keep_ratio))
            client.model.part("mask").get_buffer("kept").copy_(kept)
        selected = dict[str, torch.Tensor]()
        cut = {"temperature": params.temperature, "threshold": params.threshold}

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            scores = model.part("mask")(features)
            picked = self._mask(scores, client.generator)
            shown = picked if params.selector == "fisher" else feature_mask(scores.detach(), **cut)
            selected["mask.selected"] = shown.mean()
            whole = model.head(features)
            relevant = model.part("relevant_head")(features * picked)
            irrelevant = model.part("irrelevant_head")(features * (1 - picked))
            terms: torch.Tensor = (
                params.global_weight * F.cross_entropy(whole, labels)
                + params.relevant_weight * F.cross_entropy(relevant, labels)
                + params.irrelevant_weight * negative_entropy(irrelevant)
                + params.distillation_weight * symmetric_divergence(whole, relevant, detach_first=params.detach_targets)
            )
            return terms

        train(
            client,
            loss,
            params,
            options=TrainingOptions(suspects={"irrelevant_weight": params.irrelevant_weight}, terms=selected),
        )
        share = client.log.get("mask.selected", 0.5)
        has_hard_mask = params.selector == "learned" and params.mask == "hard"
        mistake = mistake_of_share(share) if has_hard_mask else ""
        if mistake:
            _log.warning("mask_extreme client=%s selected=%.4f: %s", client.id, share, mistake)
        return self.sent(client)

    def _mask(self, scores: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the mask of Eqs. 9 and 10, with noise from ``generator`` in training only.

        A Fisher mask has no noise.
        """
        params = self.params
        if params.selector == "fisher":
            return scores
        how = {"temperature": params.temperature, "threshold": params.threshold, "hard": params.mask == "hard"}
        return feature_mask(scores, None if generator is None else mask_noise(scores, generator), **how)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the global and the relevant classifier together, Eq. 14 (halved)."""
        model = client.model
        kind = self.params.ensemble

        def both(piece: torch.Tensor) -> torch.Tensor:
            features = model.features(piece)
            whole = model.head(features)
            if kind == "none":
                return torch.softmax(whole, dim=1)
            relevant = model.part("relevant_head")(features * self._mask(model.part("mask")(features)))
            return ensemble(whole, relevant, kind)

        return evaluate(both, model, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all features, and the mask that picks among them without noise."""
        views = super().views(client, inputs)
        model = client.model
        return {**views, "mask": evaluate(lambda z: self._mask(model.part("mask")(z)), model, views["encoder"])}

    def head_params(self, head: str) -> dict[str, Any]:
        """Return what this method has in common with its own device head; not the batch size.

        Small batches help while the encoder is trained; on frozen features they only take longer.
        """
        common = FedPickHeadParams.model_fields.keys() - {"batch_size"}
        return self.params.model_dump(include=common) if head == "fedpick" else {}


def mask_network(size: int, params: FedPickCommonParams) -> nn.Module:
    """Return s, with ``size`` features in and a logit for each out; with selector fisher, a mask set from outside."""
    if params.selector == "fisher":
        return FixedMask(size)
    width = params.mask_width or max(16, size // 2)
    return nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, size))


class FixedMask(nn.Module):
    """A mask (d,) of zeros and ones that no gradient changes; all ones until it is chosen."""

    kept: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(size))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the mask for each row of ``features`` (n, d)."""
        return self.kept.expand_as(features)
