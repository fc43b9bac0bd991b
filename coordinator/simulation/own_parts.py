"""Parts of a simulation that do not ship: a method, an encoder or data from a file or from the calling program."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import data, methods, models
from edge_agent.config import NAME_PATTERN
from edge_agent.data import partition
from edge_agent.errors import DataError, UsageError
from edge_agent.registry import is_reference, load_reference

from .datasets import Pools, held_out
from .plan import Plan, own_name

_ARCHIVE, _PARTITION = "clients.npz", "clients.json"


def register(plan: Plan) -> None:
    """Load the method and the encoder that the plan names as ``PATH.py:NAME``; every process of a run calls this.

    Raises:
        UsageError: no such file or name, the file cannot be imported, or what it names is no method or encoder.
    """
    if is_reference(plan.method):
        add_method(load_reference("method", plan.method))
    if plan.encoder is not None and is_reference(plan.encoder):
        add_encoder(load_reference("encoder", plan.encoder))


def add_method(kind: Any) -> str:
    """Make a class known to this process under its own name, which is returned.

    Raises:
        UsageError: it is no subclass of `edge_agent.methods.Method`, or has the name of a method that ships.
    """
    if not (isinstance(kind, type) and issubclass(kind, methods.Method)):
        raise UsageError(f"method {_shown(kind)}: expected a subclass of edge_agent.methods.Method")
    name = _free_name("method", kind, methods.registry)
    kind.name = name  # type: ignore[method-assign, assignment]
    methods.registry.add(name, kind)
    return name


def add_encoder(factory: Any) -> str:
    """Make a factory of modules known to this process under its own name, which is returned.

    Raises:
        UsageError: it cannot be called, or has the name of an encoder that ships.
    """
    from torch import nn

    from edge_agent.models.base import own_encoder

    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(f"encoder {_shown(factory)}: expected a class or function that makes a torch.nn.Module")
    name = _free_name("encoder", factory, models.registry)
    models.registry.add(name, own_encoder(name, factory))
    return name


def _free_name(what: str, part: Any, registry: Any) -> str:
    name = own_name(getattr(part, "__name__", type(part).__name__))
    if registry.ships(name):
        raise UsageError(f"{what} '{name}': there is one of this name already; give yours another name")
    return name


def _shown(part: Any) -> str:
    return f"'{part.__name__}'" if hasattr(part, "__name__") else f"of type {type(part).__name__}"


def reference(part: Any, add: Callable[[Any], str]) -> tuple[str, bool]:
    """How a plan names a class or factory, and whether other processes can load it: from its own file they can.

    ``add``: `add_method` or `add_encoder`.
    """
    module = sys.modules.get(getattr(part, "__module__", ""))
    file, name = getattr(module, "__file__", None), getattr(part, "__qualname__", "")
    is_loadable = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is part
    known_as = add(part)
    if is_loadable and is_reference(f"{file}:{name}"):
        return f"{Path(str(file)).resolve()}:{name}", True
    return known_as, False


# --- data of the calling program -------------------------------------------------------------------------------------


def save_clients(samples: Mapping[str, Any], folder: Path, *, test_fraction: float, seed: int) -> tuple[str, str]:
    """Write a mapping of client -> samples into ``folder``; returns a data source and the file of its partition.

    Samples are a pair ``(X, y)`` of arrays, or a torch ``Dataset`` of such pairs. X holds images (n, h, w, c) or
    (n, c, h, w), integers 0..255 or floats 0..1, or windows (n, channels, length) of floats; y integers or text.

    Raises:
        DataError: names the client and the field.
    """
    if not samples:
        raise DataError("data: the mapping has no client")
    arrays = {_checked(name): _arrays(name, given) for name, given in samples.items()}
    first, (inputs, _) = next(iter(arrays.items()))
    for name, (own, _) in arrays.items():
        if own.shape[1:] != inputs.shape[1:] or own.dtype.kind != inputs.dtype.kind:
            raise DataError(
                f"data of client '{name}', X: {own.dtype} of shape {own.shape}; client '{first}' has {inputs.dtype} of "
                f"shape {inputs.shape}, expected the same form"
            )
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.concatenate([own for _, own in arrays.values()])
    np.savez(folder / _ARCHIVE, inputs=np.concatenate([own for own, _ in arrays.values()]), labels=labels)
    source = f"npz:{folder / _ARCHIVE}" + ("?kind=window" if inputs.ndim == 3 and inputs.dtype.kind == "f" else "")
    loaded = data.load(source, compact=True)
    ends = np.cumsum([len(own) for own, _ in arrays.values()])
    shares = {
        name: held_out(loaded, np.arange(end - len(own), end), test_fraction, seed)
        for (name, (own, _)), end in zip(arrays.items(), ends, strict=True)
    }
    settings = {"test_fraction": test_fraction, "seed": seed}
    partition.divided("clients", settings, Pools(loaded, None).mark, shares).write(folder / _PARTITION)
    return source, str(folder / _PARTITION)


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise DataError(
            f"data of client {name!r}: expected a name of lower-case letters, digits, '-' and '_', such as 'porch-2'"
        )
    return name


def _arrays(client: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    where = f"data of client '{client}'"
    is_sized = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    if isinstance(given, tuple | list) and len(given) == 2:
        inputs, labels = _array(f"{where}, X", given[0]), _array(f"{where}, y", given[1])
    elif is_sized and not isinstance(given, str | tuple | list | dict):
        inputs, labels = _stacked(where, given)
    else:
        raise DataError(f"{where}: {type(given).__name__}, expected a pair (X, y) of arrays or a torch Dataset")
    if inputs.ndim not in {3, 4} or inputs.dtype.kind not in "iufb":
        raise DataError(
            f"{where}, X: {inputs.dtype} of shape {inputs.shape}, expected images (n, h, w, c) or (n, c, h, w), or "
            "windows (n, channels, length)"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise DataError(f"{where}, y: {labels.dtype} of shape {labels.shape}, expected (n,) integers or text")
    if len(inputs) != len(labels):
        raise DataError(f"{where}: X has {len(inputs)} samples, y has {len(labels)}; expected one label for each")
    if not len(inputs):
        raise DataError(f"{where}: X is empty; expected at least one sample")
    if inputs.dtype.kind == "f":
        if not np.isfinite(inputs).all():
            raise DataError(f"{where}, X: holds NaN or infinity")
        if inputs.ndim == 4 and (inputs.min() < 0 or inputs.max() > 1):
            raise DataError(
                f"{where}, X: values from {inputs.min():.3g} to {inputs.max():.3g}, expected floats 0..1 or integers "
                "0..255; the model normalises them itself, see input={'mean': ..., 'std': ...}"
            )
    return inputs, labels


def _array(where: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: no array ({error})") from error


def _stacked(where: str, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """All samples of a torch ``Dataset``, whose items are pairs (x, y)."""
    try:
        pairs = [dataset[index] for index in range(len(dataset))]
        inputs = np.stack([_array(f"{where}, X", x) for x, _ in pairs]) if pairs else np.zeros((0, 1, 1, 1))
        return inputs, np.asarray([y if isinstance(y, str) else int(y) for _, y in pairs])
    except DataError:
        raise
    # Whatever a user's data set raises is its own matter, and no reason for a traceback.
    except Exception as error:
        raise DataError(f"{where}: expected items (x, y) of one shape: {type(error).__name__}: {error}") from error
