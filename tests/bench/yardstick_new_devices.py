"""What devices that join after training get, on four tasks: alone, shared classifier, each head, auto, full training.

``python tests/bench/yardstick_new_devices.py --folder DIR`` trains FedAvg-FT without five new clients, and again with
them, for each task and seed; it keeps results in DIR, and prints the tables of examples/results/new-devices.md. Tasks:

- ``domains``: digits in five styles; 15 clients train, three of each style; a new client for each style.
- ``fonts``: printed digits; clients of 16 fonts train; the new clients' fonts are of families that none of them has.
- ``watch``: recordings of a watch, --watch FILE; a client is one arm of a person; three persons never train. Clients
  learn from the beginning of each recording, and are tested on its end, two seconds later.
- ``fashion``: Fashion-MNIST, labels by a Dirichlet distribution of 0.3; new clients by the same rule.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yardstick_own_classes as own_classes

from coordinator import simulate
from edge_agent import data
from edge_agent.bundle.unpacked import Bundle
from edge_agent.data import Samples, digits, partition
from edge_agent.heads import AUTO
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import evaluate_heads, extract, personalize
from edge_agent.personal.personalizer import load_bundle
from edge_agent.personal.precision import open_encoder

NEW = 5
ROUNDS = 20
PARAMS = {"lr": 0.05, "local_epochs": 2, "batch_size": 32}
HEADS = ("lr", "svm", "mlp", "prototype", "knn", "ridge", "tuned")
ROWS = {
    "best local model": "local",
    "shared classifier": "global",
    **{f"head {head}": f"fp32/{head}" for head in HEADS},
    "auto, shipped batch norm": "fp32/auto",
    "auto, own batch norm": "own/auto",
    "auto, int8": "int8/auto",
    "auto, as a device chooses, `--no-blend`": "auto norm/auto",
    "the same with `--allow-local`": "used",
    "**auto, as a device chooses**": "blend",
    "the blend in any case": "blend in any case",
    "starter encoder, nothing shared: auto": "starter",
    "starter encoder, one round of AFL: auto": "starter afl",
    "full training, classifier tuned": "full, head tuned",
    "full training, all tuned": "full, all tuned",
}
"""Row of the table -> name in the results."""
DOMAINS: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "inverted": digits.inverted,
    "photo": digits.on_photo,
    "slanted": digits.slanted,
    "striped": digits.striped,
    "plain": lambda digit, seed, number: np.repeat(digits._large(digit)[:, :, None], 3, axis=2),
}


@dataclass(frozen=True)
class Part:
    """Samples of one client; ``groups``: windows of one recording, in time order."""

    inputs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None


Clients = dict[str, tuple[Part, Part]]
"""Client -> training and test samples; the names of new clients come last."""


def domains(seed: int) -> Clients:
    """Digits 32 x 32 in colour; the handwritten originals of test samples are in nobody's training samples."""
    rng = np.random.default_rng([seed, 1])
    (originals, labels) = digits.load()
    order = rng.permutation(len(labels))
    pools = order[: len(order) // 2], order[len(order) // 2 :]

    def drawn(style: str, pool: np.ndarray, count: int) -> Part:
        rows = rng.permutation(pool)[:count]
        images = [DOMAINS[style](originals[row], seed, int(rng.integers(2**31))) for row in rows]
        return Part(np.stack(images), labels[rows])

    names = [f"a{number}-{style}" for style in DOMAINS for number in range(3)] + [f"new-{style}" for style in DOMAINS]
    sizes = [(200, 60)] * (3 * len(DOMAINS)) + [(100, 300)] * NEW
    return {
        name: (drawn(name.split("-")[1], pools[0], size[0]), drawn(name.split("-")[1], pools[1], size[1]))
        for name, size in zip(names, sizes, strict=True)
    }


def fonts(seed: int) -> Clients:
    """Printed digits 32 x 32 in colour, one font for each client; needs matplotlib, which brings fonts."""
    from matplotlib import get_data_path

    rng = np.random.default_rng([seed, 2])
    folder = Path(get_data_path()) / "fonts" / "ttf"
    kinds = ("", "-Bold", "-Oblique", "-BoldOblique")
    families = {
        "sans": [folder / f"DejaVuSans{kind}.ttf" for kind in kinds],
        "mono": [folder / f"DejaVuSansMono{kind}.ttf" for kind in kinds],
        "serif": [folder / f"DejaVuSerif{kind}.ttf" for kind in ("", "-Bold", "-Italic", "-BoldItalic")],
        "stix": [folder / f"STIXGeneral{kind}.ttf" for kind in ("", "Bol", "Italic", "BolIta")],
        "computer modern": [folder / f"cm{kind}10.ttf" for kind in ("b", "r", "ss", "ti", "tt")],
    }
    unseen = (list(families) * 2)[seed % len(families) :][:2]
    strange = [path for family in unseen for path in families[family]]
    old = [path for family, paths in families.items() if family not in unseen for path in paths]
    chosen = {f"a{number:02d}": path for number, path in enumerate(old)}
    chosen |= {f"new-{number}": strange[row] for number, row in enumerate(rng.permutation(len(strange))[:NEW])}
    return {
        name: (
            Part(*own_classes.printed(100 if name.startswith("new") else 200, seed, [path], salt=2 * number)),
            Part(*own_classes.printed(300 if name.startswith("new") else 60, seed, [path], salt=2 * number + 1)),
        )
        for number, (name, path) in enumerate(chosen.items())
    }


def watch(seed: int, file: Path) -> Clients:
    """Windows of two seconds, half overlapping, of six channels; recordings shorter than ten seconds are left out."""
    arrays = data.npz.load_arrays(file)
    length = 2 * int(arrays["sampling_hz"])
    ends = np.cumsum(arrays["lengths"])
    people = np.random.default_rng([seed, 3]).permutation(np.unique(arrays["subject"]))
    clients: Clients = {}
    for person in people:
        for side in np.unique(arrays["side"]):
            parts: tuple[list[Any], list[Any]] = ([], [])
            for row in np.flatnonzero((arrays["subject"] == person) & (arrays["side"] == side)):
                recording = arrays["samples"][ends[row] - arrays["lengths"][row] : ends[row]]
                middle = int(0.6 * len(recording))
                for part, piece in zip(parts, (recording[:middle], recording[middle + length :]), strict=True):
                    begins = range(0, len(piece) - length + 1, length // 2)
                    label = arrays["label"][row]
                    part += [(piece[begin : begin + length].T, label, row) for begin in begins]
            is_new = person in people[-3:]
            name = f"{'new' if is_new else 'a'}-{person}-{side}"
            clients[name] = tuple(_windows(part) for part in parts)  # type: ignore[assignment]
    new = sorted(name for name in clients if name.startswith("new"))
    return {name: part for name, part in clients.items() if name not in new[NEW:]}


def _windows(rows: list[tuple[np.ndarray, int, int]]) -> Part:
    """``rows``: window, label, recording."""
    windows, labels, recordings = zip(*rows, strict=True)
    return Part(np.stack(windows).astype(np.float32), np.array(labels), np.array(recordings))


def fashion(seed: int) -> Clients:
    """15 clients of up to 300 training samples, new ones of 150; 28 x 28, grey."""
    rng = np.random.default_rng([seed, 4])
    (images, labels) = own_classes.fashion("train")
    pool = rng.permutation(len(labels))[:12_000]
    parts = partition.dirichlet(labels[pool], 20, 0.3, rng, min_size=300)
    rows = [pool[rng.permutation(np.asarray(part))] for part in parts]
    clients: Clients = {}
    for number, mine in enumerate(rows):
        is_new = number >= 15
        count = min(150 if is_new else 300, len(mine) // 2)
        tested = mine[count : count + 300]
        name = f"new-{number}" if is_new else f"a{number:02d}"
        clients[name] = Part(images[mine[:count]], labels[mine[:count]]), Part(images[tested], labels[tested])
    return clients


def trained(clients: Clients, folder: Path, seed: int, **settings: Any) -> Any:
    """A simulation of FedAvg-FT with these clients; every client's samples are divided as they come."""
    folder.mkdir(parents=True, exist_ok=True)
    sides = [part for client in clients.values() for part in client]
    inputs = np.concatenate([one.inputs for one in sides])
    labels = np.concatenate([one.labels for one in sides])
    np.savez(folder / "pool.npz", inputs=inputs, labels=np.char.add("k", labels.astype(str)))
    kind = "window" if inputs.dtype.kind == "f" else "image"
    source = f"npz:{folder / 'pool.npz'}?kind={kind}"
    ends = np.cumsum([len(one.labels) for one in sides]).tolist()
    rows = [np.arange(end - len(one.labels), end) for one, end in zip(sides, ends, strict=True)]
    shares = {name: (rows[2 * number], rows[2 * number + 1]) for number, name in enumerate(clients)}
    mark = partition.Pool.of(data.load(source).labels, None)
    partition.divided("as given", {}, mark, shares).write(folder / "partition.json")
    params = {**PARAMS, **settings.pop("params", {})}
    return simulate(
        "fedavg_ft", data=source, partition=str(folder / "partition.json"), rounds=settings.pop("rounds", ROUNDS),
        seed=seed, params=params, standardise=True, evaluate_every=0, engine="serial", **settings,
    )  # fmt: skip


def samples(part: Part, bundle: Bundle) -> Samples:
    """The samples as a device of this bundle takes them."""
    task = bundle.manifest.task
    found = data.from_arrays(part.inputs, np.char.add("k", part.labels.astype(str)), task.input, task.class_names)
    return Samples(found.inputs, found.labels, found.class_names, task.input, groups=part.groups)


def heads_of(bundle: Bundle, train: Samples, test: Samples) -> dict[str, float]:
    """Accuracies of a new device on ``test`` by name, and ``int8_chosen``."""
    encoders = {"fp32": Encoder.open(bundle, "fp32"), "own": open_encoder(bundle, "fp32", train, norm="own")}
    encoders["auto norm"] = open_encoder(bundle, "fp32", train)
    if "int8" in bundle.manifest.variants:
        encoders["int8"] = Encoder.open(bundle, "int8")
    found: dict[str, float] = {"int8_chosen": float(open_encoder(bundle, "auto", train).precision == "int8")}
    for name, encoder in encoders.items():
        is_first = name == "fp32"
        features = extract(bundle, (train, test), encoder, FitOptions(AUTO, local=is_first, blend=False))
        results, _ = evaluate_heads(features, [AUTO, *HEADS])
        for result in results:
            chosen = AUTO if result.choice is not None else result.title
            found[f"{name}/{chosen}"] = result.scores.personal or 0.0
        if is_first:
            found |= {"local": results[0].scores.local or 0.0, "global": results[0].scores.overall or 0.0}
    options = FitOptions(AUTO, allow_local=True, blend=False)
    used = personalize(bundle, (train, test), encoders["auto norm"], options)
    found |= {"used": used.used_accuracy or 0.0, "better_alone": float(used.scores.better_alone), "n_test": len(test)}
    for name, options in (("blend", FitOptions(AUTO)), ("blend in any case", FitOptions("blend"))):
        blended = personalize(bundle, (train, test), encoders["auto norm"], options)
        found[name] = blended.scores.personal or 0.0
    return found


def measure(clients: Clients, folder: Path, seed: int, **settings: Any) -> dict[str, dict[str, float]]:
    """New client -> accuracies 0..1 by every way, on the same test samples."""
    new = sorted(name for name in clients if name.startswith("new"))
    path = folder / "encoder.hwb"
    if not path.exists():
        run = trained(clients, folder, seed, new_clients=len(new), **settings)
        run.export(folder / "part.hwb").replace(path)
    bundle = load_bundle(path, folder / "cache")
    result = {name: heads_of(bundle, *(samples(part, bundle) for part in clients[name])) for name in new}
    for tune in ("head", "all"):
        path = folder / f"full-{tune}.json"
        if not path.exists():
            full = trained(clients, folder / "full", seed, params={"tune": tune}, **settings)
            path.write_text(json.dumps({name: full.clients[name]["acc.personal"] for name in new}))
        for name, accuracy in json.loads(path.read_text()).items():
            result[name][f"full, {tune} tuned"] = accuracy
    return result


def measure_starter(clients: Clients, folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """New client -> accuracies 0..1 on the starter encoder, as it comes and after one round of AFL of the others."""
    new = sorted(name for name in clients if name.startswith("new"))
    path = folder / "starter-afl.hwb"
    if not path.exists():
        run = starter_round({name: clients[name] for name in clients if name not in new}, folder, seed)
        run.export(folder / "part.hwb").replace(path)
    result: dict[str, dict[str, float]] = {name: {} for name in new}
    for way, source in {"starter": Path("starter"), "starter afl": path}.items():
        bundle = load_bundle(source, folder / "cache")
        for name in new:
            train, test = pair_of_samples(*clients[name], bundle)
            fitted = personalize(bundle, (train, test), open_encoder(bundle, "fp32", train), FitOptions(AUTO))
            result[name][way] = fitted.scores.personal or 0.0
    return result


def pair_of_samples(train: Part, test: Part, bundle: Bundle) -> tuple[Samples, Samples]:
    """Both parts of a device, with the same classes where the bundle has none of its own."""
    task = bundle.manifest.task
    inputs = np.concatenate([train.inputs, test.inputs])
    names = np.concatenate([class_names(train), class_names(test)])
    both = data.from_arrays(inputs, names, task.input, task.class_names, own_classes=not task.class_names)
    size = len(train.labels)
    first, second = (
        Samples(both.inputs[rows], both.labels[rows], both.class_names, task.input)
        for rows in (slice(None, size), slice(size, None))
    )
    return first, second


def starter_round(clients: Clients, folder: Path, seed: int) -> Any:
    """A simulation of one round of AFL on the starter encoder with these clients, every one with its own samples."""
    spec = load_bundle("starter", folder / "cache").manifest.task.input.model_dump(mode="json", exclude={"kind"})
    given = {
        name: (train.inputs, class_names(train), test.inputs, class_names(test))
        for name, (train, test) in clients.items()
    }
    settings = {"encoder": "starter_cnn", "weights": "starter", "input": spec, "local": False}
    return simulate("afl", data=given, rounds=1, seed=seed, engine="serial", **settings)


def class_names(part: Part) -> np.ndarray:
    """The names of a part's classes."""
    return np.char.add("k", part.labels.astype(str))


def table(folder: Path) -> list[str]:
    """Lines of Markdown: accuracies in percent, mean over new clients, and mean and standard deviation over seeds."""
    tasks = ("domains", "fonts", "watch", "fashion")
    files = {task: sorted(folder.glob(f"{task}-[0-9].json")) for task in tasks}
    runs = {task: [_with_starter(path) for path in paths] for task, paths in files.items() if paths}
    lines = [f"| | {' | '.join(runs)} |", "|---|" + "---|" * len(runs)]
    for title, name in ROWS.items():
        cells = []
        for results in runs.values():
            values = [100 * float(np.mean([client.get(name, np.nan) for client in run.values()])) for run in results]
            cells.append("–" if np.isnan(values).any() else f"{np.mean(values):.1f} ± {np.std(values):.1f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def _with_starter(path: Path) -> dict[str, dict[str, float]]:
    """The results of a file, with those on the starter encoder where they are beside it."""
    results = json.loads(path.read_text())
    beside = path.with_name(f"starter-{path.name}")
    extra = json.loads(beside.read_text()) if beside.exists() else {}
    return {name: {**accuracies, **extra.get(name, {})} for name, accuracies in results.items()}


def main() -> None:
    """Measure what is not in the folder yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="*", default=["domains", "fonts", "watch", "fashion"])
    parser.add_argument("--watch", type=Path, help="recordings, as 'windows:FILE' reads them")
    arguments = parser.parse_args()
    makers: dict[str, Callable[[int], Clients]] = {"domains": domains, "fonts": fonts, "fashion": fashion}
    if arguments.watch is not None:
        makers["watch"] = lambda seed: watch(seed, arguments.watch)
    for seed in arguments.seeds:
        for task in (task for task in arguments.tasks if task in makers):
            path = arguments.folder / f"{task}-{seed}.json"
            if not path.exists():
                result = measure(makers[task](seed), arguments.folder / f"{task}-{seed}", seed)
                path.write_text(json.dumps(result, indent=1))
            print(path, flush=True)
            beside = path.with_name(f"starter-{path.name}")
            if task != "watch" and not beside.exists():
                result = measure_starter(makers[task](seed), arguments.folder / f"{task}-{seed}", seed)
                beside.write_text(json.dumps(result, indent=1))
    print("\n".join(table(arguments.folder)))


if __name__ == "__main__":
    main()
