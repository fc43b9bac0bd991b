"""FedPAC: features drawn to common class centroids, and for each client the best combination of all classifiers.

Source: Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
2023, and the authors' code; its reproduction report (Ding, 2025), whose numbers of equations are used here, adds the
combination by prototype losses (Eqs. 12-13).
Travels: the encoder, both ways. Up: the classifier, the statistics V and h before training, class means after it, class
counts. Down: the common centroids to all, and to each client its own combination of classifiers.
Stays: the classifier of a client that takes no part in a round, which nobody else ever sees; the data.
Server: the mean encoder by sample counts (Eq. 9), centroids (Eq. 11), and one quadratic programme for each participant,
whose optimum combines the classifiers of all participants (Eq. 10).
Differs from the paper: class means of fewer than ``min_class_count`` samples are withheld (one sample's mean is that
sample), and a client that has told no class mean keeps its own classifier and lends it to nobody. A class that nobody
has in a round keeps its centroid (the code fails). The programme is solved exactly in numpy; where that fails the
client keeps its own classifier, as in the code. Among more than 100 clients weights are cut off at 0.1 / m. The
classifier's epoch runs on features that were computed once. Devices that train no encoder may take part in all else.
``global_head`` is ours. The report's Eq. 12-13 have slips: with its formula's loss F[t, s] of target t's classifier on
source s's class means, weights are exp(-F[t, s]) over their sum for s; "negative losses get weight 0" is kept and never
happens. The report gives no temperature; class means are easy for all classifiers, so weights come out almost even
unless ``class_weighting`` is label_prior or the temperature is below 1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from ..errors import TrainingFailed
from ..heads import fedpac as steps
from ..task import State, Task, Tensors
from ..training.loops import Loss, features_of, local_optimizer, train_epochs
from ..training.parts import Parts, to_arrays
from ._simplex import best_weights, combined, gram, pruned, soft_smallest
from .base import Client, Exactness, MethodParams, Update, weighted_mean
from .base import Method as Base
from .families import names_in, packed

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)

_AT_HOME = ("clients.", "mixing.")
"""Arrays of the state that only the coordinator sees."""

_HEAD = ("head.weight", "head.bias")
_MOST_SAMPLES, _LARGEST, _LARGEST_VARIANCE = 1_000_000_000, 1e6, 1e12
"""Nothing honest comes near: features of unnormalised encoders reach some thousands."""


class Params(MethodParams):
    """The paper's defaults for Fashion-MNIST."""

    lr: float = Field(0.01, gt=0, description="eta_f in Eq. 7, for the encoder; the paper's code: 0.02 for CIFAR-10")
    weight_decay: float = Field(5e-4, ge=0, description="as in the paper's code")
    local_epochs: int = Field(5, ge=0, description="E, of the encoder")
    head_lr: float = Field(0.1, gt=0, description="eta_g in Eq. 6, fixed in the paper's code")
    head_epochs: int = Field(1, ge=0, description="passes of the classifier before the encoder; the paper's code: 1")
    alignment_weight: float = Field(1.0, ge=0, description="lambda in Eq. 3")
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
    newcomers: Literal["own", "mean"] = Field(
        "own", description="classifier of a client in its first round: its own start (paper's code), or the mean of all"
    )


class Method(Base):
    """Alternating local training, centroids, and a classifier of one's own from everybody's."""

    Params = Params
    evaluate_after = True
    source = "Xu, Tong, Huang, ICLR 2023; reproduction report by Ding, 2025"
    heads = ("fedpac", "lr", "svm", "mlp", "prototype", "knn")
    exactness: ClassVar[Exactness] = {
        "fedpac": (
            "same form",
            (
                "the classifier's own epoch (Eq. 6) on the frozen encoder; but from the mean of all classifiers, where "
                "a client of the rounds has its own combination (Eq. 10). A device gets that with cohort.tier = any"
            ),
        ),
    }

    @property
    def shared(self) -> tuple[str, ...]:
        """The encoder; classifiers travel as extras, for no two clients get the same one back."""
        return ("encoder",)

    def sends(self, model: Parts, task: Task) -> Tensors:  # noqa: ARG002 - part of the contract
        """Classifier, class means and counts; with the programme also V and h."""
        head = to_arrays(model, _HEAD)
        weight, bias = (np.zeros_like(head[name]) for name in _HEAD)
        arrays = {"head.weight": weight, "head.bias": bias}
        arrays |= {"centroids": np.zeros_like(weight), "counts": np.zeros(len(bias), np.int64)}
        if self.params.weights == "qp":
            arrays |= {"variance": np.zeros(1), "weighted_means": np.zeros_like(weight)}
        return {f"extra.{name}": array for name, array in arrays.items()}

    def objection(self, tensors: Tensors) -> str:
        """Negative variances and counts, absurd sizes, and means of classes that are said not to be there."""
        return next(_objections(tensors), "")

    # --- coordinator -----------------------------------------------------------------------------------------------

    def broadcast(self, state: State) -> Tensors:
        """Encoder, centroids and their counts."""
        return {name: array for name, array in state.items() if not name.startswith(_AT_HOME)}

    def downlink(self, state: State, client: str) -> Tensors:
        """The client's combination of classifiers, from the last round that it took part in."""
        names = names_in(state, "clients.names")
        if client in names:
            row = names.index(client)
            return {name: state[f"clients.{name}"][row] for name in _HEAD}
        mean = self.global_head(state) if self.params.newcomers == "mean" else None
        return {} if mean is None else {f"head.{name}": array for name, array in mean.items()}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Mean encoder, new centroids, and for each participant the combination of this round's classifiers.

        Updates without tensors of the encoder are left out of its mean and take part in all else.
        """
        members: list[_Member] = []
        encoders = _encoders(updates, members)
        first = list(islice(encoders, 1))
        mean = weighted_mean(chain(_emptied(first), encoders)) if first else {}
        if not members:
            raise TrainingFailed("no update to aggregate; the round keeps its state")
        members.sort(key=lambda member: member.client)
        weights = self._mixing(members)
        return {**state, **mean, **self._centroids(state, members), **_heads(state, members, weights)}

    def combination(self, state: State) -> tuple[tuple[str, ...], np.ndarray]:
        """Participants of the last round, and weights (m, m) float32: row i combines the classifier of client i."""
        empty = np.zeros((0, 0), np.float32)
        return names_in(state, "mixing.names"), state.get("mixing.weights", empty)

    def global_head(self, state: State) -> Tensors | None:
        """The mean of the clients' latest classifiers by sample counts; None before the first round.

        Ours, not the paper's: it gives a new device something to start from.
        """
        if "clients.names" not in state:
            return None
        shares = state["clients.samples"] / state["clients.samples"].sum()
        return {name: combined(shares[None], list(state[f"clients.head.{name}"]))[0] for name in ("weight", "bias")}

    # --- client ----------------------------------------------------------------------------------------------------

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Statistics, then the classifier, then the encoder drawn to the centroids; at last the class means."""
        if not client.samples:
            raise TrainingFailed(f"client '{client.id}' has no training samples; it takes no part until it has some")
        labels = client.train_labels.cpu().numpy()
        before = _finite_features(client)
        self._train_head(client, before)
        self._train_encoder(client, self._targets(client, received, before, labels))
        after = _finite_features(client) if self.params.local_epochs else before
        extras = steps.told(
            to_arrays(client.model, _HEAD),
            (before, after),
            labels,
            with_statistics=self.params.weights == "qp",
            least=self.params.min_class_count,
        )
        return {**to_arrays(client.model, self.shared_names(client.model)), **extras}

    def head_params(self, head: str) -> dict[str, Any]:
        """Those of the classifier's epoch for the head of the same name."""
        return steps.settings(self.params.model_dump()).model_dump() if head == "fedpac" else {}

    # --- inside: client --------------------------------------------------------------------------------------------

    def _train_head(self, client: Client, features: np.ndarray) -> None:
        """Eq. 6 on cached features: the encoder is frozen, so they are the same in every batch."""
        head = client.model.head
        inputs = torch.from_numpy(features).to(client.device)
        cached = replace(client, model=Parts(head=head), train_inputs=inputs)
        optimizer = local_optimizer(head.parameters(), self.params, lr=self.params.head_lr)
        loss = _classify(head)
        epochs, size = self.params.head_epochs, self.params.batch_size
        train_epochs(cached, loss, optimizer, epochs=epochs, batch_size=size, log="head_loss")

    def _train_encoder(self, client: Client, targets: torch.Tensor | None) -> None:
        """Eq. 7; ``targets`` (K, d), or None for no alignment."""
        train_epochs(
            client,
            self._loss(client.model, targets),
            local_optimizer(client.model.encoder.parameters(), self.params),
            epochs=self.params.local_epochs,
            batch_size=self.params.batch_size,
            frozen=("head",),
            weights={"alignment_weight (lambda)": self.params.alignment_weight},
        )

    def _loss(self, model: Parts, targets: torch.Tensor | None) -> Loss:
        weight = self.params.alignment_weight

        def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            value = F.cross_entropy(model.head(features), labels)
            return value if targets is None else value + weight * F.mse_loss(features, targets[labels])

        return loss

    def _targets(
        self, client: Client, received: Tensors, features: np.ndarray, labels: np.ndarray
    ) -> torch.Tensor | None:
        """Where features are drawn to (K, d): common centroids, and the client's own means of classes without one.

        None as long as there are no centroids at all: the paper's first round aligns nothing.
        """
        counts = received.get("extra.counts")
        if counts is None or not counts.any() or not self.params.alignment_weight:
            return None
        own, _ = steps.class_means(features, labels, client.task.num_classes)
        chosen = np.where(counts[:, None] > 0, received["extra.centroids"], own)
        return torch.from_numpy(chosen.astype(np.float32)).to(client.device)

    # --- inside: coordinator ---------------------------------------------------------------------------------------

    def _mixing(self, members: Sequence[_Member]) -> np.ndarray:
        """Weights (m, m) float64; who has told no class mean keeps its own classifier and lends it to nobody."""
        telling = [place for place, member in enumerate(members) if member["counts"].any()]
        weights = np.eye(len(members))
        if telling:
            find = self._programme if self.params.weights == "qp" else self._by_losses
            weights[np.ix_(telling, telling)] = find([members[place] for place in telling])
        return weights

    def _programme(self, members: Sequence[_Member]) -> np.ndarray:
        """Eq. 10."""
        variances = np.array([member["variance"][0] for member in members])
        weights, solved = best_weights(variances, gram([member["weighted_means"] for member in members]))
        for place in np.flatnonzero(~solved).tolist():
            _log.warning("combination_unsolved client=%s keeps=own", members[place].client)
        return pruned(weights, self.params.prune_below)

    def _by_losses(self, members: Sequence[_Member]) -> np.ndarray:
        """Eqs. 12-13. Dearer than the programme above some dozens of clients: m^2 K^2 d against m^2 K d."""
        losses = prototype_losses(members, by_prior=self.params.class_weighting == "label_prior")
        if self.params.direction == "source_head":
            losses = losses.T
        return soft_smallest(np.where(losses < 0, np.inf, losses), self.params.temperature)

    def _centroids(self, state: State, members: Sequence[_Member]) -> Tensors:
        """Eq. 11. A class that nobody has keeps its centroid and count."""
        sums, total = np.zeros(members[0]["centroids"].shape), np.zeros(len(members[0]["counts"]))
        for member in members:
            share = member.speaks_for() if self.params.centroid_weighting == "samples" else member["counts"] > 0
            sums += share[:, None] * member["centroids"]
            total += share
        means = (sums / np.where(total > 0, total, 1.0)[:, None]).astype(np.float32)
        counts: np.ndarray = np.stack([member["counts"] for member in members]).sum(axis=0)
        if "extra.counts" in state:
            means = np.where(counts[:, None] > 0, means, state["extra.centroids"])
            counts = np.where(counts > 0, counts, state["extra.counts"])
        return {"extra.centroids": means, "extra.counts": counts.astype(np.int64)}


@dataclass(frozen=True)
class _Member:
    """The small arrays of one update, by their names without ``extra.``."""

    client: str
    samples: float
    arrays: Tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def speaks_for(self) -> np.ndarray:
        """Counts (K,) float64, together no more than the samples that the update was trained on."""
        counts = self["counts"].astype(np.float64)
        return np.asarray(counts * min(1.0, self.samples / max(counts.sum(), 1.0)))


def prototype_losses(members: Sequence[_Member], *, by_prior: bool) -> np.ndarray:
    """F (m, m): mean cross entropy of client t's classifier (row) on the class means of client s (column).

    Classes count alike, or with ``by_prior`` by how often client s has them; infinite where s has told none.
    """
    counted = np.stack([member["counts"] for member in members])
    owners, labels = np.nonzero(counted)
    means = np.concatenate([member["centroids"][member["counts"] > 0] for member in members]).astype(np.float64)
    shares = counted[owners, labels].astype(np.float64) if by_prior else np.ones(len(owners))
    sums = np.bincount(owners, shares, len(members))
    found = np.full((len(members), len(members)), np.inf)
    for row, member in zip(found, members, strict=True):
        logits = means @ member["head.weight"].T + member["head.bias"]
        top = logits.max(axis=1)
        losses = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - logits[np.arange(len(labels)), labels]
        np.divide(np.bincount(owners, shares * losses, len(members)), sums, out=row, where=sums > 0)
    return found


def _encoders(updates: Iterable[Update], members: list[_Member]) -> Iterator[tuple[float, Tensors]]:
    """The encoders of the updates that carry one; on the way their small arrays are copied into ``members``.

    Copied, because a view keeps its whole update open.
    """
    for update in updates:
        small = {n.removeprefix("extra."): np.array(a) for n, a in update.tensors.items() if n.startswith("extra.")}
        members.append(_Member(update.client, update.weight, small))
        encoder = {name: array for name, array in update.tensors.items() if not name.startswith("extra.")}
        if encoder:
            yield update.weight, encoder


def _emptied(held: list[tuple[float, Tensors]]) -> Iterator[tuple[float, Tensors]]:
    """What is held, which is let go of on the way: one encoder at a time."""
    while held:
        yield held.pop()


def _heads(state: State, members: Sequence[_Member], weights: np.ndarray) -> Tensors:
    """The combined classifiers of this round beside those of clients that were not in it, and the weights."""
    present = {member.client: place for place, member in enumerate(members)}
    before = {name: place for place, name in enumerate(names_in(state, "clients.names")) if name not in present}
    everybody = sorted({*present, *before})
    old, new = ([place for place, name in enumerate(everybody) if name in group] for group in (before, present))
    mixed = {name: combined(weights, [member[name] for member in members]) for name in _HEAD}
    fresh = {**mixed, "samples": np.array([member.samples for member in members])}
    found: Tensors = {"clients.names": packed(everybody)}
    for name, array in fresh.items():
        found[f"clients.{name}"] = np.empty((len(everybody), *array.shape[1:]), array.dtype)
        found[f"clients.{name}"][new] = array
        if before:
            found[f"clients.{name}"][old] = state[f"clients.{name}"][list(before.values())]
    return {**found, "mixing.names": packed(sorted(present)), "mixing.weights": weights.astype(np.float32)}


def _finite_features(client: Client) -> np.ndarray:
    features: np.ndarray = features_of(client.model, client.train_inputs).cpu().numpy()
    if not np.isfinite(features).all():
        raise TrainingFailed(
            f"client '{client.id}': features hold NaN or infinity in round {client.round}; expected finite numbers; "
            "lower lr or alignment_weight (lambda), or look for extreme values in the data"
        )
    return features


def _classify(head: nn.Module) -> Loss:
    return lambda features, labels: F.cross_entropy(head(features), labels)


def _objections(tensors: Tensors) -> Iterator[str]:
    counts = tensors["extra.counts"]
    if counts.min(initial=0) < 0 or counts.max(initial=0) > _MOST_SAMPLES:
        yield f"class counts from {counts.min()} to {counts.max()}, expected 0 to {_MOST_SAMPLES}"
    variance = float(tensors.get("extra.variance", np.zeros(1))[0])
    if not 0 <= variance <= _LARGEST_VARIANCE:
        yield f"variance V is {variance:g}, expected 0 to {_LARGEST_VARIANCE:g}"
    for name in ("centroids", "weighted_means", *_HEAD):
        array = tensors.get(f"extra.{name}", np.zeros(1))
        if np.abs(array).max(initial=0.0) > _LARGEST:
            yield f"'extra.{name}' reaches {np.abs(array).max():g}, expected at most {_LARGEST:g}"
        if name not in _HEAD and array.ndim > 1 and array[counts == 0].any():
            yield f"'extra.{name}' tells of a class whose count is 0"
