"""Weights of a network from a file: safetensors, or what torch.save wrote, read without running anything in it."""

from __future__ import annotations

import difflib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from edge_agent.core.errors import WeightsError, cause
from edge_agent.core.storage import open_regular
from edge_agent.training.weights import MOST_BYTES, read_tensor_file

_INSIDE = ("state_dict", "model_state_dict", "model", "model_state", "state_dict_ema")
"""Keys under which training scripts save the weights beside other things."""

_PREFIXES = ("module.", "model.", "encoder.", "_orig_mod.")
"""What stands before all names where a network was saved inside another module."""

_COUNTER = "num_batches_tracked"
_SHOWN_NAMES = 10
"""The most names of one kind, missing or unexpected, in a message: those of another network differ in hundreds."""

_SHOWN_MISTAKES = 10
"""The most mistakes, of all kinds, in a message."""

Weights = Mapping[str, torch.Tensor]


def read_weights(path: Path) -> Weights:
    """Return the tensors in a file by name.

    A file of torch.save is read by ``torch.load(weights_only=True)``, which refuses whatever is not a tensor.

    Raises:
        WeightsError: The file cannot be read, or is of neither form.
    """
    if path.suffix not in {".pth", ".pt", ".bin"}:
        return {name: torch.from_numpy(np.array(array)) for name, array in read_tensor_file(path).items()}
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise WeightsError(f"{path}: {size} bytes, expected at most {MOST_BYTES}")
        with open_regular(path) as file:
            _check_sizes(file, path)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({cause(error)}); give a file of weights") from error
    except WeightsError:
        raise
    except Exception as error:  # torch raises errors of its own, of zip files and of pickles
        raise WeightsError(
            f"{path}: holds {_what_else(error)}; nothing in it was run. Save the state_dict() alone, best as "
            ".safetensors"
        ) from error
    weights = _tensors_in(content)
    if not weights:
        raise WeightsError(f"{path}: holds no tensors by name; save the network's state_dict()")
    _check_tensors(weights, path)
    return weights


def _check_sizes(file: BinaryIO, path: Path) -> None:
    """Require that the records of a file of torch.save are no larger than a file may be, before any is unpacked.

    torch.save compresses nothing, but torch.load unpacks what somebody else has compressed: a few kilobytes can stand
    for as many gigabytes. The file is at its beginning again afterwards.

    Raises:
        WeightsError: The records are larger.
    """
    if zipfile.is_zipfile(file):
        size = sum(record.file_size for record in zipfile.ZipFile(file).infolist())
        if size > MOST_BYTES:
            raise WeightsError(f"{path}: unpacks to {size} bytes, expected at most {MOST_BYTES}")
    file.seek(0)


def _check_tensors(weights: Weights, path: Path) -> None:
    """Require dense tensors of real numbers, together no larger than a file may be.

    A tensor can be larger than the file that it is in, because with strides of 0 all its elements are one number.

    Raises:
        WeightsError: Some tensors are of another kind, or all together are too large.
    """
    others = [name for name, tensor in weights.items() if not _is_plain(tensor)]
    if others:
        names = ", ".join(others[:5])
        raise WeightsError(
            f"{path}: {len(others)} tensors are sparse, quantized, complex or without values ({names}); save the "
            "weights as float32"
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if size > MOST_BYTES:
        raise WeightsError(f"{path}: holds tensors of {size} bytes, expected at most {MOST_BYTES}")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an array of real numbers in memory."""
    is_array = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return is_array and not tensor.is_quantized and not tensor.is_complex()


def _what_else(error: Exception) -> str:
    """Return what a file of torch.save holds beside weights, as torch's refusal of it says."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is not None:
        return f"an object of {named[1]}, not only weights"
    return f"no weights that can be read ({type(error).__name__})"


def _tensors_in(content: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by name in what a file holds, also where they are under the keys of a training script."""
    # A dictionary may hold itself, so the search ends after one step for each key.
    for _ in _INSIDE:
        if isinstance(content, Mapping):
            inner = [content[key] for key in _INSIDE if isinstance(content.get(key), Mapping)]
            content = next(iter(inner), content)
    if not isinstance(content, Mapping):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}


def without_prefix(weights: Weights, names: set[str]) -> Weights:
    """Return weights by the names of a network, without what stands before all of them."""
    for prefix in _PREFIXES:
        shorter = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        is_closer = len(names & shorter.keys()) > len(names & weights.keys())
        if is_closer and len(shorter) == len(weights):
            return shorter
    return weights


def put_weights(network: nn.Module, weights: Weights, path: Path) -> None:
    """Let a network have the weights of a file.

    Raises:
        WeightsError: They are those of another network. The first names that are missing or not expected are listed,
            with the nearest one on the other side, and tensors of other shapes, or with NaN.
    """
    expected = network.state_dict()
    weights = without_prefix(weights, set(expected))
    missing = [name for name in expected if name not in weights and not name.endswith(_COUNTER)]
    unexpected = [name for name in weights if name not in expected]
    mistakes = []
    if missing:
        mistakes.append(f"{len(missing)} missing: {_listed(missing, unexpected)}")
    if unexpected:
        mistakes.append(f"{len(unexpected)} not expected: {_listed(unexpected, missing)}")
    for name, tensor in weights.items():
        if name in expected and tensor.shape != expected[name].shape:
            mistakes.append(f"'{name}' is {[*tensor.shape]}, expected {[*expected[name].shape]}")
        elif name in expected and not torch.isfinite(tensor.to(expected[name].dtype)).all():
            mistakes.append(f"'{name}' holds NaN or infinity, or numbers beyond float32")
    if mistakes:
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes[:_SHOWN_MISTAKES])
        if len(mistakes) > _SHOWN_MISTAKES:
            lines += f"\n  - and {len(mistakes) - _SHOWN_MISTAKES} more"
        raise WeightsError(
            f"{path}: not the weights of this network ({len(weights)} tensors, {len(expected)} expected); nothing was "
            f"written\n{lines}"
        )
    # The network's own dictionary also has the versions of its modules, which some of them ask for.
    expected.update(weights)
    network.load_state_dict(expected)


def _listed(names: list[str], others: list[str]) -> str:
    """Return names for a message, each with the one among the others that looks like it."""
    texts = []
    for name in names[:_SHOWN_NAMES]:
        near = difflib.get_close_matches(name, others, 1, 0.6)
        texts.append(f"{name} (the nearest: {near[0]})" if near else name)
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(texts) + more
