"""The tensors of a secure sum: those of its exchanges, and an update as integers that can be added up.

All floating arrays of an update, in the order of their names and times the update's weight, are one vector; its last
number is the weight. Counters of batch norm are no part of it: they stay as they were sent out. Lists of the exchanges
have a row for each client, in the order of `MEMBERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...core.config import NAME_PATTERN
from ...core.errors import TensorsError
from ...core.task import Tensors
from ...wire.tensors import Spec
from .fixed_point import FixedPoint
from .keys import SHARE_BYTES, PublicKeys

PREFIX = "secure."
"""The prefix of the names of all arrays of the exchanges."""

KEYS = f"{PREFIX}keys"
"""The name of public keys with the hash of a seed: (96,) uint8 from an agent, (n, 96) of all clients to the agents."""

MEMBERS = f"{PREFIX}members"
"""The name of the list of the clients: sorted, a line each, as bytes (uint8)."""

SHARES = f"{PREFIX}shares"
"""The name of encrypted shares (n, 148) uint8: from an agent to each client, or from each to it. Its own row is 0."""

SHARERS = f"{PREFIX}sharers"
"""The name of the mask (n,) bool of the clients that have sent shares."""

MASKED = f"{PREFIX}masked"
"""The name of an update as integers modulo 2^64 under masks, as int64."""

DELIVERED = f"{PREFIX}delivered"
"""The name of the mask (n,) bool of the clients whose masked updates have arrived."""

REVEALED = f"{PREFIX}revealed"
"""The name of an agent's shares (n, 66) uint8 of one secret of each client that has sent shares; 0 for the others."""

KEY_BYTES = 96
"""The bytes of a client's public keys and the hash of its seed."""

SEALED_BYTES = 2 * SHARE_BYTES + 16
"""The bytes of two shares in a box that ends in a tag of 16 bytes."""

MOST_CLIENTS = 1000
"""The most clients of one sum."""

FIXED_POINT = FixedPoint()
"""The form of numbers in all sums."""

_COUNTER = ".num_batches_tracked"
_BYTE = np.dtype(np.uint8)
_INTEGER = np.dtype(np.int64)


def context_of(run: str, number: int, session: str) -> bytes:
    """Return the bytes that name an attempt on all sides, to which its secrets belong; ``run`` is the run's name."""
    return f"{run} {number} {session}".encode()


def specs(clients: int = 0, size: int = 0) -> dict[str, Spec]:
    """Return the form of the arrays that agents send, in a sum over ``clients`` clients of ``size`` numbers each."""
    return {
        KEYS: Spec(_BYTE, (KEY_BYTES,)),
        SHARES: Spec(_BYTE, (clients, SEALED_BYTES)),
        MASKED: Spec(_INTEGER, (size + 1,)),
        REVEALED: Spec(_BYTE, (clients, SHARE_BYTES)),
    }


def parted(received: Tensors) -> tuple[Tensors, Tensors]:
    """Split received arrays into those of the exchanges and all others."""
    exchanges = {name: array for name, array in received.items() if name.startswith(PREFIX)}
    others = {name: array for name, array in received.items() if name not in exchanges}
    return exchanges, others


def taken(received: Tensors, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array called ``name``, which must have this dtype and shape.

    Raises:
        TensorsError: The array is missing, or has another shape or dtype.
    """
    expected = Spec(np.dtype(dtype), shape)
    array = received.get(name)
    if array is None or Spec(array.dtype, array.shape) != expected:
        form = "is missing" if array is None else f"is {Spec(array.dtype, array.shape)}"
        raise TensorsError(f"'{name}' {form}, a secure sum needs {expected}", is_public=True)
    return array


def members_as_bytes(members: Iterable[str]) -> np.ndarray:
    """Return the array `MEMBERS` of these clients, which must be sorted."""
    return np.frombuffer("\n".join(members).encode(), np.uint8)


def members_of(received: Tensors) -> tuple[str, ...]:
    """Return the clients of the sum, from the array `MEMBERS`.

    Raises:
        TensorsError: The names are missing, too many, invalid or not sorted.
    """
    array = received.get(MEMBERS, np.zeros(0, np.uint8))
    names = taken(received, MEMBERS, np.uint8, (array.size,)).tobytes().decode("ascii", "replace").split("\n")
    if len(names) > MOST_CLIENTS or names != sorted({*names}):
        raise TensorsError(
            f"{len(names)} clients in a secure sum, expected up to {MOST_CLIENTS}, each once and sorted", is_public=True
        )
    for name in names:
        if not re.fullmatch(NAME_PATTERN, name):
            raise TensorsError(f"client {name[:80]!r} of a secure sum is not a name of an agent", is_public=True)
    return tuple(names)


def keys_as_bytes(keys: PublicKeys) -> np.ndarray:
    """Return the array `KEYS` of one client."""
    return np.frombuffer(keys.share + keys.mask + keys.seed, np.uint8)


def keys_of(row: np.ndarray) -> PublicKeys:
    """Return the public keys in a row (96,) uint8."""
    content = row.tobytes()
    return PublicKeys(content[:32], content[32:64], content[64:])


def table(rows: Mapping[str, bytes], members: Sequence[str], width: int) -> np.ndarray:
    """Return the rows (n, width) uint8 of these members; the row of a member that has none is 0."""
    every = b"".join(rows.get(member, bytes(width)) for member in members)
    return np.frombuffer(every, np.uint8).reshape(len(members), width)


def summed(forms: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the arrays of an update that are added up, in the order of their names.

    Raises:
        TensorsError: The update has an integer array other than a batch counter, whose mean has no meaning.
    """
    floating = {name: spec for name, spec in sorted(forms.items()) if spec.dtype.kind == "f"}
    others = sorted(name for name in forms.keys() - floating.keys() if not name.endswith(_COUNTER))
    if others:
        raise TensorsError(f"'{others[0]}' holds {forms[others[0]].dtype.name}, a secure sum adds up floating numbers")
    return floating


def size_of(forms: Mapping[str, Spec]) -> int:
    """Return how many numbers of an update are added up."""
    return sum(spec.nbytes // spec.dtype.itemsize for spec in summed(forms).values())


def as_integers(update: Tensors, forms: Mapping[str, Spec], weight: float, clients: int) -> np.ndarray:
    """Return an update times its weight, and the weight, as integers (size + 1,) uint64 for a sum of ``clients``.

    Raises:
        TrainingFailed: A number is not finite, or too large for the sum.
    """
    result = np.empty(size_of(forms) + 1, np.uint64)
    begin = 0
    for name in summed(forms):
        numbers = update[name].reshape(-1).astype(np.float64) * weight
        result[begin : begin + numbers.size] = FIXED_POINT.encode(numbers, clients)
        begin += numbers.size
    result[begin:] = FIXED_POINT.encode(np.array([weight]), clients)
    return result


def mean_of(total: np.ndarray, forms: Mapping[str, Spec]) -> Tensors:
    """Return the weighted mean of the updates in a sum ``total`` (size + 1,) uint64, whose weight must be above 0."""
    numbers = FIXED_POINT.decode(total)
    begin = 0
    means: Tensors = {}
    for name, spec in summed(forms).items():
        count = spec.nbytes // spec.dtype.itemsize
        means[name] = (numbers[begin : begin + count] / numbers[-1]).astype(spec.dtype).reshape(spec.shape)
        begin += count
    return means
