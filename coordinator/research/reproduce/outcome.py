"""Comparison of simulated results with the published values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ...simulation.plan import Plan
from ...simulation.results import best_of
from ...text import counted
from .cells import Cell
from .definition import Column, Row, Table

HUNDRED = 100.0


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
            return f"failed: {_short(self.trouble)}" if self.trouble else self.under_way or "not run yet"
        few = f", {self.rounds[0]} of {self.of_rounds} rounds" if self.rounds[0] < self.of_rounds else ""
        few += f", without {counted(self.missing, 'client')}" if self.missing else ""
        if self.difference is None:
            return f"nothing published{few}"
        if self.is_within:
            return f"within {self.tolerance:g}{few}"
        return f"{abs(self.difference):.2f} points {'above' if self.difference > 0 else 'below'}{few}"

    def as_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "row": self.row.name,
            "method": self.row.method,
            "column": self.column.name,
            "scope": self.row.scope,
            "seeds": self.seeds,
            "rounds": list(self.rounds),
            "of_rounds": self.of_rounds,
            "paper": self.paper,
            "ours": self.ours,
            "std": self.std,
            "difference": self.difference,
            "tolerance": self.tolerance,
            "within": self.is_within,
            "missing": self.missing,
            "best": self.best,
            "after": self.after,
            "verdict": self.verdict,
            "trouble": self.trouble,
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
    row, column = cells[0].row, cells[0].column
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
    last = result["last"]
    best = best_of(result["rounds"], last["rounds_done"], last["acc"], _all_clients(result), average)
    scores = best if when == "best" else last["acc"]
    return HUNDRED * scores[scope][average] if scope in scores else None


def _all_clients(result: Mapping[str, Any]) -> int:
    """How many clients a whole round scores; results of earlier versions count all clients."""
    return int(result.get("scored_clients", int(result["clients"]) - int(result["new_clients"])))


def _after(result: Mapping[str, Any], average: str) -> float | None:
    """Accuracy right after local training, of the last round that evaluated it for all clients."""
    all_clients = _all_clients(result)
    scored = [one["acc"]["after"] for one in result["rounds"] if "after" in one["acc"]]
    whole = [scores[average] for scores in scored if scores.get("clients", all_clients) >= all_clients]
    return HUNDRED * whole[-1] if whole else None


def _short(reason: str, limit: int = 160) -> str:
    """A reason, shortened for a table cell; table.json has all of it."""
    words = " ".join(reason.replace("|", "/").split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 3) if known else None


def promises(table: Table, found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Each order that the table claims, looked at in each column: ``holds`` None while a row is missing."""
    return [
        {"column": column.name, **claim}
        for column in table.columns
        for claim in _kept(table, {one.row.name: one for one in found if one.column.name == column.name})
    ]


def _kept(table: Table, found: Mapping[str, Outcome]) -> Iterator[dict[str, Any]]:
    for promise in table.promises:
        if promise.row not in found:
            continue
        others = [row.name for row in table.rows if row.name != promise.row and _is_meant(row.name, promise.above)]
        values = {name: found[name].ours for name in others if name in found}
        mine = found[promise.row].ours
        above = {name: mine > value for name, value in values.items() if mine is not None and value is not None}
        beaten_by = [name for name, is_below in above.items() if not is_below]
        whole = len(above) == len(others)
        holds = False if beaten_by else (True if whole else None)
        yield {"row": promise.row, "above": others, "compared": list(above), "beaten_by": beaten_by, "holds": holds}


def _is_meant(name: str, above: Sequence[str]) -> bool:
    return "all" in above or name in above
