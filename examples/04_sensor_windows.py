"""Sensor recordings of people: a shared one-dimensional encoder, and a personal head for somebody new.

Run it:  python examples/04_sensor_windows.py                       (about 10 s; recordings are made up)
         python examples/04_sensor_windows.py my_recordings.npz     (yours, in the layout of `windows:`)

The archive holds ``samples`` (time, channels) float32, all recordings one after another; ``lengths``, ``label`` and
``subject`` of each recording; and ``label_names``. Here seven made-up people do three exercises in ways of their own:
the watch sits differently on each arm, and everybody has their own tempo. Five train the encoder together (FedAvg,
nobody's recordings leave them); the other two get the frozen encoder in a bundle and fit a head on the first half of
each of their own recordings.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edge_agent import data, methods
from edge_agent.bundle import Bundle, install
from edge_agent.client.session import Arrays, ClientState, Session
from edge_agent.encoder import Encoder
from edge_agent.methods import Update
from edge_agent.personalize import Result, personalize
from edge_agent.task import State, Task, WindowInput
from edge_agent.training.parts import to_arrays
from export.bundle import export_bundle, model_from_state

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
    shifts, sizes = rng.uniform(0, 2 * np.pi, (3, 6)), rng.uniform(0.2, 1.5, (3, 6))
    samples, labels, subjects = [], [], []
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


def task_of(people: People, trainers: tuple[int, ...]) -> Task:
    """Windows of two seconds, half overlapping; mean and spread of each channel are those of the training people."""
    samples = data.load(people.source(*trainers))
    spec = data.standardised(samples)
    if not isinstance(spec, WindowInput):
        raise SystemExit(f"{people.path} holds no recordings")
    return Task(input=spec, class_names=samples.class_names, encoder="cnn1d")


def federate(people: People, trainers: tuple[int, ...], task: Task, rounds: int = ROUNDS) -> State:
    """FedAvg over the training people, each a client of their own; the state after the last round."""
    method = methods.create("fedavg", PARAMS)
    sessions = []
    for subject in trainers:
        train, test = data.split(data.load(people.source(subject), task.input, task.class_names), 0.25, seed=0)
        arrays = (Arrays(part.inputs, part.labels) for part in (train, test))
        sessions.append(Session(method, task, f"person-{subject}", *arrays, seed=0, device="cpu"))
    torch.manual_seed(0)
    model = method.build(task)
    state = method.start(to_arrays(model, method.shared_names(model)))
    for number in range(1, rounds + 1):
        outcomes = [s.train(state, ClientState(), round_number=number, rounds=rounds, evaluate=False) for s in sessions]
        updates = [Update(s.client, o.samples, o.update) for s, o in zip(sessions, outcomes, strict=True)]
        state = method.aggregate(state, updates)
    return state


def bundle_of(state: State, task: Task, calibration: np.ndarray, folder: Path) -> Bundle:
    """The encoder as devices get it: exported, checked, packed, verified and unpacked."""
    method = methods.create("fedavg", PARAMS)
    path = folder / "watch.hwb"
    export_bundle(
        model_from_state(method, task, state),
        method,
        task,
        calibration,
        path,
        name="watch",
        created="2026-01-01T00:00:00+00:00",
        global_head=method.global_head(state),
        exporter="legacy",
    )
    return install(path, folder / "bundles")


def newcomers(people: People, folder: Path, rounds: int = ROUNDS) -> dict[int, Result]:
    """Subject -> what a personal head gave to each person who did not train."""
    trainers, new = people.subjects[:TRAINERS], people.subjects[TRAINERS:]
    task = task_of(people, trainers)
    state = federate(people, trainers, task, rounds)
    calibration = data.load(people.source(*trainers), task.input, task.class_names).inputs[:128]
    bundle = bundle_of(state, task, calibration, folder)
    encoder = Encoder.open(bundle, "fp32")
    return {
        subject: personalize(
            bundle,
            data.load(people.source(subject), task.input, task.class_names),
            "lr",
            encoder=encoder,
            test_fraction=0.5,
        )
        for subject in new
    }


def main() -> None:
    """Train with five people, personalize for the others, print what they get."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "made_up.npz"
        if len(sys.argv) == 1:
            made_up(path)
        for subject, result in newcomers(open_archive(path), folder).items():
            found = ", ".join(
                f"{scope} {value:.3f}" for scope, value in result.scores.metrics().items() if value is not None
            )
            print(f"person {subject}: {found} ({result.n_train} windows to fit, {result.n_test} held back)")


if __name__ == "__main__":
    main()
