"""Named arrays as bytes, in the safetensors layout, read behind limits of our own.

Writing is ours because it must not copy: the library doubles a 45 MB model in memory before the first byte is on disk.
Reading is ours for the same reason (files are mapped, not loaded) and must refuse what the library lets pass: duplicate
names, huge headers, hundreds of thousands of empty tensors, and arrays that the receiver did not ask for. Nothing is
allocated before every size has been checked. The bytes are those that the library writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TensorsError, cause
from ..task import Tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_HEADER_BYTES = 512 * 1024  # a ResNet152 with every buffer needs 120 KiB
MAX_TENSORS = 8192
MAX_DIMENSIONS = 8
MAX_NAME = 256

_DTYPES: dict[str, np.dtype[Any]] = {
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
_BEYOND_NUMPY = 1 << 59
"""Elements: numpy counts the bytes of a shape in 64 bits, and leaves sides of length 0 out."""

_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_FIRST = ("I64", "F64", "F32", "I32", "F16", "I16", "I8", "U8", "BOOL")
"""The library's order: wide types first, so that all arrays are aligned."""


@dataclass(frozen=True)
class Spec:
    """Form of one array: its dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def specs_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Spec]:
    """The form of each array."""
    return {name: Spec(array.dtype, array.shape) for name, array in tensors.items()}


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Arrays as safetensors bytes; equal contents give equal bytes whatever their order in the mappings.

    Raises:
        TensorsError: a name, shape or dtype that the format, as we use it, does not carry, or too many of them.
    """
    return b"".join(pieces(tensors, metadata))


def pieces(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview[int]]:
    """What `encode` joins: the header, then each array's own bytes (a view wherever the array lies as it is sent).

    Raises:
        TensorsError: as `encode`.
    """
    for name, array in tensors.items():
        _check_name(name)
        if array.dtype.newbyteorder("<") not in _CODES or array.ndim > MAX_DIMENSIONS:
            carried = f"at most {MAX_DIMENSIONS} dimensions of {', '.join(map(str, _CODES))}"
            raise TensorsError(f"tensor {name!r} is {array.dtype} in {array.ndim} dimensions; carried are {carried}")
    arrays = {name: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: (_FIRST.index(_CODES[arrays[name].dtype]), name))
    header = _header_of({name: arrays[name] for name in order}, dict(metadata or {}))
    if len(tensors) > MAX_TENSORS or len(header) > MAX_HEADER_BYTES:
        raise TensorsError(
            f"{len(tensors)} tensors with a header of {len(header)} bytes; "
            f"read are at most {MAX_TENSORS} and {MAX_HEADER_BYTES}"
        )
    contents = [arrays[name].reshape(-1).view(np.uint8).data for name in order]
    return [len(header).to_bytes(8, "little"), header, *contents]


def _header_of(ordered: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """JSON, filled up with spaces so that the arrays begin at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, array in ordered.items():
        begin, end = end, end + array.nbytes
        code = _CODES[array.dtype]
        entries[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def decode(data: Buffer) -> Tensors:
    """Arrays from bytes, as read-only views on ``data`` (no copy).

    Raises:
        TensorsError: the bytes break the layout or one of our limits.
    """
    view = memoryview(data).cast("B")
    start, entries, _ = _header(view)
    return {name: _view(name, view, start + offset, spec) for name, (spec, offset) in entries.items()}


def inspect(data: Buffer) -> tuple[dict[str, Spec], dict[str, str]]:
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
        *(f"missing {name!r}" for name in _first(expected.keys() - found.keys())),
        *(f"unexpected {name!r}" for name in _first(found.keys() - expected.keys())),
        *(
            f"{name!r} is {found[name]}, expected {expected[name]}"
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
    if not raw.startswith(b"{"):
        raise TensorsError(f"header begins {raw[:8]!r}, expected a JSON object")
    try:
        # As text: from bytes, json would guess UTF-16 and UTF-32, which no other reader of this format does.
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise TensorsError(f"header cannot be read: {cause(error)}") from error
    return dict(parsed)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _metadata(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) and _is_text(value) for value in raw.values()):
        raise TensorsError("metadata must map names to strings")
    if not all(map(_is_text, raw)):
        raise TensorsError("a name in the metadata is not text")
    return dict(raw)


def _entry(name: str, fields: object) -> tuple[Spec, int]:
    _check_name(name)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorsError(f"tensor {name!r}: expected exactly dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise TensorsError(f"tensor {name!r}: dtype {_short(code)} is not one of {', '.join(_DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise TensorsError(f"tensor {name!r}: shape {_short(shape)} is not a list of at most {MAX_DIMENSIONS} naturals")
    if math.prod(side or 1 for side in shape) >= _BEYOND_NUMPY:
        raise TensorsError(f"tensor {name!r}: shape {_short(shape)} is larger than an array can be, even an empty one")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TensorsError(f"tensor {name!r}: data_offsets {_short(offsets)} are not [begin, end]")
    spec = Spec(dtype, tuple(shape))
    if spec.nbytes != offsets[1] - offsets[0]:
        raise TensorsError(f"tensor {name!r}: {spec} needs {spec.nbytes} bytes, offsets give {offsets[1] - offsets[0]}")
    return spec, offsets[0]


def _check_name(name: str) -> None:
    if name == "__metadata__" or len(name) > MAX_NAME or not _is_text(name):
        raise TensorsError(f"tensor name {_short(name)} is not text of at most {MAX_NAME} characters")


def _is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8: JSON lets half a surrogate pair pass, which nothing else does."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_layout(entries: Mapping[str, tuple[Spec, int]], available: int) -> None:
    """No holes, no overlaps, nothing after the last tensor."""
    position = 0
    for name, (spec, offset) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if offset != position:
            raise TensorsError(f"tensor {name!r} begins at byte {offset}, expected {position}: hole or overlap")
        position += spec.nbytes
    if position != available:
        raise TensorsError(f"tensors take {position} bytes, the container has {available}")


def _view(name: str, view: memoryview, begin: int, spec: Spec) -> np.ndarray:
    count = math.prod(spec.shape)
    # numpy would let a true of 255 through, and count it as 255.
    if spec.dtype.kind == "b" and np.frombuffer(view, np.uint8, count, begin).max(initial=0) > 1:
        raise TensorsError(f"tensor {name!r} is bool and holds other bytes than 0 and 1")
    array = np.frombuffer(view, spec.dtype, count, begin).reshape(spec.shape)
    array.flags.writeable = False
    return array


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _first(names: Iterable[str], count: int = 5) -> list[str]:
    return sorted(names)[:count]


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
