"""The page of a run: facts, charts, agents, missing updates. All text that agents contribute is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from edge_agent.errors import StateError

from ..state.store import RunFolder
from ..text import counted
from .charts import (
    MARKERS,
    Chart,
    Keys,
    Series,
    accuracy_floor,
    bar_chart,
    dot_chart,
    legend,
    line_chart,
    standalone,
    style_sheet,
)
from .figures import SCOPES, AgentFigures, RoundFigures, RunFigures, Scope, as_number, read_run

MAX_INCIDENTS = 200
"""Rows of the table of missing and rejected updates; the journal has all of them."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(run: RunFigures) -> str:
    """The whole page as HTML. It loads nothing and runs nothing."""
    sections = (
        _head(run),
        _warnings(run),
        _cards(run),
        _charts(run),
        _agents(run.agents),
        _incidents(run.rounds),
        _request(run),
    )
    return html_page(f"{run.run} · {_text(run.summary.get('method'))}", sections)


def html_page(title: str, sections: Iterable[str]) -> str:
    """A self-contained page: no scripts, nothing loaded."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def header(kind: str, title: str, facts: Mapping[str, str], below: str = "") -> str:
    """The head of a page; ``title``, the values of ``facts`` and what is ``below`` the title are HTML."""
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f'<header><p class="over">{kind}</p><h1>{title}</h1>{below}<dl>{listed}</dl></header>'


def charts_section(figures: Iterable[str]) -> str:
    """Figures in columns; empty without any."""
    made = "".join(figures)
    return f'<section class="charts" aria-label="Charts">{made}</section>' if made else ""


def figure(title: str, chart: Chart, keys: Keys, caption: str, link: str = "") -> str:
    """One chart with its legend and caption; ``link`` is HTML after the caption."""
    below = f"{legend(keys)}<figcaption>{escape(caption)}{link}</figcaption>"
    return f"<figure><h2>{escape(title)}</h2>{chart}{below}</figure>"


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


def _head(run: RunFigures) -> str:
    summary = run.summary
    status = _text(summary.get("status")) if "status" in summary else "running"
    asked = as_number(summary.get("rounds"))
    facts = {
        "Method": _text(summary.get("method")),
        "Rounds": f"{len(run.rounds)}" + (f" of {asked:g}" if asked is not None else ""),
        "Agents": f"{len(run.agents) or len({name for line in run.rounds for name in line.agents})}",
        "Seed": _text(summary.get("seed")),
        "Duration": duration(as_number(summary.get("seconds"))),
    }
    if warm := _warm_start(summary.get("warm_start")):
        facts["Warm start"] = warm
    title = f'{escape(run.run)} <span class="status" data-status="{escape(status)}">{escape(status)}</span>'
    shown = {name: escape(value) for name, value in facts.items()}
    return header("Headwater run", title, shown, _unfinished(run, asked) + _unscored(run))


def _warnings(run: RunFigures) -> str:
    result = run.summary.get("warnings")
    listed = [one for one in result if isinstance(one, dict)] if isinstance(result, list) else []
    lines = "".join(f"<li>{escape(_text(one.get('message')))}</li>" for one in listed)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{lines}</ul></section>' if lines else ""


def _warm_start(record: object) -> str:
    """The warm start in half a sentence; empty without one."""
    if not isinstance(record, dict):
        return ""
    samples, epochs, accuracy = (as_number(record.get(name)) for name in ("samples", "epochs", "accuracy"))
    scored = "not scored" if accuracy is None else f"accuracy {percent(accuracy)}"
    return f"{_count(samples)} samples, {_count(epochs)} epochs, {scored}"


def _unscored(run: RunFigures) -> str:
    lines = (f"acc.proxy could not be computed, first after round {number}: {why}" for number, why in run.proxy_failed)
    return "".join(f'<p class="caption">{escape(line)}</p>' for line in lines)


def _unfinished(run: RunFigures, asked: float | None) -> str:
    """A line for a run without a result: how many rounds are closed, and why it ended if it has."""
    if run.summary.get("status", "running") == "finished":
        return ""
    closed = as_number(run.summary.get("round"))
    done = f"{len(run.rounds) if closed is None else closed:g}" + (f" of {asked:g}" if asked is not None else "")
    reason = f" Why it ended there: {_text(run.summary['reason'])}." if run.summary.get("reason") else ""
    return f'<p class="caption">This run has not finished: round {done} is closed.{escape(reason)}</p>'


def _cards(run: RunFigures) -> str:
    notes = {
        "local": "trained on local data only",
        "global": "the shared model",
        "personal": "shared encoder, personal head",
    }
    cards = [
        _card(f"acc.{scope}", percent(mean), f"{note}; mean over agents", scope)
        for scope, note in notes.items()
        if (mean := run.final_mean(scope)) is not None  # type: ignore[arg-type]
    ]
    if run.proxy:
        last = run.proxy[-1]
        note = f"the shared model after round {last.round}, on {_count(last.samples)} samples of the coordinator"
        cards.append(_card("acc.proxy", percent(last.acc), f"{note}, by {last.by}", "plain"))
    for name, direction in (("from agents", "bytes_up"), ("to agents", "bytes_down")):
        total = run.total(direction)  # type: ignore[arg-type]
        if total is not None:
            cards.append(_card(name, megabytes(total), "payload of the whole run", ""))
    return f'<section class="cards" aria-label="Key figures">{"".join(cards)}</section>' if cards else ""


def _card(name: str, value: str, note: str, style: str) -> str:
    return f'<div class="card {style}"><h2>{escape(name)}</h2><p class="big">{value}</p><p>{escape(note)}</p></div>'


def _charts(run: RunFigures) -> str:
    return charts_section((_accuracy(run), _spread(run.agents), _seconds(run.rounds), _traffic(run.rounds)))


def _accuracy(run: RunFigures) -> str:
    series = [line for scope in SCOPES for line in _scope_lines(run.rounds, scope)]
    if run.proxy:
        series.append(Series("acc.proxy", tuple((float(one.round), one.acc) for one in run.proxy), "plain"))
    if not series:
        return ""
    low = accuracy_floor(y for line in series for _, y in line.points)
    text = "Accuracy by round. " + " ".join(
        f"{line.name}: {line.points[0][1]:.3f} in round {line.points[0][0]:g}, "
        f"{line.points[-1][1]:.3f} in round {line.points[-1][0]:g}."
        for line in series
    )
    chart = line_chart(text, series, x_label="round", y_label="accuracy", low=low, high=1.0)
    return figure("Accuracy by round", chart, [line.key for line in series], "Accuracy on held-out samples, 0 to 1.")


def _scope_lines(rounds: Sequence[RoundFigures], scope: Scope) -> list[Series]:
    mean = tuple((float(line.round), value) for line in rounds if (value := line.mean(scope)) is not None)
    worst = tuple((float(line.round), value) for line in rounds if (value := line.worst(scope)) is not None)
    if not mean:
        return []
    lines = [Series(f"acc.{scope}, mean", mean, scope)]
    if worst != mean:
        lines.append(Series(f"acc.{scope}, worst agent", worst, scope, is_dashed=True))
    return lines


def _spread(agents: Sequence[AgentFigures]) -> str:
    known = [agent for agent in agents if agent.acc][:60]
    rows = [
        (f"{agent.id} *" if agent.notes else agent.id, {str(s): agent.acc[s] for s in SCOPES if s in agent.acc})
        for agent in known
    ]
    shown = [scope for scope in SCOPES if any(scope in values for _, values in rows)]
    if not shown:
        return ""
    low = accuracy_floor(value for _, values in rows for value in values.values())
    text = "Accuracy of each agent; the numbers are in the table of agents."
    chart = dot_chart(text, rows, x_label="accuracy", low=low, high=1.0)
    keys = [(f"acc.{scope}", scope, MARKERS[scope]) for scope in shown]
    more = " *: see the note in the table of agents." if any(agent.notes for agent in known) else ""
    return figure("Accuracy of each agent", chart, keys, f"Accuracy on held-out samples, 0 to 1.{more}")


def _seconds(rounds: Sequence[RoundFigures]) -> str:
    groups = [(line.round, (line.seconds,)) for line in rounds if line.seconds is not None]
    if not groups:
        return ""
    total = sum(values[0] for _, values in groups)
    longest = max(groups, key=lambda group: group[1])
    text = f"Seconds of each round; {total:.1f} s in all, the longest is round {longest[0]} with {longest[1][0]:.2f} s."
    chart = bar_chart(text, groups, ("plain",), x_label="round", y_label="seconds")
    return figure("Time of each round", chart, (), f"Seconds from opening to closing; {total:.1f} s in all.")


def _traffic(rounds: Sequence[RoundFigures]) -> str:
    groups = [
        (line.round, ((line.bytes_up or 0) / 1e6, (line.bytes_down or 0) / 1e6))
        for line in rounds
        if line.bytes_up is not None or line.bytes_down is not None
    ]
    if not groups:
        return ""
    up, down = (sum(values[side] for _, values in groups) for side in (0, 1))
    text = f"Megabytes of each round; {up:.2f} MB from agents and {down:.2f} MB to agents in all."
    chart = bar_chart(text, groups, ("up", "down"), x_label="round", y_label="MB")
    keys = [("from agents", "up", "bar"), ("to agents", "down", "bar")]
    caption = "Payload in MB (millions of bytes), as counted by the coordinator."
    return figure("Traffic of each round", chart, keys, caption)


def _agents(agents: Sequence[AgentFigures]) -> str:
    if not agents:
        return ""
    heads = (
        ("agent", ""),
        ("tier", ""),
        ("samples", "n"),
        *((f"acc.{scope}", "n") for scope in SCOPES),
        ("head", ""),
        ("memory", "n"),
        ("torch", ""),
        ("sent", "n"),
        ("received", "n"),
        ("note", ""),
    )
    rows = [
        (
            agent.id,
            agent.tier or "–",
            _count(agent.samples),
            *(percent(agent.acc.get(scope)) for scope in SCOPES),
            agent.head or "–",
            "–" if agent.rss_mb is None else f"{agent.rss_mb:.0f} MB",
            {True: "loaded", False: "no", None: "–"}[agent.torch_loaded],
            megabytes(agent.bytes_up),
            megabytes(agent.bytes_down),
            "; ".join(agent.notes),
        )
        for agent in agents
    ]
    if not any(agent.notes for agent in agents):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    caption = "At the end of the run. Memory is the resident set of the agent's process; sent and received are payload."
    return table("Agents", caption, heads, rows)


def _incidents(rounds: Sequence[RoundFigures]) -> str:
    missing = [(line.round, name, "no update before the round closed") for line in rounds for name in line.missing]
    rejected = [(line.round, name, f"rejected: {why}") for line in rounds for name, why in line.rejected]
    left_out = [(line.round, name, f"left out: {why}") for line in rounds for name, why in line.left_out]
    rows = [(str(number), name, what) for number, name, what in sorted(missing + rejected + left_out)]
    if not rows:
        return ""
    more = f" The first {MAX_INCIDENTS} of {len(rows)}." if len(rows) > MAX_INCIDENTS else ""
    caption = f"Updates that are not in the aggregate of their round, and why.{more}"
    heads = (("round", "n"), ("agent", ""), ("what", ""))
    return table("Missing and rejected updates", caption, heads, rows[:MAX_INCIDENTS])


def table(title: str, caption: str, heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table; ``heads`` are (name, style) of the columns, style ``n`` for numbers."""
    head = "".join(f'<th scope="col" class="{style}">{escape(name)}</th>' for name, style in heads)
    body = "".join(f"<tr>{_cells(row, [style for _, style in heads])}</tr>" for row in rows)
    return (
        f'<section><h2>{title}</h2><p class="caption">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table aria-label="{title}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _cells(row: Sequence[str], styles: Sequence[str]) -> str:
    return "".join(f'<td class="{style}">{escape(value)}</td>' for value, style in zip(row, styles, strict=True))


def _request(run: RunFigures) -> str:
    shown = {key: run.summary[key] for key in ("bundle", "encoder_sha256", "params") if run.summary.get(key)}
    if not shown:
        return ""
    names = {"bundle": "Bundle", "encoder_sha256": "Weights (SHA-256)", "params": "Parameters of the method"}
    parts = "".join(f"<h3>{names[key]}</h3><pre>{escape(_pretty(value))}</pre>" for key, value in shown.items())
    return f"<section><details><summary>Encoder, bundle and parameters</summary>{parts}</details></section>"


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
