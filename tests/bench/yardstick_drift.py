"""How often inputs are called changed when they are not, and how soon when they are.

``python tests/bench/yardstick_drift.py`` prints the tables of examples/results/changed-inputs.md: digits in printed
fonts with a convolutional encoder, and motions with six sensors and sounds of a microphone, made up, with one over
time. A device fits a head on some samples; others, drawn again and again, are its stream. What is changed is the input,
before the encoder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from PIL import Image

from coordinator import simulate
from edge_agent import heads
from edge_agent.core.task import ImageInput
from edge_agent.data import Samples, load
from edge_agent.data.wav import WavOptions, log_mel, mel_bands
from edge_agent.heads import Head
from edge_agent.personal.drift import EVERY, WINDOW, Reference, reference_of
from edge_agent.personal.personalizer import Personalizer
from edge_agent.personal.unknown import UnknownRule

TRAINED_ON = (100, 300, 1000)
SEEDS = 10
ANSWERS = 100_000
WITHIN = 200
CALM_LOOKS = 2 * WINDOW // EVERY
RUNS = 60
"""Answers of one class in a row, in streams of such runs, and of one input in streams of pictures that stay."""

Change = Callable[[np.ndarray], np.ndarray]
"""Pixels (height, width, channels) 0..255, values (channels, time) or a sound (time,) of one input, changed."""


@dataclass(frozen=True)
class Task:
    """Samples, an encoder, and what may change about inputs."""

    name: str
    personal: Personalizer
    samples: Samples
    changes: dict[str, Change]

    def features(self, change: Change | None = None) -> np.ndarray:
        """Features of all samples, after a change of their inputs."""
        inputs = self.samples.inputs
        if change is not None:
            inputs = self.changed(change)
        return self.personal.encoder.features(inputs.astype(np.float32))

    def changed(self, change: Change) -> np.ndarray:
        """All inputs after a change, as the encoder takes them."""
        return np.stack([self._changed(row, change) for row in self.samples.inputs])

    def _changed(self, row: np.ndarray, change: Change) -> np.ndarray:
        spec = self.samples.input
        axes = (-1, *[1] * (row.ndim - 1))
        mean = np.reshape(np.asarray(spec.mean), axes)
        std = np.reshape(np.asarray(spec.std), axes)
        values = row * std + mean
        if isinstance(spec, ImageInput):
            pixels = np.clip(np.round(values.transpose(1, 2, 0) * 255), 0, 255).astype(np.uint8)
            values = change(pixels).transpose(2, 0, 1) / 255
        else:
            values = change(values)
        return (values - mean) / std


@dataclass(frozen=True)
class SoundTask(Task):
    """Sounds, which are changed before they become log-mel energies."""

    signals: np.ndarray
    """(n, time), 1 being full scale."""

    def changed(self, change: Change) -> np.ndarray:
        """See `Task.changed`."""
        spec = self.samples.input
        return (energies(change(self.signals)) - column(spec.mean)) / column(spec.std)


def column(values: Sequence[float]) -> np.ndarray:
    """One value for each channel, for inputs (n, channels, time)."""
    return np.reshape(np.asarray(values, np.float32), (-1, 1))


def turned(pixels: np.ndarray) -> np.ndarray:
    image = Image.fromarray(pixels)
    return np.asarray(image.rotate(30, fillcolor=image.getpixel((0, 0))))


def noisy(size: float) -> Change:
    rng = np.random.default_rng(0)

    def change(values: np.ndarray) -> np.ndarray:
        changed = values + rng.normal(0, size, values.shape)
        return np.clip(changed, 0, 255).astype(np.uint8) if values.dtype == np.uint8 else changed

    return change


def digits() -> Task:
    """Printed digits in many fonts."""
    result = simulate("fedavg", data="digits", partition="domains", rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        personal = Personalizer.open(result.export(Path(folder) / "e.hwb"), norm="shipped", cache=folder)
    task = personal.bundle.manifest.task
    samples = load("digits:rendered?n=4000", task.input, task.class_names)
    return Task(
        "digits",
        personal,
        samples,
        {
            "camera turned by 30°": turned,
            "lights off (15 %)": lambda pixels: (pixels * 0.15).astype(np.uint8),
            "dimmed (60 %)": lambda pixels: (pixels * 0.6).astype(np.uint8),
            "noise (σ = 25 of 255)": noisy(25),
        },
    )


def motions() -> Task:
    """Six sensors of a motion of three kinds, by many people."""
    rng = np.random.default_rng(3)
    shifts = rng.uniform(0, 2 * np.pi, (3, 6))
    sizes = rng.uniform(0.2, 1.5, (3, 6))
    windows = []
    labels = []
    for _ in range(5000):
        label = int(rng.integers(3))
        phase = 2 * np.pi * (rng.uniform(0.7, 1.4) * np.arange(100) / 50 + rng.uniform())
        waves = np.stack([np.sin(phase + shift) for shift in shifts[label]]) * sizes[label][:, None]
        windows.append(waves * rng.uniform(0.7, 1.3) + rng.normal(0, 0.5, (6, 100)))
        labels.append(label)
    inputs = np.asarray(windows, np.float32)
    result = simulate("fedavg", data=(inputs[:1000], np.asarray(labels[:1000])), clients=5, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        personal = Personalizer.open(result.export(Path(folder) / "e.hwb"), norm="shipped", cache=folder)
    spec = personal.bundle.manifest.task.input
    values = inputs[1000:]
    mean = np.reshape(np.asarray(spec.mean, np.float32), (-1, 1))
    std = np.reshape(np.asarray(spec.std, np.float32), (-1, 1))
    names = personal.bundle.manifest.task.class_names
    samples = Samples((values - mean) / std, np.asarray(labels[1000:]), names, spec)
    return Task(
        "motions",
        personal,
        samples,
        {
            "rescaled (x 1.5)": lambda values: values * 1.5,
            "offset (+ 1 on one sensor)": lambda values: values + np.eye(6)[0][:, None],
            "noise (twice as much)": noisy(0.87),
            "two sensors exchanged": lambda values: values[[1, 0, 2, 3, 4, 5]],
        },
    )


RATE = 8000
LOG_MEL = WavOptions(rate=RATE, mels=24, frame_ms=32, step_ms=16)


def energies(signals: np.ndarray) -> np.ndarray:
    """Log-mel energies (n, mels, frames) of sounds (n, time)."""
    bands = mel_bands(LOG_MEL)
    return np.stack([log_mel(signal, LOG_MEL, bands).T for signal in signals])


def sound(label: int, rng: np.random.Generator) -> np.ndarray:
    """One second of a bell, a knock, a whistle or a motor, before some noise."""
    time = np.arange(RATE) / RATE
    begin = rng.uniform(0, 0.4)
    since = np.maximum(time - begin, 0)
    heard = time >= begin
    pitch = rng.uniform(0.8, 1.25)
    if label == 0:
        partials = [np.sin(2 * np.pi * 700 * pitch * k * since) / k for k in (1, 2.4, 3.9)]
        signal = heard * np.exp(-5 * since) * sum(partials)
    elif label == 1:
        signal = heard * np.exp(-40 * since) * (rng.normal(size=RATE) + 2 * np.sin(2 * np.pi * 180 * pitch * since))
    elif label == 2:
        sweep = 1200 * pitch * since + 500 * rng.uniform(-1, 1) * since**2
        signal = heard * (since < 0.5) * np.sin(2 * np.pi * sweep)
    else:
        turns = 2 * np.pi * 90 * pitch * time
        signal = sum(np.sin(k * turns) / k for k in range(1, 12)) * (1 + 0.3 * np.sin(2 * np.pi * 7 * time))
    loudness = rng.uniform(0.1, 0.4)
    return np.asarray(loudness * signal / np.abs(signal).max() + rng.uniform(0.003, 0.01) * rng.normal(size=RATE))


def muffled(signals: np.ndarray) -> np.ndarray:
    """Sounds of a covered microphone: each sample is the mean of nine."""
    return np.apply_along_axis(np.convolve, 1, signals, np.full(9, 1 / 9), mode="same")


def sounds() -> Task:
    """Four kinds of sounds, made up, as log-mel energies."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 4, 4000)
    signals = np.stack([sound(int(label), rng) for label in labels])
    inputs = energies(signals)
    result = simulate("fedavg", data=(inputs[:1000], labels[:1000]), clients=5, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        personal = Personalizer.open(result.export(Path(folder) / "e.hwb"), norm="shipped", cache=folder)
    task = personal.bundle.manifest.task
    values = (inputs[1000:] - column(task.input.mean)) / column(task.input.std)
    hiss = np.random.default_rng(0).normal(0, 0.03, signals[1000:].shape)
    return SoundTask(
        "sounds",
        personal,
        Samples(values, labels[1000:], task.class_names, task.input),
        {
            "noise (σ = 0.03 of full scale)": lambda heard: heard + hiss,
            "a third as loud": lambda heard: heard / 3,
            "microphone covered": muffled,
        },
        signals[1000:],
    )


def looks(device: Device, features: np.ndarray, order: np.ndarray, first: int = WINDOW) -> Iterator[tuple[int, bool]]:
    """Answers so far, and what a look finds then, of a stream of rows."""
    answered = device.head.predict_proba(features).argmax(axis=1)
    residuals = device.reference.residuals(features, answered)
    unknown = device.rule.is_unknown(features)
    for end in range(first, len(order) + 1, EVERY):
        rows = order[end - WINDOW : end]
        yield end, device.reference.compare(residuals[rows], answered[rows], unknown[rows]).have_changed


@dataclass(frozen=True)
class Device:
    """What was fitted on the samples of a device."""

    head: Head
    rule: UnknownRule
    reference: Reference

    @classmethod
    def fit(cls, features: np.ndarray, labels: np.ndarray) -> Device:
        """Fit head and rule on features (n, d) and labels (n,)."""
        head = heads.create("lr")
        head.fit(heads.FitData(features, labels, int(labels.max()) + 1), np.random.default_rng(0))
        rule = UnknownRule.fit(features, 0.05, labels=labels)
        reference = reference_of(rule)
        if rule is None or reference is None:
            raise SystemExit("nothing to compare with")
        return cls(head, rule, reference)


def alarms_of(found: Iterator[tuple[int, bool]]) -> int:
    """How often inputs are newly called changed, as `InputsWatch` does."""
    alarms = 0
    calm = CALM_LOOKS
    for _, is_found in found:
        if is_found and calm >= CALM_LOOKS:
            alarms += 1
        calm = 0 if is_found else calm + 1
    return alarms


def measure(task: Task) -> None:
    """Print a table of false alarms and one of answers until an alarm."""
    plain = task.features()
    changed = {name: task.features(change) for name, change in task.changes.items()}
    labels = task.samples.labels
    print(f"\n### {task.name}\n")
    print("| learned from | any order | runs of one class | inputs that stay | " + " | ".join(changed) + " |")
    print("|---|---|---|---|" + "---|" * len(changed))
    for count in TRAINED_ON:
        alarms: dict[str, list[int]] = {"any": [], "runs": [], "stay": []}
        answers: dict[str, list[int | None]] = {name: [] for name in changed}
        for seed in range(SEEDS):
            rng = np.random.default_rng(seed)
            order = rng.permutation(len(plain))
            train = order[:count]
            others = order[count:]
            device = Device.fit(plain[train], labels[train])
            each = ANSWERS // SEEDS
            streams = {
                "any": rng.choice(others, each),
                "runs": np.concatenate(
                    [
                        rng.choice(others[labels[others] == rng.choice(np.unique(labels))], RUNS)
                        for _ in range(each // RUNS)
                    ]
                ),
                "stay": np.repeat(rng.choice(others, each // RUNS), RUNS),
            }
            for name, stream in streams.items():
                alarms[name].append(alarms_of(looks(device, plain, stream)))
            for name, features in changed.items():
                both = np.concatenate([plain, features])
                stream = np.concatenate([rng.choice(others, WINDOW), len(plain) + rng.choice(others, WITHIN)])
                ends = (end for end, is_found in looks(device, both, stream, WINDOW + EVERY) if is_found)
                end = next(ends, None)
                answers[name].append(None if end is None else end - WINDOW)
        cells = [f"{sum(counts)} (most {max(counts)})" for counts in alarms.values()]
        for found in answers.values():
            times = [answer for answer in found if answer is not None]
            cells.append(f"{len(times)} of {SEEDS}" + (f", {median(times):.0f}" if times else ""))
        print(f"| {count} | {' | '.join(cells)} |", flush=True)
    rows = fmean(float(np.linalg.norm(row)) for row in plain[:100])
    print(f"\n{plain.shape[1]} features of length {rows:.1f} in the mean.")


def main() -> None:
    """Measure all tasks."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for task in (digits(), motions(), sounds()):
        measure(task)


if __name__ == "__main__":
    main()
