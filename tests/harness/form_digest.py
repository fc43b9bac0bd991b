"""A digest of the fields of models, which a test compares: changed fields need another version number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pydantic import BaseModel


def fields_digest(*kinds: type[BaseModel], without: tuple[str, ...] = ()) -> str:
    """16 hexadecimal digits of the names of all fields, nested ones too, and of the values that literals allow.

    ``without``: places that do not count, as ``Kind.field``.
    """
    lines = sorted({line for kind in kinds for line in _lines(kind.model_json_schema(), kind.__name__)})
    lines = [line for line in lines if line not in without]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _lines(schema: object, where: str) -> Iterator[str]:
    if isinstance(schema, list):
        for inner in schema:
            yield from _lines(inner, where)
    if not isinstance(schema, dict):
        return
    for key, inner in schema.items():
        if key in {"enum", "const"}:
            yield f"{where} {inner if key == 'enum' else [inner]}"
        elif key in {"properties", "$defs"}:
            for name, field in inner.items():
                place = f"{where}.{name}" if key == "properties" else name
                yield place
                yield from _lines(field, place)
        else:
            yield from _lines(inner, where)
