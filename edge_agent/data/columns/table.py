"""What a table is here: the options by which a user says what it holds, and what each form of file has to offer."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from ...core.errors import DataError, HeadwaterError, MissingCapability, cause
from ..base import PartOptions, Shape, Strings

if TYPE_CHECKING:
    from types import ModuleType

SHOWN = 20
"""Columns or rows that a message lists."""


class ColumnOptions(PartOptions):
    """The options of a table: the meaning of its columns."""

    input: str | None = Field(None, description="column of inputs")
    label: str | None = Field(None, description="column of classes, integers or text; of decimal numbers: targets")
    group: str | None = Field(None, description="column that tells recordings apart; they are held out whole")
    user: str | None = Field(None, description="column of the users who made the samples, for partition users")
    kind: Literal["image", "window", "recording"] | None = Field(
        None, description="what numbers in lists are; default: image for integers or three axes"
    )
    shape: Shape = Field((), description="of one input, where a cell is one flat list")
    class_names: Strings = Field((), description="names of the labels 0, 1, 2 …; default: those in the table")
    split: str | None = Field(None, description="part to take, or all; default: train where there is one")


def import_pyarrow(purpose: str) -> ModuleType:
    """Return the package ``pyarrow``.

    Args:
        purpose: What it is needed for, as a clause of a message.

    Raises:
        MissingCapability: It is not installed.
    """
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingCapability.package("pyarrow", "tables", purpose) from error


@contextlib.contextmanager
def damage_as_data_error(where: str) -> Iterator[None]:
    """Let an error that reading a damaged table raises be one about data.

    Names and texts that are no UTF-8, and numbers that lead out of the file, are only noticed when they are used, and
    pyarrow has many ways to say so.

    Args:
        where: What is read, with which the message begins.

    Raises:
        DataError: The table is damaged.
    """
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        raise DataError(
            f"{where}: cannot be read: {cause(error)}; it is damaged or was not copied whole: copy or save it again"
        ) from error


class Table(Protocol):
    """A table whose columns are read on demand."""

    where: str
    """The kind and the location of the source, with which messages begin."""

    folder: Path
    """The folder from which paths in cells count."""

    schema: Any
    """The ``pyarrow.Schema``: names and types of the columns."""

    rows: int

    def column(self, name: str) -> Any:
        """Return a whole column as a ``pyarrow.ChunkedArray``, without an extension type.

        Raises:
            DataError: The column is damaged.
        """

    def cells(self, name: str) -> Sequence[Any]:
        """Return the cells of a column as ``pyarrow.Scalar``, each read when it is asked for."""

    def release(self) -> None:
        """Drop from memory what was read of mapped files."""

    def row_name(self, row: int) -> str:
        """Return the name of a row for people, which says in which file it is."""


def rows_listed(table: Table, rows: np.ndarray) -> str:
    """Return the names of the first rows for a message, and how many more there are."""
    return listed([table.row_name(int(row)) for row in rows[: SHOWN + 1]], len(rows))


def listed(names: Iterable[str], count: int | None = None) -> str:
    """Return the first of ``count`` names for a message, and how many more there are."""
    names = list(names)
    total = len(names) if count is None else count
    text = ", ".join(names[:SHOWN]) or "none"
    if total > SHOWN:
        text += f" and {total - SHOWN} more"
    return text
