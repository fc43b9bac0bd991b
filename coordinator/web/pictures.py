"""The charts of the pages, as values of `coordinator.report.charts`; aggregates are over all agents and rounds."""

from __future__ import annotations

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
    """The charts of one run by their ids; those that there are figures for."""
    result: dict[str, Chart] = {}
    lines = tuple(line for scope in ("global", "personal") for line in _accuracy(points, scope))
    if lines:
        caption = (
            "Mean over the agents of a round, with the tenth to ninetieth percentile; dashed: mean of the worst tenth."
        )
        result["accuracy"] = Lines("Accuracy by round", ends(lines, shown=percent), ROUND, OF_ROUND, lines, caption)
    losses = tuple((float(one.round), one.loss) for one in points if one.loss is not None)
    if losses:
        loss = (Series("training loss", losses, "plain"),)
        axis = Axis("mean over agents", can_log=True, log=spans_decades([value for _, value in losses]))
        result["loss"] = Lines("Training loss", ends(loss), ROUND, axis, loss)
    result |= _phases(points) | _bytes(points)
    return result


def _accuracy(points: Sequence[RoundPoint], scope: str) -> Iterator[Series]:
    known: list[tuple[float, Spread]] = [(float(one.round), one.acc[scope]) for one in points if scope in one.acc]
    if not known:
        return
    band = tuple((spread.low, spread.high) for _, spread in known)
    yield Series(f"{WORDS[scope]}, mean", tuple((x, spread.mean) for x, spread in known), scope, band=band)
    yield Series(f"{WORDS[scope]}, worst tenth", tuple((x, one.worst) for x, one in known), scope, dashed=True)


def _phases(points: Sequence[RoundPoint]) -> dict[str, Chart]:
    """Seconds by phase; a slow first round, which builds the model, does not squash the others."""
    timed = [one for one in points if one.seconds is not None]
    if not timed:
        return {}
    work = sum(one.seconds or 0.0 for one in timed)
    waits = sum(one.waiting_s or 0.0 for one in timed)
    longest = max(timed, key=lambda one: one.seconds or 0.0)
    summary = (
        f"{work:.1f} s in rounds and {waits:.1f} s waiting for agents before them; the longest is round "
        f"{longest.round} with {longest.seconds:.2f} s."
    )
    series = (
        Series("training and transfer", tuple((float(one.round), one.seconds) for one in timed), "plain"),
        Series(
            "waiting for agents before it", tuple((float(one.round), one.waiting_s or 0.0) for one in timed), "down"
        ),
    )
    high, caption = slow_first(timed[0].round, [(one.seconds or 0.0) + (one.waiting_s or 0.0) for one in timed])
    axis = Axis("time of a round", "s", low=0.0, high=high)
    return {"phases": Bars("Time by phase", summary, ROUND, axis, series, caption, stacked=True)}


def _bytes(points: Sequence[RoundPoint]) -> dict[str, Chart]:
    known = [one for one in points if one.bytes_up is not None or one.bytes_down is not None]
    sums = [(one.bytes_up or 0.0) + (one.bytes_down or 0.0) for one in known]
    if not sums or max(sums) - min(sums) <= EQUAL * max(sums):
        return {}
    up, down = (sum(getattr(one, name) or 0.0 for one in known) / 1e6 for name in ("bytes_up", "bytes_down"))
    series = (
        Series("from agents", tuple((float(one.round), (one.bytes_up or 0.0) / 1e6) for one in known), "up"),
        Series("to agents", tuple((float(one.round), (one.bytes_down or 0.0) / 1e6) for one in known), "down"),
    )
    summary = f"{up:.2f} MB from agents and {down:.2f} MB to agents in all."
    caption = "" if all(one.bytes_down for one in known) else NOTHING_DOWN
    axis = Axis("payload", "MB", low=0.0)
    return {"bytes": Bars("Traffic by round", summary, ROUND, axis, series, caption, stacked=True)}


def of_fleet(rows: Sequence[AgentRow]) -> dict[str, Chart]:
    """What each of these agents gains: its accuracies on one line."""
    known = [row for row in rows if row.personal is not None and (row.local is not None or row.shared is not None)]
    if not known:
        return {}
    known.sort(key=lambda row: (-(row.gain if row.gain is not None else -1.0), row.id))
    made = [Row(row.id, _marks(row), "better off alone" if row.better_alone else "", "bad") for row in known]
    gains = [row for row in known if row.gain is not None]
    summary = "What these agents reach alone is not known yet."
    if gains:
        kinds = Counter(row.gain_kind for row in gains)
        summary = f"Of {counted(len(gains), 'agent')} {kinds[Gain.ABOVE]} gain by more than noise"
        summary += f" and {kinds[Gain.BELOW]} lose by more than noise; the others' differences may be noise."
    caption = summary
    if any(mark.low is not None for row in made for mark in row.marks.values()):
        caption += " Shaded: 95 % Wilson intervals for the agent's held-out samples."
    marks = [mark.value for row in made for mark in row.marks.values()]
    axis = replace(ACCURACY, low=accuracy_floor(marks))
    return {"gains": Rows("What these agents gain", summary, axis, KEYS, tuple(made), caption)}


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
    """Accuracies of one agent in the rounds of a run."""
    series = tuple(
        Series(WORDS[scope], points, scope)
        for scope, at in (("global", 1), ("personal", 2))
        if (points := tuple((float(one[0]), one[at]) for one in by_round if one[at] is not None))
    )
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
    """The means of several runs on common axes, one chart for each accuracy."""
    result: dict[str, Chart] = {}
    most = max(8, MOST_COMPARED_POINTS // max(1, len(runs)))
    for scope in ("personal", "global"):
        lines = list[Series]()
        is_thinned = False
        for number, (name, curves) in enumerate(runs):
            known = [(float(one.round), one.acc[scope].mean) for one in curves.rounds() if scope in one.acc]
            step = -(-len(known) // most)
            is_thinned |= step > 1
            shown = known if step < 2 else [*known[:-1:step], known[-1]]
            if known:
                lines.append(Series(name, tuple(shown), f"c{number % 10}", dashed=number % 20 >= 10))
        if lines:
            best = max(lines, key=lambda line: line.points[-1][1] or 0.0)
            text = f"{len(lines)} runs; the highest at its end is {best.name} with {percent(best.points[-1][1])}."
            some = f"; of each run at most {most} rounds, its last one among them" if is_thinned else ""
            note = " ".join([f"Mean over agents{some}.", *_coinciding(lines)])
            result[scope] = Lines(
                f"{WORDS[scope].capitalize()} accuracy by round", text, ROUND, OF_ROUND, tuple(lines), note
            )
    return result


def _coinciding(lines: Sequence[Series]) -> Iterator[str]:
    """Which lines hide which: those that agree in all rounds that both have, as runs with the same seed do."""
    left = list(lines)
    while left:
        longest = max(left, key=lambda one: len(one.points))
        known = dict(longest.points)
        same = [one for one in left if len(one.points) > 1 and all(known.get(x, y) == y for x, y in one.points)]
        if len(same) > 1:
            yield f"The lines of {listed([one.name for one in same])} coincide as far as they go."
        left = [one for one in left if one is not longest and one not in same]
