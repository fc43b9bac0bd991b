"""Comparison of simulated results with the published values: as JSON, as Markdown, and as a picture of the curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from edge_agent.core.storage import write_atomic, write_json

from ...report.charts import CLASSES, Axis, Lines, Series, ends
from ...report.pictures import picture
from ...simulation.plan import Plan
from ...simulation.results import best_of, curve, scored_clients
from ...text import counted, listed
from .cells import Cell, Column, Reproduction, Row, Table

HUNDRED = 100.0
REASON_CHARS = 160
CAVEAT = "One machine, few seeds: differences below a point are noise; `last` is after the last round, never the best."


@dataclass(frozen=True)
class Outcome:
    """One cell of the table, over its seeds; accuracies in percent, None where there is none."""

    row: Row
    column: Column
    seeds: int
    rounds: tuple[int, ...]
    paper: float | None
    ours: float | None
    std: float | None
    best: float | None
    after: float | None
    tolerance: float
    of_rounds: int = 0
    """How many rounds the table asks for."""
    missing: int = 0
    """The most clients that are missing at the end of one of the runs."""
    trouble: str = ""
    under_way: str = ""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points."""
        return None if self.ours is None or self.paper is None else self.ours - self.paper

    @property
    def is_within(self) -> bool | None:
        """Whether the difference is within the tolerance; None where there is nothing to compare."""
        return None if self.difference is None else abs(self.difference) <= self.tolerance

    @property
    def verdict(self) -> str:
        """The comparison in a few words."""
        if self.ours is None:
            reason = " ".join(self.trouble.replace("|", "/").split())  # for a table cell; table.json has all of it
            reason = reason if len(reason) <= REASON_CHARS else f"{reason[: REASON_CHARS - 1]}…"
            return f"failed: {reason}" if reason else self.under_way or "not run yet"
        few = f", {self.rounds[0]} of {self.of_rounds} rounds" if self.rounds[0] < self.of_rounds else ""
        few += f", without {counted(self.missing, 'client')}" if self.missing else ""
        if self.difference is None:
            return f"nothing published{few}"
        if self.is_within:
            return f"within {self.tolerance:g}{few}"
        return f"{abs(self.difference):.2f} points {'above' if self.difference > 0 else 'below'}{few}"

    def as_json(self) -> dict[str, Any]:
        """The same as JSON."""
        numbers = {name: value for name, value in vars(self).items() if name not in {"row", "column", "under_way"}}
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
        }


def outcomes(table: Table, cells: Sequence[Cell]) -> list[Outcome]:
    """One for each row and column of the wanted cells, in their order."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.row.name, cell.column.name), []).append(cell)
    return [_outcome(table, group) for group in groups.values()]


def _outcome(table: Table, cells: Sequence[Cell]) -> Outcome:
    row = cells[0].row
    column = cells[0].column
    results = [result for cell in cells if (result := cell.result) is not None]
    value = [_percent(result, row.scope, table.when, table.average) for result in results]
    ours = [one for one in value if one is not None]
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
        of_rounds=int({**table.plan, **column.plan, **row.plan}.get("rounds", Plan.model_fields["rounds"].default)),
        missing=max((len(result.get("failed", ())) for result in results), default=0),
        under_way=next((f"in round {closed + 1}" for cell in cells if (closed := cell.closed)), ""),
        trouble=next((failure for cell in cells if (failure := cell.failure)), ""),
    )


def _percent(result: Mapping[str, Any], scope: str, when: str, average: str) -> float | None:
    if scope == "after" and when == "last":
        return _after(result, average)
    scores = best_of(result, average) if when == "best" else result["last"]["acc"]
    return HUNDRED * scores[scope][average] if scope in scores else None


def _after(result: Mapping[str, Any], average: str) -> float | None:
    """Accuracy right after local training, of the last round that evaluated it for all clients."""
    all_clients = scored_clients(result)
    for one in reversed(result["rounds"]):
        scores = one["acc"].get("after")
        if scores is not None and scores.get("clients", all_clients) >= all_clients:
            return HUNDRED * float(scores[average])
    return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 3) if known else None


def promises(table: Table, compared: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Each order that the table claims, checked in each column: ``holds`` None while a row is missing."""
    result = []
    for column, promise in itertools.product(table.columns, table.promises):
        accuracies = {one.row.name: one.ours for one in compared if one.column.name == column.name}
        if promise.row not in accuracies:
            continue
        mine = accuracies[promise.row]
        others = [
            row.name
            for row in table.rows
            if row.name != promise.row and ("all" in promise.above or row.name in promise.above)
        ]
        values = {name: accuracies.get(name) for name in others}
        above = {name: mine > value for name, value in values.items() if mine is not None and value is not None}
        beaten_by = [name for name, is_below in above.items() if not is_below]
        is_complete = len(above) == len(others)
        holds = False if beaten_by else (True if is_complete else None)
        result.append(
            {
                "column": column.name,
                "row": promise.row,
                "above": others,
                "compared": list(above),
                "beaten_by": beaten_by,
                "holds": holds,
            }
        )
    return result


def as_json(reproduction: Reproduction, compared: Sequence[Outcome]) -> dict[str, Any]:
    """The comparison as one JSON object."""
    table = reproduction.table
    return {
        "title": table.title,
        "source": table.source,
        "measure": table.measure,
        "average": table.average,
        "when": table.when,
        "cells": [one.as_json() for one in compared],
        "promises": promises(table, compared),
        "notes": list(table.notes),
        "folder": str(reproduction.folder),
    }


def write(reproduction: Reproduction, cells: Sequence[Cell]) -> None:
    """Write table.json, table.md and curves.svg: of these cells, and of others that have results in the folder."""
    shown = reproduction.shown(cells)
    compared = outcomes(reproduction.table, shown)
    folder = reproduction.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", as_json(reproduction, compared))
    write_atomic(folder / "table.md", "".join(f"{line}\n" for line in _markdown(reproduction, compared)).encode())
    write_atomic(folder / "curves.svg", _curves(reproduction.table, shown))


def _markdown(reproduction: Reproduction, compared: Sequence[Outcome]) -> Iterator[str]:
    table = reproduction.table
    yield f"# {table.title}"
    yield f"\nPublished: {table.source}; {table.measure}.\n"
    for column in table.columns:
        rows = [one for one in compared if one.column.name == column.name]
        if not rows:
            continue
        yield f"## {column.name}\n"
        if column.doubt:
            yield f"*Doubtful:* {column.doubt}\n"
        yield "| method | paper | ours | ± | difference | verdict | best | after training | rounds | seeds |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for one in rows:
            paper, ours, std, best, after = map(_number, (one.paper, one.ours, one.std, one.best, one.after))
            sign = "–" if one.difference is None else f"{one.difference:+.2f}"
            rounds = "–".join(map(str, sorted({min(one.rounds), max(one.rounds)}))) if one.rounds else "–"
            row = [one.row.name, paper, ours, std, sign, one.verdict, best, after, rounds, str(one.seeds)]
            yield f"| {' | '.join(row)} |"
        yield ""
        yield from (f"{sentence(claim)}\n" for claim in promises(table, compared) if claim["column"] == column.name)
    yield f"*{CAVEAT}* `best` is chosen on the test samples. All values are percent."
    notes = [*table.notes, *(f"{row.name}: {row.note}" for row in table.rows if row.note)]
    yield from ([""] if notes else [])
    yield from (f"- {note}" for note in notes)
    yield f"\n```\n{reproduction.command}\n```"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def sentence(claim: Mapping[str, Any]) -> str:
    """A sentence on whether an order that the paper claims holds."""
    order = f"{claim['row']} above {listed(claim['above'])}"
    if claim["holds"]:
        return f"The paper's order holds: {order}."
    if claim["beaten_by"]:
        return f"The paper's order does **not** hold ({order}): {listed(claim['beaten_by'])} came out at least as high."
    if not claim["compared"]:
        return f"The paper's order ({order}) cannot be checked yet: there is nothing to compare."
    missing = [name for name in claim["above"] if name not in claim["compared"]]
    return (
        f"The paper's order holds so far: {claim['row']} above {listed(claim['compared'])}, which are "
        f"{len(claim['compared'])} of {len(claim['above'])}; not there yet: {listed(missing)}."
    )


_AVERAGES = {"clients_mean": "mean over clients", "samples_mean": "over all test samples"}


def _curves(table: Table, cells: Sequence[Cell]) -> bytes:
    """Return an SVG with a panel for each column, with the accuracies of its rows by rounds done."""
    charts = []
    for column in table.columns:
        shown = [cell for cell in cells if cell.column.name == column.name]
        if shown:
            charts.append(panel(table, column, shown))
    return picture(charts, title=f"{table.title} ({table.source})")


def panel(table: Table, column: Column, cells: Sequence[Cell]) -> Lines:
    """Return the chart of one column: a line for each row, and a dashed one at the value that was published for it.

    The line of several seeds is their mean, with a band from the lowest to the highest of them.
    """
    rows = {cell.row.name: cell.row for cell in cells}
    series: list[Series] = []
    for number, row in enumerate(rows.values()):
        results = [cell.result for cell in cells if cell.row.name == row.name]
        curves = [curve(result, row.scope, table.average) for result in results if result is not None]
        role = f"c{number % CLASSES}"
        line = _over_seeds(row.name, [points for points in curves if points], role)
        if line is None:
            continue
        series.append(line)
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
    """Return the mean of the curves of several seeds in percent, at the rounds that all of them have; None: of none."""
    if not curves:
        return None
    by_round = [dict(points) for points in curves]
    common = sorted(set(by_round[0]).intersection(*by_round[1:]))
    values = [[HUNDRED * points[done] for points in by_round] for done in common]
    means = tuple((done, fmean(of_round)) for done, of_round in zip(common, values, strict=True))
    if len(curves) == 1:
        return Series(name, means, role)
    band = tuple((min(of_round), max(of_round)) for of_round in values)
    return Series(f"{name}, mean of {len(curves)} seeds", means, role, band=band)


def _data_of(cells: Sequence[Cell]) -> str:
    """Return the kinds of data of some cells, without the folders that they are in."""
    sources = dict.fromkeys(source for cell in cells for source in cell.plan.data)
    return ", ".join(dict.fromkeys(source.partition(":")[0] for source in sources))
