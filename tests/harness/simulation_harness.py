"""Small data and simulations of a few seconds, and what of their results has to be the same wherever they run."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from federation_duties import quick_params

from coordinator.simulation.plan import Plan
from coordinator.simulation.run import Simulation, open_simulation
from coordinator.simulation.setup import PARTITION, Prepared


def closed_rounds(simulation) -> int:
    return len(simulation.state.journal.entries(simulation.run, ("round_closed",)))


def write_images(
    path: Path,
    count: int = 90,
    *,
    names: Sequence[str] = ("a", "b", "c"),
    seed: int = 0,
    dark: float = 60,
    noise: float = 25,
    step: float = 60,
) -> str:
    """Source of so many images of 4 x 4 whose classes differ in brightness, the first about ``dark`` of 255."""
    labels = np.arange(count) % len(names)
    grey = np.random.default_rng(seed).normal(dark, noise, (count, 4, 4))
    inputs = np.clip(grey + step * labels[:, None, None], 0, 255).astype(np.uint8)
    np.savez(path, inputs=inputs, labels=labels, class_names=np.array(names))
    return f"npz:{path}"


def write_idx(folder: Path, train: int = 400, test: int = 200, *, classes: int = 10, side: int = 28) -> str:
    """Source of the four files of MNIST, with noise for images."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for stem, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % classes).astype(np.uint8)
        pixels = rng.integers(0, 256, (count, side, side)).astype(np.uint8)
        for name, array in ((f"{stem}-images-idx3-ubyte", pixels), (f"{stem}-labels-idx1-ubyte", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
            with gzip.open(folder / f"{name}.gz", "wb") as file:
                file.write(header + array.tobytes())
    return f"idx:{folder}"


def small_plan(images: str, method: str = "fedavg", **changes: Any) -> Plan:
    """Two rounds of three clients, one after another, in which hardly anything is computed."""
    wished = {
        "method": method,
        "params": quick_params(method),
        "data": (images,),
        "clients": 3,
        "rounds": 2,
        "encoder": "linear",
        "encoder_params": {"feature_dim": 4},
        "device": "cpu",
        "engine": "serial",
    }
    return Plan(**{**wished, **changes})


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Result of a simulation, begun or gone on with in ``folder``."""
    return run_and_updates(plan, folder)[0]


def run_and_updates(plan: Plan, folder: Path, *, saved: bool = False) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The result, and by round and client what was sent and told. ``saved``: by the partition that is in ``folder``."""
    with open_simulation(Prepared.of(plan, folder / PARTITION if saved else None), folder) as simulation:
        return simulation.finish(), updates_of(simulation)


def updates_of(simulation: Simulation) -> dict[tuple[int, str], tuple[str, dict[str, float]]]:
    entries = simulation.state.journal.entries(simulation.run, ("update_accepted",))
    return {(entry.round, entry.agent): (entry.digest, entry.body["metrics"]) for entry in entries}


def learned(result: dict[str, Any]) -> dict[str, Any]:
    """All but time and traffic, which are those of the process that closed a round."""
    rounds = [{**one, "seconds": None, "bytes_up": None, "bytes_down": None} for one in result["rounds"]]
    return {**result, "rounds": rounds, "seconds": None, "start_s": None}


def learned_anywhere(result: dict[str, Any]) -> dict[str, Any]:
    """The same without who computed."""
    return {**learned(result), "engine": None, "workers": None}
