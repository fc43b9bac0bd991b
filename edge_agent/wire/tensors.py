"""Named arrays as bytes in the safetensors layout, with limits on what is read.

The library is not used for writing, because that must not copy: the library doubles a 45 MB model in memory before the
first byte is on disk. It is not used for reading for the same reason (files are mapped, not loaded), and because it
accepts what must be rejected: duplicate names, huge headers, hundreds of thousands of empty tensors, and arrays that
the receiver did not ask for. Nothing is allocated before every size has been checked. The bytes are those that the
library writes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import TensorsError, cause
from ..core.task import Tensors, parse_json

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_HEADER_BYTES = 512 * 1024
"""The most bytes of a header; a ResNet152 with every buffer needs 120 KiB."""

MAX_TENSORS = 8192
"""The most tensors of a container."""

MAX_DIMENSIONS = 8
"""The most dimensions of a tensor."""

MAX_NAME = 256
"""The most characters of a tensor's name."""

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
"""The number of elements from which on numpy cannot make an array, counting each side of length 0 as 1."""

_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_FIRST = ("I64", "F64", "F32", "I32", "F16", "I16", "I8", "U8", "BOOL")
"""The order of the types in a container: wide ones first, as in the library, so that all arrays are aligned."""


@dataclass(frozen=True)
class Spec:
    """The form of one array: its dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of such an array in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def specs_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Spec]:
    """Return the form of each array."""
    return {name: Spec(array.dtype, array.shape) for name, array in tensors.items()}


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as safetensors bytes; equal contents give equal bytes whatever their order in the mappings.

    Raises:
        TensorsError: A name, shape or dtype is not allowed in the format, or there are too many arrays.
    """
    return b"".join(pieces(tensors, metadata))


def pieces(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview[int]]:
    """Return the parts of `encode`: the header, then the bytes of each array, as a view if its layout is the format's.

    Raises:
        TensorsError: See `encode`.
    """
    for name, array in tensors.items():
        _check_name(name)
        if array.dtype.newbyteorder("<") not in _CODES or array.ndim > MAX_DIMENSIONS:
            allowed = f"at most {MAX_DIMENSIONS} dimensions of {', '.join(map(str, _CODES))}"
            raise TensorsError(f"tensor {name!r} is {array.dtype} in {array.ndim} dimensions; expected {allowed}")
    arrays = {name: np.asarray(array, array.dtype.newbyteorder("<"), order="C") for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: (_FIRST.index(_CODES[arrays[name].dtype]), name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        array = arrays[name]
        begin = end
        end += array.nbytes
        entries[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header = text + b" " * (-len(text) % 8)  # so that the arrays begin at a multiple of 8 bytes
    if len(tensors) > MAX_TENSORS or len(header) > MAX_HEADER_BYTES:
        raise TensorsError(
            f"{len(tensors)} tensors with a header of {len(header)} bytes; "
            f"expected at most {MAX_TENSORS} and {MAX_HEADER_BYTES}"
        )
    contents = [arrays[name].reshape(-1).view(np.uint8).data for name in order]
    return [len(header).to_bytes(8, "little"), header, *contents]


def decode(data: Buffer) -> Tensors:
    """Return the arrays in safetensors bytes, as read-only views on ``data`` (no copy).

    Raises:
        TensorsError: The bytes break the layout or one of this module's limits.
    """
    view = memoryview(data).cast("B")
    start, entries, _ = _read_header(view)
    arrays: Tensors = {}
    for name, (spec, offset) in entries.items():
        count = math.prod(spec.shape)
        begin = start + offset
        # numpy would accept a true of 255, and count it as 255.
        if spec.dtype.kind == "b" and np.frombuffer(view, np.uint8, count, begin).max(initial=0) > 1:
            raise TensorsError(f"tensor {name!r} is bool and holds other bytes than 0 and 1")
        array = np.frombuffer(view, spec.dtype, count, begin).reshape(spec.shape)
        array.flags.writeable = False
        arrays[name] = array
    return arrays


def inspect(data: Buffer) -> tuple[dict[str, Spec], dict[str, str]]:
    """Return the form of each array and the metadata, from the header alone.

    Raises:
        TensorsError: See `decode`.
    """
    _, entries, metadata = _read_header(memoryview(data).cast("B"))
    return {name: spec for name, (spec, _) in entries.items()}, metadata


def check_specs(specs: Mapping[str, Spec], expected: Mapping[str, Spec]) -> None:
    """Require that names, dtypes and shapes are exactly those expected.

    Raises:
        TensorsError: The arrays differ from the expected ones; the first five differences of each kind are listed.
    """
    wrong = {name for name in expected.keys() & specs.keys() if specs[name] != expected[name]}
    mistakes = [f"missing {name!r}" for name in sorted(expected.keys() - specs.keys())[:5]]
    mistakes += [f"unexpected {name!r}" for name in sorted(specs.keys() - expected.keys())[:5]]
    mistakes += [f"{name!r} is {specs[name]}, expected {expected[name]}" for name in sorted(wrong)[:5]]
    if mistakes:
        raise TensorsError("; ".join(mistakes))


def first_non_finite(tensors: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of the first floating-point array that holds NaN or infinity, or None."""
    for name in sorted(tensors):
        array = tensors[name]
        if array.dtype.kind == "f" and not _is_finite(array.reshape(-1)):
            return name
    return None


def first_negative_variance(tensors: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of the first running variance of batch norm that is below 0 somewhere, or None."""
    for name in sorted(tensors):
        if name.endswith(".running_var") and (tensors[name] < 0).any():
            return name
    return None


def _is_finite(numbers: np.ndarray) -> bool:
    """Return whether all floating-point numbers (n,) are finite."""
    # The sum of squares is one pass without a temporary; each number is checked only when the sum is not finite.
    if numbers.dtype != np.float16:
        with np.errstate(over="ignore", invalid="ignore"):
            squares = float(np.dot(numbers, numbers))
        if np.isfinite(squares):
            return True
    return bool(np.isfinite(numbers).all())


LONGEST_KEPT_HEADER_BYTES = 1 << 16
"""The most bytes of a header that is kept; longer ones are parsed each time, to save a coordinator's memory."""


def _read_header(view: memoryview) -> tuple[int, Mapping[str, tuple[Spec, int]], dict[str, str]]:
    """Return where the tensors begin, their forms and places, and the metadata.

    Raises:
        TensorsError: The bytes break the layout or one of this module's limits.
    """
    if len(view) < 8:
        raise TensorsError(f"{len(view)} bytes cannot hold a tensor container; the transfer was truncated")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise TensorsError(f"header of {length} bytes, at most {MAX_HEADER_BYTES} are read")
    if 8 + length > len(view):
        raise TensorsError(f"header of {length} bytes in a container of {len(view)} bytes")
    text = bytes(view[8 : 8 + length])
    parse = _parse_header if length > LONGEST_KEPT_HEADER_BYTES else _parse_header_once
    header = parse(text)
    available = len(view) - 8 - length
    if header.size_bytes != available:
        raise TensorsError(f"tensors take {header.size_bytes} bytes, the container has {available}")
    return 8 + length, header.entries, dict(header.metadata)


@dataclass(frozen=True)
class _Header:
    """The parsed header of a container.

    Attributes:
        entries: The form of each tensor, and the byte behind the header at which it begins.
        metadata: The metadata.
        size_bytes: The bytes of all tensors together.
    """

    entries: Mapping[str, tuple[Spec, int]]
    metadata: Mapping[str, str]
    size_bytes: int


def _parse_header(text: bytes) -> _Header:
    """Parse the header of a container.

    Raises:
        TensorsError: The header breaks the layout or one of this module's limits.
    """
    if not text.startswith(b"{"):
        raise TensorsError(f"header begins {text[:8]!r}, expected a JSON object")
    try:
        raw = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise TensorsError(f"header cannot be read: {cause(error)}") from error
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(map(_is_text, metadata.values())):
        raise TensorsError("metadata must map names to strings")
    if not all(map(_is_text, metadata)):
        raise TensorsError("a name in the metadata is not text")
    if len(raw) > MAX_TENSORS:
        raise TensorsError(f"{len(raw)} tensors, at most {MAX_TENSORS} are read")
    entries = {name: _parse_entry(name, fields) for name, fields in raw.items()}
    return _Header(entries, metadata, _size_of_layout(entries))


_parse_header_once = functools.lru_cache(maxsize=8)(_parse_header)
"""`_parse_header` with its last results kept: all updates of a round have one header, and are read several times."""


def _size_of_layout(entries: Mapping[str, tuple[Spec, int]]) -> int:
    """Return how many bytes all tensors take together.

    Raises:
        TensorsError: Two tensors overlap, or there is a gap between them.
    """
    position = 0
    for name, (spec, offset) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if offset != position:
            raise TensorsError(f"tensor {name!r} begins at byte {offset}, expected {position}: gap or overlap")
        position += spec.nbytes
    return position


def _parse_entry(name: str, fields: object) -> tuple[Spec, int]:
    """Return the form of a tensor and the byte at which it begins, from its fields in the header.

    Raises:
        TensorsError: The fields break the layout or one of this module's limits.
    """
    _check_name(name)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorsError(f"tensor {name!r}: expected exactly dtype, shape and data_offsets")
    spec = _parse_spec(name, fields["dtype"], fields["shape"])
    offsets = fields["data_offsets"]
    are_offsets = _are_naturals(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]
    if not are_offsets:
        raise TensorsError(f"tensor {name!r}: data_offsets {_short(offsets)} are not [begin, end]")
    begin, end = offsets
    if spec.nbytes != end - begin:
        raise TensorsError(f"tensor {name!r}: {spec} needs {spec.nbytes} bytes, offsets give {end - begin}")
    return spec, begin


def _parse_spec(name: str, code: object, shape: Any) -> Spec:
    """Return the form of a tensor with this dtype and shape in the header, which numpy can make an array of.

    Raises:
        TensorsError: The dtype or the shape is not one that this module reads.
    """
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise TensorsError(f"tensor {name!r}: dtype {_short(code)} is not one of {', '.join(_DTYPES)}")
    if not _are_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise TensorsError(f"tensor {name!r}: shape {_short(shape)} is not a list of at most {MAX_DIMENSIONS} naturals")
    if math.prod(side or 1 for side in shape) >= _BEYOND_NUMPY:
        raise TensorsError(f"tensor {name!r}: shape {_short(shape)} is larger than an array can be, even an empty one")
    return Spec(dtype, tuple(shape))


def _check_name(name: str) -> None:
    """Require that a tensor's name is text of a limited length, and not that of the metadata."""
    if name == "__metadata__" or len(name) > MAX_NAME or not _is_text(name):
        raise TensorsError(f"tensor name {_short(name)} is not text of at most {MAX_NAME} characters")


def _is_text(value: object) -> bool:
    """Return whether a value is text that UTF-8 can write, which half a surrogate pair, valid in JSON, is not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_naturals(values: object) -> bool:
    """Return whether these are a list of integers from 0 up to 2^48."""
    # A bool is an int, too, but its type is another one.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _short(value: object, limit: int = 80) -> str:
    """Return a value of a peer as text for messages, cut off at ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
