"""What differential privacy costs on digits: accuracy of the shared model and of personal ones, by epsilon.

The clients' own sessions and mechanism, and the method's own aggregation; noise for epsilon after all rounds as the
accountant has it. ``python tests/bench/yardstick_privacy.py`` writes examples/results/privacy.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from edge_agent import methods
from edge_agent.client import Arrays, Built, ClientState, Session
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import load
from edge_agent.methods.values import Update
from edge_agent.privacy.accountant import cost, epsilon_of
from edge_agent.privacy.noise import Mechanism

CLIENTS = 60
ROUNDS = 20
DELTA = 1e-5
SEEDS = (0, 1, 2)
CLIP = 1.0
CLIP_STATISTICS = 15.0
EPSILONS = {"fedavg": (math.inf, 32.0, 16.0, 8.0, 4.0, 2.0), "fedpac": (math.inf, 1e5, 1e4, 1e3, 16.0)}
TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=tuple("0123456789"),
    encoder="linear",
    encoder_params={"feature_dim": 16},
)
PARAMS = {
    "fedavg": {"lr": 0.1, "local_epochs": 3, "batch_size": 10},
    "fedpac": {"lr": 0.1, "local_epochs": 3, "batch_size": 10, "weights": "qp"},
}
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """A method at a budget: accuracies of each seed, in 0..1; ``noise`` None: nothing is clipped."""

    method: str
    epsilon: float
    noise: float | None
    shared: tuple[float, ...]
    personal: tuple[float, ...]


def noise_for(epsilon: float, rounds: int = ROUNDS) -> float:
    """The noise multiplier of a round's sum with which ``rounds`` rounds spend ``epsilon``."""
    low = 1e-5
    high = 1e5
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon_of(rounds * cost(middle), DELTA) > epsilon else (low, middle)
    return high


def clients_of(seed: int) -> list[tuple[Arrays, Arrays]]:
    """(Training, held-out) samples of each client: digits dealt out at random, a quarter held out."""
    samples = load("digits:optdigits", TASK.input, TASK.class_names)
    order = np.random.default_rng(seed).permutation(len(samples))
    dealt = []
    for rows in np.array_split(order, CLIENTS):
        cut = len(rows) - len(rows) // 4
        train = samples.take(rows[:cut])
        test = samples.take(rows[cut:])
        dealt.append((Arrays(train.inputs, train.labels), Arrays(test.inputs, test.labels)))
    return dealt


def federate(name: str, noise: float | None, seed: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """(acc.global (NaN where the method shares no classifier), acc.personal), in 0..1, means over clients."""
    method = methods.create(name, PARAMS[name])
    built = Built.of(method, TASK, seed=seed, device="cpu")
    sessions = [
        Session(method, TASK, f"c{i:02d}", train, test, seed=seed, device="cpu", model=built)
        for i, (train, test) in enumerate(clients_of(seed))
    ]
    parts = len(sessions) if method.server_step_is_mean() else 1
    part = None if noise is None else Mechanism(CLIP, CLIP_STATISTICS, noise / math.sqrt(parts))
    state = method.start({n: built.fresh[n] for n in sessions[0].shared})
    kept = [ClientState() for _ in sessions]
    rng = np.random.default_rng([seed, 16])
    for number in range(1, rounds + 1):
        updates = []
        for i, session in enumerate(sessions):
            received = {**method.broadcast(state), **method.downlink(state, session.client)}
            done = session.train(received, kept[i], round_number=number, rounds=rounds, evaluate=False)
            kept[i] = done.kept
            sent = done.update
            weight = done.samples
            if part is not None:
                sent = part.apply(method, sent, received, rng)
                weight = 1
            updates.append(Update(session.client, weight, sent))
        state = method.aggregate(state, updates)
    shared = []
    personal = []
    for i, session in enumerate(sessions):
        received = {**method.broadcast(state), **method.downlink(state, session.client)}
        scores = session.finish(received, kept[i], rounds=rounds).metrics
        personal.append(scores["acc.personal"])
        shared.append(scores.get("acc.global", math.nan))
    return fmean(shared), fmean(personal)


def measured(names: Iterable[str] = tuple(PARAMS), seeds: tuple[int, ...] = SEEDS) -> list[Row]:
    """All rows: without anything, clipped only, then with noise."""
    rows = []
    for name in names:
        for epsilon, noise in [
            (math.nan, None),
            *((e, 0.0 if e == math.inf else noise_for(e)) for e in EPSILONS[name]),
        ]:
            results = [federate(name, noise, seed) for seed in seeds]
            rows.append(Row(name, epsilon, noise, *map(tuple, zip(*results, strict=True))))
            print(rows[-1], flush=True)
    return rows


def shown(values: tuple[float, ...]) -> str:
    """Mean and standard deviation in percent."""
    return "–" if any(map(math.isnan, values)) else f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f}"


def page(rows: list[Row]) -> str:
    """The result as Markdown."""
    lines = []
    for row in rows:
        if row.noise is None:
            budget = "no clipping, no noise"
            local = "–"
        elif row.noise == 0:
            budget = "clipping only"
            local = "–"
        else:
            parts = CLIENTS if methods.create(row.method).server_step_is_mean() else 1
            alone = epsilon_of(ROUNDS * cost(row.noise / math.sqrt(parts)), DELTA)
            budget = f"ε = {row.epsilon:g} (noise {row.noise:.3g})"
            local = f"{alone:.0f}"
        lines.append(f"| {row.method} | {budget} | {shown(row.shared)} | {shown(row.personal)} | {local} |")
    table = "\n".join(lines)
    return f"""# What differential privacy costs on digits

scikit-learn's 1,797 digits among {CLIENTS} clients at random (22 or 23 training samples each), an encoder of one linear
layer (64 to 16), {ROUNDS} rounds of all clients, 3 local epochs; clip {CLIP:g}, clip_statistics {CLIP_STATISTICS:g},
δ = 1e-5. Accuracy in percent on held-out samples, mean ± standard deviation over seeds {", ".join(map(str, SEEDS))}.
ε is that of all data of one client against whoever sees the models of all rounds; the last column is the ε of the same
noise against the coordinator, which sees single updates.

| method | privacy | acc.global | acc.personal | ε against the coordinator |
|---|---|---|---|---|
{table}

Noise in the mean falls with the number of clients, so FedAvg loses little down to ε = 8. FedPAC sends class means and a
classifier of each client, which are combined for each client alone: noise that hides one of them is not averaged away,
so each client adds all of it, and a useful ε leaves nothing of the method.

Made by `python tests/bench/yardstick_privacy.py`.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "results" / "privacy.md")
    place_of = parser.parse_args().out
    place_of.write_text(page(measured()), encoding="utf-8")
