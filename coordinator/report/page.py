"""The page of a run: facts, charts, agents, missing updates. All text that agents contribute is escaped."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge_agent.errors import StateError

from ..state.store import RunFolder
from ..text import counted
from .charts import (
    MARKERS,
    Picture,
    Series,
    accuracy_floor,
    bar_chart,
    dot_chart,
    key_mark,
    line_chart,
    standalone,
    style_sheet,
)
from .figures import SCOPES, AgentFigures, RoundFigures, RunFigures, as_number, read_run

if TYPE_CHECKING:
    import jinja2

MOST_INCIDENTS = 200
"""Rows of the table of missing and rejected updates; the journal has all of them."""

_CARDS = {
    "local": "best model that each agent fits alone",
    "global": "the shared model",
    "personal": "shared encoder, personal head",
}
_DETAILS = {
    "bundle": "Bundle",
    "encoder_sha256": "Weights (SHA-256)",
    "params": "Parameters of the method",
    "privacy": "Privacy",
}


def render(run: RunFigures, releases: Sequence[Mapping[str, Any]] = ()) -> str:
    """The whole page as HTML, with the ``releases`` of the run's bundle. It loads nothing and runs nothing."""
    summary = run.summary
    rounds, closed = as_number(summary.get("rounds")), as_number(summary.get("round"))
    warnings = summary.get("warnings")
    columns = ["agent", "tier", "samples", "acc.local", "alone", "acc.global", "acc.personal", "head", "memory"]
    columns += ["torch", "sent"]
    has_notes = any(agent.notes for agent in run.agents)
    columns += ["received", "note"] if has_notes else ["received"]
    text_columns = {"agent", "tier", "alone", "head", "torch", "note"}
    return render_page(
        "run.html",
        kind="Headwater run",
        title=f"{run.run} · {_text(summary.get('method'))}",
        run=run,
        summary=summary,
        status=_text(summary["status"]) if "status" in summary else "running",
        of_rounds="" if rounds is None else f" of {rounds:g}",
        closed=f"{len(run.rounds) if closed is None else closed:g}",
        agent_count=len(run.agents) or len({name for line in run.rounds for name in line.agents}),
        warm_start=_warm_start(summary.get("warm_start")),
        warnings=[one for one in warnings if isinstance(one, dict)] if isinstance(warnings, list) else [],
        cards=list(_cards(run)),
        pictures=[*_accuracy(run), *_spread(run.agents), *_seconds(run.rounds), *_traffic(run.rounds)],
        agent_columns=[(name, "" if name in text_columns else "n") for name in columns],
        agent_rows=[_agent_row(agent)[: len(columns)] for agent in run.agents],
        incidents=sorted(_incidents(run.rounds)),
        most=MOST_INCIDENTS,
        releases=[_release_row(one) for one in releases],
        scores=[row for one in releases for row in _score_rows(one)],
        details=[(name, _pretty(summary[key])) for key, name in _DETAILS.items() if summary.get(key)],
    )


def _release_row(release: Mapping[str, Any]) -> tuple[str, ...]:
    outcomes, parent = release["outcomes"], release["lineage"]["parent"]
    cells = (
        release["release"],
        release["plan"]["channel"],
        release["stage"],
        release["by"] or "the run",
        (parent or "none")[:12],
        *(outcomes.get(name, 0) for name in ("ok", "failed", "declined", "unable")),
        release["plan"]["note"],
    )
    return tuple(map(str, cells))


def _score_rows(release: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for agent, result in release["results"].items():
        scores = ("" if value is None else f"{value:.3f}" for value in (result["before"], result["acc"]))
        yield (str(release["release"]), agent, result["outcome"], *scores, str(result["support"]), result["reason"])


def render_page(template: str, **content: Any) -> str:
    """A self-contained page from one of the templates; values that are not HTML are escaped."""
    return _templates().get_template(template).render(style_sheet=style_sheet(), **content)


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2  # when the first page is written: an idle coordinator does without

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.globals["key_mark"] = key_mark
    templates.filters.update({"text": _text, "number": as_number, "duration": duration})
    return templates


def accuracy_svg(folder: RunFolder) -> str:
    """An SVG file with the accuracies of each device.

    Raises:
        StateError: no device has reported accuracies yet, or the files are damaged.
    """
    run = read_run(folder.run, folder.summary() or {}, folder.metrics())
    rows = [(agent.id, {str(s): agent.acc[s] for s in SCOPES if s in agent.acc}) for agent in run.agents if agent.acc]
    if not rows:
        raise StateError(f"{folder.folder}: no device has reported accuracies yet; try again after the run")
    parts = (f"{name}: " + ", ".join(f"acc.{scope} {value:.3f}" for scope, value in acc.items()) for name, acc in rows)
    text = "Accuracy of each device. " + "; ".join(parts)
    chart = dot_chart(text, rows, x_label="accuracy on held-out samples", low=0.0, high=1.0)
    rounds = as_number(run.summary.get("rounds"))
    title = f"{run.summary.get('method', run.run)}, {'?' if rounds is None else counted(int(rounds), 'round')}"
    return standalone(title, chart, [(f"acc.{scope}", scope, MARKERS[scope]) for scope in SCOPES])


def _warm_start(record: object) -> str:
    """The warm start in half a sentence; empty without one."""
    if not isinstance(record, dict):
        return ""
    samples, epochs, accuracy = (as_number(record.get(name)) for name in ("samples", "epochs", "accuracy"))
    scored = "not scored" if accuracy is None else f"accuracy {percent(accuracy)}"
    return f"{_count(samples)} samples, {_count(epochs)} epochs, {scored}"


def _cards(run: RunFigures) -> Iterator[tuple[str, str, str, str]]:
    """Name, value, note and style of each key figure."""
    for scope in SCOPES:
        if (mean := run.final_mean(scope)) is not None:
            yield f"acc.{scope}", percent(mean), f"{_CARDS[scope]}; mean over agents", scope
    if run.proxy:
        last = run.proxy[-1]
        note = f"the shared model after round {last.round}, on {_count(last.samples)} samples of the coordinator"
        yield "acc.proxy", percent(last.acc), f"{note}, by {last.by}", "plain"
    for name, total in (("from agents", run.total("bytes_up")), ("to agents", run.total("bytes_down"))):
        if total is not None:
            yield name, megabytes(total), "payload of the whole run", ""


def _accuracy(run: RunFigures) -> Iterator[Picture]:
    series = []
    for scope in SCOPES:
        mean, worst = (
            tuple((float(line.round), value) for line in run.rounds if (value := figure(line, scope)) is not None)
            for figure in (RoundFigures.mean, RoundFigures.worst)
        )
        if mean:
            series.append(Series(f"acc.{scope}, mean", mean, scope))
        if worst != mean:
            series.append(Series(f"acc.{scope}, worst agent", worst, scope, is_dashed=True))
    if run.proxy:
        series.append(Series("acc.proxy", tuple((float(one.round), one.acc) for one in run.proxy), "plain"))
    if not series:
        return
    low = accuracy_floor(y for line in series for _, y in line.points)
    text = "Accuracy by round. " + " ".join(
        f"{line.name}: {line.points[0][1]:.3f} in round {line.points[0][0]:g}, "
        f"{line.points[-1][1]:.3f} in round {line.points[-1][0]:g}."
        for line in series
    )
    chart = line_chart(text, series, x_label="round", y_label="accuracy", low=low, high=1.0)
    keys = [line.key for line in series]
    yield Picture("accuracy", "Accuracy by round", "Accuracy on held-out samples, 0 to 1.", chart, keys)


def _spread(agents: Sequence[AgentFigures]) -> Iterator[Picture]:
    known = [agent for agent in agents if agent.acc][:60]
    rows = [
        (f"{agent.id} *" if agent.notes else agent.id, {str(s): agent.acc[s] for s in SCOPES if s in agent.acc})
        for agent in known
    ]
    shown = [scope for scope in SCOPES if any(scope in values for _, values in rows)]
    if not shown:
        return
    low = accuracy_floor(value for _, values in rows for value in values.values())
    text = "Accuracy of each agent; the numbers are in the table of agents."
    chart = dot_chart(text, rows, x_label="accuracy", low=low, high=1.0)
    keys = [(f"acc.{scope}", scope, MARKERS[scope]) for scope in shown]
    more = " *: see the note in the table of agents." if any(agent.notes for agent in known) else ""
    yield Picture("agents", "Accuracy of each agent", f"Accuracy on held-out samples, 0 to 1.{more}", chart, keys)


def _seconds(rounds: Sequence[RoundFigures]) -> Iterator[Picture]:
    groups = [(line.round, (line.seconds,)) for line in rounds if line.seconds is not None]
    if not groups:
        return
    total = sum(values[0] for _, values in groups)
    longest = max(groups, key=lambda group: group[1])
    text = f"Seconds of each round; {total:.1f} s in all, the longest is round {longest[0]} with {longest[1][0]:.2f} s."
    chart = bar_chart(text, groups, ("plain",), x_label="round", y_label="seconds")
    yield Picture("seconds", "Time of each round", f"Seconds from opening to closing; {total:.1f} s in all.", chart)


def _traffic(rounds: Sequence[RoundFigures]) -> Iterator[Picture]:
    groups = [
        (line.round, ((line.bytes_up or 0) / 1e6, (line.bytes_down or 0) / 1e6))
        for line in rounds
        if line.bytes_up is not None or line.bytes_down is not None
    ]
    if not groups:
        return
    up, down = (sum(values[side] for _, values in groups) for side in (0, 1))
    text = f"Megabytes of each round; {up:.2f} MB from agents and {down:.2f} MB to agents in all."
    chart = bar_chart(text, groups, ("up", "down"), x_label="round", y_label="MB")
    keys = [("from agents", "up", "bar"), ("to agents", "down", "bar")]
    caption = "Payload in MB (millions of bytes), as counted by the coordinator."
    yield Picture("traffic", "Traffic of each round", caption, chart, keys)


def _agent_row(agent: AgentFigures) -> tuple[str, ...]:
    return (
        agent.id,
        agent.tier or "–",
        _count(agent.samples),
        percent(agent.acc.get("local")),
        agent.local_model or "–",
        *(percent(agent.acc.get(scope)) for scope in ("global", "personal")),
        agent.head or "–",
        "–" if agent.rss_mb is None else f"{agent.rss_mb:.0f} MB",
        {True: "loaded", False: "no", None: "–"}[agent.torch_loaded],
        megabytes(agent.bytes_up),
        megabytes(agent.bytes_down),
        "; ".join(agent.notes),
    )


def _incidents(rounds: Sequence[RoundFigures]) -> Iterator[tuple[int, str, str]]:
    """Round, agent and reason of each update that is not in the aggregate of its round, or is not as it was sent."""
    for line in rounds:
        yield from ((line.round, name, "no update before the round closed") for name in line.missing)
        yield from ((line.round, name, f"rejected: {why}") for name, why in line.rejected)
        yield from ((line.round, name, f"left out: {why}") for name, why in line.left_out)
        yield from ((line.round, name, what) for name, what in line.bounded.items())


def percent(value: float | None) -> str:
    """A share as a percentage; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.1f} %"


def megabytes(size: float | None) -> str:
    """Bytes in MB (millions), or in kB where that is less than one; a dash where it is not known."""
    if size is None:
        return "–"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that a person would use; a dash where it is not known."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}".replace(",", " ")


def _text(value: object) -> str:
    return "–" if value is None else str(value)


def _pretty(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True, default=str)
