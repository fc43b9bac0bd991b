"""Charts of a comparison: learning curves, paired differences, clients against the baseline, tuning by trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

from ...report.charts import CLASSES, Axis, Chart, Key, Lines, Mark, Row, Rows, Series, ends, percent, points
from ...report.run_charts import accuracy_floor
from ...text import counted
from .records import Comparison, MethodRecord
from .row_statistics import (
    ComparisonStatistics,
    HurtRule,
    PairedDifference,
    RowStatistics,
    client_pairs,
    successful_runs,
)

HUNDRED = 100.0


@dataclass(frozen=True)
class Figure:
    """A chart with the name of its files."""

    name: str
    chart: Chart


def figures(comparison: Comparison, statistics: ComparisonStatistics) -> list[Figure]:
    """Return every figure that the records have numbers for, in the order of a page.

    A row has the same colour, markers and dashes in all of them: those of its place in the table.
    """
    charts = {
        "differences": _differences(statistics),
        "clients": _clients(comparison, statistics),
        "curves": _curves(comparison, statistics),
        "tuning": _tuning(comparison, statistics),
    }
    return [Figure(name, chart) for name, chart in charts.items() if chart is not None]


def _role(index: int) -> str:
    """Return the role of the row at an index of the table."""
    return f"c{index % CLASSES}"


def _record_of(comparison: Comparison, row: RowStatistics) -> MethodRecord:
    """Return the record of a row."""
    return next(record for record in comparison.methods if record.name == row.name)


def _differences(statistics: ComparisonStatistics) -> Chart | None:
    """Return the differences of rows to the baseline and to the best row, with their intervals."""
    to_baseline = Key(f"to {statistics.baseline}", "personal", "dot")
    to_best = Key(f"to {statistics.best} (best)", "global", "diamond", is_said=False)
    is_one_row = statistics.baseline == statistics.best
    rows = list[Row]()
    for row in statistics.rows:
        marks = dict[str, Mark]()
        if row.to_baseline is not None:
            marks[to_baseline.name] = _mark(row.to_baseline)
        if row.to_best is not None and not is_one_row:
            marks[to_best.name] = _mark(row.to_best)
        if marks:
            rows.append(Row(row.name, marks))
    keys = [key for key in (to_baseline, to_best) if any(key.name in row.marks for row in rows)]
    if not rows:
        return None
    title = "Paired differences of client means"
    described = [_difference_in_words(row) for row in statistics.rows if row.to_baseline or row.to_best]
    caption = (
        "Percentage points, mean over seeds; lines are Student's 95 % intervals of the mean, not corrected for the "
        "number of rows. One pair has no interval."
    )
    axis = Axis("difference", "points", digits=1)
    return Rows(title, f"{title}. {'; '.join(described)}.", axis, tuple(keys), tuple(rows), caption)


def _mark(difference: PairedDifference) -> Mark:
    """Return a difference in points with its interval."""
    estimate = difference.estimate
    if estimate.low is None or estimate.high is None:
        return Mark(HUNDRED * estimate.mean)
    return Mark(HUNDRED * estimate.mean, HUNDRED * estimate.low, HUNDRED * estimate.high)


def _difference_in_words(row: RowStatistics) -> str:
    """Return the differences of a row as text."""
    differences = [difference for difference in (row.to_baseline, row.to_best) if difference is not None]
    parts = [f"{points(difference.estimate.mean)} to {difference.other}" for difference in differences]
    return f"{row.name} {', '.join(parts)}"


def _clients(comparison: Comparison, statistics: ComparisonStatistics) -> Chart | None:
    """Return for each row the differences of its clients to the baseline, from the most hurt one to the most helped."""
    baseline = next((record for record in comparison.methods if record.name == statistics.baseline), None)
    if baseline is None:
        return None
    baseline_runs = successful_runs(baseline.runs)
    series = list[Series]()
    for index, row in enumerate(statistics.rows):
        if row.name == baseline.name:
            continue
        cases = client_pairs(successful_runs(_record_of(comparison, row).runs), baseline_runs)
        differences = list[float]()
        for pairs in cases.values():
            gains = [HUNDRED * (client.accuracy - other.accuracy) for client, other in pairs]
            if statistics.hurt_rule is HurtRule.SEEDS:
                gains = [fmean(gains)]
            differences += gains
        if differences:
            series.append(Series(row.name, _spread_out(sorted(differences)), _role(index), index >= CLASSES))
    if not series:
        return None
    title = f"Accuracy of each client against {baseline.name}"
    hurt = [
        f"{row.name}: {percent(row.hurt.hurt)} hurt, {percent(row.hurt.lower)} lower"
        for row in statistics.rows
        if row.hurt is not None
    ]
    what = "Each client in each seed"
    if statistics.hurt_rule is HurtRule.SEEDS:
        what = "Each client's mean over seeds"
    caption = f"{what}, sorted for each method by itself; below 0 a client is better off with {baseline.name}."
    zero = Series(f"as {baseline.name}", ((0.0, 0.0), (HUNDRED, 0.0)), "plain", dashed=True)
    x_axis = Axis("clients, from the most hurt", "%", low=0.0, high=HUNDRED)
    y_axis = Axis(f"difference to {baseline.name}", "points", digits=1)
    return Lines(title, f"{title}. {'; '.join(hurt)}.", x_axis, y_axis, (*series, zero), caption)


def _spread_out(values: Sequence[float]) -> tuple[tuple[float, float | None], ...]:
    """Return sorted values over the share of clients up to each, 0..100; a single one stands in the middle."""
    if len(values) == 1:
        return ((HUNDRED / 2, values[0]),)
    last = len(values) - 1
    return tuple((HUNDRED * index / last, value) for index, value in enumerate(values))


def _curves(comparison: Comparison, statistics: ComparisonStatistics) -> Chart | None:
    """Return the client mean of each row by rounds done, with its standard deviation over seeds as a band."""
    series = list[Series]()
    has_band = False
    for index, row in enumerate(statistics.rows):
        curves = [dict(run.curve) for run in successful_runs(_record_of(comparison, row).runs).values() if run.curve]
        rounds = sorted(set.intersection(*map(set, curves))) if curves else []
        if not rounds:
            continue
        means = list[tuple[float, float | None]]()
        band = list[tuple[float, float]]()
        for done in rounds:
            values = [curve[done] for curve in curves]
            mean = fmean(values)
            means.append((done, mean))
            if len(values) > 1:
                deviation = stdev(values)
                band.append((mean - deviation, mean + deviation))
                has_band = True
        series.append(Series(row.name, tuple(means), _role(index), index >= CLASSES, tuple(band)))
    if not series:
        return None
    floor = accuracy_floor(y for line in series for _, y in line.points if y is not None)
    title = "Client mean by rounds done"
    caption = "Mean over seeds of the model that clients answer with."
    if has_band:
        caption += " Bands: standard deviation over seeds."
    summary = f"{title}. {ends(series, 'after round', percent)}"
    y_axis = Axis("client mean", low=floor, is_share=True)
    return Lines(title, summary, Axis("rounds done"), y_axis, tuple(series), caption)


def _tuning(comparison: Comparison, statistics: ComparisonStatistics) -> Chart | None:
    """Return the best validation score of each row by the number of trials, the defaults first."""
    series = list[Series]()
    for index, row in enumerate(statistics.rows):
        best_scores = tuple(_best_so_far(_record_of(comparison, row)))
        if len(best_scores) > 1:
            series.append(Series(row.name, best_scores, _role(index), index >= CLASSES))
    if not series:
        return None
    floor = accuracy_floor(y for line in series for _, y in line.points if y is not None)
    most = max(len(line.points) for line in series)
    title = "Best validation score by trials"
    summary = f"{title}. {ends(series, 'after trial', percent)}"
    caption = (
        f"Mean over clients on validation samples; the first trial has the defaults. Up to {counted(most, 'trial')}."
    )
    y_axis = Axis("best validation score", low=floor, is_share=True)
    return Lines(title, summary, Axis("trials"), y_axis, tuple(series), caption)


def _best_so_far(record: MethodRecord) -> Iterator[tuple[float, float]]:
    """Yield (number of trials, best score among them) from the first trial on that has a score."""
    scores = [-1.0 if trial.score is None else trial.score for trial in record.trials]
    for index, best in enumerate(accumulate(scores, max)):
        if best >= 0:
            yield index + 1.0, best
