"""The charts of the pages, as values of `coordinator.report.charts`; aggregates are over all agents and rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from edge_agent.core.time_and_text import moment_of

from ..report.charts import Axis, Bars, Chart, Lines, Mark, Row, Rows, Series, ends, percent
from ..report.run_charts import KEYS as SCOPE_KEYS
from ..report.run_charts import NOTHING_DOWN, accuracy_floor, slow_first, wilson
from ..state.fleet_rows import AgentRow
from ..state.noise import Gain
from ..text import counted, listed
from .run_curves import RoundPoint, RunCurves, Spread

WORDS = {"local": "alone", "global": "shared", "personal": "personal"}
"""Scope of an accuracy -> its word on the pages; JSON, tables of commands and reports call it acc.SCOPE."""

KEYS = tuple(replace(key, name=WORDS[key.role]) for key in SCOPE_KEYS)
"""The marks of the accuracies by these words."""

MOST_COMPARED_POINTS = 1200
"""In each chart of a comparison; the page of a hundred runs stays small."""

EQUAL = 0.02
"""Rounds whose traffic differs by less need no chart: the mean says it."""

DECADES = 50.0
"""A loss of more than so many times its smallest value is drawn on a logarithmic axis at first."""

ACCURACY = Axis("accuracy on held-out samples", low=0.0, high=1.0, digits=1, is_share=True)
OF_ROUND = replace(ACCURACY, label="accuracy")
"""For charts that are half as wide as the page, and less high than the longer label."""

ROUND = Axis("round")


def of_run(points: Sequence[RoundPoint]) -> dict[str, Chart]:
    """Return the charts of one run by their ids; those that there are figures for."""
    charts = (("accuracy", _accuracy(points)), ("loss", _loss(points)), ("phases", _phases(points)))
    result: dict[str, Chart] = {name: chart for name, chart in charts if chart is not None}
    traffic = _traffic(points)
    if traffic is not None:
        result["bytes"] = traffic
    return result


def _accuracy(points: Sequence[RoundPoint]) -> Chart | None:
    """Return mean and worst tenth of the accuracies by round."""
    lines = tuple(line for scope in ("global", "personal") for line in _accuracy_lines(points, scope))
    if not lines:
        return None
    caption = (
        "Mean over the agents of a round, with the tenth to ninetieth percentile; dashed: mean of the worst tenth."
    )
    return Lines("Accuracy by round", ends(lines, shown=percent), ROUND, OF_ROUND, lines, caption)


def _accuracy_lines(points: Sequence[RoundPoint], scope: str) -> Iterator[Series]:
    """Yield the lines of one accuracy: its mean with a band, and its worst tenth; nothing where no round has it."""
    spreads: list[tuple[float, Spread]] = [(point.x, point.acc[scope]) for point in points if scope in point.acc]
    if not spreads:
        return
    band = tuple((spread.low, spread.high) for _, spread in spreads)
    yield Series(f"{WORDS[scope]}, mean", tuple((x, spread.mean) for x, spread in spreads), scope, band=band)
    worst = tuple((x, spread.worst) for x, spread in spreads)
    yield Series(f"{WORDS[scope]}, worst tenth", worst, scope, dashed=True)


def _loss(points: Sequence[RoundPoint]) -> Chart | None:
    """Return the mean training loss by round."""
    losses = tuple((point.x, point.loss) for point in points if point.loss is not None)
    if not losses:
        return None
    lines = (Series("training loss", losses, "plain"),)
    axis = Axis("mean over agents", can_log=True, log=spans_decades([value for _, value in losses]))
    return Lines("Training loss", ends(lines), ROUND, axis, lines)


def _phases(points: Sequence[RoundPoint]) -> Chart | None:
    """Return the seconds by phase; a slow first round, which builds the model, does not squash the others."""
    timed = [point for point in points if point.seconds is not None]
    if not timed:
        return None
    work_s = sum(point.work_s for point in timed)
    waiting_s = sum(point.wait_s for point in timed)
    longest = max(timed, key=lambda point: point.work_s)
    summary = (
        f"{work_s:.1f} s in rounds and {waiting_s:.1f} s waiting for agents before them; the longest is round "
        f"{longest.round} with {longest.work_s:.2f} s."
    )
    series = (
        Series("training and transfer", tuple((point.x, point.work_s) for point in timed), "plain"),
        Series("waiting for agents before it", tuple((point.x, point.wait_s) for point in timed), "down"),
    )
    high, caption = slow_first(timed[0].round, [point.work_s + point.wait_s for point in timed])
    axis = Axis("time of a round", "s", low=0.0, high=high)
    return Bars("Time by phase", summary, ROUND, axis, series, caption, stacked=True)


def _traffic(points: Sequence[RoundPoint]) -> Chart | None:
    """Return the megabytes by round and direction; None where all rounds are alike, so that the mean says it."""
    measured = [point for point in points if point.has_traffic]
    totals_mb = [point.up_mb + point.down_mb for point in measured]
    if not totals_mb:
        return None
    largest_mb = max(totals_mb)
    if largest_mb - min(totals_mb) <= EQUAL * largest_mb:
        return None
    up_mb = sum(point.up_mb for point in measured)
    down_mb = sum(point.down_mb for point in measured)
    summary = f"{up_mb:.2f} MB from agents and {down_mb:.2f} MB to agents in all."
    series = (
        Series("from agents", tuple((point.x, point.up_mb) for point in measured), "up"),
        Series("to agents", tuple((point.x, point.down_mb) for point in measured), "down"),
    )
    caption = "" if all(point.bytes_down for point in measured) else NOTHING_DOWN
    axis = Axis("payload", "MB", low=0.0)
    return Bars("Traffic by round", summary, ROUND, axis, series, caption, stacked=True)


def of_fleet(rows: Sequence[AgentRow]) -> dict[str, Chart]:
    """Return the chart of what each of these agents gains: its accuracies on one line."""
    compared = [row for row in rows if _can_be_compared(row)]
    if not compared:
        return {}
    compared.sort(key=_by_gain)
    lines = []
    for row in compared:
        note = "better off alone" if row.better_alone else ""
        lines.append(Row(row.id, _marks(row), note, "bad"))
    marks = [mark for line in lines for mark in line.marks.values()]
    summary = _sum_up_gains(compared)
    caption = summary
    if any(mark.low is not None for mark in marks):
        caption += " Shaded: 95 % Wilson intervals for the agent's held-out samples."
    axis = replace(ACCURACY, low=accuracy_floor([mark.value for mark in marks]))
    return {"gains": Rows("What these agents gain", summary, axis, KEYS, tuple(lines), caption)}


def _can_be_compared(row: AgentRow) -> bool:
    """Return whether an agent has a personal accuracy and another one to compare it with."""
    return row.personal is not None and (row.local is not None or row.shared is not None)


def _by_gain(row: AgentRow) -> tuple[float, str]:
    """Return what agents are sorted by: the highest gain first, those without one last."""
    gain = -1.0 if row.gain is None else row.gain
    return (-gain, row.id)


def _sum_up_gains(rows: Sequence[AgentRow]) -> str:
    """Return how many of these agents gain or lose by more than noise, as a sentence."""
    kinds = Counter(row.gain_kind for row in rows if row.gain is not None)
    agents = kinds.total()
    if not agents:
        return "What these agents reach alone is not known yet."
    return (
        f"Of {counted(agents, 'agent')} {kinds[Gain.ABOVE]} gain by more than noise and {kinds[Gain.BELOW]} lose by "
        "more than noise; the others' differences may be noise."
    )


def _marks(row: AgentRow) -> dict[str, Mark]:
    """Return the accuracies of an agent, with their intervals where the number of its held-out samples is known."""
    marks = {}
    for scope, value in (("local", row.local), ("global", row.shared), ("personal", row.personal)):
        if value is None:
            continue
        has_interval = bool(row.support) and scope != "global" and 0 <= value <= 1
        low, high = wilson(value, row.support or 0) if has_interval else (None, None)
        marks[WORDS[scope]] = Mark(value, low, high)
    return marks


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether the values of a curve are so far apart that its small ones lie on the axis of a linear plot."""
    return min(values) > 0 and max(values) > DECADES * min(values)


def of_agent(by_round: Sequence[tuple[int, float | None, float | None]], run: str) -> dict[str, Chart]:
    """Return the chart of one agent's accuracies in the rounds of a run.

    Args:
        by_round: Round, acc.global and acc.personal (0..1; None: not reported).
        run: Name of the run.
    """
    by_scope = {
        "global": [(float(number), shared) for number, shared, _ in by_round if shared is not None],
        "personal": [(float(number), personal) for number, _, personal in by_round if personal is not None],
    }
    series = tuple(Series(WORDS[scope], tuple(points), scope) for scope, points in by_scope.items() if points)
    if not series:
        return {}
    return {"rounds": Lines(f"Accuracy in {run}", ends(series, shown=percent), ROUND, OF_ROUND, series)}


def of_history(results: Sequence[tuple[str, Mapping[str, float | None]]]) -> dict[str, Chart]:
    """Return the chart of an agent's end results, of runs and of releases that it has installed.

    Args:
        results: Time (ISO 8601) and accuracies by scope of each result, the oldest first.
    """
    series = []
    for scope in ("local", "global", "personal"):
        points = []
        for at, acc in results:
            value = acc.get(scope)
            if value is not None:
                points.append((moment_of(at).timestamp(), value))
        if points:
            series.append(Series(WORDS[scope], tuple(points), scope))
    axis = Axis("time (UTC)", is_time=True)
    # Results of one minute have one place on the axis, which would have no width; the cards show them.
    if len({axis.shown(x) for line in series for x, _ in line.points}) < 2:
        return {}
    text = ends(series, "at", percent, axis.shown)
    return {"history": Lines("Accuracy over time", text, axis, OF_ROUND, tuple(series))}


def of_compared(runs: Sequence[tuple[str, RunCurves]]) -> dict[str, Chart]:
    """Return the means of several runs on common axes, one chart for each accuracy.

    Args:
        runs: Name and figures of each run.
    """
    result: dict[str, Chart] = {}
    most = max(8, MOST_COMPARED_POINTS // max(1, len(runs)))
    for scope in ("personal", "global"):
        chart = _compare(runs, scope, most)
        if chart is not None:
            result[scope] = chart
    return result


def _compare(runs: Sequence[tuple[str, RunCurves]], scope: str, most: int) -> Chart | None:
    """Return the chart of one accuracy of several runs, with at most about ``most`` rounds of each."""
    lines = list[Series]()
    is_thinned = False
    for number, (name, curves) in enumerate(runs):
        means = [(point.x, point.acc[scope].mean) for point in curves.rounds() if scope in point.acc]
        if not means:
            continue
        thinned = _thin_out(means, most)
        is_thinned |= len(thinned) < len(means)
        # Ten colours, and the same ten dashed.
        lines.append(Series(name, tuple(thinned), f"c{number % 10}", dashed=number % 20 >= 10))
    if not lines:
        return None
    best = max(lines, key=lambda line: line.points[-1][1] or 0.0)
    text = f"{len(lines)} runs; the highest at its end is {best.name} with {percent(best.points[-1][1])}."
    some = f"; of each run at most {most} rounds, its last one among them" if is_thinned else ""
    note = " ".join([f"Mean over agents{some}.", *_coinciding(lines)])
    return Lines(f"{WORDS[scope].capitalize()} accuracy by round", text, ROUND, OF_ROUND, tuple(lines), note)


def _thin_out(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """Return every n-th of the points and the last one, so that there are no more than about ``most``."""
    step = math.ceil(len(points) / most)
    return points if step < 2 else [*points[:-1:step], points[-1]]


def _coinciding(lines: Sequence[Series]) -> Iterator[str]:
    """Yield which lines hide which: those that agree in all rounds that both have, as runs with the same seed do."""
    remaining = list(lines)
    while remaining:
        longest = max(remaining, key=lambda line: len(line.points))
        values = dict(longest.points)
        same = [line for line in remaining if len(line.points) > 1 and _agrees(line, values)]
        if len(same) > 1:
            yield f"The lines of {listed([line.name for line in same])} coincide as far as they go."
        remaining = [line for line in remaining if line is not longest and line not in same]


def _agrees(line: Series, values: Mapping[float, float | None]) -> bool:
    """Return whether a line has these values in all rounds that have one."""
    return all(values.get(x, y) == y for x, y in line.points)
