"""FedFomo: every client has its own model, and takes from a few others' what helps on its validation data.

Source: Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization",
ICLR 2021, Eqs. 3-6; official code where the paper is silent.
Travels: up the whole model and how much each received one helped; down to each client the whole models of at most
``peers`` others, without names. **Privacy: clients get other clients' models**, from which training data can be
inferred; other methods here show them means or combinations alone. The bytes down are ``peers`` times FedAvg's.
Stays: the model with which the last training began, and the one with which it ended.
Server: keeps the latest model of every client (memory and checkpoints grow with the number of clients), the affinities
P, and offers each client those of the largest, at times others by chance. The mean of the models by sample counts is
kept for an export; no client ever gets it.
Differs from the paper: a fixed fifth of the local samples is held out for validation; of fewer than four samples all
serve for both. Distances are those of the learned weights; batch norm statistics are mixed like them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from ..core.task import State, Task, Tensors
from ..training.finetune import copy_tensors, second
from ..training.loops import cross_entropy, evaluate, train
from ..training.parts import Parts, load_arrays, to_arrays
from . import Choices, Client, LocalWork, MethodParams, Stage, Update, grades, searched
from .base import is_learned
from .families import TwoNetworks, names_in, rng_of, with_rows

_NAMES = "clients.names"
_MODEL = "clients.model."
_AFFINITY = "clients.affinity"
_ROUND = "clients.round"
_PEER = "extra.model."
_HELPED = "extra.helped"
_BEGAN = "began."
_VALIDATION = 0
_EXPLORING = 1


class FedFomoParams(MethodParams):
    """The parameters of FedFomo, with the defaults of the official code."""

    lr: float = Field(0.1, gt=0, description="step size in the first round; official code: 0.1")
    lr_decay: float = Field(0.99, gt=0, le=1, description="factor of lr for each round; official code: 0.99")
    weight_decay: float = Field(1e-4, ge=0, description="official code: 1e-4")
    local_epochs: int = Field(5, ge=0, description="official code: 5")
    peers: int = searched(
        5,
        Choices((4, 5, 9)),
        ge=1,
        le=100,
        description="M, models that a client gets; official code: 4 or 9; PFLlib: 5",
    )
    explore: float = Field(0.3, ge=0, le=1, description="epsilon: chance of each peer to be any; official code: 0.3")
    explore_decay: float = Field(0.05, ge=0, le=1, description="what epsilon falls by each round; official code: 0.05")


class FedFomo(TwoNetworks):
    """A model for each client, moved towards those that lower its validation loss."""

    Params = FedFomoParams
    resumable = True
    source = "Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021"
    exactness = grades(
        mlp=("approximate", "one linear layer on the mean of all encoders, which the paper never makes"),
    )

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return how much each of the offered models helped, in the order of the offer."""
        return {_HELPED: np.zeros(self.params.peers)}

    def objection(self, tensors: Tensors) -> str:
        """Return an objection to negative help; empty where there is none."""
        least = float(tensors[_HELPED].min())
        return "" if least >= 0 else f"'{_HELPED}' goes down to {least:g}, expected 0 or more"

    # --- coordinator -----------------------------------------------------------------------------------------------

    def broadcast(self, state: State) -> Tensors:
        """Return nothing: no two clients get the same."""
        return {}

    def downlink(self, state: State, client: str) -> Tensors:
        """Return the models of the peers, stacked."""
        names = names_in(state, _NAMES)
        rows = [names.index(peer) for peer in self.offered(state, client)]
        if not rows:
            return {}
        stacks = {name.removeprefix(_MODEL): array for name, array in state.items() if name.startswith(_MODEL)}
        return {_PEER + name: array[rows] for name, array in stacks.items()}

    def offered(self, state: State, client: str) -> list[str]:
        """Return the clients whose models this one gets: those of largest affinity, sometimes any.

        It depends on the state.
        """
        names = names_in(state, _NAMES)
        peers = [name for name in names if name != client]
        if not peers:
            return []
        number = int(state[_ROUND][0])
        rng = rng_of(client, _EXPLORING, number)
        chance = self.params.explore - self.params.explore_decay * (number - 1)
        peers = [peers[index] for index in rng.permutation(len(peers))]  # equal affinities stand in random order
        if client in names:
            row = state[_AFFINITY][names.index(client)]
            peers.sort(key=lambda name: -row[names.index(name)])
        # The next one is that of largest affinity, or by this chance any.
        chosen = list[str]()
        while peers and len(chosen) < self.params.peers:
            position = 0
            if rng.random() < chance:
                position = int(rng.integers(len(peers)))
            chosen.append(peers.pop(position))
        return chosen

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Return each client's latest model, the affinities after the reported help, and the mean model."""
        models = dict[str, Tensors]()
        helped = dict[str, np.ndarray]()

        def take(update: Update, extras: Tensors) -> None:
            """Note a client's model, and how much those that it got have helped."""
            model = {name: array for name, array in update.tensors.items() if name != _HELPED}
            models[update.client] = {_MODEL + name: np.array(array) for name, array in model.items()}
            helped[update.client] = extras["helped"]

        mean = self.mean(updates, take)
        rows = with_rows(state, _NAMES, models)
        # P (m, m): how much client j's models have helped client i so far.
        clients = names_in(rows, _NAMES)
        before = names_in(state, _NAMES)
        affinities = np.zeros((len(clients), len(clients)))
        if before:
            positions = [clients.index(name) for name in before]
            affinities[np.ix_(positions, positions)] = state[_AFFINITY]
        for client, amounts in helped.items():
            for peer, amount in zip(self.offered(state, client), amounts, strict=False):
                affinities[clients.index(client), clients.index(peer)] += amount
        number = state.get(_ROUND, np.zeros(1, np.int64)) + 1
        return {**state, **mean, **rows, _ROUND: number, _AFFINITY: affinities}

    # --- client ----------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return the passes over the samples that are not held out."""
        params = self.params
        learns = "all parts, on four fifths of the samples"
        schedule = f"times {params.lr_decay:g} each round"
        return LocalWork((Stage(learns, 0.8 * params.local_epochs),), schedule=schedule)

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Mix the received models into the client's own, then E epochs on the training part."""
        client.require_samples()
        helped = self._federate(client, received)
        names = self.shared_names(client.model)
        client.memory.update({_BEGAN + name: array for name, array in to_arrays(client.model, names).items()})
        rows, _ = held_back(client)
        part = replace(client, train_inputs=client.train_inputs[rows], train_labels=client.train_labels[rows])
        params = self.params
        train(part, cross_entropy(client.model), params, lr=params.lr * params.lr_decay ** (client.round - 1))
        copy_tensors(client.model, second(client.model))
        padded = np.zeros(params.peers)
        padded[: len(helped)] = helped
        return {**to_arrays(client.model, names), _HELPED: padded}

    def personalize(self, client: Client, received: Tensors) -> None:
        """Mix the last models into the client's own, without training."""
        self._federate(client, received)
        copy_tensors(client.model, second(client.model))

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return None: there is no shared model."""
        return None

    def _federate(self, client: Client, received: Tensors) -> np.ndarray:
        """Make ``client.model`` the mixture, and return how much each of the received models helped (k,) float64.

        The first candidate is the client's own model after its last training, which stays if no model helps.
        """
        model = client.model
        names = self.shared_names(client.model)
        copy_tensors(second(model), model)
        peers = _peers_in(received, names)
        if _BEGAN + names[0] not in client.memory or not client.samples:
            return np.zeros(len(peers))
        # How much lower each candidate's validation loss is than that of the model before the last training.
        old = {name: client.memory[_BEGAN + name] for name in names}
        candidates = [to_arrays(model, names), *peers]
        losses = np.array([validation_loss(client, tensors) for tensors in (old, *candidates)])
        distances = np.array([distance(tensors, old) for tensors in candidates])
        helped = helpfulness(losses[0] - losses[1:], distances)
        total = helped.sum()
        if total > 0:
            load_arrays(model, moved(old, candidates, helped / total))
        else:
            load_arrays(model, candidates[0])
        return np.asarray(helped[1:])


def _peers_in(received: Tensors, names: Sequence[str]) -> list[Tensors]:
    """Return the peers' models, which arrive stacked; ``names`` are those of the shared tensors."""
    stacks = {name.removeprefix(_PEER): array for name, array in received.items() if name.startswith(_PEER)}
    if not stacks:
        return []
    return [{name: array[row] for name, array in stacks.items()} for row in range(len(stacks[names[0]]))]


def helpfulness(drops: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return Eq. 6: max(0, drop of the validation loss / distance of the weights), or 0 for the same model."""
    useful = np.where(np.isfinite(drops), np.maximum(drops, 0.0), 0.0)
    return np.asarray(np.divide(useful, distances, out=np.zeros(len(drops)), where=distances > 0))


def moved(old: Tensors, candidates: Sequence[Tensors], weights: np.ndarray) -> Tensors:
    """Return the weights of Eq. 3: old + sum_j w_j (candidate_j - old)."""
    result: Tensors = {}
    for name, start in old.items():
        change = sum(w * (c[name].astype(np.float64) - start) for w, c in zip(weights, candidates, strict=True))
        result[name] = (start + change).astype(start.dtype)
    return result


def distance(one: Tensors, other: Tensors) -> float:
    """Return the Euclidean distance of two models' learned weights."""
    squares = [np.square(a.astype(np.float64) - other[n]).sum() for n, a in one.items() if is_learned(n, a)]
    return float(np.sqrt(np.sum(squares)))


def held_back(client: Client) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices of training and validation samples, 80 to 20, the same in each round; below four, all for both."""
    order = torch.from_numpy(rng_of(client.id, _VALIDATION).permutation(client.samples)).to(client.device)
    if client.samples < 4:
        return order, order
    cut = max(1, round(0.2 * client.samples))
    return order[cut:], order[:cut]


def validation_loss(client: Client, tensors: Tensors) -> float:
    """Return the mean cross entropy of a model on the held-out samples; ``client.model`` is that model afterwards."""
    model = client.model
    (_, rows) = held_back(client)
    load_arrays(model, tensors)
    logits = evaluate(model, model, client.train_inputs[rows])
    return float(F.cross_entropy(logits, client.train_labels[rows]))
