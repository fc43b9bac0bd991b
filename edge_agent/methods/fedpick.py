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
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from ..heads._features import fisher_score, keep_top, mistake_of_share
from ..task import Task, Tensors
from ..training.loops import Loss, evaluate, features_of, local_optimizer, train_epochs
from ..training.losses import negative_entropy, symmetric_divergence
from ..training.networks import drawn_mask, ensemble, mask_noise, steady_mask
from ..training.parts import encoder_and_head, feature_dim, to_arrays
from .base import Client, Exactness, MethodParams, ours, refreshed_stats
from .base import Method as Base

if TYPE_CHECKING:
    from ..training.parts import Parts

_log = logging.getLogger(__name__)


class Params(MethodParams):
    """The paper's values where they are known: Table III for Office-Caltech-10 and DomainNet, threshold 0.5."""

    batch_size: int = ours(
        16, paper=32, ge=1, description="ours; lost in the paper, FedBN's code for the same data: 32"
    )
    refresh_stats: bool = refreshed_stats()
    mask: Literal["hard", "soft"] = Field("hard", description="zeros and ones (Eq. 10), or weights 0..1 (Eq. 21)")
    selector: Literal["learned", "fisher"] = Field(
        "learned", description="mask network (Eq. 9), or the features of highest Fisher score (Eq. 5), anew each round"
    )
    keep_ratio: float = Field(0.5, gt=0, le=1, description="share of features that selector fisher keeps")
    share_mask: bool = Field(False, description="the mask network travels ('Share PFSM' in Table IV)")
    share_local_heads: bool = Field(False, description="h_r and h_u travel: 'PFSM' may mean them, too")
    share_norm: bool = Field(False, description="batch norm travels ('Share BN' in Table IV)")
    ensemble: Literal["probs", "logits", "none"] = Field(
        "probs", description="Eq. 14; none: the global classifier alone ('w/o Ensemble' in Table IV)"
    )
    global_weight: float = Field(1.0, ge=0, description="weight g in Eq. 15, of L_g; Digits-Five 10")
    relevant_weight: float = Field(1.0, ge=0, description="weight r in Eq. 15, of L_r; Digits-Five 10")
    irrelevant_weight: float = Field(
        0.001, ge=0, description="weight u in Eq. 15, of L_u; above 0.01 training exploded"
    )
    distillation_weight: float = Field(1.0, ge=0, description="weight d in Eq. 15, of L_d; Digits-Five 10")
    detach_targets: bool = Field(False, description="each Kullback-Leibler term of Eq. 13 trains its second side only")
    temperature: float = Field(1.0, gt=0, description="T in Eq. 9, of the mask; lost in the paper")
    threshold: float = Field(0.5, gt=0, lt=1, description="eta, above which a feature is picked")
    mask_width: int = Field(0, ge=0, le=8192, description="r, hidden units of the mask network; 0: d / 2, at least 16")

    @model_validator(mode="after")
    def _mask_can_travel(self) -> Params:
        if self.share_mask and self.selector == "fisher":
            raise ValueError("share_mask with selector 'fisher': that mask has no weights to share; choose one of them")
        return self


class Method(Base):
    """Global, relevant and irrelevant features trained together, in every batch."""

    Params = Params
    source = "Zhu et al., Take Your Pick (FedPick), arXiv 2307.13995"
    heads = ("fedpick", "lr", "svm", "mlp", "prototype", "knn")
    exactness: ClassVar[Exactness] = {
        "fedpick": (
            "same form",
            (
                "mask, local classifiers and losses from fresh weights on a frozen encoder and a frozen global "
                "classifier, which the paper trains along"
            ),
        )
    }

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
        """Encoder, mask and three linear classifiers h_g, h_r and h_u."""
        model = encoder_and_head(task)
        size = feature_dim(model.encoder)
        model.add_module("mask", mask_network(size, self.params))
        model.add_module("relevant_head", nn.Linear(size, task.num_classes))
        model.add_module("irrelevant_head", nn.Linear(size, task.num_classes))
        return model

    def local_update(self, client: Client, received: Tensors) -> Tensors:  # noqa: ARG002 - loaded by the caller
        """E epochs of Eq. 15 on all parts together."""
        params = self.params
        if params.selector == "fisher" and client.samples:
            self._choose_by_score(client)
        steps = -(-client.samples // params.batch_size)  # what is told is the share in the last epoch
        shares: deque[torch.Tensor] = deque(maxlen=max(1, steps))
        train_epochs(
            client,
            self._loss(client, shares.append),
            local_optimizer(client.model.parameters(), params),
            epochs=params.local_epochs,
            batch_size=params.batch_size,
            weights={"irrelevant_weight": params.irrelevant_weight},
        )
        if shares:
            share = client.log["mask.selected"] = float(torch.stack(list(shares)).mean())
            if params.selector == "learned" and params.mask == "hard" and (mistake := mistake_of_share(share)):
                _log.warning("mask_extreme client=%s selected=%.4f: %s", client.id, share, mistake)
        return to_arrays(client.model, self.shared_names(client.model))

    def _choose_by_score(self, client: Client) -> None:
        features = features_of(client.model, client.train_inputs).cpu().numpy()
        kept = keep_top(fisher_score(features, client.train_labels.cpu().numpy()), self.params.keep_ratio)
        client.model.part("mask").get_buffer("kept").copy_(torch.from_numpy(kept.astype(np.float32)))

    def _loss(self, client: Client, tell_share: Callable[[torch.Tensor], object]) -> Loss:
        params, model = self.params, client.model

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            picked = self._drawn(client, features, tell_share)
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

        return loss

    def _drawn(
        self, client: Client, features: torch.Tensor, tell_share: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        """The mask of a training step, with noise; tells the share of features that it picks without."""
        scores, params = client.model.part("mask")(features), self.params
        if params.selector == "fisher":
            tell_share(scores.mean())
            return torch.as_tensor(scores)
        how: dict[str, Any] = {"temperature": params.temperature, "threshold": params.threshold}
        tell_share(steady_mask(scores.detach(), **how).mean())
        return drawn_mask(scores, mask_noise(scores, client.generator), hard=params.mask == "hard", **how)

    def _steady(self, model: Parts, features: torch.Tensor) -> torch.Tensor:
        """The mask at inference: no noise."""
        scores, params = model.part("mask")(features), self.params
        if params.selector == "fisher":
            return torch.as_tensor(scores)
        hard = params.mask == "hard"
        return steady_mask(scores, temperature=params.temperature, threshold=params.threshold, hard=hard)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities of the global and the relevant classifier together, Eq. 14 (halved)."""
        model, kind = client.model, self.params.ensemble

        def both(piece: torch.Tensor) -> torch.Tensor:
            features = model.features(piece)
            whole = model.head(features)
            if kind == "none":
                return torch.softmax(whole, dim=1)
            relevant = model.part("relevant_head")(features * self._steady(model, features))
            return ensemble(whole, relevant, kind)

        return evaluate(both, model, inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities of the global classifier on all features."""
        return super().predict(client, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """All features, and the mask that picks among them without noise."""
        found, model = super().views(client, inputs), client.model
        return {**found, "mask": evaluate(lambda piece: self._steady(model, piece), model, found["encoder"])}

    def head_params(self, head: str) -> dict[str, Any]:
        """What this method has in common with its own device head."""
        return self.params.model_dump(include=set(_HEAD_PARAMS)) if head == "fedpick" else {}


# Not the batch size: small batches help while the encoder is trained, on frozen features they only take longer.
_HEAD_PARAMS = (
    *("lr", "momentum", "weight_decay", "mask", "selector", "keep_ratio", "ensemble", "relevant_weight"),
    *("irrelevant_weight", "distillation_weight", "detach_targets", "temperature", "threshold", "mask_width"),
)


def mask_network(size: int, params: Params) -> nn.Module:
    """s: ``size`` features in, one logit for each out; with selector fisher, a mask that is set from outside."""
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
        """The mask for each row of ``features`` (n, d)."""
        return self.kept.expand_as(features)
