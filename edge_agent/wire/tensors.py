"""Named arrays as bytes, in the safetensors layout, read behind limits of our own.

The safetensors library writes. Reading is ours because it must not copy (a 45 MB model is mapped, not loaded) and must
refuse what the library lets pass: duplicate names, huge headers, hundreds of thousands of empty tensors, and arrays
that the receiver did not ask for. Nothing is allocated before every size has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save

from ..errors import TensorsError
from ..task import Tensors

MAX_HEADER_BYTES = 512 * 1024  # a ResNet152 with every buffer needs 120 KiB
MAX_TENSORS = 8192
MAX_DIMENSIONS = 8

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("<i1"),
    "U8": np.dtype("<u1"),
    "BOOL": np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Form of one array: its dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * _product(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def specs_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Spec]:
    """The form of each array."""
    return {name: Spec(array.dtype, array.shape) for name, array in tensors.items()}


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Arrays as safetensors bytes; equal arrays give equal bytes whatever their order in the mapping.

    Raises:
        TensorsError: a dtype that the format, as we use it, does not carry.
    """
    for name, array in tensors.items():
        if array.dtype.newbyteorder("<") not in _CODES:
            raise TensorsError(f"tensor '{name}' is {array.dtype}; carried are {', '.join(map(str, _CODES))}")
    ordered = {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}
    return save(ordered, metadata=dict(metadata) if metadata else None)


def decode(data: bytes | bytearray | memoryview | np.ndarray) -> Tensors:
    """Arrays from bytes, as read-only views on ``data`` (no copy).

    Raises:
        TensorsError: the bytes break the layout or one of our limits.
    """
    view = memoryview(data).cast("B")
    start, entries, _ = _header(view)
    return {name: _view(view, start, spec, offset) for name, (spec, offset) in entries.items()}


def inspect(data: bytes | bytearray | memoryview | np.ndarray) -> tuple[dict[str, Spec], dict[str, str]]:
    """Form of each array and the metadata, from the header alone.

    Raises:
        TensorsError: as `decode`.
    """
    _, entries, metadata = _header(memoryview(data).cast("B"))
    return {name: spec for name, (spec, _) in entries.items()}, metadata


def check_specs(found: Mapping[str, Spec], expected: Mapping[str, Spec]) -> None:
    """Return quietly when names, dtypes and shapes are exactly those expected.

    Raises:
        TensorsError: lists every difference (the first five of each kind).
    """
    mistakes = [
        *(f"missing '{name}'" for name in _first(expected.keys() - found.keys())),
        *(f"unexpected '{name}'" for name in _first(found.keys() - expected.keys())),
        *(
            f"'{name}' is {found[name]}, expected {expected[name]}"
            for name in _first(n for n in expected.keys() & found.keys() if found[n] != expected[n])
        ),
    ]
    if mistakes:
        raise TensorsError("; ".join(mistakes))


def first_non_finite(tensors: Mapping[str, np.ndarray]) -> str | None:
    """Name of the first floating array that holds NaN or infinity, or None."""
    for name in sorted(tensors):
        array = tensors[name]
        # The sum of squares is one pass without a temporary; only when it is not finite is a closer look needed.
        if array.dtype.kind == "f" and array.size and not _is_finite(array):
            return name
    return None


def _is_finite(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        quick = float(np.dot(flat, flat)) if array.dtype != np.float16 else float("nan")
    return bool(np.isfinite(quick)) or bool(np.isfinite(flat).all())


def _header(view: memoryview) -> tuple[int, dict[str, tuple[Spec, int]], dict[str, str]]:
    if len(view) < 8:
        raise TensorsError(f"{len(view)} bytes cannot hold a tensor container; the transfer is cut short")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise TensorsError(f"header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
    if 8 + length > len(view):
        raise TensorsError(f"header of {length} bytes in a container of {len(view)} bytes")
    raw = _json(bytes(view[8 : 8 + length]))
    metadata = _metadata(raw.pop("__metadata__", {}))
    if len(raw) > MAX_TENSORS:
        raise TensorsError(f"{len(raw)} tensors, at most {MAX_TENSORS} are read")
    entries = {name: _entry(name, fields) for name, fields in raw.items()}
    _check_layout(entries, len(view) - 8 - length)
    return 8 + length, entries, metadata


def _json(raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise TensorsError(f"header is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise TensorsError("header is not a JSON object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _metadata(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise TensorsError("metadata must map names to strings")
    return dict(raw)


def _entry(name: str, fields: object) -> tuple[Spec, int]:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorsError(f"tensor '{name}': expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise TensorsError(f"tensor '{name}': dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise TensorsError(f"tensor '{name}': shape {str(shape)[:80]} is not a list of at most {MAX_DIMENSIONS} naturals")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TensorsError(f"tensor '{name}': data_offsets {str(offsets)[:80]} are not [begin, end]")
    spec = Spec(_DTYPES[dtype], tuple(shape))
    if spec.nbytes != offsets[1] - offsets[0]:
        raise TensorsError(f"tensor '{name}': {spec} needs {spec.nbytes} bytes, offsets give {offsets[1] - offsets[0]}")
    return spec, offsets[0]


def _check_layout(entries: Mapping[str, tuple[Spec, int]], available: int) -> None:
    """No holes, no overlaps, nothing after the last tensor."""
    position = 0
    for name, (spec, offset) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if offset != position:
            raise TensorsError(f"tensor '{name}' begins at byte {offset}, expected {position}: hole or overlap")
        position += spec.nbytes
    if position != available:
        raise TensorsError(f"tensors take {position} bytes, the container has {available}")


def _view(view: memoryview, start: int, spec: Spec, offset: int) -> np.ndarray:
    flat = np.frombuffer(view, dtype=spec.dtype, count=_product(spec.shape), offset=start + offset)
    array = flat.reshape(spec.shape)
    array.flags.writeable = False
    return array


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _product(shape: Iterable[int]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _first(names: Iterable[str], count: int = 5) -> list[str]:
    return sorted(names)[:count]
