"""A published table, one TOML file for each, and the simulations that reproduce it, one for each cell."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from edge_agent import data, methods, models
from edge_agent.core.config import mistakes_of, parse
from edge_agent.core.errors import ConfigError, DataError, StateError, UnknownName, UsageError
from edge_agent.core.own_folders import remove_folder
from edge_agent.core.registry import absolute, is_reference, load_reference
from edge_agent.core.storage import read_json, read_toml, write_json
from edge_agent.core.task import Frozen
from edge_agent.data.partition import Division

from ...rounds.request import Weights
from ...simulation.own_parts import add_method, register
from ...simulation.own_sources import describe_changes, own_sources
from ...simulation.plan import Plan
from ...simulation.setup import SIMULATION_FOLDER, WEIGHTS, read_plan, why_tied
from ...state.store import StateFolder
from ...text import counted
from ...views.runs import RunRecord, replay
from ..footing import Footing, Scope

FOLDER = Path("reproduce")


class Column(Frozen):
    """One setting of the table, such as a number of clients."""

    name: str = Field(min_length=1, max_length=80)
    plan: dict[str, Any] = Field(default_factory=dict, description="fields of a simulation that make this setting")
    doubt: str = Field("", description="why its published values may be wrong")


class Row(Frozen):
    """One method of the table."""

    name: str = Field(min_length=1, max_length=80)
    method: str = Field(max_length=1000, description="a method's name, or PATH.py:CLASS for your own")
    params: dict[str, Any] = Field(default_factory=dict, description="on top of those that all rows share")
    plan: dict[str, Any] = Field(default_factory=dict, description="fields of a simulation, of this row alone")
    paper: dict[str, float] = Field(default_factory=dict, description="column -> published value, in percent")
    paper_source: str = Field("", description="where its published values stand, if not in the table's source")
    tolerance: float | None = Field(None, gt=0, description="points; default: that of the table")
    scope: Scope = Field("personal", description="which accuracy is compared")
    note: str = Field("", description="what differs from the paper's row, or is not known")


Part = TypeVar("Part", Row, Column)
"""A row or a column of a table."""


ValuesAre = Literal["printed", "worked out", "quoted", "read from a figure"]
"""How the published values of a table were obtained.

printed: they stand in the source as they are. worked out: of values that stand there, such as the mean of some columns.
quoted: the source was not at hand; another paper prints them as its values. read from a figure: good to about a point.
"""


class Promise(Frozen):
    """An order that the table claims: ``row`` above each of ``above``, which are names of rows or ``all``."""

    row: str
    above: tuple[str, ...] = Field(("all",), min_length=1)


class Table(Frozen):
    """A published table. The simulation of a cell has the fields of ``plan``, then the column's, then the row's."""

    title: str
    source: str = Field(description="paper, year, and the table or figure in it")
    values: ValuesAre = Field("printed", description="how the published values were obtained")
    quoted_in: str = Field("", description="the paper and table that quote them, where they are quoted")
    measure: str = Field(description="what the published numbers are, as far as is known")
    average: Literal["clients_mean", "samples_mean"] = Field("clients_mean", description="over clients or over samples")
    when: Literal["last", "best"] = Field(
        "last", description="after the last round, or in the best one, which is chosen on test samples"
    )
    tolerance: float = Field(1.5, gt=0, description="points of accuracy within which a value counts as met")
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    get_data: str = Field("", description="where to get the data")
    plan: dict[str, Any] = Field(default_factory=dict)
    columns: tuple[Column, ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)
    promises: tuple[Promise, ...] = ()
    published_footing: dict[str, str] = Field(
        default_factory=dict, description="aspect of coordinator.research.footing -> what the paper has in all its rows"
    )
    notes: tuple[str, ...] = ()

    @property
    def has_published_values(self) -> bool:
        """Whether there is a published value for any row."""
        return any(row.paper for row in self.rows)

    def mistakes(self) -> Iterator[str]:
        """Yield inconsistent names and seeds, and fields that no simulation has."""
        # 1. Cells that would share a folder.
        if len(set(self.seeds)) < len(self.seeds):
            yield "a seed is given twice, which repeats the same run"
        rows = [row.name for row in self.rows]
        columns = [column.name for column in self.columns]
        yield from _shared_folders("row", rows)
        yield from _shared_folders("column", columns)
        # 2. Names of rows and columns that the table does not have.
        for row in self.rows:
            unknown_columns = [name for name in row.paper if name not in columns]
            yield from (f"{row.name}: no column '{name}'" for name in unknown_columns)
        for promise in self.promises:
            unknown_rows = {promise.row, *promise.above} - {"all", *rows}
            yield from (f"promise about '{name}', which is no row" for name in sorted(unknown_rows))
        unknown_aspects = sorted(self.published_footing.keys() - Footing.model_fields.keys())
        aspects = ", ".join(Footing.model_fields)
        yield from (f"published_footing: '{name}', expected one of {aspects}" for name in unknown_aspects)
        # 3. A paper that quotes the values is named exactly where values are quoted.
        if self.values == "quoted" and not self.quoted_in:
            yield "values = 'quoted' without quoted_in, expected the paper and table that quote them"
        if self.values != "quoted" and self.quoted_in:
            yield f"quoted_in with values = '{self.values}', expected values = 'quoted'"
        # 4. Fields of the simulations, wherever they are stated.
        yield from _mistakes_in(self.plan, "[plan]")
        for row in self.rows:
            yield from _mistakes_in(row.plan, f"plan of row '{row.name}'")
        for column in self.columns:
            yield from _mistakes_in(column.plan, f"plan of column '{column.name}'")


def _shared_folders(kind: str, labels: Sequence[str]) -> Iterator[str]:
    """Yield the folders that several rows, or columns, would have in common."""
    counts = Counter(map(slug, labels))
    for folder in sorted(counts):
        if counts[folder] > 1:
            yield f"two {kind}s would have the folder {folder}"


def data_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a simulation, whose ``data`` in a TOML file may be a single source."""
    source = fields.get("data")
    if isinstance(source, str):
        return {**fields, "data": (source,)}
    return dict(fields)


def _mistakes_in(plan: Mapping[str, Any], where: str) -> list[str]:
    """Return the fields of a plan that no simulation has, and values that are not allowed, each with its place.

    Combinations of fields are checked later, with the fields of all layers together.
    """
    try:
        Plan.model_validate({"data": ("not given yet",), **data_of(plan)})
    except ValidationError as error:
        are_of_fields = all(detail["loc"] for detail in error.errors())
        if not are_of_fields:
            return []
        return [f"{where}: {mistake}" for mistake in mistakes_of(error, Plan)]
    except UnknownName as error:
        return [f"{where}: {error}"]
    return []


def slug(name: str) -> str:
    """Return a name as a part of a folder's name: in lower case, its words joined by hyphens."""
    parts: list[str] = [""]
    for letter in name.lower():
        if letter.isalnum() or letter == ".":
            parts[-1] += letter
        else:
            parts.append("")
    return "-".join(filter(None, parts))


def names() -> list[str]:
    """Return the names of all tables that ship with Headwater."""
    return sorted(path.stem for path in _home().glob("*.toml"))


def read_table(name: str) -> Table:
    """Read the table of that name, or in that file.

    Raises:
        UnknownName: There is no such table; the nearest name is suggested.
        ConfigError: The file is no table; the message lists all mistakes.
    """
    path = Path(name)
    if not name.endswith(".toml"):
        path = _home() / f"{name}.toml"
        if not path.exists():
            raise UnknownName("table", name, names())
    table = parse(Table, read_toml(path), where=str(path))
    mistakes = list(table.mistakes())
    if mistakes:
        raise ConfigError(str(path), mistakes)
    return table


def _home() -> Path:
    """Return the folder of the tables: beside the packages in a checkout, else among the environment's shared files."""
    beside = Path(__file__).resolve().parents[3] / "configs" / FOLDER
    if beside.is_dir():
        return beside
    return Path(sysconfig.get_path("data")) / "share" / "headwater" / FOLDER


FAILED = "failed.json"
"""The file in a cell's folder that records a failure."""

RESULT = "result.json"
"""The file in a cell's folder that has the result of the simulation."""

_OR_ELSE = "remove it to restart that row, or choose another --out"


@dataclass(frozen=True)
class Cell:
    """A simulation of a table: a row, a column and a seed."""

    row: Row
    column: Column
    seed: int
    plan: Plan
    folder: Path

    def __str__(self) -> str:
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"

    @property
    def result(self) -> dict[str, Any] | None:
        """The result; None until the run has finished with at least as many rounds as are wanted."""
        result = read_json(self.folder / RESULT)
        if result is None:
            return None
        begun = read_plan(self.folder)
        if begun is None:
            return dict(result)
        # Until a run with more rounds than before has finished again, the result of before is still there.
        is_of_all_rounds = bool(result.get("stopped")) or result["last"]["rounds_done"] >= begun.rounds
        if not is_of_all_rounds or begun.rounds < self.plan.rounds:
            return None
        return dict(result)

    @property
    def is_over(self) -> bool:
        """Whether there is a result, and the run has no fewer rounds than are wanted."""
        return self.result is not None

    @property
    def failure(self) -> str:
        """Why it failed; empty where it did not."""
        if self.is_over:
            return ""
        return str(self._record_of_failure().get("reason", ""))

    @property
    def closed(self) -> int:
        """The number of closed rounds of an unfinished run."""
        if self.is_over or read_plan(self.folder) is None:
            return 0
        with StateFolder(self.folder).look() as state:
            return len(state.journal.entries(kinds=("round_closed",)))

    @property
    def must_restart(self) -> bool:
        """Whether a retry starts from round 1.

        The run has ended without a result, or it failed with an own method that was edited since, or its training
        failed with settings that have changed since.
        """
        if self._has_ended_without_result():
            return True
        if self.failure and read_plan(self.folder) is not None and self._describe_edits():
            return True
        if not self._record_of_failure().get("would_fail_again", False):
            return False
        try:
            return not self.is_begun()
        except UsageError:
            return True

    def _record_of_failure(self) -> dict[str, Any]:
        """Return what `fail` has recorded, as JSON; empty where there is no record."""
        return read_json(self.folder / FAILED) or {}

    def _has_ended_without_result(self) -> bool:
        """Return whether a run in the folder has failed or was cancelled, so that it cannot be resumed."""
        if self.is_over or read_plan(self.folder) is None:
            return False
        with StateFolder(self.folder).look() as state:
            statuses = [replay(state.journal, run).status for run in state.journal.runs()]
        return "failed" in statuses or "cancelled" in statuses

    def is_there(self) -> bool:
        """Return whether its folder holds a run with the same settings, or a recorded failure."""
        try:
            return self.is_begun() or bool(self.failure)
        except (UsageError, StateError):
            return False

    def fail(self, reason: str, *, would_again: bool = False) -> None:
        """Record a failure, and whether a retry with the same settings would fail again."""
        write_json(self.folder / FAILED, {"reason": reason, "would_fail_again": would_again})

    def forgive(self) -> None:
        """Remove the record of a failure. The run stays and is resumed, unless it has to restart from round 1.

        Raises:
            UsageError: The run has to restart, and its folder cannot be removed.
        """
        if not self.must_restart:
            (self.folder / FAILED).unlink(missing_ok=True)
            return
        # The folder of all cells is the user's choice, and may be reached by a link.
        folder = self.folder.parent.resolve() / self.folder.name
        if folder.exists() and not remove_folder(folder, SIMULATION_FOLDER):
            raise UsageError(
                f"{self.folder}: cannot be removed to start again (see the warning); remove it, or choose another --out"
            )

    def is_begun(self) -> bool:
        """Return whether there is a run to resume, perhaps with more rounds.

        Raises:
            UsageError: The run in the folder has other settings or weights, or another source of a method or encoder of
                the user's own, or cannot have more rounds.
        """
        begun = read_plan(self.folder)
        if begun is None:
            return False
        # 1. The settings have to be the same; the same files of data may be named from another folder.
        has_more_rounds = self.plan.rounds > begun.rounds
        compared_otherwise = ("data", "rounds") if has_more_rounds else ("data",)
        differences = begun.differences(self.plan, but=compared_otherwise)
        if _locations_of(begun) != _locations_of(self.plan):
            differences.append(f"data {begun.data}, now {self.plan.data}")
        if differences:
            raise UsageError(f"{self.folder} has other settings ({'; '.join(differences[:5])}); {_OR_ELSE}")
        if has_more_rounds:
            self._check_more_rounds(begun.rounds)
        # 2. So do the weights that it starts with, of which the run has a copy.
        weights_path = self.plan.weights_path
        if weights_path is not None:
            weights = Weights.of(weights_path)
            if weights.sha256 != Weights.of(self.folder / WEIGHTS).sha256:
                raise UsageError(f"{self.folder} started with other weights than those in {weights.path}; {_OR_ELSE}")
        # 3. And the source of a method or encoder of the user's own.
        edits = self._describe_edits()
        if edits:
            raise UsageError(f"{self.folder}: its results are of another source of {edits}; {_OR_ELSE}")
        return True

    def _describe_edits(self) -> str:
        """Say which of the user's own method and encoder was edited since the run in the folder began; empty: none."""
        sources = own_sources(method=self.plan.method, encoder=self.plan.encoder)
        if not sources:
            return ""
        record = self._record_of_run()
        if record is None or record.request.simulation is None:
            return ""
        return describe_changes(record.request.simulation.own_sources, sources)

    def _record_of_run(self) -> RunRecord | None:
        """Return where the run in the folder stands; None: it was killed before the journal had it."""
        with StateFolder(self.folder).look() as state:
            runs = state.journal.runs()
            return replay(state.journal, runs[0]) if runs else None

    def _check_more_rounds(self, before: int) -> None:
        """Require that the run in the folder, which has ``before`` rounds, ends with more of them as if it always had.

        Raises:
            UsageError: It does not.
        """
        record = self._record_of_run()
        if record is None:
            return
        plan = self.plan
        register(plan)
        method = methods.create(plan.method_name, plan.params, paper=plan.paper, paper_for=plan.paper_for)
        tied = why_tied(record, plan, method)
        if tied:
            raise UsageError(
                f"{self.folder}: {counted(before, 'round')} cannot become {plan.rounds}: {tied}; {_OR_ELSE}"
            )


def _check_source(plan: Plan, source: str) -> None:
    """Check that a source of a plan exists; where it is a set of several domains, that each of them does.

    Raises:
        HeadwaterError: See `edge_agent.data.check`.
    """
    domains: Mapping[str, str] = {}
    if plan.partition == "domains" and len(plan.data) == 1:
        domains = data.domains(source, seed=plan.seed, folder=plan.folder)
    if not domains:
        data.check(source, plan.folder)
    for domain in domains.values():
        data.check(domain, plan.folder)


def _locations_of(plan: Plan) -> list[Any]:
    """Return where the sources of a simulation are, whatever folder their paths count from."""
    return [data.location(source, plan.folder) for source in plan.data]


@dataclass(frozen=True)
class Reproduction:
    """A table, the selected part of it, and the folder of its runs."""

    name: str
    table: Table
    folder: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of all simulations that replace those of the table, such as ``rounds``."""

    rows: Sequence[str] = ()
    """Names of the selected rows; empty: all of them."""

    columns: Sequence[str] = ()
    """Names of the selected columns; empty: all of them."""

    seeds: Sequence[int] = ()
    """The seeds; empty: those of the table."""

    def cells(self) -> list[Cell]:
        """Return all selected simulations, ordered by seed: a table with one seed is complete before the second begins.

        Raises:
            UnknownName: The table does not have a row or column of such a name.
            ConfigError: Simulations are impossible, selected or not; all mistakes are listed.
        """
        rows = select(self.table.rows, self.rows, "row")
        columns = select(self.table.columns, self.columns, "column")
        return [cell for cell in self._all_cells() if cell.row in rows and cell.column in columns]

    def shown(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the selected cells, and all others of the same seeds that have a run or a failure in the folder."""
        selected = {cell.folder for cell in cells}
        return [cell for cell in self._all_cells() if cell.folder in selected or cell.is_there()]

    def check(self, cells: Sequence[Cell]) -> None:
        """Check that data, partitions, weights and devices of these cells exist; no sample is read.

        Raises:
            ConfigError: Some do not exist; all of them are listed.
            MissingCapability: A package that a source needs is not installed.
        """
        from edge_agent.client import choose_device

        mistakes = Mistakes(self.table)
        for cell in cells:
            for source in cell.plan.data:
                with mistakes.of(cell.row, cell.column), with_advice(self.table):
                    _check_source(cell.plan, source)
            with mistakes.of(cell.row, cell.column):
                choose_device(cell.plan.device)
            if read_plan(cell.folder) is None:  # a run has its own copies of partition and weights
                self._check_files(cell, mistakes)
        mistakes.check(self.name)

    def _check_files(self, cell: Cell, mistakes: Mistakes) -> None:
        """Note where the partition or the weights of a cell cannot be read."""
        from torch import nn

        from edge_agent.training.weights import read_weights

        with mistakes.of(cell.row, cell.column):
            if cell.plan.saved_partition is not None:
                Division.read(cell.plan.saved_partition)
        with mistakes.of(cell.row, cell.column):
            if cell.plan.weights_path is not None:  # whether they fit needs the network
                read_weights(nn.Module(), cell.plan.weights_path)

    @property
    def command(self) -> str:
        """The command line that selects the same cells."""
        parts = ["headwater", "reproduce", self.name]
        for row in self.rows:
            parts += ["--row", row]
        for column in self.columns:
            parts += ["--column", column]
        if self.seeds:
            parts += ["--seeds", ",".join(map(str, self.seeds))]
        for name, value in self.changes.items():
            # An option that is repeated has all its values in a tuple.
            values = value if isinstance(value, tuple) else (value,)
            for repeated_value in values:
                parts += [f"--{name}", str(repeated_value)]
        parts += ["--out", str(self.folder)]
        return shlex.join(parts)

    def _all_cells(self) -> list[Cell]:
        """Return the cells of all rows and columns.

        Raises:
            ConfigError: Some are impossible; the message lists all mistakes.
        """
        cells = list[Cell]()
        mistakes = Mistakes(self.table)
        seeds = self.seeds or self.table.seeds
        for seed, column, row in itertools.product(seeds, self.table.columns, self.table.rows):
            fields = self._fields_of(row, column, seed)
            with mistakes.of(row, column):
                name = _known_method(fields["method"])
                methods.create(name, fields["params"], paper=fields["paper"], paper_for=fields.get("paper_for"))
            with mistakes.of(row, column):
                if not fields.get("data"):
                    raise UsageError(f"no data; give them with --data. {self.table.get_data}".strip())
                plan = parse(Plan, fields, where="plan")
                # An encoder of the user's own is known to this process from here on.
                register(plan)
                if plan.encoder_name is not None and plan.encoder_name not in models.names():
                    raise UnknownName("encoder", plan.encoder_name, models.names())
                folder = self.folder / f"{slug(row.name)}--{slug(column.name)}--seed{seed}"
                cells.append(Cell(row, column, seed, plan, folder))
        mistakes.check(self.name)
        return cells

    def _fields_of(self, row: Row, column: Column, seed: int) -> dict[str, Any]:
        """Return the fields of a `Plan` for one cell, as a file of settings would have them.

        Later layers replace fields of earlier ones; only parameters of the method are put together.
        """
        fields: dict[str, Any] = {"folder": str(Path.cwd()), "method": row.method, "paper": True, "seed": seed}
        params: dict[str, Any] = {}
        for layer in (self.table.plan, column.plan, row.plan, self.changes):
            fields |= layer
            params |= layer.get("params", {})
        # Files of the user's own count from the working folder, as data do; a run that is resumed may be in another.
        for part in ("method", "encoder"):
            if isinstance(fields.get(part), str):
                fields[part] = absolute(fields[part])
        return data_of({**fields, "params": params | row.params})


def _known_method(reference: str) -> str:
    """Return the name of a method; one from a file of the user's is made known to this process.

    Raises:
        UsageError: The file cannot be imported, or what it names is no method.
    """
    if is_reference(reference):
        return add_method(load_reference("method", reference))
    return reference


def select(parts: Sequence[Part], names: Sequence[str], kind: str) -> list[Part]:
    """Return the rows or columns of these names or folder names, in the table's order; without names all of them.

    Raises:
        UnknownName: There is no such name; the nearest one is suggested.
    """
    by_folder = {slug(part.name): part for part in parts}
    for name in names:
        if slug(name) not in by_folder:
            raise UnknownName(kind, name, sorted(by_folder))
    if not names:
        return list(by_folder.values())
    selected = set(map(slug, names))
    return [part for folder, part in by_folder.items() if folder in selected]


class Mistakes:
    """A collection of errors of cells; one that several seeds or columns of a row have in common is listed once."""

    def __init__(self, table: Table) -> None:
        self._everywhere = {(row.name, column.name) for row in table.rows for column in table.columns}
        """(Row, column) of all cells."""

        self._found: dict[str, dict[tuple[str, str], None]] = {}
        """Message -> (row, column) of each cell that has the error, in the order in which they were found."""

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
            ConfigError: Errors were recorded; the message lists all of them, with the rows and columns that have them.
        """
        lines = list[str]()
        for message, cells in self._found.items():
            lines.extend(f"{location}: {message}" for location in self._describe_cells(list(cells)))
        if lines:
            raise ConfigError(where, lines)

    def _describe_cells(self, cells: Sequence[tuple[str, str]]) -> Iterator[str]:
        """Yield where an error is: in all rows, or in each row with its columns.

        Args:
            cells: (Row, column) of each cell that has it.
        """
        columns_of_rows: dict[str, list[str]] = {}
        for row, column in cells:
            columns_of_rows.setdefault(row, []).append(f"'{column}'")
        if set(cells) == self._everywhere and len(columns_of_rows) > 1:
            yield "all rows"
            return
        for row, columns in columns_of_rows.items():
            noun = "column" if len(columns) == 1 else "columns"
            yield f"row '{row}', {noun} {', '.join(columns)}"


@contextlib.contextmanager
def with_advice(table: Table) -> Iterator[None]:
    """Add the table's advice on where to get data to a DataError raised inside.

    Raises:
        DataError: A `DataError` was raised inside; its message gets the table's advice.
    """
    try:
        yield
    except DataError as error:
        if not table.get_data:
            raise
        raise DataError(f"{error}. {table.get_data}") from error
