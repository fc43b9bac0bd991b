"""What a device that joins after training reaches: the method's own head, 'lr' and 'auto' beside training it all.

Some clients train a method; then others, with the same rule of label shares, either fit heads on the frozen encoder or
train on with everybody as full clients. Both are tested on the same samples of theirs.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from edge_agent import data, heads, methods
from edge_agent.core.task import Task, Tensors
from edge_agent.data import Samples
from edge_agent.data.partition import dirichlet
from edge_agent.heads import FitData
from edge_agent.methods.base import Method, pooled_norm
from edge_agent.methods.values import Client, Update
from edge_agent.personal.choice import FOLDS, candidates, choose, thin_out
from edge_agent.personal.local.validation import folds
from edge_agent.training.loops import features_of
from edge_agent.training.parts import load_arrays, personal_names, to_arrays

FASHION = "idx:/usr/share/datasets/fashion-mnist?split=train"
AS_BEFORE: dict[str, dict[str, Any]] = {
    "fedpac": {"c": None},
    "dualfed": {"shared_c": None},
    "fedpick": {"shared_c": None},
}
"""Parameters with which the methods' heads do as little for a new device as for a client of a run."""


@dataclass(frozen=True)
class Setting:
    """A federation of ``clients`` - ``new`` clients, and how long the new ones train with it in the comparison."""

    method: str
    seed: int = 0
    source: str = FASHION
    encoder: str = "fedrir_cnn"
    params: dict[str, Any] = field(default_factory=dict)
    pool: int = 12_000
    clients: int = 15
    new: int = 5
    alpha: float = 0.3
    largest: tuple[int, int] = (300, 500)
    rounds: int = 10
    joined: int = 8


SETTINGS = (
    Setting("fedpac", encoder="fedpac_cnn", rounds=8, joined=4),
    Setting("dualfed", params={"lr": 0.05}),
    Setting("fedpick", params={"lr": 0.02}),
    Setting("repper", params={"local_epochs": 1}, rounds=4, joined=2),
)


class Federation:
    """The clients of a setting in one process; nothing is sent."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        rng = np.random.default_rng(setting.seed)
        pool = data.load(setting.source).ready()
        pool = pool.take(rng.permutation(len(pool))[: setting.pool])
        parts = dirichlet(pool.labels, setting.clients, setting.alpha, rng, min_size=max(10, setting.pool // 120))
        rows = list(parts.values()) if isinstance(parts, dict) else list(parts)
        self.task = Task(input=pool.input, class_names=pool.class_names, encoder=setting.encoder)
        self.method: Method = methods.create(setting.method, setting.params)
        self.model = self._fresh(0)
        self.shared = self.method.shared_names(self.model)
        self.state = self.method.start(to_arrays(self.model, self.shared))
        self.clients: dict[str, Client] = {}
        self.tests: dict[str, Samples] = {}
        for number, own in enumerate(rows):
            mixed = rng.permutation(np.asarray(own))
            name = f"c{number:02d}"
            count = min(len(mixed) // 2, setting.largest[0])
            train = pool.take(mixed[:count])
            self.tests[name] = pool.take(mixed[count : count + setting.largest[1]])
            self.clients[name] = Client(
                id=name,
                model=self._fresh(number + 1),
                train_inputs=torch.from_numpy(train.inputs),
                train_labels=torch.from_numpy(train.labels),
                task=self.task,
                device=torch.device("cpu"),
                rng=np.random.default_rng([setting.seed, number]),
                generator=torch.Generator().manual_seed(1000 * setting.seed + number),
                rounds=setting.rounds + setting.joined,
            )
        names = sorted(self.clients)
        self.old = names[: -setting.new]
        self.new = names[-setting.new :]

    def run(self, rounds: int, who: list[str]) -> dict[str, float]:
        """Rounds of local training and aggregation; accuracies after the last local training."""
        accuracies: dict[str, float] = {}
        for number in range(1, rounds + 1):
            updates = []
            for name in who:
                client = self.clients[name]
                client.round = number
                sent = self.method.local_update(client, self.download(name))
                updates.append(Update(name, float(client.samples), sent))
                if number == rounds and self.method.evaluate_after:
                    accuracies[name] = self.accuracy(name)
            self.state = self.method.aggregate(self.state, updates)
        return accuracies

    def download(self, name: str) -> Tensors:
        """What a client receives, loaded into its model."""
        received = {**self.method.broadcast(self.state), **self.method.downlink(self.state, name)}
        load_arrays(self.clients[name].model, {k: a for k, a in received.items() if not k.startswith("extra.")})
        return received

    def accuracy(self, name: str) -> float:
        """Share of right answers, 0..1, of a client's model on its test samples."""
        answers = self.method.predict(self.clients[name], torch.from_numpy(self.tests[name].inputs))
        return float((answers.cpu().numpy().argmax(axis=1) == self.tests[name].labels).mean())

    def freeze(self) -> None:
        """Put the state into the model that is exported, with batch norm pooled over the clients that have trained."""
        state = dict(self.state)
        own = self.clients[self.old[0]].model
        kept = [n for n in personal_names(own, self.shared) if n.startswith("encoder.") and "num_batches" not in n]
        if kept:
            members = [self.clients[name] for name in self.old]
            state |= pooled_norm([(float(one.samples), to_arrays(one.model, kept)) for one in members])
        load_arrays(self.model, {name: array for name, array in state.items() if name in self.model.state_dict()})

    def _fresh(self, salt: int) -> Any:
        torch.manual_seed(1000 * self.setting.seed + salt)
        return self.method.build(self.task)


def measure(setting: Setting) -> dict[str, float]:
    """Mean accuracies 0..1 over the new clients, and ``auto_s``, the CPU seconds of the choice of a head."""
    federation = Federation(setting)
    federation.run(setting.rounds, federation.old)
    federation.freeze()
    shared = federation.method.global_head(federation.state)
    found: dict[str, list[float]] = {}
    for name in federation.new:
        for head, value in of_heads(federation, name, shared).items():
            found.setdefault(head, []).append(value)
    if setting.method == "fedpac":
        found["combined"] = combined(federation, shared)
    after = federation.run(setting.joined, federation.old + federation.new)
    for name in federation.new:
        federation.method.personalize(federation.clients[name], federation.download(name))
        found.setdefault("full", []).append(max(federation.accuracy(name), after.get(name, 0.0)))
    return {name: float(np.mean(values)) for name, values in found.items()}


def combined(federation: Federation, shared: Tensors | None) -> list[float]:
    """Accuracies of FedPAC's combination of all classifiers (Eq. 10) for each new client, whose own is fitted first.

    Everybody sends statistics and classifier of the frozen encoder; nobody trains on.
    """
    still = methods.create("fedpac", {**federation.setting.params, "local_epochs": 0, "head_epochs": 0})
    updates = []
    for name, client in federation.clients.items():
        received = federation.download(name)
        if name in federation.new:
            rows = features_of(federation.model, client.train_inputs).numpy()
            own = heads.create("fedpac")
            known = FitData(rows, client.train_labels.numpy(), federation.task.num_classes, shared)
            own.fit(known, np.random.default_rng(0))
            load_arrays(client.model, {f"head.{part}": own.arrays[part] for part in ("weight", "bias")})
        updates.append(Update(name, float(client.samples), still.local_update(client, received)))
    state = still.aggregate(federation.state, updates)
    for name in federation.new:
        load_arrays(federation.clients[name].model, dict(still.downlink(state, name)))
    return [federation.accuracy(name) for name in federation.new]


def of_heads(federation: Federation, name: str, shared: Tensors | None) -> dict[str, float]:
    """Accuracies of heads on the frozen encoder for one new client."""
    client = federation.clients[name]
    test = federation.tests[name]
    method = federation.method
    labels = client.train_labels.numpy()
    train_rows = features_of(federation.model, client.train_inputs).numpy()
    test_rows = features_of(federation.model, torch.from_numpy(test.inputs)).numpy()

    def fit(head: str, rows: np.ndarray, **params: Any) -> heads.Head:
        fitted = heads.create(head, {**(method.head_params(head) if head in method.heads else {}), **params})
        known = FitData(train_rows[rows], labels[rows], federation.task.num_classes, shared)
        fitted.fit(known, np.random.default_rng(0))
        return fitted

    def score(head: str, **params: Any) -> float:
        answers = fit(head, np.arange(len(labels)), **params).predict_proba(test_rows)
        return float((answers.argmax(axis=1) == test.labels).mean())

    own = method.heads[0]
    result = {"own": score(own), "own as before": score(own, **AS_BEFORE.get(method.name, {})), "lr": score("lr")}
    samples = Samples(client.train_inputs.numpy(), labels, test.class_names, test.input)
    rng = np.random.default_rng(0)
    divisions = thin_out(labels, folds(samples, FOLDS, rng), rng)
    begin = time.process_time()
    choice = choose(
        candidates(method.heads, has_shared=True), fit, train_rows, labels, divisions, clock=time.process_time
    )
    result["auto_s"] = time.process_time() - begin
    return {**result, "auto": score(choice.name)}


def main() -> None:
    """Print a line for each method and seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=[one.method for one in SETTINGS])
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for setting in SETTINGS:
        for seed in range(arguments.seeds) if setting.method in arguments.methods else ():
            found = measure(Setting(**{**vars(setting), "seed": seed}))
            print(setting.method, seed, {name: round(value, 4) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
