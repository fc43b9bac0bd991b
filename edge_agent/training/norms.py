"""Batch norm statistics of a client's own samples, taken anew under the weights that the client has now.

Where running means and variances stay with clients, those that a client has kept belong to the weights that it trained.
Aggregation replaces the weights below them, and the two no longer fit: where labels are skewed, accuracies of the
received model collapse. Statistics taken anew under the received weights fit; nothing but the statistics changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as Norm  # what all layers of NORM_LAYERS are

from .parts import NORM_LAYERS

MOST_ROWS = 1024
"""Samples, evenly spaced, that the statistics are taken from; more of them change nothing that matters."""

PIECE_ROWS = 256
"""Samples of one forward pass, at most."""


def own_layers(model: nn.Module, personal: Collection[str]) -> list[Norm]:
    """Batch norm layers of ``model`` with running statistics that are among the tensors called ``personal``."""
    return [
        layer
        for place, layer in model.named_modules()
        if isinstance(layer, NORM_LAYERS) and f"{place}.running_mean" in personal
    ]


def take_statistics(layers: Collection[Norm], forward: Callable[[torch.Tensor], object], inputs: torch.Tensor) -> None:
    """Replace the running statistics of ``layers`` by those of ``inputs`` (n, ...).

    ``forward`` runs the model in eval mode on some of the inputs; all other layers do as in evaluation, so nothing
    random is drawn. Fewer than two inputs have no variance: the statistics stay as they are.
    """
    if len(inputs) < 2 or not layers:
        return
    rows = np.unique(np.linspace(0, len(inputs) - 1, min(MOST_ROWS, len(inputs))).round().astype(np.int64))
    pieces = np.array_split(rows, -(-len(rows) // PIECE_ROWS))
    momenta = [layer.momentum for layer in layers]
    hooks = [layer.register_forward_pre_hook(_use_batch) for layer in layers]
    hooks += [layer.register_forward_hook(_use_running) for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over all pieces
        with torch.no_grad():
            for piece in pieces:
                forward(inputs[torch.from_numpy(piece).to(inputs.device)])
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


@contextlib.contextmanager
def statistics_of(
    layers: Collection[Norm], forward: Callable[[torch.Tensor], object], inputs: torch.Tensor
) -> Iterator[None]:
    """Inside, ``layers`` have the statistics of ``inputs``; afterwards those from before, bit for bit."""
    before = [{name: buffer.clone() for name, buffer in layer.named_buffers()} for layer in layers]
    take_statistics(layers, forward, inputs)
    try:
        yield
    finally:
        for layer, buffers in zip(layers, before, strict=True):
            for name, buffer in buffers.items():
                layer.get_buffer(name).copy_(buffer)


def _use_batch(layer: nn.Module, _: Any) -> None:
    layer.training = True


def _use_running(layer: nn.Module, *_: Any) -> None:
    layer.training = False
