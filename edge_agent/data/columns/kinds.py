"""What the type of a column says about its cells: images, lists, text. Types are those of pyarrow."""

from __future__ import annotations

from typing import Any


def holds_images(kind: Any) -> bool:
    """Return whether cells of this type are encoded images, paths of images, or structs of both."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return _is_image_struct(kind)
    return _is_bytes(kind) or is_text(kind)


def _is_image_struct(kind: Any) -> bool:
    """Return whether a struct has the fields of Hugging Face's images: ``bytes``, and perhaps ``path``."""
    import pyarrow as pa

    types = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
    if "bytes" not in types:
        return False
    bytes_type = types["bytes"]
    path_type = types.get("path", pa.null())
    # A field that no cell fills has the type null.
    may_hold_bytes = _is_bytes(bytes_type) or pa.types.is_null(bytes_type)
    may_hold_path = is_text(path_type) or pa.types.is_null(path_type)
    return bool(may_hold_bytes and may_hold_path)


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
