"""Several files of one set: the parts that they are of, and whether they have the same columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...core.errors import DataError
from ..base import near
from .table import listed

_TEST_PARTS = ("test", "validation", "valid", "val", "dev")


def parts_among(splits: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of the training and test part among the parts of a set; None where it has not both.

    Without a part called test, that for validation is one.
    """
    if "train" not in splits:
        return None
    for name in _TEST_PARTS:
        if name in splits:
            return "train", name
    return None


def choose_splits(splits: Sequence[str], split: str | None, where: str) -> tuple[str, ...]:
    """Return the parts of a set that an option asks for.

    Args:
        splits: The names of all parts.
        split: The option; None: the training part, or the only one.
        where: The source, for messages.

    Raises:
        DataError: There is no such part, or no default among several.
    """
    if split == "all":
        return tuple(splits)
    if split is None and len(splits) == 1:
        return tuple(splits)
    if split is None and "train" in splits:
        return ("train",)
    names = listed(splits)
    if split is None:
        raise DataError(f"{where}: has the parts {names}; say which one (split=NAME, or split=all)")
    if split not in splits:
        raise DataError(f"{where}: no part '{split}'{near(split, splits)}; it has {names}, or say split=all")
    return (split,)


def mistakes_in_types(schemas: Iterator[tuple[str, Any]], first: Any) -> list[str]:
    """Return a line for each table whose columns have other names or types than those of the first.

    Args:
        schemas: Name and schema of each further table.
        first: The schema of the first one.
    """
    mistakes = []
    for name, schema in schemas:
        differing = list(_differing_columns(schema, first))
        if differing:
            mistakes.append(f"{name} lacks, or has in another type: {listed(differing)}")
    return mistakes


def _differing_columns(schema: Any, first: Any) -> Iterator[str]:
    """Yield the columns of ``first`` that a schema lacks, then those that it has in another type, with both types."""
    for column in first.names:
        if column not in schema.names:
            yield column
    for column in first.names:
        if column not in schema.names:
            continue
        column_type = schema.field(column).type
        expected_type = first.field(column).type
        if column_type != expected_type:
            yield f"{column} ({column_type}, expected {expected_type})"
