"""RepPer: learn a common representation together, then each device fits its own head on it.

Source: "A Closer Look at Personalization in Federated Image Classification", Algorithm 1. Stage CRL (common
representation learning) is a round of ours; stage PCL (personalized classifier learning) is ``personalize``.
Travels: the encoder, both ways, batch norm statistics included.
Stays: the personal head, and the features that it is fitted on.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: the loss is the mean over anchors, where Eq. 4 writes a sum. Augmentations, which the paper does
not name, are those of ``training.augment``. Whether heads see r or z = r / ||r|| is not stated: ours standardise r of
un-augmented images, ``feature_norm`` chooses. The step size falls when ``decay_at`` says so, by default never.
``global_head`` is ours: each round also trains one linear layer on detached features and shares it, so that a device
without labels has something to start from; off by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from .. import heads
from ..core.published import Published
from ..core.task import Task, Tensors
from ..training import augment
from ..training.loops import Loss, local_optimizer, train
from ..training.losses import supervised_contrastive
from ..training.parts import Parts, encoder_alone, encoder_and_head
from . import Choices, Client, LocalWork, MethodParams, Range, Stage, grades, searched
from .families import FittedHead


class RepPerParams(MethodParams):
    """The paper's defaults."""

    lr: float = searched(1e-3, Range(0.0001, 0.01, log=True), gt=0, description="step size of Adam")
    optimizer: Literal["adam"] = Field("adam", description="of the encoder; paper")
    weight_decay: float = Field(1e-4, ge=0)
    batch_size: int = Field(256, ge=1, description="images in a batch; with two views each, twice as many vectors")
    local_epochs: int = Field(10, ge=0, description="E")
    temperature: float = searched(0.1, Choices((0.05, 0.1, 0.5)), gt=0, description="tau in Eq. 5")
    sc_variant: Literal["in", "out"] = Field(
        "in", description="position of the logarithm; 'in' is Eq. 5, 'out' is usual"
    )
    augment: bool = Field(True, description="two random views of each image; false: the image itself, once")
    decay_at: tuple[float, ...] = Field((), description="shares of the run (0..1) after which lr falls by lr_decay")
    lr_decay: float = Field(0.1, gt=0, le=1)
    feature_norm: Literal["l2", "none", "standard"] = Field(
        "standard", description="what the head sees; none: r; l2: z = r / ||r||; standard: r with mean 0, variance 1"
    )
    head: str = Field("mlp", description="personal head, a file name in edge_agent/heads; paper: mlp, lr, svm")
    head_params: dict[str, Any] = Field(default_factory=dict, description="parameters of that head")
    global_head: bool = Field(False, description="also train and share a linear classifier on detached features")
    global_head_lr: float = Field(0.01, gt=0, description="step size of Adam for that classifier")

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "lr": (Published(1e-3, "paper", "Implementation"),),
        "optimizer": (Published("adam", "paper", "Implementation"),),
        "weight_decay": (Published(1e-4, "paper", "Implementation"),),
        "batch_size": (Published(256, "paper", "Implementation"),),
        "local_epochs": (Published(10, "paper", "Implementation, and E = 20 in Table 1"),),
        "temperature": (Published(0.1, "paper", "Implementation"),),
        "sc_variant": (Published("in", "paper", "Eq. 5"),),
        "lr_decay": (Published(0.1, "paper", "Implementation; it takes effect where decay_at says when"),),
        "decay_at": (Published(None, "not published", "the paper's decay of 0.1 has no time"),),
        "augment": (Published(True, "paper", "two views of each image; which is not said"),),
        "feature_norm": (Published(None, "not published", "r or z is not said"),),
        "head": (Published("mlp", "paper", "one linear layer; Table 3 has svm and lr, too"),),
    }


class RepPer(FittedHead):
    """Supervised contrastive learning of the encoder; heads on devices."""

    Params = RepPerParams
    resumable = True
    source = "A Closer Look at Personalization in Federated Image Classification, Algorithm 1"
    heads = ("mlp", "lr", "svm", "prototype")
    exactness = grades(
        mlp=("exact", "stage PCL of the paper: one linear layer on the frozen representation"),
        lr=("exact", "stage PCL of the paper with logistic regression"),
        svm=("exact", "stage PCL of the paper with a support vector machine"),
    )

    @property
    def tied_to_rounds(self) -> str:
        """Why a step depends on how many rounds a run has: with ``decay_at``, where the step size falls."""
        falls = bool(self.params.decay_at) and self.params.lr_decay != 1
        return "its step size falls after shares of the rounds (decay_at)" if falls else ""

    @property
    def shared(self) -> tuple[str, ...]:
        """The encoder; the linear classifier too where ``global_head`` asks for it."""
        return ("encoder", "head") if self.params.global_head else ("encoder",)

    def build(self, task: Task) -> Parts:
        """Return the encoder, and the shared classifier where asked for."""
        return encoder_and_head(task) if self.params.global_head else encoder_alone(task)

    def local_work(self) -> LocalWork:
        """Return the contrastive passes, and the fit of the head."""
        params = self.params
        learns = "encoder and shared classifier" if params.global_head else "encoder"
        schedule = ""
        if params.decay_at:
            shares = ", ".join(f"{share:g}" for share in params.decay_at)
            schedule = f"times {params.lr_decay:g} after {shares} of the rounds"
        work = replace(super().local_work(), rounds=(Stage(learns, params.local_epochs),), schedule=schedule)
        return replace(work, augmentation="two random views of each image" if params.augment else "none")

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run stage CRL: E epochs of the supervised contrastive loss."""
        params = self.params
        model = client.model
        shrink = params.lr_decay ** sum(client.round > share * client.rounds for share in params.decay_at)
        optimizer = local_optimizer(model.encoder.parameters(), params, lr=params.lr * shrink)
        if params.global_head:
            head_group = {"params": list(model.head.parameters()), "lr": params.global_head_lr * shrink}
            optimizer.add_param_group(head_group)
        train(client, self.loss(client, received), params, optimizer=optimizer)
        return self.sent(client)

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the loss of Eq. 5 on two views of each image, plus that of the classifier of ``global_head``."""
        views = augment.for_task(client.task) if self.params.augment else None

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if views is not None:
                inputs = torch.cat([views(inputs, client.generator), views(inputs, client.generator)])
                labels = torch.cat([labels, labels])
            features = client.model.features(inputs)
            value = supervised_contrastive(features, labels, self.params.temperature, self.params.sc_variant)
            if self.params.global_head:
                value = value + F.cross_entropy(client.model.head(features.detach()), labels)
            return value

        return loss

    def head_params(self, head: str) -> dict[str, Any]:
        """Return the normalisation of features for heads that have such a parameter.

        For its own head all parameters.
        """
        fields = heads.get(head).Params.model_fields
        norm = {"feature_norm": self.params.feature_norm} if "feature_norm" in fields else {}
        return {**norm, **super().head_params(head)}
