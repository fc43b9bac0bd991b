"""Ranges of an encoder's activations on a client's samples: two numbers for each step of its forward pass, no data.

The steps are the calls of torch functions that the encoder's own code makes, in their order, so that they need no names
and are the same on every device. The exporter finds the tensors of its graph among them by their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

MOST_ROWS = 256
"""The most samples, evenly spaced, from which ranges are taken."""

PIECE_ROWS = 32
"""The most samples of one forward pass."""


class _Outputs(TorchFunctionMode):
    """Shows ``see`` each floating point tensor that a torch function returns."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
            self._see(result)
        return result


def steps(encoder: nn.Module, inputs: torch.Tensor, see: Callable[[torch.Tensor], None]) -> None:
    """Show ``see`` the inputs (n, ...), then the result of each step of the encoder in eval mode, while it is valid."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            see(inputs)
            with _Outputs(see):
                encoder(inputs)
    finally:
        encoder.train(was_training)


def activation_ranges(encoder: nn.Module, inputs: torch.Tensor) -> np.ndarray:
    """Return the smallest and largest value (steps, 2) float32 of each step over at most 256 ``inputs`` (n, ...)."""
    rows = np.unique(np.linspace(0, len(inputs) - 1, min(MOST_ROWS, len(inputs))).round().astype(np.int64))
    pieces = []
    for begin in range(0, len(rows), PIECE_ROWS):
        ends: list[tuple[float, float]] = []

        def note(tensor: torch.Tensor, ends: list[tuple[float, float]] = ends) -> None:
            low, high = torch.aminmax(tensor)
            ends.append((float(low), float(high)))

        steps(encoder, inputs[torch.from_numpy(rows[begin : begin + PIECE_ROWS]).to(inputs.device)], note)
        pieces.append(ends)
    every = np.asarray(pieces, np.float32)
    return np.stack([every[:, :, 0].min(axis=0), every[:, :, 1].max(axis=0)], axis=1)
