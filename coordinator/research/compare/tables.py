"""The tables of a comparison: which columns each has, and what stands in its cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...estimates import Estimate
from ...report.charts import clean
from .facts import baseline_name, hours_in_all
from .notes import differences_of, notes_of_differences, notes_of_methods, notes_of_tuning
from .records import Comparison, MethodRecord
from .row_statistics import ComparisonStatistics, PairedDifference, RowStatistics
from .table_model import (
    DASH,
    FOOTING_TITLE,
    HUNDRED,
    ONE_PAIR,
    OTHER_FOOTING,
    SAME_AS_BEST,
    SEEDS_MISSING,
    Cell,
    Column,
    Mark,
    Note,
    Table,
)

_ROW = Column("row", "method", is_number=False)


def all_tables(comparison: Comparison, statistics: ComparisonStatistics) -> list[Table]:
    """Return every table that the comparison has figures for, that of the methods first."""
    tables = [methods_table(comparison, statistics), differences_table(statistics)]
    if comparison.trials or statistics.has_tuning:
        tables.append(tuning_table(comparison, statistics))
    if any(record.space for record in comparison.methods):
        tables.append(space_table(comparison))
    tables.append(costs_table(statistics))
    if any(record.footing for record in comparison.methods):
        tables.append(footing_table(statistics))
    if statistics.failures:
        tables.append(failures_table(statistics))
    return tables


def methods_table(comparison: Comparison, statistics: ComparisonStatistics) -> Table:
    """Return the table of accuracies, differences and clients that are hurt: a row for each method."""
    # As for the best row: a row that lacks a seed is compared only where all rows lack one.
    complete_rows = [row for row in statistics.rows if not row.missing_seeds]
    candidates = complete_rows or statistics.rows
    best_pooled = _highest(row.pooled_mean for row in candidates)
    best_tenth = _highest(row.worst_tenth for row in candidates)
    columns = (
        _ROW,
        Column("rank", "rank"),
        _share("client_mean", "client mean", has_spread=True),
        _share("pooled_mean", "pooled mean", has_spread=True),
        _share("worst_tenth", "worst tenth", has_spread=True),
        _difference("to_best", "to best"),
        _difference("to_baseline", f"to {baseline_name(comparison, statistics)}"),
        _share("hurt_share", "hurt", digits=0),
        _share("lower_share", "lower", digits=0),
        Column("seeds", "seeds"),
    )
    rows = []
    for row in statistics.rows:
        hurt = None
        lower = None
        if row.hurt is not None:
            hurt = row.hurt.hurt
            lower = row.hurt.lower
        rows.append(
            (
                Cell(row.name, marks=_marks_of_row(row)),
                Cell(row.rank),
                _estimate(row.client_mean, is_best=row.name == statistics.best, marks=_marks_of_mean(row)),
                _estimate(row.pooled_mean, is_best=_is_value(row.pooled_mean, best_pooled)),
                _estimate(row.worst_tenth, is_best=_is_value(row.worst_tenth, best_tenth)),
                _paired(row.to_best),
                _paired(row.to_baseline),
                Cell(hurt),
                Cell(lower),
                Cell(len(row.seeds)),
            )
        )
    notes = tuple(notes_of_methods(comparison, statistics))
    return Table("methods", clean(comparison.title, 200), columns, tuple(rows), notes)


def differences_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of paired differences to the best row and to the baseline, with p values."""
    columns = (
        _ROW,
        Column("other", "compared with", is_number=False),
        Column("pairs", "pairs"),
        _difference("difference", "difference"),
        Column("standard_error", "standard error", "points", digits=2, factor=HUNDRED),
        Column("p", "p", digits=3, least=0.001),
        Column("p_holm", "p, Holm", digits=3, least=0.001),
        Column("verdict", "verdict", is_number=False),
    )
    rows = list[tuple[Cell, ...]]()
    for row in statistics.rows:
        rows += [_difference_cells(row, difference) for difference in differences_of(row)]
    notes = tuple(notes_of_differences(statistics))
    return Table("differences", "Paired differences", columns, tuple(rows), notes, has_row_per_method=False)


def tuning_table(comparison: Comparison, statistics: ComparisonStatistics) -> Table:
    """Return the table of what tuning was worth: ranks and client means with and without it, chosen parameters."""
    columns = (
        _ROW,
        Column("tuned_rank", "rank"),
        Column("default_rank", "default rank"),
        _share("tuned_mean", "tuned mean", has_spread=True),
        _share("default_mean", "default mean", has_spread=True),
        _difference("tuning_worth", "worth of tuning"),
        Column("trial", "trial"),
        Column("params", "parameters", is_number=False),
    )
    records = {record.name: record for record in comparison.methods}
    rows = []
    for row in statistics.rows:
        tuning = row.tuning
        record = records[row.name]
        rows.append(
            (
                Cell(row.name, marks=_marks_of_row(row)),
                Cell(row.rank),
                Cell(tuning.rank),
                _estimate(row.client_mean),
                _estimate(tuning.mean),
                _paired(tuning.worth),
                Cell(record.chosen),
                Cell(_params_text(record, comparison.trials)),
            )
        )
    notes = tuple(notes_of_tuning(comparison, statistics))
    return Table("tuning", "What tuning was worth", columns, tuple(rows), notes)


def space_table(comparison: Comparison) -> Table:
    """Return the table of the values that were searched for each parameter."""
    columns = (
        _ROW,
        Column("param", "parameter", is_number=False),
        Column("values", "values searched", is_number=False),
    )
    rows = list[tuple[Cell, ...]]()
    for record in comparison.methods:
        rows += [(Cell(record.name), Cell(param), Cell(values)) for param, values in record.space.items()]
    return Table("space", "What was searched", columns, tuple(rows), has_row_per_method=False)


def costs_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of trials, hours and bytes."""
    columns = (
        _ROW,
        Column("trials", "trials"),
        Column("failed_trials", "trials failed"),
        Column("trial_cpu_hours", "trials", "CPU h", digits=3),
        Column("run_cpu_hours", "runs", "CPU h", digits=3),
        Column("trial_hours", "trials", "h", digits=3),
        Column("run_hours", "runs", "h", digits=3),
        Column("bytes_up", "from clients", "MB", digits=2, factor=1e-6),
        Column("bytes_down", "to clients", "MB", digits=2, factor=1e-6),
    )
    rows = []
    for row in statistics.rows:
        costs = row.costs
        rows.append(
            (
                Cell(row.name),
                Cell(costs.trials),
                Cell(costs.failed_trials),
                Cell(costs.trial_hours),
                Cell(costs.run_hours),
                Cell(costs.trial_wall_hours),
                Cell(costs.run_wall_hours),
                Cell(costs.bytes_up),
                Cell(costs.bytes_down),
            )
        )
    notes = (
        Note(f"{hours_in_all(statistics)} Hours of runs hold the runs with defaults, too."),
        Note("CPU h: processor time of all processes; h: by the clock, whatever else ran on the machine."),
        Note("Bytes of one run: all clients and rounds, mean over seeds; MB are millions of bytes."),
    )
    return Table("costs", "What it cost", columns, tuple(rows), notes)


def footing_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of what the rows rest on: what all or most have, and what a row has instead."""
    columns = (
        Column("aspect", "aspect", is_number=False),
        Column("who", "rows", is_number=False),
        Column("value", "what it is", is_number=False),
    )
    footing = statistics.footing
    rows = [(Cell(aspect), Cell("all"), Cell(value)) for aspect, value in footing.common.items()]
    differing_rows = [row for row in statistics.rows if row.differing]
    aspects = dict.fromkeys(aspect for row in differing_rows for aspect in row.differing)
    for aspect in aspects:
        if aspect in footing.usual:
            rows.append((Cell(aspect), Cell("the others"), Cell(footing.usual[aspect])))
        for row in differing_rows:
            if aspect in row.differing:
                name = Cell(row.name, marks=(OTHER_FOOTING,))
                rows.append((Cell(aspect), name, Cell(row.differing[aspect] or "not stated")))
    note = Note("No row differs from the others.")
    if differing_rows:
        note = Note("differs here from the others, and a difference in accuracy may be due to that.", OTHER_FOOTING)
    return Table("footing", FOOTING_TITLE, columns, tuple(rows), (note,), has_row_per_method=False)


def failures_table(statistics: ComparisonStatistics) -> Table:
    """Return the table of runs and trials that have no result, and why."""
    columns = (
        _ROW,
        Column("run", "run", is_number=False),
        Column("reason", "reason", is_number=False),
    )
    rows = [(Cell(failure.row), Cell(failure.run), Cell(failure.reason)) for failure in statistics.failures]
    return Table("failures", "Without a result", columns, tuple(rows), has_row_per_method=False)


def _share(key: str, head: str, *, digits: int = 1, has_spread: bool = False) -> Column:
    """Return a column of shares, shown in per cent."""
    return Column(key, head, "%", digits=digits, factor=HUNDRED, has_spread=has_spread)


def _difference(key: str, head: str) -> Column:
    """Return a column of differences of shares with their intervals, shown in points."""
    return Column(key, head, "points", digits=1, factor=HUNDRED, is_signed=True, has_interval=True)


def _highest(estimates: Iterable[Estimate | None]) -> float | None:
    """Return the highest mean; None where there is none."""
    return max((estimate.mean for estimate in estimates if estimate is not None), default=None)


def _is_value(estimate: Estimate | None, value: float | None) -> bool:
    """Return whether an estimate has this mean."""
    return estimate is not None and estimate.mean == value


def _estimate(estimate: Estimate | None, *, is_best: bool = False, marks: tuple[Mark, ...] = ()) -> Cell:
    """Return the cell of a mean over seeds with its standard deviation."""
    if estimate is None:
        return Cell(None)
    return Cell(estimate.mean, spread=estimate.deviation, is_best=is_best, marks=marks)


def _paired(difference: PairedDifference | None) -> Cell:
    """Return the cell of a paired difference with its interval."""
    if difference is None:
        return Cell(None)
    estimate = difference.estimate
    marks = (ONE_PAIR,) if difference.is_distinguishable is None else ()
    return Cell(estimate.mean, low=estimate.low, high=estimate.high, marks=marks)


def _marks_of_row(row: RowStatistics) -> tuple[Mark, ...]:
    """Return the marks behind the name of a row."""
    marks = list[Mark]()
    if row.differing:
        marks.append(OTHER_FOOTING)
    if row.missing_seeds:
        marks.append(SEEDS_MISSING)
    return tuple(marks)


def _marks_of_mean(row: RowStatistics) -> tuple[Mark, ...]:
    """Return the marks behind the client mean of a row."""
    if row.to_best is not None and row.to_best.is_distinguishable is False:
        return (SAME_AS_BEST,)
    return ()


def _difference_cells(row: RowStatistics, difference: PairedDifference) -> tuple[Cell, ...]:
    """Return the row of one paired difference."""
    return (
        Cell(row.name, marks=_marks_of_row(row)),
        Cell(difference.other),
        Cell(len(difference.seeds)),
        _paired(difference),
        Cell(difference.estimate.standard_error),
        Cell(difference.p),
        Cell(difference.p_holm),
        Cell(verdict(difference)),
    )


def verdict(difference: PairedDifference) -> str:
    """Return in words whether a difference is one."""
    if difference.is_distinguishable is None:
        return "one pair: no verdict"
    if not difference.is_distinguishable:
        return "not distinguishable"
    if difference.estimate.mean > 0:
        return "higher"
    return "lower"


def _params_text(record: MethodRecord, trials: int) -> str:
    """Return the parameters that the runs of a row have, or will have, beside the method's defaults.

    Args:
        record: The row.
        trials: The trials that each method of the comparison gets.
    """
    has_chosen = bool(record.runs) or record.chosen is not None
    if trials and not has_chosen:
        return DASH
    params = _run_params(record)
    if not params:
        return "the defaults"
    return ", ".join(f"{name}={value}" for name, value in params.items())


def _run_params(record: MethodRecord) -> Mapping[str, Any]:
    """Return the parameters of the runs of a row; before its first run those of the trial that was chosen."""
    if record.runs:
        return record.runs[0].params
    for trial in record.trials:
        if trial.number == record.chosen:
            return trial.params
    return {}
