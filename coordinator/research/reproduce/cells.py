"""Which simulations a table takes, where they are kept, and which of them are still to be done."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edge_agent import data, methods, models
from edge_agent.config import parse
from edge_agent.data.partition import Division
from edge_agent.errors import ConfigError, DataError, StateError, UnknownName, UsageError
from edge_agent.storage import read_json, write_json

from ...simulation.folder import planned
from ...simulation.plan import HOW_NOT_WHAT, Plan
from ...simulation.prepared import WEIGHTS
from ...state.run_request import Weights
from ...state.store import StateFolder
from .definition import Column, Row, Table, data_of, slug

FAILED, RESULT = "failed.json", "result.json"
_OR_ELSE = "remove it to begin that row anew, or choose another --out"


@dataclass(frozen=True)
class Cell:
    """One simulation of a table."""

    row: Row
    column: Column
    seed: int
    plan: Plan
    folder: Path

    def __str__(self) -> str:
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out; None as long as it is not over."""
        return read_json(self.folder / RESULT)

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return (self.folder / RESULT).exists()

    @property
    def failure(self) -> str:
        """Why it came to no result; empty where it did not fail."""
        if self.is_over:
            return ""
        return str((read_json(self.folder / FAILED) or {}).get("reason", ""))

    @property
    def closed(self) -> int:
        """How many rounds of an unfinished run have closed."""
        if self.is_over or planned(self.folder) is None:
            return 0
        with StateFolder(self.folder).look() as state:
            return len(state.journal.entries(kinds=("round_closed",)))

    @property
    def is_to_begin_anew(self) -> bool:
        """Whether to try it again means from the start.

        Its run has ended without a result, or its training failed as it was asked for then, which it is not any more.
        """
        if self._is_lost:
            return True
        if not (read_json(self.folder / FAILED) or {}).get("would_fail_again", False):
            return False
        try:
            return not self.is_begun()
        except UsageError:
            return True

    @property
    def _is_lost(self) -> bool:
        if self.is_over or planned(self.folder) is None:
            return False
        with StateFolder(self.folder).look() as state:
            return any(state.journal.replay(run).status in {"failed", "cancelled"} for run in state.journal.runs())

    def is_there(self) -> bool:
        """Whether its folder holds a run of what it asks for, or why there is none."""
        try:
            return self.is_begun() or bool(self.failure)
        except (UsageError, StateError):
            return False

    def fail(self, reason: str, *, would_again: bool = False) -> None:
        """Note that it has come to no result, and whether it would not the next time, asked for as it is."""
        write_json(self.folder / FAILED, {"reason": reason, "would_fail_again": would_again})

    def forgive(self) -> None:
        """Forget that it has failed. Its run stays, to be gone on with, unless it has to begin anew."""
        if self.is_to_begin_anew:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            (self.folder / FAILED).unlink(missing_ok=True)

    def is_begun(self) -> bool:
        """Whether there is a run to go on with.

        Raises:
            UsageError: what lies there was asked for otherwise.
        """
        found = planned(self.folder)
        if found is None:
            return False
        other = [
            name
            for name in Plan.model_fields
            if name not in {*HOW_NOT_WHAT, "folder", "data"} and getattr(found, name) != getattr(self.plan, name)
        ]
        other += ["data"] if _places(found) != _places(self.plan) else []
        if not other and self.plan.weights_place is not None:
            begun, now = Weights.of(self.folder / WEIGHTS), Weights.of(self.plan.weights_place)
            if begun.sha256 != now.sha256:
                raise UsageError(f"{self.folder} began with other weights than {now.path} holds; {_OR_ELSE}")
        if other:
            told = "; ".join(f"{name} {getattr(found, name)}, now {getattr(self.plan, name)}" for name in other[:5])
            raise UsageError(f"{self.folder} was asked for otherwise ({told}); {_OR_ELSE}")
        return True


@dataclass(frozen=True)
class Reproduction:
    """A table, the part of it that is wanted, and the folder of its runs."""

    name: str
    table: Table
    folder: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of all simulations that the caller wants otherwise, such as ``rounds``."""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def cells(self) -> list[Cell]:
        """All wanted simulations, seeds last: a table with one seed is whole before the second begins.

        Raises:
            UnknownName: rows or columns that the table does not have.
            ConfigError: simulations that cannot be, wanted or not, for all of them go into the table; all mistakes are
                listed.
        """
        rows = chosen(self.table.rows, self.rows, "row")
        columns = chosen(self.table.columns, self.columns, "column")
        return [cell for cell in self._all_cells() if cell.row in rows and cell.column in columns]

    def shown(self, cells: Sequence[Cell]) -> list[Cell]:
        """The wanted cells, and all others of the same seeds of which there is something in the folder."""
        wanted = {cell.folder for cell in cells}
        return [cell for cell in self._all_cells() if cell.folder in wanted or cell.is_there()]

    def check(self, cells: Sequence[Cell]) -> None:
        """Return quietly where all that these cells are to begin with is there; no sample is read.

        Raises:
            ConfigError: it is not; everything that is missing is listed.
            MissingCapability: a package that a source needs is not installed.
        """
        check_places(self.table, cells, self.name)

    def _all_cells(self) -> list[Cell]:
        cells, mistakes = list[Cell](), Mistakes(self.table)
        for seed, column, row in itertools.product(self.seeds or self.table.seeds, self.table.columns, self.table.rows):
            raw = self._raw(row, column, seed)
            with mistakes.of(row, column):
                methods.create(raw["method"], raw["params"], paper=raw["paper"])
            with mistakes.of(row, column):
                folder = self.folder / f"{slug(row.name)}--{slug(column.name)}--seed{seed}"
                cells.append(Cell(row, column, seed, self._plan(raw), folder))
        mistakes.check(self.name)
        return cells

    def _plan(self, raw: Mapping[str, Any]) -> Plan:
        if not raw.get("data"):
            raise UsageError(f"no data; give them with --data. {self.table.get_data}".strip())
        plan = parse(Plan, raw, where="plan")
        if plan.encoder is not None and plan.encoder not in models.names():
            raise UnknownName("encoder", plan.encoder, models.names())
        return plan

    def _raw(self, row: Row, column: Column, seed: int) -> dict[str, Any]:
        layers = (self.table.plan, column.plan, row.plan, dict(self.changes))
        raw: dict[str, Any] = {"folder": str(Path.cwd()), "method": row.method, "paper": True, "seed": seed}
        for layer in layers:
            raw |= {name: value for name, value in layer.items() if name != "params"}
        raw["params"] = dict(_merged(layer.get("params", {}) for layer in layers)) | row.params
        return data_of(raw)


def _places(plan: Plan) -> list[tuple[str, str, dict[str, str]]]:
    return [data.location(source, plan.folder) for source in plan.data]


def chosen(all_of_them: Sequence[Any], wanted: Sequence[str], kind: str) -> list[Any]:
    """Those whose name or folder name is wanted, in the table's order; all of them where nothing was said.

    Raises:
        UnknownName: no such name; the nearest one is suggested.
    """
    known = {slug(one.name): one for one in all_of_them}
    picked = []
    for name in wanted:
        if slug(name) not in known:
            raise UnknownName(kind, name, sorted(known))
        picked.append(slug(name))
    return [one for name, one in known.items() if not picked or name in picked]


def _merged(layers: Iterator[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for layer in layers:
        yield from layer.items()


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
    from edge_agent.client.session import choose_device

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
