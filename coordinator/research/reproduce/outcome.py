"""Comparison of simulated results with the published values: as JSON, as Markdown, and as a picture of the curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from edge_agent import methods
from edge_agent.core.storage import write_atomic, write_json

from ...report.charts import CLASSES, Axis, Lines, Series, ends
from ...report.pictures import COLUMN, picture
from ...simulation.plan import Plan
from ...simulation.results import best_of, curve, scored_clients
from ...text import counted
from ..footing import Footing, SharedFooting, in_words
from .cells import Cell, Column, Reproduction, Row, Table
from .orders import CheckedOrder, Values, check_order, markdown_of_pairs

HUNDRED = 100.0
REASON_CHARS = 160
FOOTING = "What the rows rest on; ≠ marks what a row has in place of the usual:"
_NOISE = "One machine, few seeds: differences below a point are noise unless pairs of seeds say more"
_ROUND_OF_OURS = {
    "last": "`ours` is after the last round, never the best",
    "best": "`ours` is the best round by test samples",
}
"""When the values are taken that are compared -> the same in words."""


@dataclass(frozen=True)
class Outcome:
    """A cell of the table over its seeds; accuracies in percent, None where there is none."""

    row: Row
    column: Column
    seeds: int
    """The number of seeds with a result."""

    rounds: tuple[int, ...]
    """The numbers of rounds that these runs have done, ascending, each once."""

    paper: float | None
    """The published value."""

    ours: float | None
    """The mean of our values over seeds."""

    std: float | None
    """Their standard deviation; None for a single seed."""

    best: float | None
    """The mean over seeds of the best round, which is chosen on the test samples."""

    after: float | None
    """The mean over seeds of the accuracy right after local training."""

    tolerance: float
    """The points within which our value counts as the published one."""

    of_rounds: int = 0
    """How many rounds the table asks for."""

    of_seeds: int = 0
    """How many seeds the table asks for."""

    missing: int = 0
    """The most clients that are missing at the end of one of the runs."""

    trouble: str = ""
    """Why a run has failed; empty: none has."""

    under_way: str = ""
    """How many rounds an unfinished run has done; empty: there is none."""

    by_seed: Mapping[int, float] = field(default_factory=dict)
    """Seed -> our value, of the seeds with a result."""

    footing: Mapping[str, str] = field(default_factory=dict)
    """What the cell rests on, as `Footing.named` has it: aspect -> what it is."""

    @property
    def difference(self) -> float | None:
        """Our value minus the paper's, in points; None where one of them is missing."""
        if self.ours is None or self.paper is None:
            return None
        return self.ours - self.paper

    @property
    def is_within(self) -> bool | None:
        """Whether the difference is within the tolerance; None where there is nothing to compare."""
        if self.difference is None:
            return None
        return abs(self.difference) <= self.tolerance

    @property
    def is_short(self) -> bool:
        """Whether a run has fewer rounds than the table asks for."""
        return bool(self.rounds) and self.rounds[0] < self.of_rounds

    @property
    def verdict(self) -> str:
        """The comparison in a few words."""
        if self.ours is None:
            return self._why_no_value()
        reservations = self._reservations()
        if self.difference is None:
            return f"nothing published{reservations}"
        if self.is_within:
            return f"within {self.tolerance:g}{reservations}"
        side = "above" if self.difference > 0 else "below"
        return f"{abs(self.difference):.2f} points {side}{reservations}"

    def _why_no_value(self) -> str:
        """Return why there is no value of ours, short enough for a cell of a table; table.json has all of it."""
        reason = " ".join(self.trouble.replace("|", "/").split())
        if len(reason) > REASON_CHARS:
            reason = f"{reason[: REASON_CHARS - 1]}…"
        if reason:
            return f"failed: {reason}"
        return self.under_way or "not run yet"

    def _reservations(self) -> str:
        """Return in which respects our value is not of what the table asks for; empty: in none."""
        text = ""
        most = self.rounds[-1]
        if self.is_short:
            text += f", {self.rounds[0]} of {self.of_rounds} rounds"
        elif self.of_rounds and most > self.of_rounds:
            text += f", {most} rounds in place of {self.of_rounds}"
        if self.seeds < self.of_seeds:
            text += f", {self.seeds} of {self.of_seeds} seeds"
        if self.trouble:
            text += ", a seed failed"
        if self.missing:
            text += f", without {counted(self.missing, 'client')}"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the cell as a JSON object of table.json."""
        left_out = {"row", "column", "under_way", "footing"}
        numbers = {name: value for name, value in vars(self).items() if name not in left_out}
        return {
            "row": self.row.name,
            "method": self.row.method,
            "column": self.column.name,
            "scope": self.row.scope,
            **numbers,
            "difference": self.difference,
            "within": self.is_within,
            "verdict": self.verdict,
            "doubt": self.column.doubt,
            "note": self.row.note,
            "paper_source": self.row.paper_source,
            "footing": dict(self.footing),
        }


def outcomes(table: Table, cells: Sequence[Cell]) -> list[Outcome]:
    """Return one outcome for each row and column of some cells, in their order."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.row.name, cell.column.name), []).append(cell)
    return [_outcome(table, group) for group in groups.values()]


def _outcome(table: Table, cells: Sequence[Cell]) -> Outcome:
    """Compare the runs of one cell, which differ in their seeds alone, with the published value."""
    row = cells[0].row
    column = cells[0].column
    results = _results_of(cells)
    by_seed = _values_by_seed(table, cells)
    ours = list(by_seed.values())
    plan = {**table.plan, **column.plan, **row.plan}
    return Outcome(
        row,
        column,
        seeds=len(ours),
        rounds=tuple(sorted({len(result["rounds"]) for result in results})),
        paper=row.paper.get(column.name),
        ours=_mean(ours),
        std=round(stdev(ours), 3) if len(ours) > 1 else None,
        best=_mean([_percent(result, row.scope, "best", table.average) for result in results]),
        after=_mean([_after(result, table.average) for result in results]),
        tolerance=row.tolerance or table.tolerance,
        of_rounds=int(plan.get("rounds", Plan.model_fields["rounds"].default)),
        of_seeds=len(table.seeds),
        missing=max((len(result.get("failed", ())) for result in results), default=0),
        under_way=_first_under_way(cells),
        trouble=_first_failure(cells),
        by_seed=by_seed,
        footing=_footing(table, cells[0]),
    )


def _footing(table: Table, cell: Cell) -> dict[str, str]:
    """Return what a cell rests on, metric and counted round included."""
    plan = cell.plan
    method = methods.create(plan.method_name, plan.params, paper=plan.paper, paper_for=plan.paper_for)
    footing = Footing.of(plan, method, average=table.average, scope=cell.row.scope, when=table.when)
    return footing.named()


_OBTAINED = {
    "printed": "as printed there",
    "worked out": "worked out from the values printed there",
    "read from a figure": "read from the figure, good to about a point",
}


def caveat(table: Table) -> str:
    """Return in Markdown what small differences mean, and of which round our values are."""
    return f"{_NOISE}; {_ROUND_OF_OURS[table.when]}."


def source_lines(table: Table) -> Iterator[str]:
    """Yield where the published values stand and how they were obtained; of rows apart those from another place."""
    if not table.has_published_values:
        yield f"No published values to compare with; rows and settings follow {table.source}."
        return
    obtained = _OBTAINED.get(table.values, f"quoted by {table.quoted_in}")
    yield f"Published values: {table.source}; {obtained}."
    for row in table.rows:
        if row.paper_source:
            yield f"The published value of {row.name}: {row.paper_source}."


def footing_lines(table: Table, footing: SharedFooting) -> Iterator[str]:
    """Yield what the rows of a column rest on, and last what the paper has in all its rows where it says that."""
    yield from footing.sentences()
    if table.published_footing:
        names = {name: str(aspect.description) for name, aspect in Footing.model_fields.items()}
        published = {names[name]: value for name, value in table.published_footing.items()}
        yield f"the paper: {in_words(published)}"


def footings(compared: Sequence[Outcome]) -> dict[str, SharedFooting]:
    """Return for each column what its rows have in common, and where each of them differs."""
    by_column: dict[str, dict[str, Mapping[str, str]]] = {}
    for cell in compared:
        by_column.setdefault(cell.column.name, {})[cell.row.name] = cell.footing
    return {column: SharedFooting.among(rows) for column, rows in by_column.items()}


def _first_failure(cells: Sequence[Cell]) -> str:
    """Return why the first of these runs has failed that has; empty where none has."""
    for cell in cells:
        failure = cell.failure
        if failure:
            return failure
    return ""


def _first_under_way(cells: Sequence[Cell]) -> str:
    """Say how many rounds the first unfinished run has done that has closed one; empty where there is none."""
    for cell in cells:
        closed = cell.closed
        if closed:
            return f"{closed} of {counted(cell.plan.rounds, 'round')} done"
    return ""


def _results_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the results of those cells that are finished."""
    results = []
    for cell in cells:
        result = cell.result
        if result is not None:
            results.append(result)
    return results


def _values_by_seed(table: Table, cells: Sequence[Cell]) -> dict[int, float]:
    """Return seed -> our value in percent, of the finished runs of one row and column."""
    by_seed = {}
    for cell in cells:
        result = cell.result
        if result is None:
            continue
        value = _percent(result, cell.row.scope, table.when, table.average)
        if value is not None:
            by_seed[cell.seed] = value
    return by_seed


def _percent(result: Mapping[str, Any], scope: str, when: str, average: str) -> float | None:
    """Return the accuracy of a run that is compared, in percent; None where the run has none of that scope."""
    if scope == "after" and when == "last":
        return _after(result, average)
    scores: Mapping[Any, Any] = result["last"]["acc"]
    if when == "best":
        scores = best_of(result, average)
    if scope not in scores:
        return None
    return HUNDRED * float(scores[scope][average])


def _after(result: Mapping[str, Any], average: str) -> float | None:
    """Return the accuracy right after local training, of the last round that evaluated it for all clients."""
    all_clients = scored_clients(result)
    for figures in reversed(result["rounds"]):
        scores = figures["acc"].get("after")
        if scores is not None and scores.get("clients", all_clients) >= all_clients:
            return HUNDRED * float(scores[average])
    return None


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that there are; None where there is none."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return round(fmean(present), 3)


def check_orders(table: Table, compared: Sequence[Outcome]) -> list[CheckedOrder]:
    """Return each order that the table claims, checked in each column in which the order's row was looked at."""
    checked = []
    for column, promise in itertools.product(table.columns, table.promises):
        cells = [cell for cell in compared if cell.column.name == column.name]
        values = {cell.row.name: Values(cell.ours, cell.by_seed) for cell in cells}
        if promise.row in values:
            short_rows = [cell.row.name for cell in cells if cell.is_short]
            checked.append(check_order(table, promise, column.name, values, short_rows=short_rows))
    return checked


def as_json(reproduction: Reproduction, compared: Sequence[Outcome]) -> dict[str, Any]:
    """Return the comparison as the JSON object of table.json."""
    table = reproduction.table
    return {
        "title": table.title,
        "source": table.source,
        "values": table.values if table.has_published_values else None,
        "quoted_in": table.quoted_in,
        "measure": table.measure,
        "average": table.average,
        "when": table.when,
        "cells": [cell.as_json() for cell in compared],
        "promises": [order.to_json() for order in check_orders(table, compared)],
        "footing": {column: footing.to_json() for column, footing in footings(compared).items()},
        "notes": list(table.notes),
        "folder": str(reproduction.folder),
    }


def write(reproduction: Reproduction, cells: Sequence[Cell]) -> None:
    """Write table.json, table.md, curves.svg and, for print, curves.pdf: of these cells and others with results."""
    shown = reproduction.shown(cells)
    compared = outcomes(reproduction.table, shown)
    folder = reproduction.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", as_json(reproduction, compared))
    write_atomic(folder / "table.md", "".join(f"{line}\n" for line in _markdown(reproduction, compared)).encode())
    title = f"{reproduction.table.title} ({reproduction.table.source})"
    panels = _panels(reproduction.table, shown)
    write_atomic(folder / "curves.svg", picture(panels, title=title))
    write_atomic(folder / "curves.pdf", picture(panels, "pdf", form=COLUMN))


def _markdown(reproduction: Reproduction, compared: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of table.md."""
    table = reproduction.table
    yield f"# {table.title}"
    yield ""
    yield from source_lines(table)
    yield f"What is measured: {table.measure}.\n"
    for column in table.columns:
        yield from _markdown_of_column(table, column, compared)
    yield f"*{caveat(table)}* `best` is chosen on the test samples. All values are percent."
    notes = list(table.notes)
    notes += [f"{row.name}: {row.note}" for row in table.rows if row.note]
    if notes:
        yield ""
    for note in notes:
        yield f"- {note}"
    yield f"\n```\n{reproduction.command}\n```"


def _markdown_of_column(table: Table, column: Column, compared: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of one column of table.md: its cells, and whether the claimed orders hold; none without cells."""
    cells = [cell for cell in compared if cell.column.name == column.name]
    if not cells:
        return
    yield f"## {column.name}\n"
    if column.doubt:
        yield f"*Doubtful:* {column.doubt}\n"
    footing = footings(cells)[column.name]
    yield "| method | paper | ours | ± | difference | verdict | best | after training | rounds | seeds | ≠ |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for cell in cells:
        aspects = footing.differences.get(cell.row.name, {})
        yield f"| {' | '.join([*_markdown_row(cell), ', '.join(aspects)])} |"
    yield ""
    yield f"{FOOTING}\n"
    yield from (f"- {line}" for line in footing_lines(table, footing))
    yield ""
    orders = [order for order in check_orders(table, compared) if order.column == column.name]
    for order in orders:
        yield f"{' '.join(order.sentences())}\n"
    yield from markdown_of_pairs(orders)


def _markdown_row(cell: Outcome) -> list[str]:
    """Return one cell of the published table as a row of table.md."""
    sign = "–"
    if cell.difference is not None:
        sign = f"{cell.difference:+.2f}"
    rounds = "–"
    if cell.rounds:
        rounds = "–".join(map(str, sorted({min(cell.rounds), max(cell.rounds)})))
    return [
        cell.row.name,
        _number(cell.paper),
        _number(cell.ours),
        _number(cell.std),
        sign,
        cell.verdict,
        _number(cell.best),
        _number(cell.after),
        rounds,
        str(cell.seeds),
    ]


def _number(value: float | None) -> str:
    """Return a number with two decimals; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:.2f}"


_AVERAGES = {"clients_mean": "mean over clients", "samples_mean": "over all test samples"}


def _panels(table: Table, cells: Sequence[Cell]) -> list[Lines]:
    """Return a chart for each column, with the accuracies of its rows by rounds done."""
    charts = []
    for column in table.columns:
        shown = [cell for cell in cells if cell.column.name == column.name]
        if shown:
            charts.append(panel(table, column, shown))
    return charts


def panel(table: Table, column: Column, cells: Sequence[Cell]) -> Lines:
    """Return the chart of one column: a line for each row, and a dashed one at the value that was published for it.

    The line of several seeds is their mean, with a band from the lowest to the highest of them.
    """
    rows = {cell.row.name: cell.row for cell in cells}
    series: list[Series] = []
    for number, row in enumerate(rows.values()):
        # 1. The line of the row, in a colour of its own.
        role = f"c{number % CLASSES}"
        results = _results_of([cell for cell in cells if cell.row.name == row.name])
        curves = [curve(result, row.scope, table.average) for result in results]
        line = _over_seeds(row.name, [points for points in curves if points], role)
        if line is None:
            continue
        series.append(line)
        # 2. The published value, in the same colour.
        published = row.paper.get(column.name)
        if published is not None:
            # From the first round on, also where only one point of a line is known yet.
            last = max(line.points[-1][0], 1.0)
            name = f"{row.name}, published {published:g} %"
            series.append(Series(name, ((0.0, published), (last, published)), role, dashed=True))
    return Lines(
        f"{column.name}: {_data_of(cells)}",
        f"{column.name}: accuracy by rounds done. {ends(series, 'after round')}",
        Axis("rounds done"),
        Axis(f"accuracy, {_AVERAGES[table.average]}", "%"),
        tuple(series),
    )


def _over_seeds(name: str, curves: Sequence[Sequence[tuple[float, float]]], role: str) -> Series | None:
    """Return the line of a row: the mean of the curves of its seeds in percent, at the rounds that all of them have.

    None where there is no curve.

    Args:
        name: The name of the row.
        curves: (Rounds done, accuracy 0..1) of each seed.
        role: The role that the line has its colour from.
    """
    if not curves:
        return None
    by_round = [dict(points) for points in curves]
    common_rounds = sorted(set(by_round[0]).intersection(*by_round[1:]))
    means = []
    band = []
    for done in common_rounds:
        percents = [HUNDRED * accuracies[done] for accuracies in by_round]
        means.append((done, fmean(percents)))
        band.append((min(percents), max(percents)))
    if len(curves) == 1:
        return Series(name, tuple(means), role)
    return Series(f"{name}, mean of {len(curves)} seeds", tuple(means), role, band=tuple(band))


def _data_of(cells: Sequence[Cell]) -> str:
    """Return the kinds of data of some cells, without the folders that they are in."""
    kinds = dict[str, None]()
    for cell in cells:
        for source in cell.plan.data:
            kind, _, _ = source.partition(":")
            kinds[kind] = None
    return ", ".join(kinds)
