"""Names of clients inside a state, which holds nothing but arrays."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ..task import State


def packed(names: Sequence[str]) -> np.ndarray:
    """Names as the rows of a uint8 array, filled up with zeros: tensors hold no text, and their names are limited."""
    text = np.array([name.encode() for name in names])
    return text.view(np.uint8).reshape(len(names), -1)


def names_in(state: State, which: str) -> tuple[str, ...]:
    """Names out of a `packed` array of the state; none where there is no such array."""
    rows = state.get(which)
    return () if rows is None else tuple(row.tobytes().rstrip(b"\0").decode() for row in rows)


def numbers_for(client: str, *salt: int) -> np.random.Generator:
    """Random numbers that are the client's own in every run: they depend on its id and ``salt`` alone."""
    return np.random.default_rng([zlib.crc32(client.encode()), *salt])
