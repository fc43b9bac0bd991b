"""What a pass of engine ``stacked`` costs: fitted on some sizes, predicted on others, and beside one after another.

``python tests/bench/yardstick_stacked_cost.py [--device cpu]`` times one step of k clients in one pass, and of the same
clients one after another, for batches b of several networks. The model of cost has a term for each thing that a step
has to do:

    seconds = c0 L + c1 k L + c2 k W + c3 k b M

with L layers that have weights, W weights, and M multiplications for one sample. c0 is what a pass costs whatever its
size, which is what stacking saves. The coefficients are not negative and minimise relative errors on the cells that are
fitted; the table shows all others. It is that of examples/results/speed.md.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from edge_agent import methods
from edge_agent.client import Arrays, Built, ClientState, Session
from edge_agent.client.stacked import Convolutions, Stack, schedule
from edge_agent.core.limits import keep_freed_memory
from edge_agent.core.task import ImageInput, Task
from edge_agent.methods import Client

NETWORKS = {"linear": 8, "fedpac_cnn": 28, "small_cnn": 32}
"""Encoder -> pixels of a side."""

CLIENTS = (1, 4, 16)
BATCHES = (8, 32)
HELD_OUT = {(4, 32), (16, 8)}
"""(clients, batch) that nothing is fitted on, for every network."""

STEPS = 3
REPEATS = 3


@dataclass(frozen=True)
class Cell:
    """A size, and the measured seconds of a step of all its clients: in one pass, and one after another."""

    network: str
    clients: int
    batch: int
    layers: int
    weights: int
    products: int
    stacked_s: float
    one_by_one_s: float

    @property
    def terms(self) -> list[float]:
        """What the coefficients are multiplied with."""
        k = self.clients
        return [
            float(self.layers),
            float(k * self.layers),
            float(k * self.weights),
            float(k * self.batch * self.products),
        ]

    @property
    def is_held_out(self) -> bool:
        """Whether nothing is fitted on it."""
        return (self.clients, self.batch) in HELD_OUT


def fit(cells: list[Cell]) -> np.ndarray:
    """Return the coefficients (4,) that minimise relative errors, none of them negative."""
    rows = np.array([cell.terms for cell in cells])
    seconds = np.array([cell.stacked_s for cell in cells])
    scale = 1.0 / np.maximum(rows.max(axis=0), 1e-30)  # terms differ by factors of 10^9
    coefficients, _ = nnls(rows * scale / seconds[:, None], np.ones(len(cells)))
    return np.asarray(coefficients * scale)


def measure(network: str, clients: int, batch: int, device: torch.device) -> Cell:
    """Time steps of so many clients both ways; the quicker way of convolutions counts."""
    side = NETWORKS[network]
    task = Task(input=ImageInput(channels=1, height=side, width=side), class_names=tuple("0123456789"), encoder=network)
    params = {"local_epochs": 1, "batch_size": batch, "lr": 0.01, "momentum": 0.5}
    method = methods.create("fedavg", params)
    model = Built.of(method, task, seed=0, device=str(device))
    draws = np.random.default_rng(0)
    samples = Arrays(
        draws.standard_normal((STEPS * batch, *task.input_shape)).astype(np.float32), np.arange(STEPS * batch) % 10
    )
    nothing = Arrays(samples.inputs[:0], samples.labels[:0])
    sessions = [
        Session(method, task, f"c{number}", samples, nothing, seed=0, device=str(device), model=model)
        for number in range(clients)
    ]

    def begin(session: Session) -> Client:
        return session.before_round(model.fresh, ClientState(), round_number=1, rounds=1)

    ways: list[Convolutions] = ["grouped"] if network == "linear" else ["grouped", "unfolded"]
    stacked = min(_seconds(device, functools.partial(_stacked, model, sessions, begin, method, way)) for way in ways)
    alone = _seconds(device, functools.partial(_alone, sessions[: min(4, clients)], begin, method))
    products = _products(model.model.encoder, task, device)
    return Cell(
        network,
        clients,
        batch,
        layers=sum(1 for module in model.model.modules() if list(module.parameters(recurse=False))),
        weights=sum(weight.numel() for weight in model.model.parameters()),
        products=products,
        stacked_s=stacked / STEPS,
        one_by_one_s=alone / STEPS * clients / min(4, clients),
    )


def _stacked(model, sessions, begin, method, way) -> Iterator[None]:  # type: ignore[no-untyped-def]
    stack = Stack(model.model, len(sessions))
    clients = []
    for position, session in enumerate(sessions):
        clients.append(begin(session))
        stack.hold(position)
    schedules = [schedule(client, method.params) for client in clients]
    yield
    stack.train(clients, schedules, method.params, (), way)


def _alone(sessions, begin, method) -> Iterator[None]:  # type: ignore[no-untyped-def]
    clients = [begin(session) for session in sessions]
    yield
    for client in clients:
        method.local_update(client, {})


def _seconds(device: torch.device, work) -> float:  # type: ignore[no-untyped-def]
    """Return the median seconds of what follows the preparation, after one time that does not count."""
    seconds = []
    for _ in range(REPEATS + 1):
        steps = work()
        next(steps)
        begin = _now(device)
        next(steps, None)
        seconds.append(_now(device) - begin)
    return median(seconds[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def _products(encoder: nn.Module, task: Task, device: torch.device) -> int:
    """Return the multiplications of the encoder for one sample."""
    total = 0

    def note(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        places = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        total += weight.numel() * places

    layers = [layer for layer in encoder.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        encoder.eval()(torch.zeros(1, *task.input_shape, device=device))
    for hook in hooks:
        hook.remove()
    return total


def table(cells: list[Cell]) -> list[str]:
    """Return the lines of the table, and the errors of what was not fitted."""
    coefficients = fit([cell for cell in cells if not cell.is_held_out])
    lines = [
        "| encoder | clients | batch | one pass, ms | predicted, ms | | one after another, ms | saved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for cell in cells:
        predicted = float(np.dot(coefficients, cell.terms))
        if cell.is_held_out:
            errors.append(abs(predicted / cell.stacked_s - 1))
        role = "not fitted" if cell.is_held_out else ""
        saved = 1 - cell.stacked_s / cell.one_by_one_s
        size = f"{cell.network} | {cell.clients} | {cell.batch}"
        times = f"{1000 * cell.stacked_s:.2f} | {1000 * predicted:.2f} | {role} | {1000 * cell.one_by_one_s:.2f}"
        lines.append(f"| {size} | {times} | {saved:+.0%} |")
    c0, c1, c2, c3 = coefficients
    lines.append("")
    lines.append(f"c0 {c0:.3g} s, c1 {c1:.3g} s, c2 {c2:.3g} s, c3 {c3:.3g} s; largest error of what was not fitted:")
    lines.append(f"{max(errors):.0%}, median {median(errors):.0%}")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, nargs="*", default=list(CLIENTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    device = torch.device(arguments.device)
    cells = [
        measure(network, clients, batch, device)
        for network in NETWORKS
        for clients in arguments.clients
        for batch in BATCHES
    ]
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
