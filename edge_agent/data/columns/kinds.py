"""What the type of a column says about its cells: images, lists, text. Types are those of pyarrow."""

from __future__ import annotations

from typing import Any


def holds_images(kind: Any) -> bool:
    """Return whether cells of this type are encoded images, paths of images, or structs of both."""
    import pyarrow as pa

    if not pa.types.is_struct(kind):
        return _is_bytes(kind) or is_text(kind)
    types = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
    # Where no cell has one of both, its type is null.
    bytes_type = types.get("bytes")
    path_type = types.get("path", pa.null())
    if bytes_type is None:
        return False
    has_bytes = _is_bytes(bytes_type) or pa.types.is_null(bytes_type)
    return bool(has_bytes and (is_text(path_type) or pa.types.is_null(path_type)))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_list(kind: Any) -> bool:
    """Return whether cells of this type are lists, of any or of one length."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Return whether cells of this type are text, also where each different one is stored once."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def without_extension(column: Any) -> Any:
    """Return a ``pyarrow.ChunkedArray`` as what an extension type stores, such as the lists of a tensor; not copied."""
    import pyarrow as pa

    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
