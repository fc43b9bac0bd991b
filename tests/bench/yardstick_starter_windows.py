"""Whether a starter encoder of sensor windows, trained on formulas alone, is worth its place beside local models.

``python tests/bench/yardstick_starter_windows.py --folder DIR --series DIR --watch FILE`` trains the encoder of
`windows_of_formulas` for 22 minutes of a processor, if DIR has none, draws the samples of each task, fits heads on the
encoder and the best model of the raw windows, keeps results in --folder, and prints the tables of
examples/results/starter.md. ``--series``: the folder ``aeon/datasets/data`` of the wheel of aeon 1.6.0, unpacked.
espeak-ng and Debian's dataset-fashion-mnist are installed. Tasks:

- ``watch``: seven exercises with a watch, 6 channels x 100 samples; tested on other people.
- ``words``: ten words by a synthesizer, the levels of three bands, 3 x 128; tested on other voices.
- ``clothes``: both edges, lightness and contrast of Fashion-MNIST's clothes from top to bottom, 4 x 64.
- ``vowels``: which of nine men says two Japanese vowels, 12 coefficients x 64 (JapaneseVowels).
- ``gun``: the height of a hand that draws a gun or points, 1 x 128 (GunPoint).
- ``leaves``: outlines of leaves of five kinds of trees, 1 x 128 (OSULeaf).
- ``appliances``: the power that ten kinds of appliances draw, 1 x 128 (ACSF1).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import yardstick_own_classes as own_classes
import yardstick_starter as pictures
from scipy.signal import spectrogram
from windows_of_formulas import WindowEncoder, train

from edge_agent.bundle.manifest import NEWEST_SCHEMA
from edge_agent.bundle.unpacked import Bundle
from edge_agent.core.storage import write_atomic
from edge_agent.core.task import EncoderTask, WindowInput
from edge_agent.personal.personalizer import load_bundle
from edge_agent.training.parts import load_arrays
from edge_agent.wire.tensors import decode, encode
from export.batch_norm import free_batch_norm
from export.calibration import Calibration
from export.packing import BundleOptions, Checked, Graphs, Origin, check_passed, pack_checked
from export.parity import graph_gates, parity_gate

EACH = pictures.EACH
"""Samples of each class that a device learns from."""

BANDS_HZ = (100, 700, 1900, 5000)
"""Limits of the bands of words."""

TREES = 5
"""Kinds of leaves; of the sixth there are too few."""


@dataclass(frozen=True)
class Sources:
    """Where the data of tasks are."""

    series: Path
    """The folder of time series in the wheel of aeon."""

    watch: Path
    """The recordings of watches, as ``windows:FILE`` reads them."""

    folder: Path
    """The folder in which spoken words are kept."""


Drawn = tuple[np.ndarray, np.ndarray]
"""Windows (n, channels, length) float32 and their classes (n,)."""


def drawn_apart(pool: Drawn, test_pool: Drawn, rng: np.random.Generator) -> pictures.Pictures:
    """Return samples to learn from, the classes in turn, and others for tests.

    They are 50 of each class, or as many as there are of the smallest; for tests there are 40 of each at most.
    """
    classes = np.unique(pool[1])
    each = min(EACH[-1], int(np.bincount(pool[1]).min()))
    by_class = [rng.permutation(np.flatnonzero(pool[1] == label))[:each] for label in classes]
    in_turn = np.stack(by_class).T.reshape(-1)
    tested = own_classes.some(test_pool[1], classes, pictures.TESTED, rng)
    return pictures.Pictures(pool[0][in_turn], pool[1][in_turn], test_pool[0][tested], test_pool[1][tested])


def divided(drawn: Drawn, learned: int, rng: np.random.Generator) -> pictures.Pictures:
    """Return ``learned`` samples of each class to learn from, and the others for tests."""
    by_class = [rng.permutation(np.flatnonzero(drawn[1] == label)) for label in np.unique(drawn[1])]
    first = np.concatenate([rows[:learned] for rows in by_class])
    others = np.concatenate([rows[learned:] for rows in by_class])
    return drawn_apart((drawn[0][first], drawn[1][first]), (drawn[0][others], drawn[1][others]), rng)


def resampled(signals: np.ndarray, length: int) -> np.ndarray:
    """Return windows (n, channels, m) as windows of another length, interpolated."""
    before = np.linspace(0, 1, signals.shape[2])
    after = np.linspace(0, 1, length)
    rows = [np.interp(after, before, row) for row in signals.reshape(-1, signals.shape[2])]
    return np.stack(rows).reshape(*signals.shape[:2], length).astype(np.float32)


def series(sources: Sources, folder: str, name: str) -> Drawn:
    """Return the time series of one set, training and test together; all have one length."""
    rows = []
    names = []
    for part in ("TRAIN", "TEST"):
        for line in (sources.series / folder / f"{name}_{part}.ts").read_text().splitlines():
            if line and line[0] not in "#@":
                *channels, label = line.strip().split(":")
                rows.append([np.array(channel.split(","), np.float32) for channel in channels])
                names.append(label)
    return np.array(rows), np.unique(np.array(names), return_inverse=True)[1]


def watch(seed: int, sources: Sources) -> pictures.Pictures:
    """Return windows of two seconds of four people, and of three others for tests."""
    rng = np.random.default_rng([seed, 11])
    arrays = np.load(sources.watch)
    length = 2 * int(arrays["sampling_hz"])
    ends = np.cumsum(arrays["lengths"])
    people = rng.permutation(np.unique(arrays["subject"]))
    pools = []
    for some in (people[:4], people[4:]):
        windows = []
        labels = []
        for row in np.flatnonzero(np.isin(arrays["subject"], some)):
            recording = arrays["samples"][ends[row] - arrays["lengths"][row] : ends[row]]
            begins = range(0, len(recording) - length + 1, length)
            windows += [recording[begin : begin + length].T for begin in begins]
            labels += [int(arrays["label"][row])] * len(begins)
        pools.append((np.stack(windows).astype(np.float32), np.array(labels)))
    return drawn_apart(pools[0], pools[1], rng)


def words(seed: int, sources: Sources) -> pictures.Pictures:
    """Return levels of bands of words; the voices of tests are in no other sample."""
    rng = np.random.default_rng([seed, 12])
    file = sources.folder / "words.npz"
    if not file.exists():
        np.savez(file, **_spoken())
    arrays = np.load(file)
    voices = rng.permutation(arrays["voice"].max() + 1)
    is_strange = np.isin(arrays["voice"], voices[: len(voices) // 3])
    pools = [(arrays["windows"][rows], arrays["label"][rows]) for rows in (~is_strange, is_strange)]
    return drawn_apart(pools[0], pools[1], rng)


def _spoken() -> dict[str, np.ndarray]:
    """Return the windows (n, 3, 128) float32 of all words by all voices, in decibels, with their labels and voices."""
    rng = np.random.default_rng(5)
    windows = []
    labels = []
    speakers = []
    for voice, label, sound in pictures.spoken_words(rng):
        signal, rate = pictures.noisy_sound(sound, rng, (-3.0, -1.8))
        hertz, _, power = spectrogram(signal, rate, nperseg=512, noverlap=512 - len(signal) // 133)
        bands = [power[(hertz >= low) & (hertz < high)].sum(0) for low, high in pairwise(BANDS_HZ)]
        windows.append(resampled(10 * np.log10(np.stack(bands)[None] + 1e-12), 128)[0])
        labels.append(label)
        speakers.append(voice)
    return {"windows": np.stack(windows), "label": np.array(labels), "voice": np.array(speakers)}


def clothes(seed: int, _sources: Sources) -> pictures.Pictures:
    """Return what is seen of clothes from top to bottom."""
    rng = np.random.default_rng([seed, 13])
    pools = []
    for split in ("train", "test"):
        images, labels = own_classes.fashion(split)
        rows = rng.permutation(len(labels))[:3000]
        pixels = images[rows].astype(np.float64)
        is_clothing = pixels > 25
        is_empty = ~is_clothing.any(2)
        left = np.where(is_empty, 14, is_clothing.argmax(2))
        right = np.where(is_empty, 14, is_clothing[:, :, ::-1].argmax(2))
        signals = np.stack([left, right, pixels.mean(2) / 10, pixels.std(2) / 10], 1)
        pools.append((resampled(signals, 64), labels[rows]))
    return drawn_apart(pools[0], pools[1], rng)


def vowels(seed: int, sources: Sources) -> pictures.Pictures:
    """Return what nine men say."""
    windows, labels = series(sources, "JapaneseVowels", "JapaneseVowels_eq")
    return divided((resampled(windows, 64), labels), 30, np.random.default_rng([seed, 18]))


def gun(seed: int, sources: Sources) -> pictures.Pictures:
    """Return movements of a hand."""
    windows, labels = series(sources, "GunPoint", "GunPoint")
    return divided((resampled(windows, 128), labels), 60, np.random.default_rng([seed, 15]))


def leaves(seed: int, sources: Sources) -> pictures.Pictures:
    """Return outlines of leaves."""
    windows, labels = series(sources, "OSULeaf", "OSULeaf")
    is_chosen = labels < TREES
    return divided((resampled(windows[is_chosen], 128), labels[is_chosen]), 36, np.random.default_rng([seed, 16]))


def appliances(seed: int, sources: Sources) -> pictures.Pictures:
    """Return the power of appliances, means of eight values."""
    windows, labels = series(sources, "ACSF1", "ACSF1")
    means = windows[:, :, :1456].reshape(len(windows), 1, 182, 8).mean(3)
    return divided((resampled(means, 128), labels), 10, np.random.default_rng([seed, 17]))


TASKS: dict[str, Callable[[int, Sources], pictures.Pictures]] = {
    "watch": watch,
    "words": words,
    "clothes": clothes,
    "vowels": vowels,
    "gun": gun,
    "leaves": leaves,
    "appliances": appliances,
}


def trained_encoder(file: Path, minutes: float, seed: int) -> WindowEncoder:
    """Return the encoder whose weights are in ``file``, which is written where there is none."""
    if not file.exists():
        encoder = train(minutes, seed)
        weights = {name: value.numpy() for name, value in encoder.state_dict().items() if value.is_floating_point()}
        write_atomic(file, encode(weights))
    encoder = WindowEncoder()
    load_arrays(encoder, decode(file.read_bytes()))
    return encoder.eval()


def bundle_for(encoder: WindowEncoder, windows: np.ndarray, folder: Path) -> Bundle:
    """Return a bundle of the encoder for windows (n, channels, length) like these.

    Channels are brought to mean 0 and variance 1 by statistics of these windows, for the local models as well.
    """
    _, channels, length = windows.shape
    mean = windows.mean((0, 2))
    std = windows.std((0, 2))
    spec = WindowInput(channels=channels, length=length, stride=length, mean=mean.tolist(), std=std.tolist())
    task = EncoderTask(input=spec, encoder="windows_of_formulas")
    inputs = ((windows[:128] - mean[:, None]) / std[:, None]).astype(np.float32)
    size = channels * (encoder.width + 2)
    encoder.feature_dim = size  # type: ignore[assignment]
    free_norm = free_batch_norm(encoder, task)
    if free_norm is None:
        raise SystemExit("the encoder has no batch norm; expected the network of windows_of_formulas")
    gate, parity = parity_gate(free_norm.exported.model, encoder, inputs)
    gates = [*graph_gates(free_norm.exported.model, task), gate]
    check_passed(gates, task.encoder)
    origin = Origin(task, size, schema_version=NEWEST_SCHEMA)
    checked = Checked(Graphs(free_norm.exported, free_norm), origin, gates, parity, encoder)
    path = folder / "windows.hwb"
    options = BundleOptions("windows", int8=False, why_no_int8="not measured")
    pack_checked(checked, Calibration.from_inputs(inputs), path, options, {})
    return load_bundle(path, folder / "unpacked")


def measure(
    encoder: WindowEncoder, drawn: pictures.Pictures, folder: Path, seed: int, numbers: Sequence[int] = EACH
) -> dict[str, dict[str, float]]:
    """Return the accuracies by samples of each class: of the best model alone, the best head, and `auto`.

    Of ``numbers`` of samples those are left out of which there are not as many.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bundle = bundle_for(encoder, drawn.train, folder)
    largest = len(drawn.train) // len(np.unique(drawn.train_labels))
    return {str(each): pictures.measure(bundle, drawn, each, seed) for each in numbers if each <= largest}


def tables(folder: Path) -> list[str]:
    """Return a table for each number of samples, as of `yardstick_starter.tables`."""
    lines = []
    for each in map(str, EACH):
        rows = []
        for task in TASKS:
            runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}-[0-9].json"))]
            if runs and each in runs[0]:
                rows.append(table_row(task, [run[each] for run in runs]))
        if rows:
            lines += ["", f"{each} of each class:" if each != "1" else "One of each class:", ""]
            lines += ["| task | best alone | encoder, head | gain | encoder, `auto` | gain |", "|---|" + "---|" * 5]
            lines += rows
    return lines


def table_row(task: str, runs: list[dict[str, float]]) -> str:
    """Return the line of one task: accuracies of each seed as `measure` returns them."""
    alone, head, auto = (np.array([run[name] for run in runs]) for name in ("local", "head", "auto"))
    cells = [
        pictures.spread(alone),
        pictures.spread(head),
        pictures.gain(head - alone),
        pictures.spread(auto),
        pictures.gain(auto - alone),
    ]
    return f"| {task} | {' | '.join(cells)} |"


def main() -> None:
    """Train if there is no encoder, measure what is not in the folder yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folder", "series", "watch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=22.0, help="of training; 0 leaves the weights random")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--each", type=int, nargs="*", default=list(EACH), help="samples of each class")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    encoder = trained_encoder(folder / "encoder.safetensors", arguments.minutes, seed=0)
    sources = Sources(arguments.series, arguments.watch, folder)
    for seed in arguments.seeds:
        for task in arguments.tasks:
            path = folder / f"{task}-{seed}.json"
            if path.exists():
                continue
            result = measure(encoder, TASKS[task](seed, sources), folder / f"{task}-{seed}", seed, arguments.each)
            path.write_text(json.dumps(result, indent=1))
            print(path, result, flush=True)
    print("\n".join(tables(folder)))


if __name__ == "__main__":
    main()
