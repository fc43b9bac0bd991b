"""Trains the starter encoder and writes its weights: ``python examples/starter/train.py --bank bank.npz --out FILE``.

It learns to tell 8,641 things apart, and to which of 84 folders of the clip art a thing belongs. 7,500 steps of 192
pictures take about an hour on one and a half cores of a server with bfloat16 arithmetic, and two hours without. The
weights are means over the last steps (decay 0.998).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from views import SIDE, Views

from edge_agent import models
from edge_agent.core.storage import write_atomic
from edge_agent.core.task import EncoderTask, ImageInput
from edge_agent.wire.tensors import encode

TASK = EncoderTask(
    input=ImageInput(channels=3, height=SIDE, width=SIDE, mean=(0.5,), std=(0.25,)), encoder="starter_cnn"
)
"""What the encoder takes."""

BATCH = 192
STEP_SIZE = 2e-3
WARM_UP = 300
_DECAY = 0.998
_SMOOTHING = 0.05
_SHARE_OF_FOLDERS = 0.25


class Network(nn.Module):
    """The encoder with two classifiers, of things and of folders, which are thrown away after the training."""

    def __init__(self, classes: int, folders: int) -> None:
        super().__init__()
        self.encoder = models.create(TASK)
        width = int(self.encoder.feature_dim)
        self.things = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, classes)
        )
        self.folders = nn.Linear(width, folders)

    def loss(self, pictures: Tensor, classes: Tensor, folders: Tensor) -> Tensor:
        """Return the cross-entropy of things, and a quarter of that of folders where there are some."""
        mean = TASK.input.mean[0]
        std = TASK.input.std[0]
        inputs = ((pictures.float() / 255 - mean) / std).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            features = self.encoder(inputs)
            things = self.things(features)
            places = self.folders(features)
        has_folder = folders >= 0
        of_things = functional.cross_entropy(things.float(), classes, label_smoothing=_SMOOTHING)
        of_folders = functional.cross_entropy(places.float()[has_folder], folders[has_folder])
        return of_things + _SHARE_OF_FOLDERS * of_folders


def train(bank: dict[str, np.ndarray], steps: int, seed: int) -> dict[str, np.ndarray]:
    """Return the weights of the trained encoder by name."""
    torch.manual_seed(seed)
    views = Views(bank, BATCH, seed)
    network = Network(views.classes, int(bank["folders"])).to(memory_format=torch.channels_last)
    matrices = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}], lr=STEP_SIZE
    )
    means = {name: value.clone() for name, value in network.encoder.state_dict().items()}
    batches = iter(DataLoader(views, batch_size=None, num_workers=1, prefetch_factor=4))
    begin = time.monotonic()
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = STEP_SIZE * warm * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.005)
        loss = network.loss(*next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        decay = min(_DECAY, 1 - 1 / (step + 2))
        for name, value in network.encoder.state_dict().items():
            if value.is_floating_point():
                means[name].lerp_(value, 1 - decay)
        if step % 100 == 99:
            rate = (step + 1) * BATCH / (time.monotonic() - begin)
            left_min = (steps - step - 1) * BATCH / rate / 60
            print(f"step {step + 1} of {steps}, loss {loss.item():.2f}, {rate:.0f} pictures/s, {left_min:.0f} min left")
    return {name: value.numpy() for name, value in means.items() if value.is_floating_point()}


def main() -> None:
    """Train, and write the weights as safetensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=7500, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    with np.load(arguments.bank) as file:
        bank = dict(file)
    weights = train(bank, arguments.steps, arguments.seed)
    write_atomic(arguments.out, encode(weights))


if __name__ == "__main__":
    main()
