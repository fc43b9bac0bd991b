"""Training a part of the encoder, measured beside training all of it: accuracy, bytes, memory and time.

``python tests/bench/yardstick_peft.py [--seeds N] [--only runs|costs] [--task WORD] [--choice WORD]`` prints one JSON
object a line, and at the end the tables of the page in Markdown; ``--tables FILE ...`` makes them of earlier output. On
each of two tasks FedAvg begins with the same pretrained encoder, which has seen other data. Each choice has the
learning rate of `RATES` that is best for it with a seed that the table leaves out, or that of ``--lr``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from coordinator import SimulationResult, simulate
from coordinator.research.bench.workloads import FASHION
from coordinator.simulation.trained import TrainedModel
from edge_agent import data, methods
from edge_agent.client import Arrays, Built, ClientState, Session
from edge_agent.core.errors import TrainingFailed
from edge_agent.core.storage import write_tensors
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import partition
from edge_agent.data.idx import read_idx

RATES = (0.01, 0.05, 0.2, 1.0)
SEED_OF_RATES = 1000
ROUNDS = 10
PARAMS = {"local_epochs": 1, "batch_size": 20, "momentum": 0.5}
ENCODER = "small_cnn"
DOMAINS = ("inverted", "photo", "slanted", "striped")
EACH_DOMAIN = 3
CLIENTS = 20
SAMPLES = 3000
PRETRAINING = 3000

Samples = tuple[np.ndarray, np.ndarray]
"""Images and labels."""

Clients = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
"""Client -> images and labels to train on, images and labels to be tested on."""


@dataclass(frozen=True)
class Choice:
    """What of the encoder learns."""

    name: str
    peft: str | None = None
    params: tuple[tuple[str, int], ...] = ()

    def settings(self) -> dict[str, Any]:
        """The arguments of `simulate` that say so."""
        return {"peft": self.peft, "peft_params": dict(self.params)} if self.peft else {}


CHOICES = (
    Choice("all of it"),
    Choice("lora, rank 4", "lora", (("rank", 4),)),
    Choice("lora, rank 16", "lora", (("rank", 16),)),
    Choice("bn", "bn"),
    Choice("last_block", "last_block"),
)


# --- the tasks -------------------------------------------------------------------------------------------------------


def fashion(split: str) -> Samples:
    """Images (n, 28, 28) uint8 and labels (n,) of Fashion-MNIST."""
    images, labels = (FASHION / f"{split}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
    return read_idx(images, 3), read_idx(labels, 1).astype(np.int64)


def fashion_clients(seed: int) -> tuple[Samples, Clients]:
    """Pretraining on five classes of ten; twenty clients with all ten, Dirichlet 0.3, tested on shares alike."""
    images, labels = fashion("train")
    test_images, test_labels = fashion("t10k")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    known = order[labels[order] < 5]
    apart = known[:PRETRAINING]
    mine = np.setdiff1d(order, apart, assume_unique=True)
    mine = rng.permutation(mine)[:SAMPLES]
    clients: Clients = {}
    for number, rows in enumerate(partition.dirichlet(labels[mine], CLIENTS, 0.3, rng, min_size=20)):
        own = mine[rows]
        # The test samples of a client have its own classes in its own shares.
        shares = np.bincount(labels[own], minlength=10)
        drawn = [rng.permutation(np.flatnonzero(test_labels == label))[:count] for label, count in enumerate(shares)]
        held = np.concatenate(drawn)
        clients[f"c{number:02d}"] = (images[own], labels[own], test_images[held], test_labels[held])
    return (images[apart], labels[apart]), clients


def digits_clients(seed: int) -> tuple[Samples, Clients]:
    """Pretraining on rendered digits; three clients for each of four domains of handwritten ones."""
    spec = ImageInput(channels=3, height=32, width=32)
    names = tuple(map(str, range(10)))

    def images_of(source: str) -> Samples:
        loaded = data.load(source, spec, names)
        return np.asarray(np.round((loaded.inputs * 0.5 + 0.5) * 255), np.uint8), loaded.labels

    clients: Clients = {}
    for domain in DOMAINS:
        for number in range(EACH_DOMAIN):
            images, labels = images_of(f"digits:{domain}?client={number}&clients={EACH_DOMAIN}&seed={seed}")
            order = np.random.default_rng([seed, number]).permutation(len(labels))
            train = order[:200]
            held = order[200:]
            clients[f"{domain}-{number}"] = (images[train], labels[train], images[held], labels[held])
    return images_of(f"digits:rendered?n={PRETRAINING}&seed={seed}"), clients


TASKS = {"digits, 4 domains": digits_clients, "Fashion-MNIST, Dirichlet 0.3": fashion_clients}


# --- runs ------------------------------------------------------------------------------------------------------------


def pretrained(folder: Path, task: str, seed: int, samples: Samples) -> Path:
    """A file of weights of an encoder that was trained at one place."""
    path = folder / f"{task[:6]}-{seed}.safetensors"
    if path.exists():
        return path
    result = simulate(
        "fedavg",
        data={"all": samples},
        rounds=6,
        seed=seed,
        params={**PARAMS, "lr": 0.02, "momentum": 0.9},
        encoder=ENCODER,
        local=False,
    )
    state = TrainedModel.of(result.folder, result.summary["run_id"]).state
    write_tensors(path, {name: array for name, array in state.items() if name.startswith("encoder.")})
    return path


def run(task: str, seed: int, choice: Choice, lr: float, folder: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """One row: accuracy of the shared model, and what a round costs a device."""
    samples, clients = TASKS[task](seed)
    weights = pretrained(folder, task, seed, samples)
    result: SimulationResult = simulate(
        "fedavg",
        data=clients,
        rounds=rounds,
        seed=seed,
        params={**PARAMS, "lr": lr},
        encoder=ENCODER,
        weights=weights,
        local=False,
        engine="serial",
        evaluate_every=0,
        **choice.settings(),
    )
    summary = result.summary
    lines = summary["rounds"]
    return {
        "task": task,
        "seed": seed,
        "rounds": rounds,
        "choice": choice.name,
        "lr": lr,
        "acc": summary["last"]["acc"]["global"]["clients_mean"],
        "up": fmean(line["bytes_up"] for line in lines) / len(clients),
        "down_first": lines[0]["bytes_down"] / len(clients),
        "down": fmean(line["bytes_down"] for line in lines[1:]) / len(clients),
    }


def frozen_row(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """The row of an encoder that stays as it is: the classifier that AFL finds in one round."""
    samples, clients = TASKS[task](seed)
    weights = pretrained(folder, task, seed, samples)
    settings = {"encoder": ENCODER, "weights": weights, "local": False, "seed": seed, "engine": "serial"}
    result = simulate("afl", data=clients, rounds=1, params={"min_class_count": 1}, **settings)
    summary = result.summary
    return {
        "task": task,
        "seed": seed,
        "choice": "nothing (afl)",
        "rounds": 1,
        "lr": None,
        "acc": summary["last"]["acc"]["global"]["clients_mean"],
        "up": summary["rounds"][0]["bytes_up"] / len(clients),
        "down_first": summary["rounds"][0]["bytes_down"] / len(clients),
        "down": None,
    }


def best_rate(task: str, choice: Choice, folder: Path) -> float:
    """The learning rate with the highest accuracy for a seed that the table leaves out."""
    accuracies = {}
    for lr in RATES:
        try:
            row = run(task, SEED_OF_RATES, choice, lr, folder)
        except TrainingFailed:  # it diverges
            row = {"task": task, "choice": choice.name, "lr": lr, "acc": 0.0}
        print(json.dumps({"trial": row}), flush=True)
        accuracies[lr] = row["acc"]
    return max(RATES, key=lambda lr: accuracies[lr])


def rows_of_runs(
    arguments: argparse.Namespace, folder: Path, tasks: list[str], choices: list[Choice]
) -> list[dict[str, Any]]:
    """All runs of these tasks and choices; the encoder that nobody trains is among them where all choices are."""
    rows = []
    for task in tasks:
        best = {choice: arguments.lr or best_rate(task, choice, folder) for choice in choices}
        for seed in range(arguments.seeds):
            if len(choices) == len(CHOICES):
                rows.append(frozen_row(task, seed, folder))
                print(json.dumps(rows[-1]), flush=True)
            for choice in choices:
                rows.append(run(task, seed, choice, best[choice], folder, arguments.rounds))
                print(json.dumps(rows[-1]), flush=True)
    return rows


# --- what local training costs a device ------------------------------------------------------------------------------

ENCODERS = (ENCODER, "mobilenet_v2", "resnet18")
STEPS = 6
BATCH = 50


def image_task(encoder: str, choice: Choice) -> Task:
    """Ten classes of colour images of 32 x 32."""
    spec = ImageInput(channels=3, height=32, width=32)
    task = Task(input=spec, class_names=tuple(map(str, range(10))), encoder=encoder)
    return task.with_peft(choice.peft, dict(choice.params))


def update_kb(encoder: str, name: str) -> float:
    """Thousands of bytes of the tensors of an update, by the name of the choice."""
    (choice,) = (choice for choice in CHOICES if choice.name == name)
    task = image_task(encoder, choice)
    method = methods.create("fedavg")
    model = method.adapt(method.build(task), task)
    state = model.state_dict()
    return sum(state[tensor].nbytes for tensor in method.returned_names(model)) / 1e3


def cost(encoder: str, choice: Choice) -> tuple[float, float]:
    """MB that the process grows by while it trains, and seconds of CPU of one step; in a process of its own."""
    torch.set_num_threads(1)
    task = image_task(encoder, choice)
    method = methods.create("fedavg", {**PARAMS, "lr": 0.01, "batch_size": BATCH})
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((BATCH * STEPS, *task.input_shape), dtype=np.float32)
    samples = Arrays(inputs, np.arange(BATCH * STEPS) % 10)
    built = Built.of(method, task, seed=0, device="cpu")
    session = Session(method, task, "a", samples, samples, seed=0, device="cpu", model=built)
    # A first step loads what torch loads once; what it needs for one sample is far below what a batch needs.
    with torch.no_grad():
        built.model.eval()(torch.from_numpy(inputs[:1]))
    before = resident_mb()
    begin = time.process_time()
    session.train({}, ClientState(), round_number=1, rounds=1, evaluate=False)
    seconds = (time.process_time() - begin) / STEPS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before, seconds


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def cost_rows(repeats: int, choices: list[Choice]) -> list[dict[str, Any]]:
    """One row for each encoder and choice, and repetition."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for encoder in ENCODERS:
        for choice in choices:
            for _ in range(repeats):
                with context.Pool(1) as pool:
                    grown_mb, seconds = pool.apply(cost, (encoder, choice))
                rows.append({"encoder": encoder, "choice": choice.name, "mb": grown_mb, "seconds": seconds})
                print(json.dumps(rows[-1]), flush=True)
    return rows


# --- the tables ------------------------------------------------------------------------------------------------------


def spread(values: Iterable[float], digits: int, factor: float = 1.0) -> str:
    """Mean ± standard deviation of the population."""
    numbers = [factor * value for value in values]
    return f"{fmean(numbers):.{digits}f} ± {pstdev(numbers):.{digits}f}"


def table_of_runs(rows: list[dict[str, Any]]) -> str:
    """The table of accuracies and bytes."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["task"], row["choice"], row["rounds"]].append(row)
    lines = [
        "| task | what learns | rounds | learning rate | accuracy, % | kB up a round | kB down, first round | then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, choice, rounds), group in groups.items():
        first = group[0]
        down = "–" if first["down"] is None else f"{fmean(row['down'] for row in group) / 1e3:.1f}"
        rate = "–" if first["lr"] is None else f"{first['lr']:g}"
        cells = (
            task,
            choice,
            str(rounds),
            rate,
            spread((row["acc"] for row in group), 1, 100.0),
            f"{fmean(row['up'] for row in group) / 1e3:.1f}",
            f"{fmean(row['down_first'] for row in group) / 1e3:.1f}",
            down,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_costs(rows: list[dict[str, Any]]) -> str:
    """The table of memory and time."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["encoder"], row["choice"]].append(row)
    lines = [
        "| encoder | what learns | kB of an update | MB of memory | ms of CPU for a step |",
        "|---|---|---|---|---|",
    ]
    for (encoder, choice), group in groups.items():
        memory = spread((row["mb"] for row in group), 0)
        time_ms = spread((row["seconds"] for row in group), 0, 1e3)
        lines.append(f"| {encoder} | {choice} | {update_kb(encoder, choice):,.0f} | {memory} | {time_ms} |")
    return "\n".join(lines)


def rows_in(files: list[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of runs and of costs in earlier output, in the order of the tables."""
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{") and "trial" not in line]
    order = ["nothing (afl)", *(choice.name for choice in CHOICES)]
    runs = [row for row in rows if "task" in row]
    runs.sort(key=lambda row: (list(TASKS).index(row["task"]), order.index(row["choice"]), row["rounds"]))
    costs = [row for row in rows if "encoder" in row]
    costs.sort(key=lambda row: (ENCODERS.index(row["encoder"]), order.index(row["choice"])))
    return runs, costs


def main() -> None:
    """Print the rows and the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("runs", "costs"), default=None)
    parser.add_argument("--task", default="", help="only tasks with this word in their names")
    parser.add_argument("--choice", default="", help="only choices with this word in their names")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--tables", type=Path, nargs="+", help="files with earlier output")
    arguments = parser.parse_args()
    if arguments.tables:
        runs, costs = rows_in(arguments.tables)
        print(f"{table_of_runs(runs)}\n\n{table_of_costs(costs)}")
        return
    tasks = [task for task in TASKS if arguments.task in task]
    choices = [choice for choice in CHOICES if arguments.choice in choice.name]
    tables = []
    if arguments.only != "costs":
        with tempfile.TemporaryDirectory() as folder:
            tables.append(table_of_runs(rows_of_runs(arguments, Path(folder), tasks, choices)))
    if arguments.only != "runs":
        tables.append(table_of_costs(cost_rows(arguments.seeds, choices)))
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
