"""Own classes and unknown inputs on a device, measured: RepPer's Fig. 6 in small, false alarms, AUROC, calibration.

``python tests/bench/yardstick_own_classes.py --folder DIR`` trains one encoder for each seed on six classes of
Fashion-MNIST, by RepPer or by the method that --method names, and one on handwritten digits (some minutes, kept in
DIR), and prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import simulate
from coordinator.research.bench.workloads import FASHION
from edge_agent import Personalizer, load_data
from edge_agent.core.task import ImageInput
from edge_agent.data import Samples
from edge_agent.data.idx import read_idx
from edge_agent.personal.confidence import Calibration, calibration_error
from edge_agent.personal.detectors import DETECTORS, ClassMeans, Detector
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import personalize
from edge_agent.personal.precision import open_encoder
from edge_agent.personal.unknown import UnknownRule

EACH = (5, 10, 20, 50)
KNOWN = 6
OWN = 4
FONTS = Path("/usr/share/fonts/truetype/dejavu")
HEADS = ("lr", "prototype", "auto")
ROUNDS = 20


def fashion(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 28, 28) uint8 and labels (n,) of Fashion-MNIST."""
    stem = {"train": "train", "test": "t10k"}[split]
    images, labels = (FASHION / f"{stem}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
    return read_idx(images, 3), read_idx(labels, 1).astype(np.int64)


def some(labels: np.ndarray, classes: np.ndarray, each: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of ``each`` random samples of every class."""
    return np.concatenate([rng.permutation(np.flatnonzero(labels == label))[:each] for label in classes])


PARAMS = {
    "repper": {"local_epochs": 4, "batch_size": 100},
    "fedavg": {"local_epochs": 3, "batch_size": 50, "lr": 0.05, "momentum": 0.9},
}


def trained(folder: Path, seed: int, method: str) -> tuple[Path, np.ndarray]:
    """Bundle of an encoder trained on six classes, `ROUNDS` rounds, five clients of 600 samples; and those classes."""
    classes = np.sort(np.random.default_rng(seed).permutation(10)[:KNOWN])
    path = folder / f"{method}-{seed}.hwb"
    if not path.exists():
        images, labels = fashion("train")
        rows = some(labels, classes, 500, np.random.default_rng(seed + 100)).reshape(KNOWN, 5, 100)
        clients = {f"c{number}": rows[:, number].reshape(-1) for number in range(5)}
        data = {name: (images[mine], np.char.add("k", labels[mine].astype(str))) for name, mine in clients.items()}
        options = {"params": PARAMS[method], "encoder": "small_cnn", "engine": "serial"}
        run = simulate(method, data=data, rounds=ROUNDS, seed=seed, **options)
        shutil.copy(run.export(folder / "part.hwb"), path)
    return path, classes


def by_samples(folder: Path, seeds: int, method: str) -> list[dict[str, Any]]:
    """Accuracy on the four classes that the encoder has never seen, by samples for each class."""
    pool = fashion("train")
    test_pool = fashion("test")
    rows = []
    for seed in range(seeds):
        path, known = trained(folder, seed, method)
        own = np.setdiff1d(np.arange(10), known)
        rng = np.random.default_rng(seed + 200)
        device = Personalizer.open(path, cache=folder / "cache")
        test = some(test_pool[1], own, 250, rng)
        for each in EACH:
            train = some(pool[1], own, each, rng)
            parts = [samples(device, *part, own) for part in ((pool, train), (test_pool, test))]
            encoder = open_encoder(device.bundle, "fp32", parts[0])
            local = None
            for head in HEADS:
                options = FitOptions(head, local=local is None)
                scores = personalize(device.bundle, (parts[0], parts[1]), encoder, options).scores
                local = scores.local if local is None else local
                rows.append({"seed": seed, "each": each, "head": head, "local": local, "own": scores.personal})
    return rows


def samples(device: Personalizer, pool: tuple[np.ndarray, np.ndarray], rows: np.ndarray, own: np.ndarray) -> Samples:
    """Samples of the device's own classes, ``own0`` and so on."""
    named = np.char.add("own", np.searchsorted(own, pool[1][rows]).astype(str))
    return device._samples(pool[0][rows], named, device.classes, own_classes=True)


def confidence(
    device: Personalizer,
    known: tuple[np.ndarray, np.ndarray],
    tested: tuple[np.ndarray, np.ndarray],
    **others: np.ndarray,
) -> dict[str, float | int]:
    """False alarms, AUROC of each kind of unknown inputs, and calibration, of a head on ``known`` samples."""
    device.fit(*known, own_classes=True, unknown=0.05)
    saved = device.head
    rule = saved.confidence.unknown
    # Where no temperature lowers the error in the folds, probabilities stay as they are.
    calibration = saved.confidence.calibration or Calibration(1.0, np.nan, np.nan)
    test = device._samples(*tested, device.classes)
    features = device.encoder.features(test.inputs)
    usual = rule.scores(features)
    sure = saved.head.predict_proba(features).max(axis=1)
    raw = saved.head.predict_proba(features)
    tempered = saved.predict_proba(features)
    result: dict[str, float | int] = {
        "n_train": len(known[1]),
        "n_test": len(test),
        "accuracy": float((raw.argmax(axis=1) == test.labels).mean()),
        "false_alarms_asked": rule.rate,
        "false_alarms": float((usual > rule.threshold).mean()),
        "missed_estimated": rule.misses.share,
        "by_class_means": float(isinstance(rule.detector, ClassMeans)),
        "temperature": calibration.temperature,
        "ece_test_before": calibration_error(raw, test.labels),
        "ece_test_after": calibration_error(tempered, test.labels),
        "ece_folds_before": calibration.error_before,
        "ece_folds_after": calibration.error_after,
    }
    for name, inputs in others.items():
        strange = device.encoder.features(device._samples(inputs, None, device.classes, is_labelled=False).inputs)
        distances = rule.scores(strange)
        shares = saved.head.predict_proba(strange).max(axis=1)
        result[f"auroc_{name}"] = auroc(usual, distances)
        result[f"auroc_{name}_by_probability"] = auroc(-sure, -shares)
        result[f"rejected_{name}"] = float((distances > rule.threshold).mean())
    return result


def auroc(usual: np.ndarray, strange: np.ndarray) -> float:
    """Probability that a strange input scores higher than a usual one; ties count half."""
    order = np.concatenate([usual, strange])
    ranks = np.unique(order, return_inverse=True)[1]
    counts = np.bincount(ranks)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    total = mean_rank[ranks[len(usual) :]].sum() - len(strange) * (len(strange) + 1) / 2
    return float(total / (len(usual) * len(strange)))


def on_fashion(folder: Path, seed: int, method: str) -> dict[str, float | int]:
    """Known: the six classes of the encoder; near: the four left out; far: handwritten digits."""
    path, known = trained(folder, seed, method)
    pool = fashion("train")
    test_pool = fashion("test")
    rng = np.random.default_rng(seed + 300)
    rows = some(pool[1], known, 50, rng)
    tested = some(test_pool[1], known, 150, rng)
    near = some(test_pool[1], np.setdiff1d(np.arange(10), known), 150, rng)
    digits = load_data(f"digits:optdigits?n=600&seed={seed}", ImageInput(channels=1, height=28, width=28))
    far = np.round((digits.inputs[:, 0] * 0.5 + 0.5) * 255).astype(np.uint8)
    labels = [np.char.add("k", part[1][mine].astype(str)) for part, mine in ((pool, rows), (test_pool, tested))]
    device = Personalizer.open(path, cache=folder / "cache")
    inputs = pool[0][rows], test_pool[0][tested]
    return confidence(device, (inputs[0], labels[0]), (inputs[1], labels[1]), near=test_pool[0][near], far=far)


def on_fonts(folder: Path, seed: int) -> dict[str, float | int]:
    """Known: digits 0 to 6 in fonts that the encoder has never seen; near: 7 to 9 in these fonts; far: clothes."""
    path = folder / "digits.hwb"
    if not path.exists():
        sources = [f"digits:{style}?client={number}&clients=3" for number, style in enumerate(("inverted", "photo"))]
        params = {"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": 3}
        run = simulate("fedavg", data=sources, partition="domains", rounds=3, params=params, engine="serial")
        shutil.copy(run.export(folder / "part.hwb"), path)
    images, labels = printed(1400, seed)
    first = images[:500]
    rest = images[500:]
    known = labels[:500] < 7
    later = labels[500:] < 7
    clothes = np.repeat(np.pad(fashion("test")[0][:600], ((0, 0), (2, 2), (2, 2)))[..., None], 3, axis=3)
    device = Personalizer.open(path, cache=folder / "cache")
    names = np.char.add("digit", labels.astype(str))
    train = (first[known], names[:500][known])
    test = (rest[later], names[500:][later])
    return confidence(device, train, test, near=rest[~later], far=clothes)


def printed(count: int, seed: int, paths: Sequence[Path] | None = None, salt: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Digits (n, 32, 32, 3) uint8 and labels (n,), drawn in these fonts (default: DejaVu), turned and coloured."""
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng([seed, salt])
    paths = paths or sorted(FONTS.glob("*.ttf"))
    labels = rng.integers(0, 10, count)
    images = []
    for label in labels:
        paper, ink = rng.integers(0, 256, (2, 3))
        while abs(float(paper.mean() - ink.mean())) < 80:
            paper, ink = rng.integers(0, 256, (2, 3))
        font = ImageFont.truetype(str(paths[rng.integers(len(paths))]), int(rng.integers(20, 28)))
        image = Image.new("RGB", (32, 32), tuple(paper.tolist()))
        middle = tuple((16 + rng.uniform(-2, 2, 2)).tolist())
        ImageDraw.Draw(image).text(middle, str(label), fill=tuple(ink.tolist()), font=font, anchor="mm")
        images.append(np.asarray(image.rotate(float(rng.uniform(-15, 15)), fillcolor=tuple(paper.tolist()))))
    return np.stack(images), labels


def by_detector(folder: Path, seeds: int, method: str) -> list[dict[str, Any]]:
    """Unknown inputs of an own class that a device has not shown, by what tells them apart; see `left_out`."""
    pool = fashion("test")
    rows = []
    for seed in range(seeds):
        path, known = trained(folder, seed, method)
        device = Personalizer.open(path, cache=folder / "cache")
        own = np.setdiff1d(np.arange(10), known)
        mine = some(pool[1], own, 150, np.random.default_rng(seed + 300))
        features = device.encoder.features(samples(device, pool, mine, own).inputs)
        labels = np.searchsorted(own, pool[1][mine])
        rows += [
            {"seed": seed, "each": each, "detectors": name, **left_out(features, labels, label, each, detectors)}
            for each in (10, 30, 100)
            for name, detectors in (("distance", DETECTORS[:1]), ("chosen", DETECTORS))
            for label in range(OWN)
        ]
    return rows


def left_out(
    features: np.ndarray, labels: np.ndarray, label: int, each: int, detectors: Sequence[type[Detector]]
) -> dict[str, float]:
    """AUROC, misses and false alarms for inputs of one class, of a rule from ``each`` samples of the others."""
    rng = np.random.default_rng(label)
    others = [rng.permutation(np.flatnonzero(labels == other)) for other in range(OWN) if other != label]
    train = np.concatenate([rows[:each] for rows in others])
    test = np.concatenate([rows[each:] for rows in others])
    rule = UnknownRule.fit(features[train], 0.05, labels=labels[train], detectors=detectors)
    usual = rule.scores(features[test])
    strange = rule.scores(features[labels == label])
    return {
        "auroc": auroc(usual, strange),
        "missed": float((strange <= rule.threshold).mean()),
        "missed_estimated": rule.misses.share,
        "false_alarms": float((usual > rule.threshold).mean()),
        "by_class_means": float(isinstance(rule.detector, ClassMeans)),
    }


def summary(rows: list[dict[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of all figures of rows that agree in ``by``."""
    keys = list(dict.fromkeys(tuple(row[name] for name in by) for row in rows))
    result = []
    for key in keys:
        group = [row for row in rows if tuple(row[name] for name in by) == key]
        figures = [name for name in group[0] if name not in {*by, "seed"}]
        values = {name: np.array([row[name] for row in group], float) for name in figures}
        spread = {name: [round(float(one.mean()), 4), round(float(one.std()), 4)] for name, one in values.items()}
        result.append({**dict(zip(by, key, strict=True)), **spread})
    return result


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "headwater-own-classes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--method", choices=sorted(PARAMS), default="repper")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(arguments.seeds)
    result = {"by_samples": summary(by_samples(arguments.folder, arguments.seeds, arguments.method), ("head", "each"))}
    by_detectors = by_detector(arguments.folder, arguments.seeds, arguments.method)
    result["by_detector"] = summary(by_detectors, ("detectors", "each"))
    kinds = {"fashion": lambda seed: on_fashion(arguments.folder, seed, arguments.method)}
    kinds["fonts"] = lambda seed: on_fonts(arguments.folder, seed)
    for name, measured in kinds.items():
        result[name] = summary([{"task": name, "seed": seed, **measured(seed)} for seed in seeds], ("task",))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
