"""Definition of a published table and of the simulations that reproduce it: one TOML file for each table."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from edge_agent.config import mistakes_of, parse
from edge_agent.errors import ConfigError, UnknownName
from edge_agent.storage import read_toml
from edge_agent.task import Frozen

from ...simulation.plan import Plan

FOLDER = Path("reproduce")


class Column(Frozen):
    """One setting of the table, such as a number of clients."""

    name: str = Field(min_length=1, max_length=80)
    plan: dict[str, Any] = Field(default_factory=dict, description="fields of a simulation that make this setting")
    doubt: str = Field("", description="why its published values may be wrong")


class Row(Frozen):
    """One method of the table."""

    name: str = Field(min_length=1, max_length=80)
    method: str = Field(max_length=64)
    params: dict[str, Any] = Field(default_factory=dict, description="on top of those that all rows share")
    plan: dict[str, Any] = Field(default_factory=dict, description="fields of a simulation, of this row alone")
    paper: dict[str, float] = Field(default_factory=dict, description="column -> published value, in percent")
    tolerance: float | None = Field(None, gt=0, description="points; default: that of the table")
    scope: Literal["personal", "global", "after"] = Field("personal", description="which accuracy is compared")
    note: str = Field("", description="what differs from the paper's row, or is not known")


class Promise(Frozen):
    """An order that the table claims: ``row`` above each of ``above``, which are names of rows or ``all``."""

    row: str
    above: tuple[str, ...] = Field(("all",), min_length=1)


class Table(Frozen):
    """A published table. A cell is a simulation: ``plan``, then the column's, then the row's fields."""

    title: str
    source: str = Field(description="paper, table, year")
    measure: str = Field(description="what the published numbers are, as far as one knows")
    average: Literal["clients_mean", "samples_mean"] = Field("clients_mean", description="over clients or over samples")
    when: Literal["last", "best"] = Field(
        "last", description="after the last round, or the best one, which is flattering"
    )
    tolerance: float = Field(1.5, gt=0, description="points of accuracy within which a value counts as met")
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    get_data: str = Field("", description="where to get the data")
    plan: dict[str, Any] = Field(default_factory=dict)
    columns: tuple[Column, ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)
    promises: tuple[Promise, ...] = ()
    notes: tuple[str, ...] = ()

    def mistakes(self) -> Iterator[str]:
        """What of it does not go together, and fields of simulations that cannot be in any."""
        if len(set(self.seeds)) < len(self.seeds):
            yield "a seed is given twice: that is not another run"
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        for kind, named in (("row", rows), ("column", columns)):
            short = [slug(name) for name in named]
            yield from (
                f"two {kind}s would have the folder {name}" for name in sorted(set(short)) if short.count(name) > 1
            )
        for row in self.rows:
            yield from (f"{row.name}: no column '{name}'" for name in row.paper if name not in columns)
        for promise in self.promises:
            meant = {promise.row, *promise.above} - {"all", *rows}
            yield from (f"promise about '{name}', which is no row" for name in sorted(meant))
        yield from _mistakes_in(self.plan, "[plan]")
        for kind, layers in (("row", self.rows), ("column", self.columns)):
            for layer in layers:
                yield from _mistakes_in(layer.plan, f"plan of {kind} '{layer.name}'")


def data_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a simulation, of which ``data`` may be a single source."""
    given = fields.get("data")
    return {**fields, "data": (given,)} if isinstance(given, str) else dict(fields)


def _mistakes_in(plan: Mapping[str, Any], where: str) -> list[str]:
    """Fields that no simulation has, or not with such values; whether fields go together is seen with all of them."""
    try:
        Plan.model_validate({"data": ("not given yet",), **data_of(plan)})
    except ValidationError as error:
        are_of_fields = all(detail["loc"] for detail in error.errors())
        return [f"{where}: {mistake}" for mistake in mistakes_of(error, Plan)] if are_of_fields else []
    except UnknownName as error:
        return [f"{where}: {error}"]
    return []


def slug(name: str) -> str:
    """A name as part of a folder's: lower case, words joined."""
    words = "".join(char if char.isalnum() or char == "." else " " for char in name.lower()).split()
    return "-".join(words)


def names() -> list[str]:
    """All tables that are at hand by name."""
    return sorted(path.stem for path in _home().glob("*.toml"))


def read_table(name: str) -> Table:
    """The table of that name, or in that file.

    Raises:
        UnknownName: no such table; the nearest name is suggested.
        ConfigError: the file is no table; all mistakes are listed.
    """
    path = Path(name) if name.endswith(".toml") else _home() / f"{name}.toml"
    if not path.exists() and not name.endswith(".toml"):
        raise UnknownName("table", name, names())
    table = parse(Table, read_toml(path), where=str(path))
    if mistakes := list(table.mistakes()):
        raise ConfigError(str(path), mistakes)
    return table


def _home() -> Path:
    """Beside the packages in a checkout, in the environment's shared files where it is installed."""
    beside = Path(__file__).resolve().parents[3] / "configs" / FOLDER
    return beside if beside.is_dir() else Path(sysconfig.get_path("data")) / "share" / "headwater" / FOLDER
