"""SphereFed: features on the unit sphere learn to meet a fixed classifier, which is calibrated at the end.

Source: Dong, Zhang, Li, Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022. No code was found; details are
read from what others report of it.
Travels: the encoder, both ways, batch norm statistics included; with it the fixed classifier, so that all devices hold
the same bits. Up, where ``calibrate`` is on, A = sum z z' and B = sum z onehot(y)' of the client's samples.
Stays: nothing but the batch counters of batch norm layers.
Server: mean of the updates, weighted by sample counts; after the last round W = (sum A + ridge I)^-1 sum B.
Differs from the paper: calibration takes the place of the last round's training, as an exchange after the last round
does not exist: clients send the encoder back untouched, and A and B of it. So W fits the final encoder exactly, but
rests on the clients of that round only, and a run of R rounds trains R - 1; in other rounds A and B are zeros. A run
of one round trains and does not calibrate. Samples of a class of which a client has fewer than ``min_class_count`` are
left out of A and B: the column of B of one sample is that sample's features. ``ridge`` and the scale of the loss (mean
over classes) are ours. A last batch of one sample joins the batch before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.errors import ConfigError
from ..core.published import Published
from ..core.task import State, Task, Tensors
from ..heads import get as head_called
from ..training.loops import Loss, TrainingOptions, features_of, train
from ..training.networks import orthonormal
from ..training.parts import Parts, encoder_and_head
from . import Client, LocalWork, Method, MethodParams, Range, Stage, Update, searched
from .families import MOST_SAMPLES
from .values import ClassStatistics

_GRAM = "extra.gram"
_CROSS = "extra.cross"


class SphereFedParams(MethodParams):
    """The parameters of SphereFed, with the defaults of DualFed's comparison."""

    lr: float = searched(
        0.1, Range(0.01, 1, log=True), gt=0, description="step size; DualFed's comparison: 0.1, Office-Home 1.0"
    )
    loss: Literal["mse", "ce"] = Field("mse", description="squared error of W z to one-hot labels, or cross entropy")
    scale: float = Field(10.0, gt=0, description="factor of W z in cross entropy and in probabilities; ours")
    classifier_seed: int = Field(0, ge=0, description="seed of the orthonormal rows of the fixed classifier W")
    calibrate: bool = Field(True, description="solve for W after training; takes the place of the last round")
    ridge: float = Field(1.0, gt=0, description="added to the diagonal of sum A; lost in what is known of the paper")
    min_class_count: int = Field(2, ge=1, description="classes of fewer samples are left out of A and B; the paper: 1")

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "lr": (
            Published(0.1, "others' code", "DualFed's comparison, its Sec. 5.3", data="pacs"),
            Published(0.1, "others' code", "DualFed's comparison, its Sec. 5.3", data="domainnet"),
            Published(1.0, "others' code", "DualFed's comparison, its Sec. 5.3", data="officehome"),
        ),
        "loss": (Published("mse", "recalled"),),
        "ridge": (Published(None, "not published", "no code was found"),),
        "min_class_count": (Published(1, "recalled", "all samples; not taken by --paper, as it shows single samples"),),
    }


class Spherical(nn.Module):
    """scale W z / |z| with a fixed W (K, d) of orthonormal rows."""

    def __init__(self, rows: np.ndarray, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.from_numpy(rows.astype(np.float32)), requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (n, K)."""
        return self.scale * F.linear(F.normalize(features, dim=1), self.weight)


class SphereFed(Method):
    """Training towards a fixed classifier, then one pooled ridge regression."""

    Params = SphereFedParams
    frozen = ("head",)
    resumable = True
    source = "Dong et al., SphereFed, ECCV 2022"
    class_statistics = ClassStatistics(sums=(_CROSS,), moments=(_GRAM,), class_axis=1)
    heads = ("lr", "svm", "mlp", "prototype", "knn")

    @property
    def needs_last_round(self) -> bool:
        """Whether the last round is needed: where the classifier is calibrated."""
        return bool(self.params.calibrate)

    @property
    def tied_to_rounds(self) -> str:
        """Why a step depends on how many rounds a run has: the last one calibrates the classifier."""
        return "its last round calibrates the classifier (calibrate)" if self.needs_last_round else ""

    def build(self, task: Task) -> Parts:
        """Return the encoder and fixed classifier.

        Raises:
            ConfigError: The encoder has fewer features than there are classes.
        """
        model = encoder_and_head(task)
        classes, size = model.head.get_parameter("weight").shape
        if size < classes:
            raise ConfigError(
                "method 'spherefed'",
                [f"{size} features for {classes} classes leave no room for orthogonal directions; raise feature_dim"],
            )
        model.head = Spherical(orthonormal(classes, size, self.params.classifier_seed), self.params.scale)
        return model

    @property
    def least_class_count(self) -> int | None:
        """The least samples of a class in B; None without ``calibrate``."""
        return super().least_class_count if self.params.calibrate else None

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return a as its upper triangle (d (d + 1) / 2,) and B (d, K), both float64; nothing without ``calibrate``."""
        if not self.params.calibrate:
            return {}
        size = model.head.get_parameter("weight").shape[1]
        return {_GRAM: np.zeros(size * (size + 1) // 2), _CROSS: np.zeros((size, task.num_classes))}

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to statistics that no unit vectors have: negative squares, or too large products."""
        if _GRAM not in tensors:
            return ""
        gram = unpacked(tensors[_GRAM], len(tensors[_CROSS]))
        squares = np.diag(gram)
        if squares.min() < 0:
            return f"'{_GRAM}' holds a sum of squares of {squares.min():g}, expected 0 or more"
        most = float(squares.sum()) * (1 + 1e-6)
        for name, array in ((_GRAM, gram), (_CROSS, tensors[_CROSS])):
            if np.abs(array).max() > most:
                return f"'{name}' reaches {np.abs(array).max():g}, expected at most {most:g}, the number of vectors"
        if squares.sum() > MOST_SAMPLES:
            return f"'{_GRAM}' is of {squares.sum():g} vectors, expected at most {MOST_SAMPLES}"
        # A = Z'Z and B = Z'Y with one-hot rows of Y, so Y Y' <= n I, and n A - B B' has no negative eigenvalue.
        least = most * gram - tensors[_CROSS] @ tensors[_CROSS].T
        try:
            np.linalg.cholesky(least + (1e-9 * most**2 or 1.0) * np.eye(len(gram)))
        except np.linalg.LinAlgError:
            return f"'{_GRAM}' and '{_CROSS}' cannot be of the same unit vectors: n A - B B' has a negative eigenvalue"
        return ""

    # --- coordinator -----------------------------------------------------------------------------------------------

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean encoder, and with statistics in the updates the classifier W, W' = (A + ridge I)^-1 B."""
        sums: Tensors = {}

        def add(update: Update, statistics: Tensors) -> None:
            # No client counts for more vectors of length 1 than the samples that its encoder counts for.
            vectors = float(np.trace(unpacked(statistics["gram"], len(statistics["cross"])))) if statistics else 0.0
            for name, array in statistics.items():
                counted = array * (update.weight / vectors) if vectors > update.weight * (1 + 1e-6) else array
                sums[name] = sums.get(name, 0.0) + counted

        mean = self.mean(updates, add)
        if sums and sums["gram"].any():
            gram = unpacked(sums["gram"], len(sums["cross"]))
            weights = np.linalg.solve(gram + self.params.ridge * np.eye(len(gram)), sums["cross"]).T
            mean["head.weight"] = weights.astype(np.float32)
        return {**state, **mean}

    def global_head(self, state: State) -> Tensors | None:
        """Return W without bias: on raw features it names the same class, with other probabilities."""
        weight = state["head.weight"]
        return {"weight": weight, "bias": np.zeros(len(weight), weight.dtype)}

    def head_params(self, head: str) -> dict[str, Any]:
        """Return features of length 1, for heads that have such a parameter."""
        return {"feature_norm": "l2"} if "feature_norm" in head_called(head).Params.model_fields else {}

    # --- client ----------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return the passes of the encoder, and the classifier that is worked out from all clients' features."""
        if not self.params.calibrate:
            return super().local_work()
        return replace(super().local_work(), end=(Stage("classifier worked out from all clients' features"),))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of the encoder; in the last round none, but A and B of what was received."""
        params = self.params
        labels = client.train_labels
        classes = client.task.num_classes
        calibrates = params.calibrate and client.round >= client.rounds > 1
        train(
            client,
            self.loss(client, received),
            params,
            options=TrainingOptions(epochs=0 if calibrates else None, frozen=self.frozen),
        )
        if not calibrates:
            return {**self.sent(client), **self.sends(client.model, client.task)}
        # Under the encoder in eval mode, summed in float64, of classes of enough samples.
        counted = (torch.bincount(labels, minlength=classes) >= params.min_class_count)[labels]
        unit = F.normalize(features_of(client.model, client.train_inputs)[counted].double(), dim=1)
        targets = F.one_hot(labels[counted], classes).double()
        gram = (unit.T @ unit).cpu().numpy()
        cross = (unit.T @ targets).cpu().numpy()
        return {**self.sent(client), _GRAM: gram[np.triu_indices(len(gram))], _CROSS: cross}

    def loss(self, client: Client, received: Tensors) -> Loss:
        """Return the squared error of W z / |z| to one-hot labels, or cross entropy."""
        model = client.model
        classes = client.task.num_classes
        scale = self.params.scale
        if self.params.loss == "ce":
            return lambda inputs, labels: F.cross_entropy(model(inputs), labels)
        return lambda inputs, labels: F.mse_loss(model(inputs) / scale, F.one_hot(labels, classes).float())


def unpacked(packed: np.ndarray, size: int) -> np.ndarray:
    """Return the symmetric matrix (size, size) of an upper triangle, row by row."""
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = packed
    return np.asarray(upper + np.triu(upper, 1).T)
