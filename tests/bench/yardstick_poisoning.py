"""Hostile updates against aggregation rules, measured: digits of 8 x 8, FedAvg, FedPAC and FedPick, 20 and 4 clients.

``python tests/bench/yardstick_poisoning.py --out poisoning.json --table examples/results/poisoning.md`` trains every
cell of the grid for each seed, with the clients' own code, our aggregation, our objections and our exclusions; only
transport is left out. A file that is there is continued. ``--honest`` prints instead what honest updates look like on
several splits: how far they differ in size and direction, and what the bounds cost. The bounds were chosen by that.
``--limits`` prints what FedAvg loses with other values of the limits that are constants of the code.

Attackers know everything: the bounds, and the honest updates of the round before they send their own. Updates that the
collector would reject (NaN) are left out as it does.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch

from coordinator.config import NO_BOUNDS, AggregationConfig
from coordinator.journal.entries import RoundOpened
from coordinator.rounds import bounds
from coordinator.rounds.aggregation import aggregate
from coordinator.rounds.bounds import norms_of
from coordinator.rounds.directions import find_directions
from coordinator.rounds.passes import Origin, read_here
from coordinator.rounds.repeats import count_after_round
from coordinator.rounds.selection import Exclusions
from coordinator.views.runs import Accepted, OpenRound
from edge_agent import methods
from edge_agent.client import Arrays, Built, ClientState, Session
from edge_agent.core.errors import HeadwaterError
from edge_agent.core.task import ImageInput, State, Task, Tensors
from edge_agent.data.digits import load
from edge_agent.data.partition import dirichlet, pathological, quantity
from edge_agent.methods import Method, Update
from edge_agent.methods.base import is_learned
from edge_agent.methods.values import ClassStatistics
from edge_agent.wire.tensors import first_non_finite

SIDE = 8
HELD_OUT = 0.25
BACKDOOR_CLASS = 0
TASK = Task(
    input=ImageInput(channels=1, height=SIDE, width=SIDE),
    class_names=tuple("0123456789"),
    encoder="small_cnn",
    encoder_params={"width": 8, "feature_dim": 32},
)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg with batch norm": {"lr": 0.05, "batch_size": 16},
    "fedpac": {"lr": 0.05, "batch_size": 16, "local_epochs": 2},
    "fedpick": {"lr": 0.05, "batch_size": 16},
    "fedproto": {"lr": 0.05, "batch_size": 16, "local_epochs": 2},
    "spherefed": {"batch_size": 16, "local_epochs": 2},
}
ROUNDS = 10


# --- what attackers send ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """What the attackers of a round know. Changes are those of the learned weights, as rows of float64."""

    state: State
    updates: list[Update]
    """What every client would send if it were honest, attackers included; theirs come from ``data`` of the attack."""

    attackers: list[int]
    config: AggregationConfig
    previous_step: np.ndarray | None
    """The last change of the shared model (d,); None in the first round."""

    way: np.ndarray | None
    """The change of the shared model since the start of the run (d,)."""

    rng: np.random.Generator

    method: str = "fedavg"
    number: int = 1
    """The round."""

    @property
    def names(self) -> list[str]:
        """Arrays that are weights."""
        tensors = self.updates[0].tensors
        return [name for name in sorted(tensors) if name in self.state and is_learned(name, tensors[name])]

    def changes(self, indices: Sequence[int]) -> np.ndarray:
        """The changes (len(indices), d) of some clients."""
        return np.stack([change_of(self.updates[index].tensors, self.state, self.names) for index in indices])

    @property
    def honest(self) -> list[int]:
        """Indices of the clients that are no attackers."""
        return [index for index in range(len(self.updates)) if index not in self.attackers]

    @property
    def median_norm(self) -> float:
        """Median length of the honest changes."""
        return float(np.median(np.linalg.norm(self.changes(self.honest), axis=1)))

    @property
    def median_weight(self) -> float:
        """Median sample count of the honest clients."""
        return median(self.updates[index].weight for index in self.honest)

    def with_change(self, index: int, change: np.ndarray, weight: float | None = None) -> Update:
        """The update of client ``index`` with another change of the weights, and another sample count."""
        update = self.updates[index]
        tensors = dict(update.tensors)
        begin = 0
        for name in self.names:
            array = self.state[name]
            part = change[begin : begin + array.size].reshape(array.shape)
            tensors[name] = (array + part).astype(array.dtype)
            begin += array.size
        return replace(update, tensors=tensors, weight=update.weight if weight is None else weight)


def change_of(tensors: Tensors, state: State, names: Sequence[str]) -> np.ndarray:
    """The change (d,) float64 of some arrays."""
    return np.concatenate([(tensors[name].astype(np.float64) - state[name]).reshape(-1) for name in names])


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length 1; zeros stay."""
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


Craft = Callable[[Scene, int], Update]
"""Makes the update of one attacker."""


def own_change_times(factor: float, weight: float = 1.0) -> Craft:
    """The attacker's own change times a factor, for ``weight`` times its samples; extra arrays likewise."""

    def craft(scene: Scene, index: int) -> Update:
        update = scene.updates[index]
        made = scene.with_change(index, factor * scene.changes([index])[0], weight * update.weight)
        bounded = {
            name: (np.sign(factor) * array).astype(array.dtype)
            for name, array in made.tensors.items()
            if name.startswith("extra.head.")
        }
        return replace(made, tensors={**made.tensors, **bounded})

    return craft


def against_the_honest(norm: float, weight: float) -> Craft:
    """Opposite to the honest mean, at ``norm`` times the median change and ``weight`` times the median count."""

    def craft(scene: Scene, index: int) -> Update:
        direction = -unit(scene.changes(scene.honest).mean(axis=0))
        made = scene.with_change(index, norm * scene.median_norm * direction, weight * scene.median_weight)
        return with_inverted_classifier(made)

    return craft


def with_inverted_classifier(update: Update) -> Update:
    """The same with a classifier (FedPAC) that answers the contrary."""
    inverted = {name: -array for name, array in update.tensors.items() if name.startswith("extra.head.")}
    return replace(update, tensors={**update.tensors, **inverted})


def at_cosine(cosine: float, norm: float, weight: float) -> Craft:
    """At this cosine to the honest mean, the rest of the length against what the attacker itself has learned."""

    def craft(scene: Scene, index: int) -> Update:
        mean = unit(scene.changes(scene.honest).mean(axis=0))
        # All attackers share the rest, so that they add up: away from their own deviation from the mean.
        rest = -scene.changes(scene.attackers).mean(axis=0)
        rest = unit(rest - (rest @ mean) * mean)
        direction = cosine * mean + np.sqrt(1 - cosine**2) * rest
        return scene.with_change(index, norm * scene.median_norm * direction, weight * scene.median_weight)

    return craft


def within_the_direction_test(norm: float, weight: float) -> Craft:
    """Opposite to the honest mean, but for what it takes to be at cosine -0.09 to the way of the run so far."""

    def craft(scene: Scene, index: int) -> Update:
        direction = -unit(scene.changes(scene.honest).mean(axis=0))
        if scene.way is not None:
            way = unit(scene.way)
            rest = unit(direction - (direction @ way) * way)
            along = max(-0.09, float(direction @ way))
            direction = along * way + np.sqrt(1 - along**2) * rest
        return scene.with_change(index, norm * scene.median_norm * direction, weight * scene.median_weight)

    return craft


def little_is_enough(z: float) -> Craft:
    """ALIE: honest mean minus z honest standard deviations of each weight (Baruch et al., NeurIPS 2019)."""

    def craft(scene: Scene, index: int) -> Update:
        honest = scene.changes(scene.honest)
        return scene.with_change(index, honest.mean(axis=0) - z * honest.std(axis=0))

    return craft


def inner_product(epsilon: float) -> Craft:
    """Minus epsilon times the honest mean (Xie et al., UAI 2019)."""

    def craft(scene: Scene, index: int) -> Update:
        return scene.with_change(index, -epsilon * scene.changes(scene.honest).mean(axis=0))

    return craft


def min_max(scene: Scene, index: int) -> Update:
    """As far from the honest mean as two honest changes are apart (Shejwalkar and Houmansadr, NDSS 2021)."""
    honest = scene.changes(scene.honest)
    mean = honest.mean(axis=0)
    squares = (honest**2).sum(axis=1)
    farthest = np.sqrt(np.max(squares[:, None] + squares[None] - 2 * honest @ honest.T))
    low = 0.0
    high = 50.0
    for _ in range(30):
        middle = (low + high) / 2
        distance = np.linalg.norm(honest - (mean - middle * unit(mean) * scene.median_norm), axis=1).max()
        low, high = (middle, high) if distance <= farthest else (low, middle)
    return scene.with_change(index, mean - low * unit(mean) * scene.median_norm)


def against_the_last_step(scene: Scene, index: int) -> Update:
    """-4.5 times its own length along the last step of the shared model, for 4.5 times its samples; knows no others."""
    own = scene.changes([index])[0]
    update = scene.updates[index]
    direction = own if scene.previous_step is None else scene.previous_step
    made = scene.with_change(index, -4.5 * np.linalg.norm(own) * unit(direction), 4.5 * update.weight)
    return with_inverted_classifier(made)


def filled(value: float) -> Craft:
    """Every number is this one."""

    def craft(scene: Scene, index: int) -> Update:
        update = scene.updates[index]
        tensors = {
            name: np.full_like(array, value) if array.dtype.kind == "f" and not name.startswith("extra.") else array
            for name, array in update.tensors.items()
        }
        return replace(update, tensors=tensors)

    return craft


def statistics_at_the_bound(scene: Scene, index: int) -> Update:
    """Running means of batch norm moved by 19 times the median of their honest changes, for 4.9 times the samples."""
    update = scene.updates[index]
    tensors = dict(update.tensors)
    means = [name for name in sorted(tensors) if name.endswith("running_mean") and name in scene.state]
    if means:
        lengths = [
            np.linalg.norm(change_of(scene.updates[other].tensors, scene.state, means)) for other in scene.honest
        ]
        for name in means:
            array = tensors[name]
            share = 19 * np.median(lengths) / np.sqrt(array.size * len(means))
            tensors[name] = (scene.state[name] + share).astype(array.dtype)
    return replace(update, tensors=tensors, weight=4.9 * scene.median_weight)


def lie_about_statistics(scene: Scene, index: int) -> Update:
    """FedPAC: V = 0 and the mean h of the others, so that everybody would take its classifier, which is inverted."""
    update = scene.updates[index]
    if "extra.variance" not in update.tensors:
        return own_change_times(-1.0, 4.9)(scene, index)
    others = [scene.updates[other].tensors for other in scene.honest]
    mean = np.mean([one["extra.weighted_means"] for one in others], axis=0)
    lies = {
        "extra.variance": np.zeros_like(update.tensors["extra.variance"]),
        "extra.weighted_means": mean.astype(np.float32),
        "extra.counts": np.maximum(update.tensors["extra.counts"], 1),
    }
    return with_inverted_classifier(replace(update, tensors={**update.tensors, **lies}))


def class_statistics_of(method: str) -> ClassStatistics:
    """The arrays of a method that describe classes."""
    declared = methods.create(method, {}).class_statistics
    if declared is None:
        raise ValueError(f"method {method!r} declares no class statistics")
    return declared


def exchange_classes(length: float, samples: float, count: int = 99) -> Craft:
    """The features of each class are those of the class before, so many times as long, for so many times the counts.

    ``count``: how many of the classes are exchanged; of those that the attacker has.
    """

    def craft(scene: Scene, index: int) -> Update:
        update = scene.updates[index]
        declared = class_statistics_of(scene.method)
        tensors = dict(update.tensors)
        axis = declared.class_axis
        first = (*declared.means, *declared.sums)[0]
        by_class = np.moveaxis(tensors[first], axis, 0)
        labels = np.flatnonzero(by_class.reshape(len(by_class), -1).any(axis=1))[:count]
        # Among the classes that the attacker has, so that each stays one that it has.
        order = np.arange(len(by_class))
        order[labels] = np.roll(labels, 1)
        for name in (*declared.means, *declared.sums):
            factor = length if name in declared.means else 1.0
            exchanged = np.take(tensors[name], order, axis=axis)
            tensors[name] = (factor * exchanged).astype(tensors[name].dtype)
        if declared.counts:
            tensors[declared.counts] = np.rint(samples * tensors[declared.counts]).astype(np.int64)
        else:
            for name in (*declared.sums, *declared.moments):
                tensors[name] = samples * tensors[name]
        return replace(update, tensors=tensors, weight=samples * update.weight)

    return craft


def mix_classes(share: float, length: float, samples: float) -> Craft:
    """Each class's features moved by ``share`` of the way to those of the class before: still nearer to its own."""
    exchange = exchange_classes(length, samples)

    def craft(scene: Scene, index: int) -> Update:
        own = scene.updates[index]
        made = exchange(scene, index)
        declared = class_statistics_of(scene.method)
        tensors = dict(made.tensors)
        for name in (*declared.means, *declared.sums):
            factor = length if name in declared.means else samples if declared.moments else 1.0
            mixed = share * made.tensors[name] + (1 - share) * factor * own.tensors[name]
            tensors[name] = mixed.astype(own.tensors[name].dtype)
        return replace(made, tensors=tensors)

    return craft


def one_part_against(part: str, norm: float, weight: float) -> Craft:
    """One part of the model against the honest mean, and as much of the rest along it as makes the cosine positive."""

    def craft(scene: Scene, index: int) -> Update:
        mean = scene.changes(scene.honest).mean(axis=0)
        is_part = np.concatenate([np.full(scene.state[name].size, name.startswith(part)) for name in scene.names])
        against = unit(np.where(is_part, -mean, 0))
        along = unit(np.where(is_part, 0, mean))
        shares = np.linspace(0, 1, 201)
        directions = (unit(share * along + (1 - share) * against) for share in shares)
        direction = next((one for one in directions if one @ unit(mean) >= 0.02), along)
        return scene.with_change(index, norm * scene.median_norm * direction, weight * scene.median_weight)

    return craft


def in_turns(*crafts: Craft) -> Craft:
    """One after another, round by round, from the first again."""

    def craft(scene: Scene, index: int) -> Update:
        return crafts[(scene.number - 1) % len(crafts)](scene, index)

    return craft


def flip_labels(data: Arrays) -> Arrays:
    """9 minus the label."""
    return Arrays(data.inputs, 9 - data.labels)


def add_backdoor(data: Arrays) -> Arrays:
    """Every second sample with a white patch and the label of the backdoor."""
    half = np.arange(len(data.labels)) % 2 == 0
    inputs = np.where(half[:, None, None, None], with_patch(data.inputs), data.inputs)
    return Arrays(inputs, np.where(half, BACKDOOR_CLASS, data.labels))


def with_patch(inputs: np.ndarray) -> np.ndarray:
    """The images with a white square of 2 x 2 in a corner."""
    result = inputs.copy()
    result[:, :, -2:, -2:] = 1.0
    return result


def honest_update(scene: Scene, index: int) -> Update:
    """What the client has trained."""
    return scene.updates[index]


@dataclass(frozen=True)
class Attack:
    """What some of the clients do."""

    craft: Craft = honest_update
    data: Callable[[Arrays], Arrays] | None = None
    """What the attackers train on instead of their own samples."""

    methods: tuple[str, ...] = ("fedavg", "fedpac", "fedpick")
    begins: int = 1
    """The first round in which they do it."""

    is_absent: bool = False
    """They take no part: what the others reach without them is what an attack is compared with."""


OF_CLASSES = ("fedpac", "fedproto", "spherefed")
"""Methods whose updates say what the features of each class are."""

ATTACKS: dict[str, Attack] = {
    "none": Attack(),
    "absent": Attack(is_absent=True),
    "NaN": Attack(filled(np.nan)),
    "1e30": Attack(filled(1e30)),
    "1e9 samples, -1x": Attack(own_change_times(-1.0, 1e7)),
    "-4.9x": Attack(own_change_times(-4.9)),
    "-4.9x, 4.9x samples": Attack(own_change_times(-4.9, 4.9)),
    "-4.5x last step, 4.5x samples": Attack(against_the_last_step),
    "against the honest, 4.9 and 4.9": Attack(against_the_honest(4.9, 4.9)),
    "against the honest, 1 and 2": Attack(against_the_honest(1.0, 1.99)),
    "against the honest, 1 and 1": Attack(against_the_honest(0.99, 1.0)),
    "within the direction test, 1 and 1": Attack(within_the_direction_test(0.99, 1.0)),
    "within the direction test, 1 and 3": Attack(within_the_direction_test(1.0, 2.99)),
    "cosine 0, 1 and 1": Attack(at_cosine(0.01, 1.0, 1.0)),
    "cosine 0, 1 and 3": Attack(at_cosine(0.01, 1.0, 2.99)),
    "cosine 0.2, 1 and 3": Attack(at_cosine(0.2, 1.0, 2.99)),
    "class means mixed, 1.9 and 4.9": Attack(mix_classes(0.45, 1.9, 4.9), methods=OF_CLASSES),
    "head against the honest, 4.9 and 4.9": Attack(one_part_against("head", 4.9, 4.9)),
    "alternating -4.9x, 4.9x": Attack(in_turns(own_change_times(-4.9, 4.9), own_change_times(4.9, 4.9))),
    "tiny, then -4.9x, 4.9x samples": Attack(
        in_turns(*[own_change_times(0.001)] * 7, *[own_change_times(-4.9, 4.9)] * 3)
    ),
    "drip -1x, 4.9x samples": Attack(own_change_times(-1.0, 4.9)),
    "-4.9x, 4.9x samples, from round 6": Attack(own_change_times(-4.9, 4.9), begins=6),
    "sign flip": Attack(own_change_times(-1.0)),
    "-10x": Attack(own_change_times(-10.0)),
    "ALIE z 0.37": Attack(little_is_enough(0.37)),
    "ALIE z 1.5": Attack(little_is_enough(1.5)),
    "inner product -0.5": Attack(inner_product(0.5)),
    "min-max": Attack(min_max),
    "label flip": Attack(data=flip_labels),
    "label flip, 4.9 and 4.9": Attack(own_change_times(4.9, 4.9), data=flip_labels),
    "backdoor, 4.9 and 4.9": Attack(own_change_times(4.9, 4.9), data=add_backdoor),
    "running statistics, 19 and 4.9": Attack(statistics_at_the_bound, methods=("fedavg", "fedpac")),
    "V = 0, h of the others": Attack(lie_about_statistics, methods=("fedpac",)),
    "class means exchanged": Attack(exchange_classes(4.9, 4.9), methods=OF_CLASSES),
    "class means exchanged, 1 and 1": Attack(exchange_classes(1.0, 1.0), methods=OF_CLASSES),
    "class means exchanged, 1 and 4.9": Attack(exchange_classes(1.0, 4.9), methods=OF_CLASSES),
    "two classes exchanged, 4.9 and 4.9": Attack(exchange_classes(4.9, 4.9, 2), methods=OF_CLASSES),
}

RULES: dict[str, dict[str, Any]] = {
    "no bounds": NO_BOUNDS,
    "mean (default)": {},
    "clipped": {"rule": "clipped"},
    "trimmed_mean": {"rule": "trimmed_mean"},
    "median": {"rule": "median"},
    "multi_krum": {"rule": "multi_krum"},
    "geometric_median": {"rule": "geometric_median"},
    "centered_clipping": {"rule": "centered_clipping"},
}


# --- training --------------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """The local training of all clients."""

    fresh: Tensors
    """The shared tensors that a run begins with."""

    is_personal: bool
    """Whether what counts is each client's own model."""

    def begin(self, hostile: dict[int, Arrays]) -> None:
        """A new run; ``hostile``: what some clients train on instead of their own samples."""

    def updates(self, method: Method, state: State, number: int, rounds: int) -> list[Update]:
        """What each client sends after local training."""

    def scores(self, method: Method, state: State, hidden: list[int], rounds: int) -> tuple[float, float]:
        """Accuracy on held-out samples, and the share of stamped ones of other classes taken for the backdoor's."""


class NumpyClients:
    """A network of 64, 32 and 10 units, trained for all clients at once: a cell takes a tenth of a second."""

    is_personal = False
    HIDDEN = 32
    BATCH = 8
    LR = 0.2
    MOMENTUM = 0.5

    def __init__(self, data: Sequence[tuple[Arrays, Arrays]], seed: int, epochs: int) -> None:
        self._data = data
        self._seed = seed
        self._epochs = epochs
        rng = np.random.default_rng(seed)
        sizes = {"encoder.0": (self.HIDDEN, SIDE * SIDE), "head": (len(TASK.class_names), self.HIDDEN)}
        self.fresh = {}
        for name, (out, width) in sizes.items():
            limit = 1 / np.sqrt(width)
            self.fresh[f"{name}.bias"] = rng.uniform(-limit, limit, out).astype(np.float32)
            self.fresh[f"{name}.weight"] = rng.uniform(-limit, limit, (out, width)).astype(np.float32)
        self.begin({})

    def begin(self, hostile: dict[int, Arrays]) -> None:
        own = [hostile.get(index, train) for index, (train, _) in enumerate(self._data)]
        self._sizes = np.array([len(arrays.labels) for arrays in own])
        self._inputs = np.zeros((len(own), self._sizes.max(), SIDE * SIDE), np.float32)
        self._labels = np.zeros((len(own), self._sizes.max()), np.int64)
        for index, arrays in enumerate(own):
            self._inputs[index, : self._sizes[index]] = arrays.inputs.reshape(-1, SIDE * SIDE)
            self._labels[index, : self._sizes[index]] = arrays.labels

    def updates(self, method: Method, state: State, number: int, rounds: int) -> list[Update]:
        count = len(self._sizes)
        weights = {name: np.repeat(state[name][None], count, axis=0) for name in self.fresh}
        velocity = {name: np.zeros_like(array) for name, array in weights.items()}
        rng = np.random.default_rng([self._seed, number])
        clients = np.arange(count)[:, None]
        for _ in range(self._epochs):
            # Each client's samples in random order; those who have fewer stop earlier.
            keys = rng.random(self._labels.shape)
            keys[np.arange(keys.shape[1]) >= self._sizes[:, None]] = 2.0
            order = keys.argsort(axis=1)
            for begin in range(0, int(self._sizes.max()), self.BATCH):
                rows = order[:, begin : begin + self.BATCH]
                there = (begin + np.arange(rows.shape[1]))[None] < self._sizes[:, None]
                gradients = self._gradients(weights, self._inputs[clients, rows], self._labels[clients, rows], there)
                active = there.any(axis=1)
                for name, gradient in gradients.items():
                    velocity[name][active] = self.MOMENTUM * velocity[name][active] + gradient[active]
                    weights[name][active] -= self.LR * velocity[name][active]
        return [
            Update(f"{index:02}", float(self._sizes[index]), {name: weights[name][index] for name in weights})
            for index in range(count)
        ]

    @staticmethod
    def _gradients(weights: Tensors, inputs: np.ndarray, labels: np.ndarray, there: np.ndarray) -> Tensors:
        """Gradients of cross entropy on a batch of each client; ``there`` (n, b): which samples exist."""
        before = inputs @ weights["encoder.0.weight"].transpose(0, 2, 1) + weights["encoder.0.bias"][:, None]
        features = np.maximum(before, 0)
        logits = features @ weights["head.weight"].transpose(0, 2, 1) + weights["head.bias"][:, None]
        errors = np.exp(logits - logits.max(axis=2, keepdims=True))
        errors /= errors.sum(axis=2, keepdims=True)
        np.put_along_axis(errors, labels[:, :, None], np.take_along_axis(errors, labels[:, :, None], 2) - 1, 2)
        errors *= (there / np.maximum(1, there.sum(axis=1, keepdims=True)))[:, :, None]
        errors = errors.astype(np.float32)
        back = (errors @ weights["head.weight"]) * (before > 0)
        return {
            "head.weight": errors.transpose(0, 2, 1) @ features,
            "head.bias": errors.sum(axis=1),
            "encoder.0.weight": back.transpose(0, 2, 1) @ inputs,
            "encoder.0.bias": back.sum(axis=1),
        }

    def scores(self, method: Method, state: State, hidden: list[int], rounds: int) -> tuple[float, float]:
        honest = [test for index, (_, test) in enumerate(self._data) if index not in hidden]
        inputs = np.concatenate([test.inputs for test in honest])
        labels = np.concatenate([test.labels for test in honest])
        backdoor = self._answers(state, with_patch(inputs[labels != BACKDOOR_CLASS])) == BACKDOOR_CLASS
        return float((self._answers(state, inputs) == labels).mean()), float(backdoor.mean())

    @staticmethod
    def _answers(state: State, inputs: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            pixels = inputs.reshape(len(inputs), -1)
            features = np.maximum(pixels @ state["encoder.0.weight"].T + state["encoder.0.bias"], 0)
            logits = features @ state["head.weight"].T + state["head.bias"]
        return np.asarray(logits.argmax(axis=1))


class TorchClients:
    """The clients' own code."""

    def __init__(self, method: Method, data: Sequence[tuple[Arrays, Arrays]], seed: int) -> None:
        self._data = data
        self._seed = seed
        self._method = method
        self.is_personal = method.name != "fedavg"
        self._built = Built.of(method, TASK, seed=seed, device="cpu")
        self._honest = [self._session(index, train) for index, (train, _) in enumerate(data)]
        self.fresh = {name: self._built.fresh[name] for name in self._honest[0].shared}
        self.begin({})

    def _session(self, index: int, train: Arrays) -> Session:
        _, test = self._data[index]
        client = f"{index:02}"
        return Session(self._method, TASK, client, train, test, seed=self._seed, device="cpu", model=self._built)

    def begin(self, hostile: dict[int, Arrays]) -> None:
        self._sessions = list(self._honest)
        for index, train in hostile.items():
            self._sessions[index] = self._session(index, train)
        self._kept = [ClientState()] * len(self._sessions)

    def updates(self, method: Method, state: State, number: int, rounds: int) -> list[Update]:
        updates = []
        common = method.broadcast(state)
        for index, session in enumerate(self._sessions):
            received = {**common, **method.downlink(state, session.client)}
            try:
                outcome = session.train(received, self._kept[index], round_number=number, rounds=rounds, evaluate=False)
            except HeadwaterError:  # it has diverged: what it sends is rejected
                nothing = {name: np.full_like(array, np.nan) for name, array in self.fresh.items()}
                updates.append(Update(session.client, 1.0, nothing))
                continue
            self._kept[index] = outcome.kept
            updates.append(Update(session.client, float(outcome.samples), outcome.update))
        return updates

    def scores(self, method: Method, state: State, hidden: list[int], rounds: int) -> tuple[float, float]:
        right = []
        stamped = []
        for index, session in enumerate(self._sessions):
            if index in hidden:
                continue
            received = {**method.broadcast(state), **method.downlink(state, session.client)}
            inputs, labels = session.test
            try:
                outcome = session.finish(received, self._kept[index], rounds=rounds)
            except HeadwaterError:  # it has diverged
                right.append((0.0, len(labels)))
                continue
            right.append((outcome.metrics["acc.personal"], len(labels)))
            others = labels != BACKDOOR_CLASS
            if others.any():
                client = session.before_round(received, self._kept[index], round_number=rounds, rounds=rounds, salt=1)
                answers = method.predict(client, torch.from_numpy(with_patch(inputs[others].numpy()))).argmax(dim=1)
                stamped.append((float((answers == BACKDOOR_CLASS).double().mean()), len(answers)))
        accuracy = fmean(score for score, _ in right) if self.is_personal else weighted(right)
        return accuracy, weighted(stamped)


# --- a federation ----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came out of a run."""

    accuracy: float
    """FedAvg: of the shared model on all held-out samples. Others: mean of the honest clients' personal accuracies."""

    backdoor: float
    """Share of stamped samples of other classes that the shared model takes for the backdoor's; NaN without one."""

    attackers_left_out: int = 0
    honest_left_out: int = 0
    """Rounds, added over the clients."""

    attackers_suspect: int = 0
    honest_suspect: int = 0
    honest_bounded: int = 0
    """Updates."""


def split_of(name: str, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    """The rows of each client."""
    rng = np.random.default_rng(seed)
    kind, _, value = name.partition(" ")
    if kind == "quantity":
        return list(quantity(labels, clients, float(value), rng))
    if kind == "pathological":
        return list(pathological(labels, clients, rng, classes_each=2))
    return list(dirichlet(labels, clients, float(value), rng))


@dataclass
class Federation:
    """Clients of one split, and their rounds under an attack and a rule."""

    method_name: str
    clients: int
    seed: int
    split: str = "dirichlet 0.5"
    epochs: int | None = None

    def __post_init__(self) -> None:
        images, labels = load()
        inputs = (images[:, None] / 255).astype(np.float32)
        rows = split_of(self.split, labels, self.clients, self.seed)
        params = METHODS[self.method_name] | ({} if self.epochs is None else {"local_epochs": self.epochs})
        self.method = methods.create(self.method_name.partition(" ")[0], params)
        self.data: list[tuple[Arrays, Arrays]] = []
        for own in rows:
            order = np.random.default_rng(self.seed).permutation(own)
            cut = max(1, round(HELD_OUT * len(order)))
            test = order[:cut]
            train = order[cut:]
            self.data.append((Arrays(inputs[train], labels[train]), Arrays(inputs[test], labels[test])))
        if self.method_name == "fedavg":
            self.trainer: Trainer = NumpyClients(self.data, self.seed, self.epochs or 3)
        else:
            self.trainer = TorchClients(self.method, self.data, self.seed)

    def attackers(self, count: int) -> list[int]:
        """Which clients are hostile: others for each seed."""
        return sorted(np.random.default_rng(self.seed + 1000).permutation(self.clients)[:count].tolist())

    def run(
        self,
        attack: Attack,
        count: int,
        settings: dict[str, Any],
        rounds: int = ROUNDS,
        look: Callable[[State, list[Update], Any], None] | None = None,
    ) -> Result:
        """``rounds`` rounds in which ``count`` clients attack, by an aggregation of these settings."""
        config = AggregationConfig(**{"attackers": max(1, count), **settings})
        attackers = self.attackers(count)
        self.trainer.begin({index: attack.data(self.data[index][0]) for index in attackers if attack.data})
        state = self.method.start(self.trainer.fresh)
        exclusions = Exclusions()
        begin = dict(state)
        result = Result(0.0, float("nan"))
        previous = None
        way = None
        repeats: dict[str, int] = {}
        is_bounded = settings.get("max_norm", 5.0) is not None
        for number in range(1, rounds + 1):
            left_out = exclusions.left_out(number)
            result.attackers_left_out += sum(int(agent) in attackers for agent in left_out)
            result.honest_left_out += sum(int(agent) not in attackers for agent in left_out)
            base = state
            updates = self.trainer.updates(self.method, state, number, rounds)
            if number >= attack.begins and attackers:
                rng = np.random.default_rng([self.seed, number])
                received = self.method.broadcast(state)
                scene = Scene(received, updates, attackers, config, previous, way, rng, self.method.name, number)
                made = {index: attack.craft(scene, index) for index in attackers}
                updates = [made.get(index, update) for index, update in enumerate(updates)]
            absent = {f"{index:02}" for index in attackers} if attack.is_absent else set()
            cohort = [update for update in updates if update.client not in {*left_out, *absent}]
            accepted = [update for update in cohort if self.is_acceptable(update)]
            if not accepted:  # every client has diverged: a run fails here
                break
            once = functools.partial(list, accepted)
            state, decisions = aggregate(self.method, base, once, config, begin, repeats)
            repeats = count_after_round(repeats, decisions.repeats, [update.client for update in accepted])
            names = [name for name, array in sorted(self.trainer.fresh.items()) if is_learned(name, array)]
            previous = change_of(state, base, names)
            way = change_of(state, begin, names)
            if look is not None:
                look(base, accepted, decisions)
            suspects = decisions.suspects if is_bounded else {}
            result.attackers_suspect += sum(int(agent) in attackers for agent in suspects)
            result.honest_suspect += sum(int(agent) not in attackers for agent in suspects)
            bounded = {**decisions.clipped, **decisions.capped}
            result.honest_bounded += sum(int(agent) not in attackers for agent in bounded)
            rejected = {one.client: "NaN" for one in cohort if one not in accepted}
            opened = OpenRound(
                number,
                1,
                tuple(one.client for one in cohort),
                RoundOpened(),
                {one.client: Accepted("", one.weight, {}) for one in accepted},
                rejected,
            )
            exclusions.note_closed(opened, {}, {}, (), suspects)
        result.accuracy, result.backdoor = self.trainer.scores(self.method, state, attackers, rounds)
        return result

    def is_acceptable(self, update: Update) -> bool:
        """Whether the collector takes it."""
        return first_non_finite(update.tensors) is None and not self.method.objection(update.tensors)


def weighted(pairs: Sequence[tuple[float, int]]) -> float:
    """Mean by counts."""
    return sum(score * count for score, count in pairs) / max(1, sum(count for _, count in pairs))


# --- the grid --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A table of the grid: attacks in rows, rules (or methods) in columns."""

    title: str
    method: str
    clients: int
    attackers: int
    rules: tuple[str, ...]
    attacks: tuple[str, ...]


DEFAULT = "mean (default)"
AT_THE_BOUNDS = (
    "-4.9x, 4.9x samples",
    "-4.5x last step, 4.5x samples",
    "against the honest, 4.9 and 4.9",
    "against the honest, 1 and 1",
    "drip -1x, 4.9x samples",
    "-4.9x, 4.9x samples, from round 6",
    "sign flip",
    "label flip, 4.9 and 4.9",
    "backdoor, 4.9 and 4.9",
)
"""Attacks that stay below every bound of size, or reach it exactly."""

INSIDE_THE_TEST = ("within the direction test, 1 and 1", "cosine 0, 1 and 1", "cosine 0, 1 and 3")
"""Attacks that stay below the bounds of size and of direction, by what they know of the others and of the run."""

COLLUSIONS = (
    "sign flip",
    "-10x",
    "-4.9x, 4.9x samples",
    "ALIE z 0.37",
    "ALIE z 1.5",
    "inner product -0.5",
    "label flip",
    "backdoor, 4.9 and 4.9",
    "within the direction test, 1 and 1",
)
FEW = ("-4.9x, 4.9x samples", "-4.5x last step, 4.5x samples", "drip -1x, 4.9x samples", "backdoor, 4.9 and 4.9")
EXCHANGES = (
    "class means exchanged",
    "class means exchanged, 1 and 1",
    "class means exchanged, 1 and 4.9",
    "two classes exchanged, 4.9 and 4.9",
    "class means mixed, 1.9 and 4.9",
)
"""Lies about classes, for methods whose updates say what the features of each class are."""

LIES = ("V = 0, h of the others", *EXCHANGES)
SPREAD = ("head against the honest, 4.9 and 4.9", "alternating -4.9x, 4.9x", "tiny, then -4.9x, 4.9x samples")
"""Attacks that look harmless on the whole, or in most rounds."""

BY_MEANS = ("no bounds", DEFAULT, "centered_clipping")
ROBUST = tuple(rule for rule in RULES if rule not in {"no bounds", "clipped"})

PARTS = (
    Part("FedAvg, 1 of 4", "fedavg", 4, 1, BY_MEANS, (*AT_THE_BOUNDS, *SPREAD, *INSIDE_THE_TEST)),
    Part("FedAvg, 1 of 20", "fedavg", 20, 1, BY_MEANS, (*AT_THE_BOUNDS, *SPREAD, *INSIDE_THE_TEST)),
    Part("FedAvg, 4 of 20", "fedavg", 20, 4, BY_MEANS, (*AT_THE_BOUNDS, *SPREAD, *INSIDE_THE_TEST)),
    Part("FedAvg, 6 of 20", "fedavg", 20, 6, ROBUST, COLLUSIONS),
    Part("FedPAC, 1 of 4", "fedpac", 4, 1, ("no bounds", DEFAULT), (*FEW, *LIES)),
    Part("FedPick, 1 of 4", "fedpick", 4, 1, ("no bounds", DEFAULT), FEW),
    Part("FedProto, 1 of 4", "fedproto", 4, 1, ("no bounds", DEFAULT), EXCHANGES),
    Part("SphereFed, 1 of 4", "spherefed", 4, 1, ("no bounds", DEFAULT), EXCHANGES),
    Part("FedPAC, 4 of 20", "fedpac", 20, 4, (DEFAULT,), (*FEW, *LIES)),
    Part("FedPick, 4 of 20", "fedpick", 20, 4, (DEFAULT,), FEW),
    Part("FedProto, 4 of 20", "fedproto", 20, 4, (DEFAULT,), EXCHANGES),
    Part("SphereFed, 4 of 20", "spherefed", 20, 4, (DEFAULT,), EXCHANGES),
)


def keys_of(part: Part, seed: int) -> Iterator[tuple[str, str, Attack, str]]:
    """Key, attack's name, attack and rule of each cell of a part; first that without attackers at all."""
    settings = (part.method, str(part.clients), str(part.attackers))
    yield "|".join((*settings, "absent", "no bounds", str(seed))), "absent", ATTACKS["absent"], "no bounds"
    for name in ("none", *part.attacks):
        for rule in part.rules:
            yield "|".join((*settings, name, rule, str(seed))), name, ATTACKS[name], rule


def measure(part: Part, seed: int, results: dict[str, dict[str, Any]], out: Path) -> None:
    """Run the cells of a part that have no result yet."""
    federation: Federation | None = None
    for key, _, attack, rule in keys_of(part, seed):
        if key in results:
            continue
        federation = federation or Federation(part.method, part.clients, seed)
        begin = time.process_time()
        result = federation.run(attack, part.attackers, RULES[rule])
        results[key] = {**vars(result), "cpu_s": round(time.process_time() - begin, 2)}
        out.write_text(json.dumps(results, indent=1))
        print(key, results[key], flush=True)


def table(results: dict[str, dict[str, Any]], seeds: int) -> str:
    """Markdown: for each part the accuracy without attackers, what each attack costs, and who is left out."""
    lines: list[str] = []
    for part in PARTS:
        found = [seed for seed in range(seeds) if all(key in results for key, *_ in keys_of(part, seed))]
        if not found:
            continue
        settings = f"{part.method}|{part.clients}|{part.attackers}"

        def values(
            name: str, rule: str, figure: str, settings: str = settings, seeds: list[int] = found
        ) -> list[float]:
            return [results[f"{settings}|{name}|{rule}|{seed}"][figure] for seed in seeds]

        absent = values("absent", "no bounds", "accuracy")
        lines += [f"### {part.title}", ""]
        lines += [f"Honest clients alone: {100 * fmean(absent):.1f} % (seeds: {len(found)}).", ""]
        lines += [f"| attack | {' | '.join(part.rules)} |", f"|---|{'---|' * len(part.rules)}"]
        for name in ("none", *part.attacks):
            texts = []
            for rule in part.rules:
                lost = [100 * (best - one) for best, one in zip(absent, values(name, rule, "accuracy"), strict=True)]
                text = f"{fmean(lost):.1f} ({max(lost):.1f})"
                if "backdoor" in name:
                    text += f" b {100 * fmean(values(name, rule, 'backdoor')):.0f}"
                hostile = sum(values(name, rule, "attackers_left_out"))
                honest = sum(values(name, rule, "honest_left_out"))
                text += f" out {hostile / len(found):.0f}/{honest / len(found):.0f}" if hostile or honest else ""
                texts.append(text)
            lines.append(f"| {name} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join(lines)


# --- honest clients --------------------------------------------------------------------------------------------------


def honest(seeds: int, method_names: Sequence[str]) -> None:
    """Print how far honest updates differ in size and direction on several splits, and what the bounds cost."""
    print("| method | clients | split | norm | samples | share | to others | decisive | lost | suspect | left out |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in method_names:
        for clients in (20, 4):
            for split in ("dirichlet 0.5", "dirichlet 0.1", "pathological", "quantity 0.5"):
                print(honest_row(name, clients, split, seeds), flush=True)


def honest_row(name: str, clients: int, split: str, seeds: int) -> str:
    """One row of that table."""
    norms = []
    weights = []
    shares = []
    to_others = []
    decisive = []
    lost = []
    suspects = left_out = 0
    for seed in range(seeds):
        federation = Federation(name, clients, seed, split)
        begin = federation.trainer.fresh

        def look(
            base: State, updates: list[Update], _: Any, fed: Federation = federation, start: Tensors = begin
        ) -> None:
            by_group = norms_of(fed.method, base, updates)
            norm = np.array([by_group["weights"][update.client] for update in updates])
            if not norm.any():  # SphereFed's last round calibrates, and changes no weights
                return
            weight = np.array([update.weight for update in updates])
            for found, array in ((norms, norm), (weights, weight), (shares, norm * weight)):
                found.append(array.max() / np.median(array))
            finding = find_directions(Origin(fed.method, fed.method.broadcast(base), start), by_group)
            directions = read_here(finding, lambda: updates)["weights"].values()
            to_others.append(min(direction.to_others for direction in directions))
            decisive.append(min(direction.decisive for direction in directions))

        plain = federation.run(ATTACKS["none"], 0, RULES["no bounds"], look=look)
        bounded = federation.run(ATTACKS["none"], 0, RULES[DEFAULT])
        lost.append(100 * (plain.accuracy - bounded.accuracy))
        suspects += bounded.honest_suspect
        left_out += bounded.honest_left_out
    sizes = f"{max(norms):.1f} | {max(weights):.1f} | {max(shares):.1f}"
    cosines = f"{min(to_others):.2f} | {min(decisive):.2f}"
    return f"| {name} | {clients} | {split} | {sizes} | {cosines} | {fmean(lost):.1f} | {suspects} | {left_out} |"


# --- other limits ----------------------------------------------------------------------------------------------------

LIMITS = {
    "OUTLIER_SHARE": (0.125, 0.25, 0.5, 1.0),
    "SUSPECT_SHARE": (0.05, 0.1, 0.2),
    "NEAR_BOUND": (0.75, 0.9, 1.0),
}
"""Constants of `coordinator.rounds.bounds` -> the values that are tried, one constant at a time."""

LIMIT_SEEDS = range(40, 44)
"""Seeds that no limit was chosen by."""


def limits() -> None:
    """Print what attacks on FedAvg cost, in the mean and at most, with other values of `LIMITS`."""
    print("| limit | value | 1 of 4 | 1 of 20 | 4 of 20 | honest updates suspect |")
    print("|---|---|---|---|---|---|")
    parts = [part for part in PARTS if part.method == "fedavg" and part.rules == BY_MEANS]
    for name, values in LIMITS.items():
        for value in values:
            with patch.object(bounds, name, value):
                cells = [limit_cell(part) for part in parts]
            texts = " | ".join(text for text, _ in cells)
            print(f"| {name} | {value} | {texts} | {sum(suspects for _, suspects in cells)} |", flush=True)


def limit_cell(part: Part) -> tuple[str, int]:
    """Return points lost over the attacks of a part, mean and worst, and how many honest updates were suspect."""
    lost: list[float] = []
    suspects = 0
    for seed in LIMIT_SEEDS:
        federation = federation_of(part.method, part.clients, seed)
        alone = federation.run(ATTACKS["absent"], part.attackers, RULES["no bounds"])
        for attack in part.attacks:
            attacked = federation.run(ATTACKS[attack], part.attackers, RULES[DEFAULT])
            lost.append(100 * (alone.accuracy - attacked.accuracy))
            suspects += attacked.honest_suspect
    return f"{fmean(lost):.2f} ({max(lost):.1f})", suspects


@functools.cache
def federation_of(method: str, clients: int, seed: int) -> Federation:
    """Return a federation that is split once, however often it runs."""
    return Federation(method, clients, seed)


def main() -> None:
    """Run what is asked for; a JSON file that is there is continued."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=[part.title for part in PARTS])
    parser.add_argument("--honest", nargs="*", metavar="METHOD")
    parser.add_argument("--limits", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.limits:
        limits()
        return
    if options.honest is not None:
        honest(options.seeds, options.honest or list(METHODS))
        return
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in PARTS:
        for seed in range(options.seeds):
            if part.title in options.parts:
                measure(part, seed, results, options.out)
    if options.table is not None:
        options.table.write_text(table(results, options.seeds))


if __name__ == "__main__":
    main()
