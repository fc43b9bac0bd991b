"""Weights to begin with: an encoder that has learned elsewhere, on ImageNet or in an earlier run, from a file.

Files are safetensors, or bundles of a run (`bundle_weights`). In safetensors files names are the encoder's own (those
of torchvision for its networks), with or without ``encoder.`` before them; the tensors of a classifier and whatever
else is in the file are left out. Files that torch.save wrote are pickles, which can run code, and are not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..core.errors import TensorsError, WeightsError, cause
from ..core.storage import read_regular
from ..core.task import Tensors
from ..wire.tensors import decode, first_non_finite
from .bundle_weights import is_bundle, read_bundle_weights
from .parts import Parts, first_of

CONVERT = (
    'convert it once, where you trust it: python -c "import sys, torch; from safetensors.torch import save_file; '
    "state = torch.load(sys.argv[1], weights_only=True); "
    'save_file({name: tensor.contiguous() for name, tensor in state.items()}, sys.argv[2])" IN.pth OUT.safetensors'
)
MOST_BYTES = 4 << 30
_PICKLES = (b"PK", b"\x80\x02")
_COUNTER = "num_batches_tracked"
_VARIANCE = "running_var"
_PREFIX = "encoder."


def read_weights(encoder: nn.Module, path: Path) -> tuple[Tensors, tuple[str, ...]]:
    """Return the tensors of an encoder by its names and of its dtypes, and the file's other names, sorted.

    Batch counters may be missing.

    Raises:
        WeightsError: The file cannot be read, is neither a safetensors file nor a bundle, or does not hold this encoder
            with finite values and its very shapes; all mistakes are listed.
    """
    stored = read_bundle_weights(path) if is_bundle(path) else read_tensor_file(path)
    expected = encoder.state_dict()
    # A file of a whole model has the encoder's tensors behind a prefix.
    names = {name: name if name in stored else _PREFIX + name for name in expected}
    arrays = {name: stored[key] for name, key in names.items() if key in stored}
    results = [_mistake(name, tensor, arrays.get(name)) for name, tensor in expected.items()]
    mistakes = [mistake for mistake in results if mistake]
    if mistakes:
        examples = f", such as {', '.join(sorted(stored)[:3])}" if stored else ""
        raise WeightsError(
            f"{path}: does not hold this encoder: {first_of(mistakes)}. It has {len(stored)} tensors{examples}; choose "
            "weights of the same network, or another encoder"
        )
    weights = {name: _converted(array, expected[name]) for name, array in arrays.items()}
    return weights, tuple(sorted(stored.keys() - names.values()))


def put_weights(model: Parts, weights: Tensors) -> None:
    """Let the encoder of ``model``, and every network in it that is built like it, begin with these weights."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    for module in _built_alike(model).values():
        module.load_state_dict(tensors, strict=False)


def set_by_weights(model: Parts) -> tuple[str, ...]:
    """Return names of the model's tensors that `put_weights` sets, batch counters aside, sorted."""
    names = (f"{layer}.{name}" for layer, module in _built_alike(model).items() for name in module.state_dict())
    return tuple(sorted(name for name in names if not name.endswith(_COUNTER)))


def _built_alike(model: Parts) -> dict[str, nn.Module]:
    """Return the encoder, and networks like it, by path: second models of methods start from the same weights."""

    def shapes(module: nn.Module) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in module.state_dict().items()}

    return {path: module for path, module in model.named_modules() if shapes(module) == shapes(model.encoder)}


def _mistake(name: str, expected: torch.Tensor, stored: np.ndarray | None) -> str:
    """Return what is wrong with the array that a file has for a tensor; empty where nothing is."""
    if stored is None:
        return "" if name.endswith(_COUNTER) else f"'{name}' is missing"
    if stored.shape != tuple(expected.shape):
        return f"'{name}' is {list(stored.shape)}, expected {list(expected.shape)}"
    if (stored.dtype.kind == "f") != expected.dtype.is_floating_point:
        return f"'{name}' is {stored.dtype}, expected {str(expected.dtype).removeprefix('torch.')}"
    if first_non_finite({name: _converted(stored, expected)}):
        return f"'{name}' holds NaN or infinity"
    if name.endswith(_VARIANCE) and (stored < 0).any():
        return f"'{name}' is below 0"
    return ""


def _converted(array: np.ndarray, expected: torch.Tensor) -> np.ndarray:
    """Convert an array to the model's precision; numbers that are too large for it become infinity."""
    with np.errstate(over="ignore"):
        return array.astype(torch.empty(0, dtype=expected.dtype).numpy().dtype)


def read_tensor_file(path: Path) -> Tensors:
    """Return the tensors of a safetensors file.

    Raises:
        WeightsError: The file cannot be read, is too large, or has another format.
    """
    try:
        if path.exists() and not path.is_file():
            raise WeightsError(f"{path}: is not a file; give a safetensors file of weights")
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise WeightsError(f"{path}: {size} bytes, expected at most {MOST_BYTES}")
        content = read_regular(path)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({cause(error)}); give a safetensors file of weights") from error
    if content[:2] in _PICKLES:
        raise WeightsError(f"{path}: was written by torch.save and is a pickle, which can run code; {CONVERT}")
    try:
        return decode(content)
    except TensorsError as error:
        raise WeightsError(f"{path}: is no safetensors file of weights that can be read here ({error})") from error
