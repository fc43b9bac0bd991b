"""The file of an update, read with the checks that it has to pass wherever it is taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..core.errors import UpdateRejected
from ..core.storage import mapped
from ..core.task import Tensors
from .tensors import Spec, check_specs, decode, first_negative_variance, first_non_finite, inspect


def read_update(path: Path, expected: Mapping[str, Spec]) -> Tensors:
    """Return the tensors of an update, as views on its file.

    Args:
        path: The file.
        expected: Name of a tensor -> its form; the update has these and no others.

    Raises:
        TensorsError: The file is no container of tensors, or has others.
        UpdateRejected: A value is not finite, or a variance is below 0.
        OSError: The file cannot be read.
    """
    data = mapped(path)
    specs, _ = inspect(data)
    check_specs(specs, expected)
    tensors = decode(data)
    not_finite = first_non_finite(tensors)
    if not_finite is not None:
        raise UpdateRejected(f"tensor '{not_finite}' holds NaN or infinity; local training has diverged")
    negative = first_negative_variance(tensors)
    if negative is not None:
        raise UpdateRejected(f"tensor '{negative}' holds a variance below 0")
    return tensors
