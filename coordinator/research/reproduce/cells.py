"""The simulations of a table: settings, folders, and which of them are not done yet."""

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

from ...runs.request import Weights
from ...simulation.plan import HOW_NOT_WHAT, Plan
from ...simulation.setup import WEIGHTS, planned
from ...state.store import StateFolder
from .definition import Column, Row, Table, data_of, slug

FAILED, RESULT = "failed.json", "result.json"
_OR_ELSE = "remove it to restart that row, or choose another --out"


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
        """The result; None until it is finished."""
        return read_json(self.folder / RESULT)

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return (self.folder / RESULT).exists()

    @property
    def failure(self) -> str:
        """Why it failed; empty where it did not."""
        if self.is_over:
            return ""
        return str((read_json(self.folder / FAILED) or {}).get("reason", ""))

    @property
    def closed(self) -> int:
        """Number of closed rounds of an unfinished run."""
        if self.is_over or planned(self.folder) is None:
            return 0
        with StateFolder(self.folder).look() as state:
            return len(state.journal.entries(kinds=("round_closed",)))

    @property
    def is_to_begin_anew(self) -> bool:
        """Whether a retry starts from round 1.

        The run has ended without a result, or its training failed with settings that have changed since.
        """
        if not self.is_over and planned(self.folder) is not None:
            with StateFolder(self.folder).look() as state:
                if any(state.journal.replay(run).status in {"failed", "cancelled"} for run in state.journal.runs()):
                    return True
        if not (read_json(self.folder / FAILED) or {}).get("would_fail_again", False):
            return False
        try:
            return not self.is_begun()
        except UsageError:
            return True

    def is_there(self) -> bool:
        """Whether its folder holds a run with the same settings, or a recorded failure."""
        try:
            return self.is_begun() or bool(self.failure)
        except (UsageError, StateError):
            return False

    def fail(self, reason: str, *, would_again: bool = False) -> None:
        """Record a failure, and whether a retry with the same settings would fail again."""
        write_json(self.folder / FAILED, {"reason": reason, "would_fail_again": would_again})

    def forgive(self) -> None:
        """Remove the record of a failure. The run stays and is resumed, unless it has to restart from round 1."""
        if self.is_to_begin_anew:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            (self.folder / FAILED).unlink(missing_ok=True)

    def is_begun(self) -> bool:
        """Whether there is a run to resume.

        Raises:
            UsageError: the run in the folder has other settings or weights.
        """
        result = planned(self.folder)
        if result is None:
            return False
        other = [
            name
            for name in Plan.model_fields
            if name not in {*HOW_NOT_WHAT, "folder", "data"} and getattr(result, name) != getattr(self.plan, name)
        ]
        sources = ([data.location(source, plan.folder) for source in plan.data] for plan in (result, self.plan))
        other += ["data"] if next(sources) != next(sources) else []
        if not other and self.plan.weights_place is not None:
            begun, now = Weights.of(self.folder / WEIGHTS), Weights.of(self.plan.weights_place)
            if begun.sha256 != now.sha256:
                raise UsageError(f"{self.folder} started with other weights than those in {now.path}; {_OR_ELSE}")
        if other:
            changes = "; ".join(f"{name} {getattr(result, name)}, now {getattr(self.plan, name)}" for name in other[:5])
            raise UsageError(f"{self.folder} has other settings ({changes}); {_OR_ELSE}")
        return True


@dataclass(frozen=True)
class Reproduction:
    """A table, the selected part of it, and the folder of its runs."""

    name: str
    table: Table
    folder: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of all simulations that replace those of the table, such as ``rounds``."""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def cells(self) -> list[Cell]:
        """All selected simulations, ordered by seed: a table with one seed is complete before the second begins.

        Raises:
            UnknownName: rows or columns that the table does not have.
            ConfigError: impossible simulations, selected or not; all mistakes are listed.
        """
        rows = chosen(self.table.rows, self.rows, "row")
        columns = chosen(self.table.columns, self.columns, "column")
        return [cell for cell in self._all_cells() if cell.row in rows and cell.column in columns]

    def shown(self, cells: Sequence[Cell]) -> list[Cell]:
        """The selected cells, and all others of the same seeds that have a run or a failure in the folder."""
        wanted = {cell.folder for cell in cells}
        return [cell for cell in self._all_cells() if cell.folder in wanted or cell.is_there()]

    def check(self, cells: Sequence[Cell]) -> None:
        """Check that data, partitions, weights and devices of these cells exist; no sample is read.

        Raises:
            ConfigError: some do not; all of them are listed.
            MissingCapability: a package that a source needs is not installed.
        """
        mistakes = Mistakes(self.table)
        for cell in cells:
            for check in _checks(cell, self.table):
                with mistakes.of(cell.row, cell.column):
                    check()
        mistakes.check(self.name)

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
        merged = itertools.chain.from_iterable(layer.get("params", {}).items() for layer in layers)
        raw["params"] = dict(merged) | row.params
        return data_of(raw)


def chosen(all_of_them: Sequence[Any], wanted: Sequence[str], kind: str) -> list[Any]:
    """Rows or columns selected by name or folder name, in the table's order; all of them without a selection.

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


class Mistakes:
    """Collects errors of cells; an error that several seeds or columns of a row have in common is listed once."""

    def __init__(self, table: Table) -> None:
        self._everywhere = {(row.name, column.name) for row in table.rows for column in table.columns}
        self._found: dict[str, dict[tuple[str, str], None]] = {}

    @contextlib.contextmanager
    def of(self, row: Row, column: Column) -> Iterator[None]:
        """Record errors raised inside as those of the cell."""
        try:
            yield
        except UsageError as error:
            messages = [str(error)]
            if isinstance(error, ConfigError):
                messages = [f"{error.where}: {mistake}" for mistake in error.mistakes]
            for message in messages:
                self._found.setdefault(message, {})[row.name, column.name] = None

    def check(self, where: str) -> None:
        """Check that nothing was recorded.

        Raises:
            ConfigError: all errors, with the rows and columns that have them.
        """
        if self._found:
            raise ConfigError(where, self._lines())

    def _lines(self) -> Iterator[str]:
        for message, places in self._found.items():
            if places.keys() == self._everywhere and len({row for row, _ in places}) > 1:
                yield f"all rows: {message}"
                continue
            for name in dict.fromkeys(row for row, _ in places):
                columns = [f"'{column}'" for row, column in places if row == name]
                yield f"row '{name}', column{'s' if len(columns) > 1 else ''} {', '.join(columns)}: {message}"


def _checks(cell: Cell, table: Table) -> Iterator[Callable[[], object]]:
    """Each raises a UsageError where what it checks does not exist."""
    from edge_agent.client import choose_device

    plan = cell.plan
    for source in plan.data:
        yield partial(_check_data, source, plan.folder, table)
    yield partial(choose_device, plan.device)
    if planned(cell.folder) is not None:
        return  # a run has its own copies of partition and weights
    if plan.saved_partition is not None:
        yield partial(Division.read, plan.saved_partition)
    if plan.weights_place is not None:
        yield partial(_check_weights, plan.weights_place)


@contextlib.contextmanager
def with_advice(table: Table) -> Iterator[None]:
    """Add the table's advice on where to get data to a DataError raised inside.

    Raises:
        DataError: the one that was raised inside, with the table's advice.
    """
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}. {table.get_data}" if table.get_data else str(error)) from error


def _check_data(source: str, folder: Path, table: Table) -> None:
    with with_advice(table):
        data.check(source, folder)


def _check_weights(path: Path) -> None:
    """Check that it is a file of weights; whether they fit needs the network."""
    from torch import nn

    from edge_agent.training.weights import read_weights

    read_weights(nn.Module(), path)
