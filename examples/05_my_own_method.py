"""A federated method of one's own, in this one file: FedAvg with momentum at the coordinator.

Run it:  python examples/05_my_own_method.py

It is registered for this process only. A package of yours would name it in its entry points instead:
[project.entry-points."headwater.methods"]  fedavgm = "my_package:FedAvgM"
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from pydantic import Field

from edge_agent import data, methods
from edge_agent.client.session import Arrays, ClientState, Session
from edge_agent.methods import MethodParams, Update
from edge_agent.methods.fedavg import Method as FedAvg
from edge_agent.task import State, Task, Tensors
from edge_agent.training.parts import to_arrays

ROUNDS = 8


class FedAvgM(FedAvg):
    """The round's mean is a direction; the coordinator keeps rolling in it (Hsu, Qi, Brown, arXiv 1909.06335)."""

    class Params(MethodParams):
        """FedAvg's parameters and one more."""

        server_momentum: float = Field(0.5, ge=0, lt=1, description="beta, share of the last step that is repeated")

    name = "fedavgm"
    source = "Hsu, Qi, Brown, arXiv 1909.06335"

    def start(self, tensors: Tensors) -> State:
        """The model, and a speed of zero for each of its tensors."""
        return {**tensors, **{f"extra.speed.{name}": np.zeros_like(array) for name, array in tensors.items()}}

    def broadcast(self, state: State) -> Tensors:
        """The model alone: the speed stays with the coordinator."""
        return {name: array for name, array in state.items() if not name.startswith("extra.")}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """One step along the mean of all updates and along the last step."""
        model = self.broadcast(state)
        mean = super().aggregate(model, updates)
        beta = self.params.server_momentum
        speed = {name: beta * state[f"extra.speed.{name}"] + mean[name] - model[name] for name in model}
        moved = {name: model[name] + speed[name] for name in model}
        # A variance cannot roll on: it would become negative.
        moved |= {name: mean[name] for name in model if name.endswith("running_var")}
        return {**moved, **{f"extra.speed.{name}": array for name, array in speed.items()}}


def devices(method: methods.Method, task: Task, count: int = 4) -> list[Session]:
    """Devices that hold digits of one style, each mostly of its own classes."""
    found = []
    for number in range(count):
        classes = ",".join(str((2 * number + step) % 10) for step in range(5))
        samples = data.load(f"digits:rendered?n=150&seed={number}&classes={classes}", task.input, task.class_names)
        train, test = (Arrays(s.inputs, s.labels) for s in data.split(samples, 0.4, seed=0))
        found.append(Session(method, task, f"device-{number}", train, test, seed=0, device="cpu"))
    return found


def run(name: str, task: Task) -> float:
    """Mean accuracy over all devices after the last round."""
    method = methods.create(name, {"lr": 0.05, "momentum": 0.9, "batch_size": 20, "local_epochs": 1})
    torch.manual_seed(0)
    model = method.build(task)
    state = method.start(to_arrays(model, method.shared_names(model)))
    sessions = devices(method, task)
    kept = [ClientState() for _ in sessions]
    for number in range(1, ROUNDS + 1):
        updates = []
        for place, session in enumerate(sessions):
            outcome = session.train(
                method.broadcast(state), kept[place], round_number=number, rounds=ROUNDS, evaluate=False
            )
            kept[place] = outcome.kept
            updates.append(Update(session.client, outcome.samples, outcome.update))
        state = method.aggregate(state, updates)
    ends = [s.finish(method.broadcast(state), k, rounds=ROUNDS) for s, k in zip(sessions, kept, strict=True)]
    return float(np.mean([end.metrics["acc.global"] for end in ends]))


def main() -> None:
    """Compare the new method with its parent."""
    methods.registry.add("fedavgm", FedAvgM)
    torch.set_num_threads(1)
    task = Task(class_names=tuple("0123456789"), encoder="small_cnn")
    for name in ("fedavg", "fedavgm"):
        print(f"{name:8} acc.global after {ROUNDS} rounds: {run(name, task):.3f}")


if __name__ == "__main__":
    main()
