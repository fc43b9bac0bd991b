"""Weights to begin with: an encoder that has learned elsewhere, on ImageNet or in an earlier run, from a file.

Files are safetensors. Names are the encoder's own (those of torchvision for its networks), with or without ``encoder.``
before them; the tensors of a classifier and whatever else is in the file are left out. Files that torch.save wrote are
pickles, which can run code, and are not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..errors import DataError, TensorsError, cause
from ..task import Tensors
from ..wire.tensors import decode, first_non_finite
from .parts import Parts

CONVERT = (
    'convert it once, where you trust it: python -c "import sys, torch; from safetensors.torch import save_file; '
    'save_file(torch.load(sys.argv[1], weights_only=True), sys.argv[2])" IN.pth OUT.safetensors'
)
MOST_BYTES = 4 << 30
_PICKLES = (b"PK", b"\x80\x02")
_COUNTER = "num_batches_tracked"
_PREFIX = "encoder."
_SHOWN = 5


def load_weights(model: Parts, path: Path) -> tuple[str, ...]:
    """Put a file's tensors into the model's encoder, and into every other part that is built like it.

    Returns the names in the file that were left out, sorted. Batch counters may be missing; numbers of half precision
    become those of the model.

    Raises:
        DataError: the file cannot be read or is no safetensors file, or does not hold this encoder, finite and of its
            very shapes; all mistakes are listed and nothing is loaded.
    """
    found = {name.removeprefix(_PREFIX): array for name, array in _read(path).items()}
    expected = model.encoder.state_dict()
    mistakes = [mistake for name, tensor in expected.items() if (mistake := _mistake(name, tensor, found.get(name)))]
    if mistakes:
        more = f"; and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
        raise DataError(
            f"{path}: does not hold this encoder: {'; '.join(mistakes[:_SHOWN])}{more}. It has {len(found)} tensors"
            f"{_examples(found)}; choose weights of the same network, or another encoder"
        )
    taken = {name: torch.from_numpy(found[name].copy()) for name in expected if name in found}
    for module in _alike(model, expected):
        module.load_state_dict(taken, strict=False)
    return tuple(sorted(found.keys() - expected.keys()))


def _alike(model: Parts, expected: dict[str, torch.Tensor]) -> list[nn.Module]:
    """The encoder, and parts whose tensors have the same names and shapes."""
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    parts = dict(model.named_children()).values()
    return [part for part in parts if {name: tensor.shape for name, tensor in part.state_dict().items()} == shapes]


def _mistake(name: str, expected: torch.Tensor, found: np.ndarray | None) -> str:
    if found is None:
        return "" if name.endswith(_COUNTER) else f"'{name}' is missing"
    if found.shape != tuple(expected.shape):
        return f"'{name}' is {list(found.shape)}, expected {list(expected.shape)}"
    if (found.dtype.kind == "f") != expected.dtype.is_floating_point:
        return f"'{name}' is {found.dtype}, expected {str(expected.dtype).removeprefix('torch.')}"
    return f"'{name}' holds NaN or infinity" if first_non_finite({name: found}) else ""


def _read(path: Path) -> Tensors:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise DataError(f"{path}: {size} bytes, expected at most {MOST_BYTES}")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({cause(error)}); give a safetensors file of weights") from error
    if content[:2] in _PICKLES:
        raise DataError(f"{path}: was written by torch.save and is a pickle, which can run code; {CONVERT}")
    try:
        return decode(content)
    except TensorsError as error:
        raise DataError(f"{path}: is no safetensors file of weights ({error})") from error


def _examples(found: Tensors) -> str:
    names = sorted(found)[:3]
    return f", such as {', '.join(names)}" if names else ""
