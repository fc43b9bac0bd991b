"""A kind of data source whose data are a table: its columns are chosen, and become samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.errors import DataError
from ..base import DataSource, Raw, Users
from .cells import Cells
from .choice import choose_columns, features_of
from .labels import codes_of, read_labels
from .table import ColumnOptions, Table, damage_as_data_error, import_pyarrow


def table_source(
    kind: str,
    open_table: Callable[[str, ColumnOptions], Table],
    parts: Callable[[str, Any], tuple[str, str] | None],
    *,
    takes_patterns: bool = False,
) -> DataSource:
    """Return a kind of source whose data are a table in files.

    Args:
        kind: Its name, with which messages begin.
        open_table: A function that returns the rows of the chosen parts from the location and the options.
        parts: As of `DataSource`.
        takes_patterns: As of `DataSource`.
    """

    def open_checked(where: str, options: ColumnOptions) -> Table:
        import_pyarrow(f"reading data of the kind '{kind}'")
        return open_table(where, options)

    def read(where: str, options: ColumnOptions) -> Raw:
        with damage_as_data_error(f"{kind}: '{where}'"):
            return read_table(open_checked(where, options), options)

    def inspect(where: str, options: ColumnOptions) -> None:
        with damage_as_data_error(f"{kind}: '{where}'"):
            check_table(open_checked(where, options), options)

    return DataSource(ColumnOptions, read, True, inspect, parts=parts, takes_patterns=takes_patterns)


def read_table(table: Table, options: ColumnOptions) -> Raw:
    """Return the samples of a table.

    Raises:
        DataError: Columns are missing or of types that hold no inputs or labels; all mistakes are listed.
    """
    if not table.rows:
        raise DataError(f"{table.where}: the table has no rows, expected at least one sample")
    features = features_of(table.schema)
    # 1. Which columns hold what. Every mistake in names and types is reported at once.
    chosen = choose_columns(table, features, options)
    # 2. A random part has the same rows whatever is read of them; in their order, because files are read forwards.
    rows = np.arange(table.rows)
    if options.n is not None and options.n < table.rows:
        rows = np.sort(np.random.default_rng(options.seed).permutation(table.rows)[: options.n])
    # 3. Columns of one value for each sample are read whole; inputs are not.
    labels = read_labels(table, chosen.label, features, options, rows)
    groups = None
    if options.group is not None:
        groups = codes_of(table, options.group, rows)[0]
    users = None
    if options.user is not None:
        numbers, names = codes_of(table, options.user, rows)
        users = Users(numbers, names)
    cells = table.cells(chosen.input)
    items = Cells(cells, rows, chosen.form.reader(table))
    reason = labels.reason or chosen.unlabelled
    return Raw(
        chosen.form.kind, items, labels.positions, labels.names, groups, unlabelled=reason, targets=labels.targets,
        are_whole=groups is not None, users=users, row_name=lambda row: table.row_name(int(rows[row])),
        release=table.release,
    )  # fmt: skip


def check_table(table: Table, options: ColumnOptions) -> None:
    """Check that a table has columns of inputs and labels; no cell is read.

    Raises:
        DataError: See `read_table`.
    """
    if not table.rows:
        raise DataError(f"{table.where}: the table has no rows, expected at least one sample")
    choose_columns(table, features_of(table.schema), options)
