"""Poisoned updates against aggregation rules, measured: Fashion-MNIST, 20 clients, Dirichlet 0.3, a small CNN.

``python tests/bench/yardstick_poisoning.py --out poisoning.json --table poisoning.md`` trains every combination for
each seed (half an hour of one shared core), with our aggregation and our exclusions; only local training is a plain
loop. Updates that the collector would reject (NaN) are left out as it does. ``--honest`` prints instead how far honest
updates differ in norm and sample counts, on several splits: what the default bounds were chosen by.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from coordinator.config import AggregationConfig
from coordinator.research.bench.workloads import FASHION
from coordinator.runs.aggregation import Decisions, aggregate, norms_of
from coordinator.runs.selection import Exclusions
from coordinator.state.journal import Accepted, OpenRound
from edge_agent import methods
from edge_agent.data.idx import read_idx
from edge_agent.data.partition import dirichlet, pathological, quantity
from edge_agent.methods import Update
from edge_agent.task import ImageInput, State, Task
from edge_agent.training.parts import load_arrays, to_arrays
from edge_agent.wire.tensors import first_non_finite

CLIENTS, SAMPLES, TESTED, SIDE = 20, 4000, 2000, 14
ROUNDS, HONEST_ROUNDS, BATCH, LR = 20, 10, 20, 0.05
PATCH_CLASS = 0
TASK = Task(
    input=ImageInput(channels=1, height=SIDE, width=SIDE),
    class_names=tuple("0123456789"),
    encoder="small_cnn",
    encoder_params={"width": 8, "feature_dim": 32},
)

ATTACKS = {"none": 0, "NaN": 1, "1e30": 1, "weight liar": 1, "backdoor patch": 1, "-10 x": 4, "label flip": 4}
"""Attack -> how many of the clients do it."""

OFF: dict[str, Any] = {"max_norm": None, "max_weight": None}
RULES: dict[str, dict[str, Any]] = {
    "mean, no bounds": OFF,
    "mean (default)": {},
    "clipped": {"rule": "clipped"},
    "trimmed_mean": {"rule": "trimmed_mean"},
    "median": {"rule": "median"},
    "krum": {"rule": "krum"},
    "multi_krum": {"rule": "multi_krum"},
    "geometric_median": {"rule": "geometric_median"},
}


@dataclass
class Data:
    """Images (n, 1, SIDE, SIDE) float32 in 0..1 and labels (n,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def rows(self, rows: np.ndarray) -> Data:
        """Some of them."""
        return Data(self.images[rows], self.labels[rows])


def fashion(split: str, count: int, seed: int) -> Data:
    """Random samples at half the resolution."""
    images = read_idx(FASHION / f"{split}-images-idx3-ubyte.gz", 3)
    labels = read_idx(FASHION / f"{split}-labels-idx1-ubyte.gz", 1)
    rows = np.random.default_rng(seed).permutation(len(labels))[:count]
    small = images[rows].reshape(-1, SIDE, 2, SIDE, 2).mean(axis=(2, 4)) / 255
    return Data(torch.from_numpy(small[:, None].astype(np.float32)), torch.from_numpy(labels[rows].astype(np.int64)))


def patched(images: torch.Tensor) -> torch.Tensor:
    """The images with a white square of 3 x 3 in a corner."""
    result = images.clone()
    result[:, :, -3:, -3:] = 1.0
    return result


def trained(
    model: nn.Module, state: State, names: tuple[str, ...], data: Data, rng: torch.Generator, epochs: int
) -> State:
    """The shared tensors after local training from ``state``."""
    load_arrays(model, {name: state[name] for name in names})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    for _ in range(epochs):
        order = torch.randperm(len(data.labels), generator=rng)
        for rows in order.split(BATCH):
            if len(rows) > 1:
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(data.images[rows]), data.labels[rows]).backward()
                optimizer.step()
    return to_arrays(model, names)


def accuracy(model: nn.Module, state: State, names: tuple[str, ...], data: Data) -> float:
    """Share of right answers of the shared model."""
    load_arrays(model, {name: state[name] for name in names})
    model.eval()
    with torch.no_grad():
        return float((model(data.images).argmax(dim=1) == data.labels).double().mean())


def poisoned(attack: str, state: State, data: Data) -> tuple[Data, Any]:
    """What an attacker trains on, and what it makes of the update."""
    half = torch.arange(len(data.labels)) % 2 == 0

    def scaled(factor: float) -> Any:
        return lambda sent: {
            name: (state[name] + factor * (array.astype(np.float64) - state[name])).astype(array.dtype)
            for name, array in sent.items()
        }

    if attack == "label flip":
        return Data(data.images, 9 - data.labels), scaled(1.0)
    if attack == "backdoor patch":  # model replacement: the change counts as that of all clients
        images = torch.where(half[:, None, None, None], patched(data.images), data.images)
        return Data(images, torch.where(half, PATCH_CLASS, data.labels)), scaled(float(CLIENTS))
    if attack in {"NaN", "1e30"}:
        value = np.nan if attack == "NaN" else 1e30
        return data, lambda sent: {
            name: np.full_like(array, value) if array.dtype.kind == "f" else array for name, array in sent.items()
        }
    return data, scaled({"weight liar": -1.0, "-10 x": -10.0, "none": 1.0}[attack])


class Federation:
    """Clients of one split, and their rounds under an attack and a rule."""

    def __init__(self, seed: int) -> None:
        self.pool, self.test = fashion("train", SAMPLES, seed), fashion("t10k", TESTED, 99)
        self.rows = dirichlet(self.pool.labels.numpy(), CLIENTS, 0.3, np.random.default_rng(seed))
        self.seed = seed
        self.method = methods.create("fedavg", {})
        torch.manual_seed(seed)
        self.model = self.method.build(TASK)
        self.names = self.method.shared_names(self.model)
        self.fresh = to_arrays(self.model, self.names)

    def run(self, attack: str, rule: str, rounds: int = ROUNDS) -> dict[str, Any]:
        """Accuracies by the end, and who was left out of how many rounds."""
        config = AggregationConfig(attackers=max(1, ATTACKS[attack]), **RULES[rule])
        attackers = np.random.default_rng(self.seed + 1000).permutation(CLIENTS)[: ATTACKS[attack]].tolist()
        state, exclusions, log = self.method.start(self.fresh), Exclusions(), []
        left_out = dict.fromkeys(range(CLIENTS), 0)
        for number in range(1, rounds + 1):
            out = exclusions.left_out(number)
            for agent in out:
                left_out[int(agent)] += 1
            updates = [one for one in self.updates(number, state, attack, attackers) if one.client not in out]
            good = [one for one in updates if first_non_finite(one.tensors) is None]
            if not good:  # every client has diverged: a run fails here
                break
            state, decisions = aggregate(self.method, state, lambda: good, config)  # noqa: B023 - called at once
            self._closed(exclusions, number, updates, good, decisions if rule != "mean, no bounds" else Decisions())
            log.append(decisions.body())
        stamped = Data(patched(self.test.images), torch.full_like(self.test.labels, PATCH_CLASS))
        others = np.flatnonzero(self.test.labels.numpy() != PATCH_CLASS)
        return {
            "acc": accuracy(self.model, state, self.names, self.test),
            "backdoor": accuracy(self.model, state, self.names, stamped.rows(others)),
            "attackers_left_out": sum(left_out[agent] for agent in attackers),
            "honest_left_out": sum(left_out.values()) - sum(left_out[agent] for agent in attackers),
            "honest_clipped": sum(int(a) not in attackers for one in log for a in one.get("clipped", {})),
            "honest_capped": sum(int(a) not in attackers for one in log for a in one.get("capped", {})),
        }

    def updates(
        self, number: int, state: State, attack: str, attackers: list[int], epochs: int = 1
    ) -> Iterator[Update]:
        """Each client's update of a round."""
        for client, rows in enumerate(self.rows):
            kind = attack if client in attackers else "none"
            weight = 1e9 if kind == "weight liar" else float(len(rows))
            data, change = poisoned(kind, state, self.pool.rows(rows))
            rng = torch.Generator().manual_seed(self.seed * 100_000 + number * 100 + client)
            sent = trained(self.model, state, self.names, data, rng, epochs)
            yield Update(f"{client:02}", weight, sent if kind in {"none", "label flip"} else change(sent))

    @staticmethod
    def _closed(
        exclusions: Exclusions, number: int, updates: list[Update], good: list[Update], decisions: Decisions
    ) -> None:
        accepted = {one.client: Accepted("", one.weight, {}) for one in good}
        rejected = {one.client: "NaN" for one in updates if one.client not in accepted}
        cohort = tuple(one.client for one in updates)
        exclusions.closed(OpenRound(number, 1, cohort, {}, accepted, rejected), {}, {}, (), decisions.suspects)


def honest(seeds: int) -> None:
    """Print the largest norms and sample counts of honest clients, as multiples of the median of their round."""
    splits = ("dirichlet 0.3", "dirichlet 0.1", "quantity 0.5", "pathological")
    for name, epochs in (*((split, 1) for split in splits), ("dirichlet 0.3", 5)):
        ratios: dict[str, list[float]] = {}
        counts, clipped, suspects = [], 0, 0
        for seed in range(seeds):
            fed = Federation(seed)
            rng = np.random.default_rng(seed)
            labels = fed.pool.labels.numpy()
            if name.startswith("quantity"):
                fed.rows = quantity(labels, CLIENTS, 0.5, rng)
            elif name == "pathological":
                fed.rows = pathological(labels, CLIENTS, rng, classes_each=2)
            else:
                fed.rows = dirichlet(labels, CLIENTS, float(name.split()[1]), rng)
            sizes = [len(rows) for rows in fed.rows]
            counts.append(max(sizes) / median(sizes))
            state = fed.method.start(fed.fresh)
            for number in range(1, HONEST_ROUNDS + 1):
                updates = list(fed.updates(number, state, "none", [], epochs))
                for group, norms in norms_of(fed.method, state, updates).items():
                    ratios.setdefault(group, []).append(max(norms.values()) / median(norms.values()))
                _, decisions = aggregate(fed.method, state, lambda: updates, AggregationConfig())  # noqa: B023
                clipped, suspects = clipped + len(decisions.clipped), suspects + len(decisions.suspects)
                state, _ = aggregate(fed.method, state, lambda: updates, AggregationConfig(**OFF))  # noqa: B023
        text = "; ".join(f"{group} up to {max(some):.2f} (median {median(some):.2f})" for group, some in ratios.items())
        sizes = ", ".join(f"{count:.2f}" for count in counts)
        print(f"{name}, E = {epochs}: {text}; samples {sizes}; clipped {clipped}, suspect {suspects}", flush=True)


def main() -> None:
    """Run what is asked for; a JSON file that is there is continued."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS))
    parser.add_argument("--honest", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.honest:
        honest(options.seeds)
        return
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in range(options.seeds):
        fed = Federation(seed)
        for attack in options.attacks:
            for rule in options.rules:
                key = f"{attack}|{rule}|{seed}"
                if key not in results:
                    begin = time.perf_counter()
                    results[key] = fed.run(attack, rule)
                    results[key]["seconds"] = round(time.perf_counter() - begin, 1)
                    options.out.write_text(json.dumps(results, indent=1))
                    print(key, results[key], flush=True)
    if options.table is not None:
        options.table.write_text(table(results))


def table(results: dict[str, dict[str, Any]], rules: Sequence[str] = tuple(RULES)) -> str:
    """Markdown: accuracy, % by attack and rule, then the backdoor's success and who was left out."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, one in results.items():
        attack, rule, _ = key.split("|")
        cells.setdefault((attack, rule), []).append(one)
    shown = [rule for rule in rules if any((attack, rule) in cells for attack in ATTACKS)]
    head = [f"| attack (of {CLIENTS}) | {' | '.join(shown)} |", f"|---|{'---|' * len(shown)}"]

    def rows(figure: str, attacks: Iterable[str], scale: float = 100.0) -> Iterator[str]:
        for attack in attacks:
            texts = []
            for rule in shown:
                values = [scale * one[figure] for one in cells.get((attack, rule), [])]
                texts.append(f"{fmean(values):.1f} ± {pstdev(values):.1f}" if values else "–")
            yield f"| {attack} ({ATTACKS[attack]}) | {' | '.join(texts)} |"

    parts = [*head, *rows("acc", ATTACKS), "", *head, *rows("backdoor", ("none", "backdoor patch"))]
    for figure in ("attackers_left_out", "honest_left_out", "honest_clipped", "honest_capped"):
        parts += ["", f"{figure.replace('_', ' ')}, times in {ROUNDS} rounds", "", *head, *rows(figure, ATTACKS, 1.0)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
