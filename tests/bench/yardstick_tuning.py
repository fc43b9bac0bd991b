"""What the last fine-tuning of a simulation is worth with other numbers, from its very state, without training again.

A method that fine-tunes a copy at the end (``fedbabu``, ``fedavg_ft``, ``fedprox_ft``) is scored after that: a row of a
table is then one of how clients tune as well as of how they trained. Each choice is scored twice, as a mean over
clients: on a fifth of a client's training samples, which do not tune then, and on its test samples after tuning on all
of its training samples. Choose by the first number alone. The encoder has trained on all training samples, so that the
first number is flattering, for all choices alike.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.research.analyze.simulations import SimulationTarget
from coordinator.simulation.setup import read_plan
from edge_agent import methods
from edge_agent.client import Arrays, ClientState, Session
from edge_agent.methods.base import Method

HELD_OUT = 0.2
"""The share of a client's training samples on which choices are compared."""


@dataclass(frozen=True)
class Score:
    """What one choice of fine-tuning reaches, in percent."""

    params: Mapping[str, Any]
    validation: float
    test: float
    error: float
    """The standard error of ``test`` over clients."""

    cpu_s: float


@dataclass(frozen=True)
class ClientData:
    """One client's samples: all of its training samples, these in two parts, and its test samples."""

    train: Arrays
    tuning: Arrays
    validation: Arrays
    test: Arrays

    @classmethod
    def split(cls, train: Arrays, test: Arrays, rng: np.random.Generator) -> ClientData:
        """Hold a random fifth of the training samples out, at least one."""
        order = rng.permutation(len(train.labels))
        held = max(1, round(HELD_OUT * len(order)))
        parts = [Arrays(train.inputs[rows], train.labels[rows]) for rows in (order[held:], order[:held])]
        return cls(train, parts[0], parts[1], test)


class Tuning:
    """The clients of a simulation after its last closed round."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        plan = read_plan(folder)
        if plan is None:
            raise SystemExit(f"{folder}: no simulation")
        self.plan = plan
        target = SimulationTarget.at(folder, ())
        self.round = target.rounds[-1]
        self._target = target
        self._state = target.state(self.round)
        rng = np.random.default_rng(seed)
        self._clients: dict[str, ClientData] = {}
        for client in target.clients:
            samples = target.samples_of(client)
            train = Arrays(samples.train.inputs, samples.train.labels)
            test = Arrays(samples.test.inputs, samples.test.labels)
            self._clients[client] = ClientData.split(train, test, rng)

    def score(self, **params: Any) -> Score:
        """Fine-tune and score all clients with other parameters of the method."""
        method = methods.create(self.plan.method, {**self.plan.params, **params}, paper=self.plan.paper)
        begun = time.process_time()
        validation = []
        test = []
        for client, samples in self._clients.items():
            validation.append(self._accuracy(method, client, samples.tuning, samples.validation))
            test.append(self._accuracy(method, client, samples.train, samples.test))
        error = np.std(test, ddof=1) / np.sqrt(len(test))
        means = [100 * float(np.mean(scores)) for scores in (validation, test)]
        return Score(params, means[0], means[1], 100 * float(error), time.process_time() - begun)

    def _accuracy(self, method: Method, client: str, train: Arrays, test: Arrays) -> float:
        """Return the accuracy 0..1 of a client that personalizes to the last state on ``train``."""
        plan = self.plan
        task = self._target._task
        session = Session(method, task, client, train, test, seed=plan.seed, device=plan.device)
        received = {**method.broadcast(self._state), **method.downlink(self._state, client)}
        return session.finish(received, ClientState(), rounds=plan.rounds).metrics["acc.personal"]


def main() -> None:
    """Print a table of all combinations of the choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a simulation of a method that fine-tunes at the end")
    parser.add_argument("--tune", nargs="+", default=["head", "all"], choices=["head", "all"])
    parser.add_argument("--tune-lr", nargs="+", type=float, default=[0.0003, 0.001, 0.003, 0.01])
    parser.add_argument("--tune-epochs", nargs="+", type=int, default=[5])
    options = parser.parse_args()
    torch.set_num_threads(1)
    tuning = Tuning(options.folder)
    print(f"after round {tuning.round}\n")
    print("| tuned | step size | epochs | validation | test | standard error | CPU s |\n|---|---|---|---|---|---|---|")
    for tune, lr, epochs in itertools.product(options.tune, options.tune_lr, options.tune_epochs):
        score = tuning.score(tune=tune, tune_lr=lr, tune_epochs=epochs)
        numbers = f"{score.validation:.2f} | {score.test:.2f} | {score.error:.2f} | {score.cpu_s:.0f}"
        print(f"| {tune} | {lr:g} | {epochs} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
