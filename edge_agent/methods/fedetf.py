"""FedETF: a fixed classifier whose directions are as far from each other as can be, and a projection towards it.

Source: Li, Shang, He, Lin, Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier", ICCV 2023, and settings of the authors' code.
Travels: encoder, projection, temperature and the fixed classifier (so that all devices hold the same bits), both ways,
batch norm statistics included.
Stays: the tuned copy.
Server: mean of the updates, weighted by sample counts; equal classifiers stay as they are.
Differs from the paper: in fine-tuning, the steps on classifier and projection run on features that were computed once,
with the encoder in eval mode; the momentum of the projection starts from zero in each of them. A last batch of one
sample joins the batch before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.errors import ConfigError
from ..core.task import State, Task, Tensors
from ..training.finetune import on_features
from ..training.loops import Loss, cross_entropy, train
from ..training.losses import balanced_softmax
from ..training.networks import simplex
from ..training.parts import Parts, encoder_and_head, feature_dim
from . import Client, LocalWork, MethodParams, Stage
from .families import Tuned


class FedETFParams(MethodParams):
    """The authors' code."""

    lr: float = Field(0.04, gt=0, description="step size; the authors' code: 0.04")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD; the authors' code: 0.9")
    weight_decay: float = Field(5e-4, ge=0, description="the authors' code: 5e-4")
    batch_size: int = Field(128, ge=1, description="B; the authors' code: 128")
    local_epochs: int = Field(3, ge=0, description="E, also of the first stage of fine-tuning; the authors' code: 3")
    scale: float = Field(10.0, gt=0, description="start of the learnable temperature; the authors' code: 10 or 1")
    gamma: float = Field(1.0, gt=0, description="strength of the class counts in the balanced loss")
    projection_dim: int = Field(0, ge=0, le=8192, description="d', width of the projection; 0: d, at least K")
    classifier_seed: int = Field(0, ge=0, description="seed of the orthonormal U in the classifier")
    tune_rounds: int = Field(20, ge=0, description="alternations of fine-tuning; the authors' code: 20")
    tune_epochs: int = Field(3, ge=0, description="passes of each half of an alternation; the authors' code: 3")
    tune_classifier_lr: float = Field(0.1, gt=0, description="step size of the classifier's half")
    tune_projection_lr: float = Field(0.05, gt=0, description="step size of the projection's half")


class EtfHead(nn.Module):
    """scale * cosine of the projected features and the classifier's K directions ``etf`` (K, d')."""

    def __init__(self, size: int, etf: np.ndarray, scale: float) -> None:
        super().__init__()
        self.projection = nn.Linear(size, etf.shape[1])
        self.etf = nn.Parameter(torch.from_numpy(etf.astype(np.float32)), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), scale))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (n, K)."""
        return self.scale * F.linear(F.normalize(self.projection(features), dim=1), self.etf)


class FedETF(Tuned):
    """Balanced softmax towards a simplex; classifier and projection are tuned in turns."""

    Params = FedETFParams
    source = "Li et al., FedETF, ICCV 2023"
    heads = ("lr", "svm", "mlp", "prototype", "knn")

    def build(self, task: Task) -> Parts:
        """Return the encoder, and projection, temperature and fixed classifier as its head.

        Raises:
            ConfigError: ``projection_dim`` is below the number of classes.
        """
        model = encoder_and_head(task)
        size = feature_dim(model.encoder)
        classes = task.num_classes
        params = self.params
        width = params.projection_dim or max(size, classes)
        if width < classes:
            mistake = f"projection_dim = {width} for {classes} classes, expected at least as many, or 0"
            raise ConfigError("parameters of method 'fedetf'", [mistake])
        model.head = EtfHead(size, simplex(classes, width, params.classifier_seed), params.scale)
        return model

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the balanced loss; the classifier itself learns nothing."""
        model = client.model
        gamma = self.params.gamma
        counts = torch.bincount(client.train_labels, minlength=client.task.num_classes)
        return lambda inputs, labels: balanced_softmax(model(inputs), labels, counts, gamma)

    def local_work(self) -> LocalWork:
        """Return the passes of training, and the stages of fine-tuning."""
        params = self.params
        in_turns = 2 * params.tune_rounds * params.tune_epochs
        end = (Stage("all parts", params.local_epochs), Stage("classifier and projection in turns", in_turns))
        return replace(super().local_work(), end=end)

    def tune(self, client: Client) -> None:
        """Run E epochs as in training, then classifier and projection in turns by plain cross entropy."""
        params = self.params
        train(client, self.loss(client, {}), params)
        cached = on_features(client)
        head = cached.model.head
        projection = list(head.get_submodule("projection").parameters())
        etf = [head.get_parameter("etf")]
        # Steps of SGD whatever trains the model, and those of the classifier bare, as in the authors' code.
        sgd = params.model_copy(update={"optimizer": "sgd", "local_epochs": params.tune_epochs})
        bare = sgd.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
        for _ in range(params.tune_rounds):
            tune_only(cached, etf, bare, params.tune_classifier_lr)
            tune_only(cached, projection, sgd, params.tune_projection_lr)

    def global_head(self, state: State) -> Tensors | None:
        """Return projection and classifier in one: it names the same class, with other probabilities."""
        directions = state["head.scale"] * state["head.etf"]
        return {
            "weight": directions @ state["head.projection.weight"],
            "bias": directions @ state["head.projection.bias"],
        }


def tune_only(client: Client, weights: list[nn.Parameter], params: MethodParams, lr: float) -> None:
    """Train these weights of ``client.model.head`` alone; which of its weights learn is as before afterwards."""
    head = client.model.head
    learned = {weight: weight.requires_grad for weight in head.parameters()}
    for weight in learned:
        weight.requires_grad_(any(weight is tuned_weight for tuned_weight in weights))
    try:
        train(client, cross_entropy(head), params, lr=lr)
    finally:
        for weight, before in learned.items():
            weight.requires_grad_(before)
