"""Values that a Python program gives, as files of JSON have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def make_plain(value: Any) -> Any:
    """Return a value as it is read again from JSON: numbers and arrays of NumPy as Python's own, tuples as lists.

    Mappings and lists are made plain with all that they hold. Of other kinds the value itself is returned.
    """
    import numpy as np

    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(item) for item in value]
    return value
