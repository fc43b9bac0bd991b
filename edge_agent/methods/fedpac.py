"""FedPAC: features drawn to common class centroids, and for each client the best combination of all classifiers.

Source: Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
2023, and the authors' code; its reproduction report (Ding, 2025), whose numbers of equations are used here, adds the
combination by prototype losses (Eqs. 12-13).
Travels: the encoder, both ways. Up: the classifier, the statistics V and h before training, class means after it, class
counts. Down: the common centroids to all, and to each client its own combination of classifiers.
Stays: the classifier of a client that takes no part in a round, which no other client ever receives; the data.
Server: the mean encoder by sample counts (Eq. 9), centroids (Eq. 11), and one quadratic programme for each participant,
whose optimum combines the classifiers of all participants (Eq. 10).
Differs from the paper: class means of fewer than ``min_class_count`` samples are withheld (one sample's mean is that
sample), and clients without class means keep their own classifier and are excluded from the combination. A class that
no client has in a round keeps its centroid (the code fails). The programme is solved exactly in numpy; where that fails
the client keeps its own classifier, as in the code. Among more than 100 clients weights are cut off at 0.1 / m. The
classifier's epoch runs on features that were computed once. Devices that train no encoder may take part in all else.
``global_head`` is ours. The report's Eq. 12-13 have slips: with its formula's loss F[t, s] of target t's classifier on
source s's class means, weights are exp(-F[t, s]) over their sum for s; "negative losses get weight 0" is kept and never
happens. The report gives no temperature; class means are easy for all classifiers, so weights come out almost even
unless ``class_weighting`` is label_prior or the temperature is below 1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from ..core.errors import TrainingFailed
from ..core.published import Published
from ..core.task import State, Task, Tensors
from ..heads import fedpac as steps
from ..training.loops import Loss, TrainingOptions, cross_entropy, features_of, train
from ..training.parts import Parts, to_arrays
from . import Client, LocalWork, Method, MethodParams, Range, Stage, Update, grades, searched
from ._simplex import best_weights, combined, gram, pruned, soft_smallest
from .base import CLASS_MEANS, CLASSIFIERS
from .families import LARGEST, names_in, objection_to, packed, require_finite, with_rows
from .values import ClassStatistics

_log = logging.getLogger(__name__)

_HEAD = ("head.weight", "head.bias")
_LARGEST_VARIANCE = 1e12


class FedPACParams(MethodParams):
    """The paper's defaults for Fashion-MNIST."""

    lr: float = Field(0.01, gt=0, description="eta_f in Eq. 7, for the encoder; the paper's code: 0.02 for CIFAR-10")
    weight_decay: float = Field(5e-4, ge=0, description="as in the paper's code")
    local_epochs: int = Field(5, ge=0, description="E, of the encoder")
    head_lr: float = Field(0.1, gt=0, description="eta_g in Eq. 6, fixed in the paper's code")
    head_epochs: int = Field(1, ge=0, description="passes of the classifier before the encoder; the paper's code: 1")
    alignment_weight: float = searched(1.0, Range(0.1, 10, log=True), ge=0, description="lambda in Eq. 3")
    weights: Literal["qp", "prototype_loss"] = Field(
        "qp", description="combination of classifiers: the paper's programme (Eq. 10), or the report's (Eqs. 12-13)"
    )
    direction: Literal["target_head", "source_head"] = Field(
        "target_head", description="whose classifier meets whose class means in Eq. 12; source_head is FedFomo's way"
    )
    class_weighting: Literal["uniform", "label_prior"] = Field(
        "uniform", description="classes in Eq. 12 count alike (the report), or as often as their owner has them (ours)"
    )
    temperature: float = Field(1.0, gt=0, description="divides the losses in Eq. 13; the report has none")
    prune_below: float = Field(1e-3, ge=0, lt=1, description="weights of the programme up to this are 0; paper's code")
    centroid_weighting: Literal["samples", "uniform"] = Field(
        "samples", description="clients in a centroid count by their samples of it (Eq. 11), or alike (PFLlib)"
    )
    min_class_count: int = Field(2, ge=1, description="class means of fewer samples are withheld; the paper: 1")
    new_clients: Literal["own", "mean"] = Field(
        "own", description="classifier of a client in its first round: its own start (paper's code), or the mean of all"
    )

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {
        "lr": (
            Published(0.01, "authors' code", data="fashion-mnist"),
            Published(0.02, "authors' code", data="cifar-10"),
        ),
        "momentum": (Published(0.5, "authors' code"),),
        "weight_decay": (Published(5e-4, "authors' code"),),
        "batch_size": (Published(50, "authors' code"),),
        "local_epochs": (Published(5, "paper", "Training Settings, as the reproduction report has it"),),
        "head_lr": (Published(0.1, "authors' code", "fixed there"),),
        "head_epochs": (Published(1, "authors' code"),),
        "alignment_weight": (Published(1.0, "authors' code"),),
        "weights": (Published("qp", "paper", "Eq. 10"),),
        "prune_below": (Published(1e-3, "authors' code"),),
        "centroid_weighting": (Published("samples", "paper", "Eq. 11"),),
        "min_class_count": (Published(1, "paper", "all samples; not taken by --paper, as it shows single samples"),),
        "new_clients": (Published("own", "authors' code"),),
        "temperature": (Published(None, "not published", "Eq. 13 of the reproduction report has none"),),
    }


class FedPAC(Method):
    """Alternating local training, centroids, and a personal combination of all classifiers."""

    Params = FedPACParams
    shared = ("encoder",)  # classifiers travel as extras, for no two clients get the same one back
    evaluate_after = True
    resumable = True
    source = "Xu, Tong, Huang, ICLR 2023; reproduction report by Ding, 2025"
    bounded_extras = MappingProxyType({"extra.head.": CLASSIFIERS, "extra.centroids": CLASS_MEANS})
    class_statistics = ClassStatistics(
        means=("extra.centroids",), sums=("extra.weighted_means",), counts="extra.counts"
    )
    own_norm = False  # V, h and class means of one client are compared with those of others on one encoder
    heads = ("fedpac", "lr", "svm", "mlp", "prototype", "knn")
    exactness = grades(
        fedpac=(
            "same form",
            "the classifier, pulled to the mean of all classifiers; Eq. 6 and its combination take cohort.tier = any",
        )
    )

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return classifier, class means and counts, and with the programme V and h, as zeros."""
        head = {name: np.zeros_like(array) for name, array in to_arrays(model, _HEAD).items()}
        weight = head["head.weight"]
        counts = np.zeros(task.num_classes, np.int64)
        qp = {"variance": np.zeros(1), "weighted_means": weight} if self.params.weights == "qp" else {}
        arrays = {**head, "centroids": weight, "counts": counts, **qp}
        return {f"extra.{name}": array for name, array in arrays.items()}

    def to_noise(self, extras: Tensors) -> Tensors:
        """Return all arrays, the counts as shares of the classes."""
        counts = extras["extra.counts"]
        shares = counts / max(1, int(counts.sum()))
        return {**{name: array.astype(np.float64) for name, array in extras.items()}, "extra.counts": shares}

    def from_noise(self, noisy: Tensors) -> Tensors:
        """Return counts rounded to thousandths, no means of classes whose count is 0, no negative variances."""
        counts = np.maximum(0, np.rint(1000 * noisy["extra.counts"])).astype(np.int64)
        result = {**noisy, "extra.counts": counts}
        for name in noisy.keys() & {"extra.centroids", "extra.weighted_means"}:
            result[name] = np.where(counts[:, None] > 0, noisy[name], 0.0)
        if "extra.variance" in noisy:
            result["extra.variance"] = np.maximum(0, noisy["extra.variance"])
        return result

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to negative variances or counts, absurd sizes, and means of classes whose count is 0."""
        variance = float(tensors.get("extra.variance", np.zeros(1))[0])
        if not 0 <= variance <= _LARGEST_VARIANCE:
            return f"variance V is {variance:g}, expected 0 to {_LARGEST_VARIANCE:g}"
        for name in ("extra.head.weight", "extra.head.bias"):
            largest = np.abs(tensors[name]).max(initial=0.0)
            if largest > LARGEST:
                return f"'{name}' reaches {largest:g}, expected at most {LARGEST:g}"
        means = {name: a for name, a in sorted(tensors.items()) if name in {"extra.centroids", "extra.weighted_means"}}
        return objection_to(tensors["extra.counts"], means)

    # --- client ----------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return the passes of the classifier, and the encoder's."""
        params = self.params
        return LocalWork((Stage("head", params.head_epochs, lr=params.head_lr), Stage("encoder", params.local_epochs)))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Compute statistics, train the classifier, then the encoder towards centroids, and add class means."""
        client.require_samples()
        params = self.params
        labels = client.train_labels.cpu().numpy()
        before = features_of(client.model, client.train_inputs).cpu().numpy()
        require_finite(client, "features", before)
        self.train_head(client, before)
        # Features are drawn to the common centroids, and to the client's own means of classes without one; while there
        # are no centroids at all, to nothing: the paper's first round aligns nothing.
        counts = received.get("extra.counts")
        targets = None
        if counts is not None and counts.any() and params.alignment_weight:
            own_means, _ = steps.class_means(before, labels, client.task.num_classes)
            chosen = np.where(counts[:, None] > 0, received["extra.centroids"], own_means)
            targets = torch.from_numpy(chosen.astype(np.float32)).to(client.device)
        loss = self.aligned_loss(client.model, targets)
        train(
            client,
            loss,
            params,
            options=TrainingOptions(frozen=("head",), suspects={"alignment_weight (lambda)": params.alignment_weight}),
        )
        after = features_of(client.model, client.train_inputs).cpu().numpy() if params.local_epochs else before
        require_finite(client, "features", after)
        head = to_arrays(client.model, _HEAD)
        return {**self.sent(client), **steps.extras(head, before, after, labels, params.model_dump())}

    def train_head(self, client: Client, features: np.ndarray) -> None:
        """Train the classifier by Eq.

        6 on cached features: the encoder is frozen, so they are the same in every batch.
        """
        head = client.model.head
        params = self.params
        inputs = torch.from_numpy(features).to(client.device)
        cached = replace(client, model=Parts(head=head), train_inputs=inputs)
        train(
            cached,
            cross_entropy(head),
            params,
            lr=params.head_lr,
            options=TrainingOptions(epochs=params.head_epochs, log="head_loss"),
        )

    def aligned_loss(self, model: Parts, targets: torch.Tensor | None) -> Loss:
        """Return the loss of Eq.

        7: cross entropy plus lambda times the distance to ``targets`` (K, d), None for none.
        """

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            value = F.cross_entropy(model.head(features), labels)
            if targets is not None:
                value = value + self.params.alignment_weight * F.mse_loss(features, targets[labels])
            return value

        return loss

    def head_params(self, head: str) -> dict[str, Any]:
        """Return the parameters of the classifier's epoch for the head of the same name."""
        return steps.settings(self.params.model_dump()).model_dump() if head == "fedpac" else {}

    # --- coordinator -----------------------------------------------------------------------------------------------

    def broadcast(self, state: State) -> Tensors:
        """Return the encoder, centroids and their counts."""
        return {name: array for name, array in state.items() if not name.startswith(("clients.", "mixing."))}

    def downlink(self, state: State, client: str) -> Tensors:
        """Return the client's combination of classifiers, from the last round that it took part in."""
        names = names_in(state, "clients.names")
        if client in names:
            row = names.index(client)
            return {name: state[f"clients.{name}"][row] for name in _HEAD}
        mean = self.global_head(state) if self.params.new_clients == "mean" else None
        return {} if mean is None else {f"head.{name}": array for name, array in mean.items()}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean encoder, new centroids, and for each participant the combination of this round's classifiers.

        Updates without tensors of the encoder are left out of its mean and take part in all else.
        """
        members: list[Update] = []
        mean = self.mean(updates, lambda one, arrays: members.append(replace(one, tensors=arrays)), may_be_empty=True)
        if not members:
            raise TrainingFailed("no update to aggregate; the round keeps its state")
        members.sort(key=lambda member: member.client)
        weights = self._combine(members)
        mixed = {f"clients.{name}": combined(weights, [m.tensors[name] for m in members]) for name in _HEAD}
        rows = {
            member.client: {"clients.samples": np.array(member.weight), **{name: a[i] for name, a in mixed.items()}}
            for i, member in enumerate(members)
        }
        mixing = {"mixing.names": packed([m.client for m in members]), "mixing.weights": weights.astype(np.float32)}
        return {**state, **mean, **self._centroids(state, members), **with_rows(state, "clients.names", rows), **mixing}

    def _combine(self, members: Sequence[Update]) -> np.ndarray:
        """Return weights (m, m) float64.

        Clients without class means keep their classifier and are left out otherwise.
        """
        weights = np.eye(len(members))
        params = self.params
        indices = [index for index, member in enumerate(members) if member.tensors["counts"].any()]
        if not indices:
            return weights
        chosen = [members[index] for index in indices]
        if params.weights == "qp":  # Eq. 10
            variances = np.array([member.tensors["variance"][0] for member in chosen])
            best, solved = best_weights(variances, gram([member.tensors["weighted_means"] for member in chosen]))
            for index in np.flatnonzero(~solved).tolist():
                _log.warning("combination_unsolved client=%s keeps=own", chosen[index].client)
            best = pruned(best, params.prune_below)
        else:  # Eqs. 12-13; dearer above some dozens of clients: m^2 K^2 d against m^2 K d
            losses = prototype_losses(chosen, by_prior=params.class_weighting == "label_prior")
            losses = losses if params.direction == "target_head" else losses.T
            best = soft_smallest(np.where(losses < 0, np.inf, losses), params.temperature)
        weights[np.ix_(indices, indices)] = best
        return weights

    def _centroids(self, state: State, members: Sequence[Update]) -> Tensors:
        """Return the centroids of Eq. 11; a class without samples keeps its centroid and count."""
        counted = np.stack([member.tensors["counts"] for member in members])
        sums = np.zeros(members[0].tensors["centroids"].shape)
        total = np.zeros(counted.shape[1])
        for member, member_counts in zip(members, counted, strict=True):
            # By samples a client counts for no more than those that its update was trained on.
            share = member_counts.astype(np.float64) * min(1.0, member.weight / max(float(member_counts.sum()), 1.0))
            share = share if self.params.centroid_weighting == "samples" else member_counts > 0
            sums += share[:, None] * member.tensors["centroids"]
            total += share
        means = (sums / np.where(total > 0, total, 1.0)[:, None]).astype(np.float32)
        counts = counted.sum(axis=0)
        if "extra.counts" in state:
            means = np.where(counts[:, None] > 0, means, state["extra.centroids"])
            counts = np.where(counts > 0, counts, state["extra.counts"])
        return {"extra.centroids": means, "extra.counts": counts.astype(np.int64)}

    def combination(self, state: State) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the last participants, and weights (m, m) float32: row i combines the classifier of client i."""
        return names_in(state, "mixing.names"), state.get("mixing.weights", np.zeros((0, 0), np.float32))

    def global_head(self, state: State) -> Tensors | None:
        """Return the mean of the clients' latest classifiers by sample counts; None before the first round.

        Ours, not the paper's: it gives a new device something to start from.
        """
        if "clients.names" not in state:
            return None
        shares = state["clients.samples"] / state["clients.samples"].sum()
        return {name: combined(shares[None], list(state[f"clients.head.{name}"]))[0] for name in ("weight", "bias")}


def prototype_losses(members: Sequence[Update], *, by_prior: bool) -> np.ndarray:
    """Return F (m, m): mean cross entropy of client t's classifier (row) on the class means of client s (column).

    Classes count alike, or with ``by_prior`` by how often client s has them; infinite where s has no class mean.
    """
    counted = np.stack([member.tensors["counts"] for member in members])
    owners, labels = np.nonzero(counted)
    means = np.concatenate([m.tensors["centroids"][m.tensors["counts"] > 0] for m in members]).astype(np.float64)
    shares = counted[owners, labels].astype(np.float64) if by_prior else np.ones(len(owners))
    sums = np.bincount(owners, shares, len(members))
    losses = np.full((len(members), len(members)), np.inf)
    for row, member in zip(losses, members, strict=True):
        logits = means @ member.tensors["head.weight"].T + member.tensors["head.bias"]
        top = logits.max(axis=1)
        entropies = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - logits[np.arange(len(labels)), labels]
        np.divide(np.bincount(owners, shares * entropies, len(members)), sums, out=row, where=sums > 0)
    return losses
