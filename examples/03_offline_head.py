"""From a trained encoder to a personal head on a device that is offline: bundle, fit, evaluate, predict.

Run it:  python examples/03_offline_head.py        (about 10 s)

The upper half needs torch and stands for the data center; it trains a small encoder on digits of two styles. The lower
half is what a device does with the one file that it gets, by the commands that it would type, without torch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from edge_agent import data, methods
from edge_agent.cli import main as edge_agent
from edge_agent.client.session import Arrays, ClientState, Session
from edge_agent.task import ImageInput, Task
from edge_agent.training.parts import to_arrays
from export.bundle import export_bundle, model_from_state

TASK = Task(input=ImageInput(channels=3, height=32, width=32), class_names=tuple("0123456789"), encoder="small_cnn")
EPOCHS = 3


def make_bundle(path: Path) -> None:
    """Train on two styles, check the exported encoder against torch's, and write it with an int8 variant."""
    method = methods.create("fedavg", {"lr": 0.05, "momentum": 0.9, "batch_size": 32, "local_epochs": EPOCHS})
    sources = ("digits:inverted?client=0&clients=3", "digits:photo?client=1&clients=3")
    parts = [data.load(source, TASK.input, TASK.class_names) for source in sources]
    arrays = Arrays(np.concatenate([part.inputs for part in parts]), np.concatenate([part.labels for part in parts]))
    session = Session(method, TASK, "data-center", arrays, arrays, seed=0, device="cpu")
    torch.manual_seed(0)
    model = method.build(TASK)
    start = method.start(to_arrays(model, method.shared_names(model)))
    state = session.train(method.broadcast(start), ClientState(), round_number=1, rounds=1, evaluate=False).update
    report = export_bundle(
        model_from_state(method, TASK, state),
        method,
        TASK,
        arrays.inputs[:64],
        path,
        name="example",
        created="2026-01-01T00:00:00+00:00",
        global_head=method.global_head(state),
        exporter="legacy",
    )
    print(f"bundle of {path.stat().st_size // 1000} kB, gates: {', '.join(gate.name for gate in report.gates)}\n")


def main() -> None:
    """Make a bundle, and use it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bundle, head, cache = (str(Path(folder) / name) for name in ("encoder.hwb", "my-head", "cache"))
        make_bundle(Path(bundle))
        source = "digits:slanted?client=2&clients=3"  # a style and writers that the encoder has never seen
        common = ["--bundle", bundle, "--cache", cache]
        run("fit", *common, "--data", source, "--head", "lr", "--out", head)
        run("evaluate", *common, "--data", source)
        run("predict", *common, "--data", f"{source}&n=3", "--head", head)


def run(*words: str) -> None:
    """What typing ``edge-agent …`` does."""
    print(f"$ edge-agent {words[0]} …", flush=True)
    if edge_agent(words):
        raise SystemExit(1)
    print()


if __name__ == "__main__":
    main()
