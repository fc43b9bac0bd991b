"""Sensor recordings of people: a shared one-dimensional encoder, and a personal head for somebody new.

Run it:  python examples/04_sensor_windows.py                       (about 10 s; recordings are made up)
         python examples/04_sensor_windows.py my_recordings.npz     (yours, in the layout of `windows:`)

The archive holds ``samples`` (time, channels) float32, all recordings one after another; ``lengths``, ``label`` and
``subject`` of each recording; and ``label_names``. Here seven made-up people do three exercises in their own ways:
the watch sits differently on each arm, and everybody has their own tempo. Five train the encoder together (FedAvg,
nobody's recordings leave them); the other two get the frozen encoder in a bundle and fit a head on half of their own
recordings.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator import simulate
from edge_agent import Personalizer, data, load_bundle, load_data

TRAINERS = 5
ROUNDS = 12
PARAMS = {"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": 2}


@dataclass(frozen=True)
class People:
    """An archive, and who is in it."""

    path: Path
    subjects: tuple[int, ...]

    def source(self, *subjects: int) -> str:
        """The data source of these people, as an agent's configuration names it."""
        return f"windows:{self.path}?subject={','.join(map(str, subjects))}"


def made_up(path: Path, people: int = 7, each: int = 4) -> None:
    """Write recordings: ``each`` of every exercise by everybody, 6 s at 50 Hz, 6 channels."""
    rng = np.random.default_rng(3)
    shifts = rng.uniform(0, 2 * np.pi, (3, 6))
    sizes = rng.uniform(0.2, 1.5, (3, 6))
    samples = []
    labels = []
    subjects = []
    for subject in range(people):
        turn, _ = np.linalg.qr(rng.normal(size=(6, 6)))
        mount = np.eye(6) + 0.6 * (turn - np.eye(6))
        tempo = rng.uniform(0.7, 1.4)
        for label in range(3):
            for _ in range(each):
                phase = 2 * np.pi * (tempo * np.arange(300) / 50 + rng.uniform())
                waves = np.stack([np.sin(phase + shift) for shift in shifts[label]], axis=1) * sizes[label]
                samples.append(waves @ mount + rng.normal(0, 0.5, (300, 6)))
                labels.append(label)
                subjects.append(subject)
    np.savez(
        path,
        samples=np.concatenate(samples).astype(np.float32),
        lengths=np.full(len(samples), 300),
        label=np.array(labels),
        subject=np.array(subjects),
        label_names=np.array(["raise", "turn", "swing"]),
        sampling_hz=np.array(50),
    )


def open_archive(path: Path) -> People:
    """The archive, with its people in order."""
    with np.load(path, allow_pickle=False) as arrays:
        return People(path, tuple(int(subject) for subject in np.unique(arrays["subject"])))


def new_clients(people: People, folder: Path, rounds: int = ROUNDS) -> dict[int, dict[str, float | None]]:
    """Subject -> accuracies on half of the recordings of each person who did not train, the other half of which fit.

    Windows are two seconds, half overlapping; mean and spread of each channel are those of the training people.
    """
    trainers = people.subjects[:TRAINERS]
    new = people.subjects[TRAINERS:]
    result = simulate(
        "fedavg",
        data=[people.source(subject) for subject in trainers],
        partition="domains",
        encoder="cnn1d",
        standardise=True,
        rounds=rounds,
        params=PARAMS,
        engine="serial",
    )
    bundle = load_bundle(result.export(folder / "watch.hwb"), folder)
    task = bundle.manifest.task
    found = {}
    for subject in new:
        train, test = data.split(load_data(people.source(subject), task.input, task.class_names), 0.5, seed=0)
        found[subject] = Personalizer.open(folder / "watch.hwb", cache=folder).fit(train, head="lr").evaluate(test)
    return found


def main() -> None:
    """Train with five people, personalize for the others, print what they get."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "made_up.npz"
        if len(sys.argv) == 1:
            made_up(path)
        for subject, result in new_clients(open_archive(path), folder).items():
            found = ", ".join(f"{scope} {value:.3f}" for scope, value in result.items() if value is not None)
            print(f"person {subject}: {found}")


if __name__ == "__main__":
    main()
