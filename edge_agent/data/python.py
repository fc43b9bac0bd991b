"""``python:module:function``: data from your own function, called with the options as keyword arguments (text).

``PATH.py:function`` does the same with a file.

It returns ``(inputs, labels)``, ``(inputs, labels, class_names)`` or ``(inputs, labels, class_names, groups)``. Inputs
are an array of images or windows (channels, length), or a list of recordings (time, channels). Labels may be None for
``edge-agent predict``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict

from ..core.errors import DataError, UsageError, cause
from ..core.registry import is_reference, load_reference
from .base import DataSource, Options, Raw, labels_by_name
from .npz import from_arrays


class PythonOptions(Options):
    """Keyword arguments of the function."""

    model_config = ConfigDict(extra="allow", frozen=True)


def read(where: str, options: PythonOptions) -> Raw:
    """Return raw samples from what the function returned."""
    function = _find(where)
    try:
        result = function(**(options.model_extra or {}))
    # An error of any kind in the user's function is a data error, not a traceback.
    except Exception as error:
        raise DataError(f"python: {where} failed ({type(error).__name__}: {error})") from error
    if not isinstance(result, tuple) or not 2 <= len(result) <= 4:
        raise DataError(
            f"python: {where} returned {type(result).__name__}, expected (inputs, labels[, class_names[, groups]])"
        )
    return _raw(f"python: {where}", *result)


def inspect(where: str, options: PythonOptions) -> None:  # noqa: ARG001 - only the function knows its options
    """Check that the function exists; it is not called."""
    _find(where)


def _find(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    try:
        if is_reference(where):
            function = load_reference("data", where)
        else:
            function = getattr(importlib.import_module(module), name) if module and name else None
    except UsageError as error:
        raise DataError(str(error)) from error
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"python: no '{where}': {cause(error)}; expected module:function, the module's folder on PYTHONPATH"
        ) from error
    if not callable(function):
        raise DataError(f"python: '{where}' is no function; expected module:function")
    result: Callable[..., Any] = function
    return result


def _raw(where: str, inputs: Any, labels: Any, class_names: Sequence[str] | None = None, groups: Any = None) -> Raw:
    reason = ""
    values = np.full(len(inputs), -1)
    names: tuple[str, ...] = ()
    if labels is None:
        reason = f"{where} returned no labels; expected (inputs, labels[, class_names[, groups]])"
    else:
        values, names = labels_by_name(np.asarray(labels), [str(name) for name in class_names or ()], where)
    group_ids = None if groups is None else np.asarray(groups, np.int64)
    if isinstance(inputs, list):
        if len(inputs) != len(values):
            raise DataError(f"{where}: {len(inputs)} recordings, {len(values)} labels; expected one label for each")
        items = [np.asarray(item) for item in inputs]
        return Raw("recording", items, values, names, group_ids, unlabelled=reason)
    array = np.asarray(inputs)
    kind: Literal["image", "window"] = "window" if array.ndim == 3 and array.dtype.kind == "f" else "image"
    raw = from_arrays(array, values, class_names=names, groups=group_ids, kind=kind, where=where)
    return replace(raw, unlabelled=reason)


SOURCE = DataSource(PythonOptions, read, inspect=inspect)
