"""FedKD: a large personal network and a small shared one distil each other; the shared one travels in low rank.

Source: Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 13 (2022).
Travels: encoder and head of the student, both ways, batch norm statistics included, with each matrix cut down to the
smallest rank that keeps a share of its energy; with the update the energy it was cut at.
Stays: the teacher, and the projection between the features of both.
Server: even mean of the updates, cut down again before it is sent.
Differs from the paper: matrices travel multiplied out, for all updates of a run have one shape: no bytes are saved on
the wire. What their factors would take is reported instead, as the metrics ``svd.up_bytes`` and ``svd.down_bytes``.
What is cut down is the change of a round (the paper) or the weights themselves (PFLlib), as ``decomposed`` says;
convolutions are matrices of filters, where PFLlib cuts each small window. Each network learns from its own loss only,
the other's answers and the sum of both cross entropies being constants to it. PFLlib's search for a rank never tries
the full one, and its divergence is a mean over classes, too: neither is done here.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from ..core.task import State, Task, Tensors
from ..core.weighted_sum import WeightedSum
from ..training.finetune import second
from ..training.loops import Loss, predict_probabilities, train
from ..training.parts import Parts, encoder_and_head, feature_dim
from . import Client, Method, MethodParams, grades
from .base import SERVER_ONLY, is_learned


def smallest_rank(singular: np.ndarray, energy: float) -> int:
    """Return how many singular values (r,), largest first, hold a share ``energy`` (0..1] of their sum of squares."""
    squares = np.cumsum(np.square(singular.astype(np.float64)))
    if energy >= 1.0 or not squares[-1]:
        return len(singular) if energy >= 1.0 else 0
    # The smallest rank that is enough; a search that stops before full rank would keep nothing where all are needed.
    return int(np.searchsorted(squares, energy * squares[-1] * (1 - 1e-12))) + 1


def truncated(array: np.ndarray, energy: float) -> tuple[np.ndarray, int]:
    """Return the array of the smallest sufficient rank, and the bytes that it takes: its factors', or its own if fewer.

    An array of more than two axes is the matrix of its first axis against all others. One with fewer is left alone, and
    so is what needs full rank, bit for bit.
    """
    if array.ndim < 2 or not array.size or array.dtype.kind != "f":
        return array, array.nbytes
    matrix = array.reshape(len(array), -1)
    left_vectors, singular, right_vectors = np.linalg.svd(matrix, full_matrices=False)
    rank = smallest_rank(singular, energy)
    factors = rank * (sum(matrix.shape) + 1) * array.itemsize
    if rank == len(singular):
        return array, min(factors, array.nbytes)
    low = (left_vectors[:, :rank] * singular[:rank]) @ right_vectors[:rank]
    return low.reshape(array.shape).astype(array.dtype), min(factors, array.nbytes)


def compressed(tensors: Tensors, base: Tensors, energy: float) -> tuple[Tensors, int]:
    """Return ``base`` plus each difference from it after truncation, and the bytes of all factors.

    None is in base: 0.
    """
    result = dict[str, np.ndarray]()
    total = 0
    for name, array in tensors.items():
        start = base.get(name)
        low, taken = truncated(array if start is None else array - start, energy)
        result[name] = low if start is None else (start + low).astype(array.dtype)
        total += taken
    return result, total


_ENERGY = "extra.energy"
_DOWN = "extra.down_bytes"
_BASE = SERVER_ONLY + "base."


class FedKDParams(MethodParams):
    """The paper's defaults."""

    teacher_encoder: str = Field("", description="encoder of the teacher, one of edge_agent/models; '': task's")
    teacher_params: dict[str, Any] = Field(default_factory=dict, description="its parameters, where it is named")
    decomposed: Literal["updates", "weights"] = Field(
        "updates", description="what is cut to low rank: the change of a round (the paper) or the weights (PFLlib)"
    )
    energy_start: float = Field(0.95, gt=0, le=1, description="T_start: share of energy kept in the first round")
    energy_end: float = Field(0.98, gt=0, le=1, description="T_end: the same in the last, with a line between")
    clip: float = Field(10.0, gt=0, description="largest norm of each network's gradient; PFLlib: 10")


class FedKD(Method):
    """Mutual distillation; the student travels, the teacher answers."""

    Params = FedKDParams
    weighting = "uniform"
    source = "Wu et al., Nature Communications 13 (2022)"
    exactness = grades(
        mlp=("approximate", "one linear layer on the student's encoder; the paper answers with a whole teacher"),
    )

    @property
    def tied_to_rounds(self) -> str:
        """Why a step depends on how many rounds a run has: unless the share of energy that is sent stays the same."""
        is_same = self.params.energy_start == self.params.energy_end
        return "" if is_same else "the share of energy that it sends grows to the last round (energy_end)"

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return the share of energy that was kept."""
        return {_ENERGY: np.zeros(1)}

    def objection(self, tensors: Tensors) -> str:
        """Return a share of energy that is none."""
        energy = float(tensors[_ENERGY][0])
        return "" if 0 < energy <= 1 else f"'{_ENERGY}' is {energy:g}, expected more than 0 and at most 1"

    def build(self, task: Task) -> Parts:
        """Return student (encoder and head), teacher, and the projection of the student's features to the teacher's."""
        model = encoder_and_head(task)
        params = self.params
        named = {"encoder": params.teacher_encoder, "encoder_params": params.teacher_params}
        teacher = encoder_and_head(task.model_copy(update=named) if params.teacher_encoder else task)
        sizes = feature_dim(model.encoder), feature_dim(teacher.encoder)
        model.add_module("teacher", teacher)
        model.add_module("projection", nn.Linear(*sizes, bias=False))
        return model

    # --- coordinator -----------------------------------------------------------------------------------------------

    def broadcast(self, state: State) -> Tensors:
        """Return the student as it is cut down, and the bytes of its factors; before the first round as it is."""
        student = {name: array for name, array in state.items() if not name.startswith(("extra.", SERVER_ONLY))}
        if _ENERGY not in state:
            return {**student, _DOWN: np.array([float(sum(array.nbytes for array in student.values()))])}
        base = {name.removeprefix(_BASE): array for name, array in state.items() if name.startswith(_BASE)}
        cut, taken = compressed(student, base, float(state[_ENERGY][0]))
        return {**cut, _DOWN: np.array([float(taken)])}

    def next_state(self, state: State, total: WeightedSum) -> State:
        """Return the even mean, the energy to truncate it at, and the last model that clients received, its base."""
        mean = total.mean()
        if self.params.decomposed == "weights":
            return {**state, **mean}
        had = {name: array for name, array in self.broadcast(state).items() if is_learned(name, array)}
        return {**state, **mean, **{_BASE + name: array for name, array in had.items()}}

    # --- client ----------------------------------------------------------------------------------------------------

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of both losses at once; returns the student, cut down."""
        params = self.params
        model = client.model
        networks = [[*model.encoder.parameters(), *model.head.parameters(), *model.part("projection").parameters()]]
        networks.append(list(teacher(model).parameters()))

        def clip() -> None:
            for weights in networks:
                nn.utils.clip_grad_norm_(weights, params.clip)

        train(client, mutual_loss(model), params, before_step=clip)
        passed = (client.round - 1) / max(1, client.rounds - 1)
        energy = float(params.energy_start + passed * (params.energy_end - params.energy_start))
        is_change = params.decomposed == "updates"
        base = {name: array for name, array in received.items() if is_change and is_learned(name, array)}
        sent, taken = compressed(self.sent(client), base, energy)
        client.log |= {"svd.up_bytes": float(taken), "svd.down_bytes": float(received[_DOWN][0])}
        return {**sent, _ENERGY: np.array([energy])}

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the teacher."""
        return predict_probabilities(teacher(client.model), inputs)


def teacher(model: Parts) -> Parts:
    """Return the large network."""
    return second(model, "teacher")


def mutual_loss(model: Parts) -> Loss:
    """Return the loss L_t + L_s; the projection learns with the student.

    L_t = CE_t + (KL(p_s || p_t) + MSE(z_t, W z_s)) / (CE_t + CE_s), and L_s the same with KL(p_t || p_s); in each of
    them the other network is a constant.
    """

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z_s = model.features(inputs)
        z_t = teacher(model).features(inputs)
        logits_s = model.head(z_s)
        logits_t = teacher(model).head(z_t)
        projected = model.part("projection")(z_s)
        entropies = F.cross_entropy(logits_t, labels), F.cross_entropy(logits_s, labels)
        doubt = (entropies[0] + entropies[1]).detach().clamp(min=torch.finfo(z_s.dtype).eps)
        taught = learned_from(logits_t, logits_s) + F.mse_loss(z_t, projected.detach())
        learned = learned_from(logits_s, logits_t) + F.mse_loss(projected, z_t.detach())
        return entropies[0] + entropies[1] + (taught + learned) / doubt

    return loss


def learned_from(pupil: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the batch mean of KL(softmax(other) || softmax(pupil)), a constant to ``other``."""
    target = F.log_softmax(other.detach(), dim=1)
    return F.kl_div(F.log_softmax(pupil, dim=1), target, reduction="batchmean", log_target=True)
