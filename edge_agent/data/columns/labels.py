"""Columns that have one value for each sample, which are read whole: labels, recordings, users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..base import labels_by_name
from .kinds import is_text
from .table import ColumnOptions, Table, rows_listed

_LONGEST_NAME = 256
"""The most characters of a class, a recording or a user."""

_UNLABELLED = -1
"""The label by which Hugging Face's data sets say that a sample has none."""


@dataclass(frozen=True)
class Labels:
    """The labels of the chosen rows.

    Attributes:
        positions: Positions (n,) int64 in ``names``.
        names: The classes.
        targets: Numbers to predict (n,), where the column holds decimal numbers.
        reason: Why there are no labels; empty where there are.
    """

    positions: np.ndarray
    names: tuple[str, ...] = ()
    targets: list[float] | None = field(default=None)
    reason: str = ""


def read_labels(
    table: Table, name: str | None, features: Mapping[str, Any], options: ColumnOptions, rows: np.ndarray
) -> Labels:
    """Return the labels of the chosen rows; without a column of them all are -1.

    Raises:
        DataError: Cells are empty, or hold numbers that are no class; the rows are listed.
    """
    unknown = np.full(len(rows), _UNLABELLED)
    if name is None:
        return Labels(unknown)
    import pyarrow as pa

    kind = table.schema.field(name).type
    where = f"{table.where}, column '{name}'"
    if is_text(kind):
        codes, names = codes_of(table, name, rows)
        values: np.ndarray = codes
        if options.class_names:
            values = np.array(names)[codes]
        return Labels(*labels_by_name(values, options.class_names or names, where))
    values = _numbers(table, name, rows)
    if pa.types.is_floating(kind):
        is_number = np.isfinite(values)
        if not is_number.all():
            raise DataError(
                f"{where}: {int((~is_number).sum())} cells hold NaN or infinity: "
                f"{rows_listed(table, rows[~is_number])}; replace them, or leave these rows out"
            )
        reason = f"{where} holds decimal numbers, expected integers or text"
        return Labels(unknown, targets=values.tolist(), reason=reason)
    # Hugging Face's own sets without labels, such as hidden test parts, have -1 in all rows.
    is_unlabelled = values == _UNLABELLED
    if is_unlabelled.all():
        return Labels(unknown, reason=f"{where}: all rows have the label -1, which means none")
    if is_unlabelled.any():
        raise DataError(
            f"{where}: {int(is_unlabelled.sum())} rows have the label -1, which means none: "
            f"{rows_listed(table, rows[is_unlabelled])}; leave them out, or say label=COLUMN"
        )
    names = options.class_names or _names_of_classes(features, name)
    return Labels(*labels_by_name(values, names, where))


def _names_of_classes(features: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the names of a ``ClassLabel``; empty where the column is none."""
    feature = features.get(name)
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
        return ()
    return tuple(names)


def _numbers(table: Table, name: str, rows: np.ndarray) -> np.ndarray:
    """Return the numbers (n,) of a column in the chosen rows: int64, uint64, or float64 where it holds decimal ones.

    Raises:
        DataError: Cells are empty; their rows are listed.
    """
    column = table.column(name)
    _check_filled(table, name, column, rows)
    values: np.ndarray = np.asarray(column.to_numpy())[rows]
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    return values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)


def codes_of(table: Table, name: str, rows: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the position (n,) int64 of each chosen row's value among the column's values as text, and these, sorted.

    Raises:
        DataError: Cells are empty; their rows are listed.
    """
    import pyarrow as pa

    column = table.column(name)
    _check_filled(table, name, column, rows)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    codes: np.ndarray = np.concatenate([np.asarray(chunk.indices) for chunk in column.chunks])[rows]
    values = column.chunk(0).dictionary.to_pylist()
    used = np.unique(codes)
    long = [code for code in used.tolist() if len(str(values[code])) > _LONGEST_NAME]
    if long:
        raise DataError(
            f"{table.where}, column '{name}': {len(long)} values are longer than {_LONGEST_NAME} characters, the first "
            f"begins '{str(values[long[0]])[:40]}'; expected names, name another column"
        )
    # Integers in the order of numbers, text in that of the alphabet.
    order = sorted(used.tolist(), key=lambda code: values[code])
    positions: np.ndarray = np.full(len(values), -1, np.int64)
    positions[order] = np.arange(len(order))
    return np.asarray(positions[codes]), tuple(str(values[code]) for code in order)


def _check_filled(table: Table, name: str, column: Any, rows: np.ndarray) -> None:
    """Check that a column has a value in each chosen row.

    Raises:
        DataError: Cells are empty; their rows are listed. Or there are not as many as rows.
    """
    if len(column) != table.rows:
        raise DataError(
            f"{table.where}, column '{name}': {len(column)} cells in {table.rows} rows; the file is damaged, copy or "
            "save it again"
        )
    if not column.null_count:
        return
    empty = np.asarray(column.is_null())[rows]
    if empty.any():
        raise DataError(
            f"{table.where}, column '{name}': {int(empty.sum())} cells are empty: {rows_listed(table, rows[empty])}; "
            "fill them, or leave these rows out"
        )
