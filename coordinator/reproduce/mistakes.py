"""What can be found wrong with the simulations of a table before the first of them begins, row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent import data
from edge_agent.data.partition import Division
from edge_agent.errors import ConfigError, DataError, UsageError

from ..simulate import planned
from .definition import Column, Row, Table

if TYPE_CHECKING:
    from .cells import Cell

Place = tuple[str, str]
"""Names of row and column."""


class Mistakes:
    """Collects errors of cells; what several seeds or columns of a row have in common is one mistake."""

    def __init__(self, table: Table) -> None:
        self._everywhere = {(row.name, column.name) for row in table.rows for column in table.columns}
        self._found: dict[str, dict[Place, None]] = {}

    @contextlib.contextmanager
    def of(self, row: Row, column: Column) -> Iterator[None]:
        """What is wrong inside is noted as that cell's."""
        try:
            yield
        except UsageError as error:
            for words in _words_of(error):
                self._found.setdefault(words, {})[row.name, column.name] = None

    def check(self, where: str) -> None:
        """Return quietly where none were found.

        Raises:
            ConfigError: some were; all of them are listed, with the rows and columns that have them.
        """
        if self._found:
            raise ConfigError(where, self._lines())

    def _lines(self) -> Iterator[str]:
        for words, places in self._found.items():
            if places.keys() == self._everywhere and len({row for row, _ in places}) > 1:
                yield f"all rows: {words}"
                continue
            for name in dict.fromkeys(row for row, _ in places):
                columns = [f"'{column}'" for row, column in places if row == name]
                yield f"row '{name}', column{'s' if len(columns) > 1 else ''} {', '.join(columns)}: {words}"


def check_places(table: Table, cells: Sequence[Cell], where: str) -> None:
    """Return quietly where all that these cells are to begin with is there; no sample is read.

    Raises:
        ConfigError: data, partitions, weights or devices are not; all of them are listed.
        MissingCapability: a package that a source needs is not installed.
    """
    mistakes = Mistakes(table)
    for cell in cells:
        for look in _looks(cell, table):
            with mistakes.of(cell.row, cell.column):
                look()
    mistakes.check(where)


def _looks(cell: Cell, table: Table) -> Iterator[Callable[[], object]]:
    """Each raises a UsageError where what it looks for is not there."""
    plan = cell.plan
    for source in plan.data:
        yield partial(_look_for_data, source, plan.folder, table)
    yield partial(_look_for_device, plan.device)
    if planned(cell.folder) is not None:
        return  # a run has copies of its own of the rest
    if plan.saved_partition is not None:
        yield partial(Division.read, plan.saved_partition)
    if plan.weights_place is not None:
        yield partial(_look_at_weights, plan.weights_place)


@contextlib.contextmanager
def with_advice(table: Table) -> Iterator[None]:
    """Inside, whoever misses data is told where they are to be had.

    Raises:
        DataError: the one that was raised inside, with the table's advice.
    """
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}. {table.get_data}" if table.get_data else str(error)) from error


def _look_for_data(source: str, folder: Path, table: Table) -> None:
    with with_advice(table):
        data.check(source, folder)


def _look_for_device(wish: str) -> None:
    from edge_agent.training.session import choose_device

    choose_device(wish)


def _look_at_weights(path: Path) -> None:
    """Whether it is a file of weights at all; of which network, only a network can tell."""
    from torch import nn

    from edge_agent.training.weights import read_weights

    read_weights(nn.Module(), path)


def _words_of(error: UsageError) -> list[str]:
    if isinstance(error, ConfigError):
        return [f"{error.where}: {mistake}" for mistake in error.mistakes]
    return [str(error)]
