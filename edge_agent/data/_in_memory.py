"""What a Python program gives as inputs: a batch of arrays, files, or Pillow images; one alone is a batch of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DataError
from ..core.registry import is_reference
from ..core.task import ImageInput, InputSpec
from .images import SUFFIXES

_RECORDINGS = frozenset({".npy", ".csv"})
_FEWEST_PIXELS = 4
"""Height and width of the smallest image that a task may have."""


def files_in(inputs: Any, kinds: Sequence[str]) -> list[str] | None:
    """Return the paths of single files that ``inputs`` are; None where they are something else.

    Text is the name of a data source where it begins with one of ``kinds``, and else a path if a file is there, or if
    its name ends as that of an image or a recording.
    """
    if isinstance(inputs, Path):
        return [str(inputs)]
    if isinstance(inputs, str):
        return [inputs] if _is_path(inputs, kinds) else None
    listed = _listed_objects(inputs)
    if listed and all(isinstance(item, str | Path) for item in listed):
        return [str(path) for path in listed]
    return None


def _listed_objects(inputs: Any) -> list[Any] | None:
    """Return what a list, a tuple, or a column (n,) of text or Python objects holds; None where it is something else.

    Columns are arrays, and whatever becomes such an array, as the columns of tables do.
    """
    if isinstance(inputs, list | tuple):
        return list(inputs)
    dtype = getattr(inputs, "dtype", None)
    has_objects = getattr(dtype, "kind", "") in {"O", "U"} or str(dtype) in {"string", "str"}
    if not has_objects or getattr(inputs, "ndim", 0) != 1:
        return None
    return list(np.asarray(inputs, dtype=object))


def _is_path(text: str, kinds: Sequence[str]) -> bool:
    """Return whether a text is a path, as `files_in` tells it from the name of a data source."""
    name = text.partition("?")[0]
    if name.partition(":")[0] in kinds or is_reference(name):
        return False
    path = Path(text).expanduser()
    return path.is_file() or path.suffix.lower() in SUFFIXES | _RECORDINGS


def items_in(inputs: Any, spec: InputSpec, labels: int | None) -> np.ndarray | list[Any]:
    """Return inputs in memory as an array, or as a list of images that may differ in size.

    ``labels``: how many labels came with them; None: none did.

    Raises:
        DataError: The inputs do not have one common shape, or look like one image instead of a batch.
    """
    # 1. Images that stay as they are, one by one.
    if _is_pillow(inputs):
        return [inputs]
    listed = _listed_objects(inputs)
    if listed is not None and any(map(_is_pillow, listed)):
        return [item if _is_pillow(item) else np.asarray(item) for item in listed]
    # 2. Everything else becomes an array, but for images of different sizes.
    try:
        array = _array_of(inputs)
    except (ValueError, TypeError) as error:  # of different shapes, or on a GPU
        if isinstance(spec, ImageInput) and listed is not None:
            return [_array_of(item) for item in listed]
        raise DataError(f"X: no array ({error}); expected inputs of one shape, in memory of the CPU") from error
    _check_is_array(array, inputs)
    if isinstance(spec, ImageInput) and array.ndim == 3 and labels != len(array):
        _check_is_batch(array.shape, spec)
    return array


def _check_is_array(array: np.ndarray, inputs: Any) -> None:
    """Check that inputs became more than a single value, which Python objects of other kinds become.

    Raises:
        DataError: They did not.
    """
    if array.ndim == 0:
        hint = "; of a generator give list(X)" if hasattr(inputs, "__next__") else ""
        raise DataError(
            f"X: {type(inputs).__name__}, expected an array with n inputs, a path or a list of paths, a Pillow image, "
            f"a list of images, or the name of a data source such as 'images:DIR'{hint}"
        )


def _array_of(value: Any) -> np.ndarray:
    """Return a value as an array; a tensor of torch that still has its graph is taken without it."""
    if hasattr(value, "detach"):
        value = value.detach()
    return np.asarray(value)


def _check_is_batch(shape: tuple[int, ...], spec: ImageInput) -> None:
    """Refuse (h, w, 1), (h, w, 3) and (3, h, w), of which the rows would count as grey images.

    Raises:
        DataError: The shape is that of one image.
    """
    if shape[1:] == (spec.height, spec.width) and shape[0] != spec.channels:
        return
    # No image is so narrow as a last axis of 1 or 3; one of 4 may be, where the task's own images are.
    has_channels_last = shape[2] in {1, 3, 4} and min(shape[:2]) >= _FEWEST_PIXELS
    if has_channels_last and shape[1:] != (spec.height, spec.width):
        raise DataError(
            f"X of shape {shape} is one image, and would count as {shape[0]} grey ones of {shape[1]} x {shape[2]} "
            "pixels; give X[None], or a batch (n, height, width, channels)"
        )
    has_colours_first = spec.channels == 3 and shape[0] == 3 and min(shape[1:]) >= _FEWEST_PIXELS
    if has_colours_first:
        raise DataError(
            f"X of shape {shape} may be one image, channels first, or three grey ones; give X[None] for one image, or "
            "X[:, None] for three"
        )


def _is_pillow(value: Any) -> bool:
    """Return whether this is an image of Pillow, which is not imported to find out."""
    return any(kind.__module__.partition(".")[0] == "PIL" for kind in type(value).__mro__)
