"""A table of two rows and two columns on small data, to be made again within seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TABLE = """
title = "Two methods"
source = "a paper"
measure = "accuracy"
tolerance = 5
get_data = "Get it from the shelf."
[plan]
data = "npz:i.npz"
clients = 3
rounds = 2
encoder = "linear"
encoder_params = { feature_dim = 4 }
device = "cpu"
engine = "serial"
[plan.params]
lr = 0.05
batch_size = 8
[[columns]]
name = "even"
[[columns]]
name = "odd"
plan = { partition = "dirichlet", alpha = 0.7, min_size = 2 }
doubt = "odd numbers"
[[rows]]
name = "Local"
method = "local"
paper = { even = 40.0, odd = 99.0 }
[[rows]]
name = "Fed Avg"
method = "fedavg"
scope = "global"
paper = { even = 33.3 }
params = { lr = 0.01 }
note = "smaller steps"
[[promises]]
row = "Local"
"""


def write_table(folder: Path) -> None:
    """60 images of 4 x 4 in three classes, and the table about them in ``t.toml``."""
    labels = np.arange(60) % 3
    inputs = np.random.default_rng(0).integers(0, 256, (60, 4, 4)).astype(np.uint8)
    np.savez(folder / "i.npz", inputs=inputs, labels=labels, class_names=np.array(["a", "b", "c"]))
    (folder / "t.toml").write_text(TABLE)
