"""Small samples, and the settings of simulations of them, which take a quarter of a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SETTINGS = {
    "data": "npz:i.npz",
    "clients": 2,
    "rounds": 1,
    "encoder": "linear",
    "encoder_params": {"feature_dim": 4},
    "device": "cpu",
}


def write_samples(folder: Path, seed: int = 0) -> None:
    """Write 60 images of 4 x 4 in three classes, the brighter the higher."""
    labels = np.arange(60) % 3
    noise = np.random.default_rng(seed).integers(0, 60, (60, 4, 4))
    inputs = (noise + 80 * labels[:, None, None]).astype(np.uint8)
    np.savez(folder / "i.npz", inputs=inputs, labels=labels, class_names=np.array(["a", "b", "c"]))
