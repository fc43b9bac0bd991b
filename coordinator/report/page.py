"""The page of a run: facts, benefit of each device, curves, cost, partition, agents. All text of agents is escaped."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import StateError

from ..state.noise import Gain
from ..state.store import RunFolder
from ..text import counted, sentence
from ..views.values import as_number
from . import run_charts
from .charts import Axis, Chart, InlineAssets, clean, figure_html, inline_assets, percent, points
from .figures import SCOPES, AgentFigures, RoundFigures, RunFigures, Scope, read_run
from .pictures import picture

if TYPE_CHECKING:
    import jinja2

    from ..state.release_rows import ReleaseRow  # a coordinator that writes the page of a run shows no release

MOST_AGENTS = 1000
"""Rows of the table of agents; ``metrics.jsonl`` has all of them."""

FIRST_INCIDENTS = 10
"""Rows of that table which are open; the others are folded."""

MOST_INCIDENTS = 200
"""Rows of the table of missing and rejected updates; the journal has all of them."""

_CARDS: Mapping[Scope, tuple[str, str]] = {
    "personal": ("personal", "shared encoder, personal head or model"),
    "local": ("alone", "best model that each fits alone"),
    "global": ("shared", "the shared model"),
}
"""Name and description of each card of an accuracy, in the order of the web view."""

_GAIN_STYLES = {Gain.ABOVE: "lead gain", Gain.BELOW: "lead loss", Gain.WITHIN: "lead even", Gain.UNKNOWN: "lead"}
_DETAILS = {
    "bundle": "Bundle",
    "encoder_sha256": "Weights (SHA-256)",
    "params": "Parameters of the method",
    "privacy": "Privacy",
}


def render(run: RunFigures, releases: Sequence[ReleaseRow] = ()) -> str:
    """The whole page as HTML, with the ``releases`` of the run's bundle. It loads nothing and runs its own scripts."""
    summary = run.summary
    rounds = as_number(summary.get("rounds"))
    closed = as_number(summary.get("round"))
    warnings = summary.get("warnings")
    columns = ["agent", "tier", "samples", "acc.local", "alone", "acc.global", "acc.personal", "head", "memory"]
    columns += ["torch", "sent"]
    has_notes = any(agent.notes for agent in run.agents)
    columns += ["received", "note"] if has_notes else ["received"]
    text_columns = {"agent", "tier", "alone", "head", "torch", "note"}
    simulation = run.simulation
    cost, cost_charts = run_charts.cost(run.rounds)
    return render_page(
        "run.html",
        kind="Headwater simulation" if simulation else "Headwater run",
        title=_title(run),
        run=run,
        summary=summary,
        status=_text(summary["status"]) if "status" in summary else "running",
        of_rounds="" if rounds is None else f" of {rounds:g}",
        closed=f"{len(run.rounds) if closed is None else closed:g}",
        member="client" if simulation else "agent",
        agent_count=run.agent_count,
        data=", ".join(map(source_name, simulation.get("data", []))),
        warm_start=_warm_start(summary.get("warm_start")),
        warnings=[one for one in warnings if isinstance(one, dict)] if isinstance(warnings, list) else [],
        cards=list(_cards(run)),
        benefit_sentence=run_charts.benefit_sentence(run.agents),
        benefit=_figures([run_charts.benefit(run.agents)], "benefit"),
        curves=_figures([run_charts.accuracy(run), run_charts.loss(run.rounds)], "curves"),
        cost=cost,
        cost_figures=_figures(cost_charts, "cost"),
        partition=_figures([_partition(run)], "partition"),
        agent_columns=[(name, "" if name in text_columns else "n") for name in columns],
        agent_rows=[_agent_row(agent)[: len(columns)] for agent in run.agents[:MOST_AGENTS]],
        most_agents=MOST_AGENTS,
        incidents=sorted(_incidents(run.rounds)),
        first_incidents=FIRST_INCIDENTS,
        most=MOST_INCIDENTS,
        releases=[_release_row(release) for release in releases],
        scores=[row for release in releases for row in _score_rows(release)],
        commands=list(_commands(run)),
        details=[(name, _pretty(summary[key])) for key, name in _DETAILS.items() if summary.get(key)],
    )


def _title(run: RunFigures) -> str:
    """Return what was done, by which method on what: one run among many is recognised by it."""
    method = _text(run.summary.get("method"))
    simulation = run.simulation
    if simulation:
        data = ", ".join(map(source_name, simulation.get("data", [])))
        rule = simulation.get("partition", {}).get("rule", "")
        return clean(f"{method} on {data}, {counted(run.agent_count, 'client')}, {rule}", 160)
    rounds = as_number(run.summary.get("rounds"))
    parts = [method, *([] if rounds is None else [counted(int(rounds), "round")])]
    return clean(", ".join([*parts, counted(run.agent_count, "agent")]), 160)


def source_name(source: object) -> str:
    """Return a data source without the folders of its path: ``windows:watch.npz``."""
    kind, colon, path = str(source).partition(":")
    return f"{kind}{colon}{path.rpartition('/')[2]}"


def _figures(charts: Sequence[Chart | None], name: str) -> list[str]:
    """Return the HTML of the charts that there are; their ids are ``name`` with their place among all."""
    return [figure_html(chart, f"{name}-{number}", level=3) for number, chart in enumerate(charts) if chart is not None]


def _partition(run: RunFigures) -> Chart | None:
    """Return who has which samples: of a simulation by class, of agents their number; None where that is not known."""
    shown = run.simulation.get("partition")
    if shown and shown.get("clients"):
        data = ", ".join(map(source_name, run.simulation.get("data", [])))
        return run_charts.partition({**shown, "data": data})
    sizes = [(agent.id, agent.samples) for agent in run.agents if agent.samples is not None]
    return run_charts.sample_counts(sizes) if sizes else None


def _commands(run: RunFigures) -> Iterator[tuple[str, str]]:
    """Yield what to do with the run, and the commands or settings for it."""
    plan = run.simulation.get("plan")
    if isinstance(plan, dict):
        yield "Settings: save them as simulation.toml", _toml(plan)
        yield (
            "The same simulation again: same seed, same bits",
            "headwater simulate --config simulation.toml --out again",
        )
        yield "Measures of its features and its partition", "headwater analyze again"
        return
    summary = run.summary
    arguments = []
    for name in ("method", "rounds", "seed"):
        if summary.get(name) is not None:
            arguments += [f"--{name}", str(summary[name])]
    params = summary.get("params")
    if arguments and isinstance(params, dict):
        for name, value in params.items():
            if value is not None:
                arguments += ["--set", f"{name}={json.dumps(value)}"]
        yield "The same run again, at a coordinator with the same agents", shlex.join(["headwater", "run", *arguments])
    yield "This page again", shlex.join(["headwater", "report", "--run", run.run])


def _toml(plan: Mapping[str, Any]) -> str:
    """Return settings as TOML; values are JSON, whose scalars, lists and strings TOML shares."""
    # Tables come last, because what follows the head of a table belongs to it.
    lines = [f"{key} = {json.dumps(value)}" for key, value in plan.items() if not isinstance(value, dict)]
    for key, value in plan.items():
        if isinstance(value, dict) and value:
            lines.append(f"\n[{key}]")
            for name, item in value.items():
                lines.append(f"{json.dumps(name)} = {json.dumps(item)}")
    return "\n".join(lines)


def _release_row(row: ReleaseRow) -> tuple[str, ...]:
    outcomes = row.outcomes
    cells = (
        row.number,
        row.plan.channel,
        row.standing.stage,
        row.release.author or "the run",
        (row.origin.parent or "none")[:12],
        *(outcomes.get(name, 0) for name in ("ok", "failed", "declined", "unable")),
        row.plan.note,
    )
    return tuple(map(str, cells))


def _score_rows(row: ReleaseRow) -> Iterator[tuple[str, ...]]:
    for agent, result in row.results.items():
        scores = ("" if value is None else percent(value) for value in (result.before, result.acc))
        yield (str(row.number), agent, result.outcome, *scores, str(result.support), result.reason)


def render_page(template: str, **content: Any) -> str:
    """Return a self-contained page from one of the templates; values that are not HTML are escaped."""
    return _templates().get_template(template).render(assets=_assets(), **content)


@functools.cache
def _assets() -> InlineAssets:
    return inline_assets(files(__package__).joinpath("templates/report.css").read_text(encoding="utf-8"))


@functools.cache
def _templates() -> jinja2.Environment:
    templates = templates_of(__package__)
    templates.filters.update({"text": _text, "number": as_number})
    return templates


def templates_of(package: str, shown: Callable[[Any], Any] | None = None) -> jinja2.Environment:
    """Return a package's templates with the filters of all pages; each value goes through ``shown`` and is escaped."""
    import jinja2  # when the first page is written: an idle coordinator does without

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    templates.filters.update(
        {
            "percent": percent,
            "points": points,
            "bytes": megabytes,
            "duration": duration,
            "count": _count,
            "counted": counted,
            "sentence": lambda value: sentence(str(value)),
        }
    )
    return templates


def accuracy_svg(folder: RunFolder) -> bytes:
    """Return an SVG file with the accuracies of each device.

    Raises:
        StateError: No device has reported accuracies yet, or the files are damaged.
    """
    run = read_run(folder.run, folder.summary() or {}, folder.metrics())
    chart = run_charts.benefit([agent for agent in run.agents if agent.acc])
    if chart is None:
        raise StateError(f"{folder.folder}: no device has reported accuracies yet; try again after the run")
    devices = [f"{agent.id}: {_listed_accuracies(agent)}" for agent in run.agents if agent.acc]
    summary = f"Accuracy of each device. {'; '.join(devices)}"
    axis = Axis(run_charts.ACCURACY, low=0.0, high=1.0)
    return picture([replace(chart, title=_title(run), summary=summary, value=axis)])


def _listed_accuracies(agent: AgentFigures) -> str:
    """Return the accuracies that a device has reported, as text."""
    return ", ".join(f"acc.{scope} {agent.acc[scope]:.3f}" for scope in SCOPES if scope in agent.acc)


def _warm_start(record: object) -> str:
    """Return the warm start in half a sentence; empty without one."""
    if not isinstance(record, dict):
        return ""
    samples = as_number(record.get("samples"))
    epochs = as_number(record.get("epochs"))
    accuracy = as_number(record.get("accuracy"))
    scored = "not scored"
    if accuracy is not None:
        scored = f"accuracy {percent(accuracy)}"
    return f"{_count(samples)} samples, {_count(epochs)} epochs, {scored}"


def _cards(run: RunFigures) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, value, note and style of each key figure."""
    member = "client" if run.simulation else "agent"
    compared = run_charts.gains(run.agents)
    if compared:
        gain = fmean(gain for gain, _ in compared)
        kind = run_charts.classify_mean(run.agents)
        note = f"percentage points, personal over alone; mean over {counted(len(compared), member)}"
        if kind is Gain.WITHIN:
            note += "; within noise"
        yield "gain", points(gain), note, _GAIN_STYLES[kind]
    for scope, (name, description) in _CARDS.items():
        mean = run.final_mean(scope)
        if mean is None:
            continue
        counts = sum(scope in agent.acc for agent in run.agents)
        over = f"mean over {counted(counts, member)}" if counts else "mean over agents, last round"
        yield name, percent(mean), f"{description} (acc.{scope}); {over}", scope
    if run.proxy:
        last = run.proxy[-1]
        note = f"the shared model after round {last.round}, on {_count(last.samples)} samples of the coordinator"
        yield "acc.proxy", percent(last.acc), f"{note}, by {last.by}", "plain"
    for name, total in (("from agents", run.total("bytes_up")), ("to agents", run.total("bytes_down"))):
        if total is not None:
            yield name, megabytes(total), "payload of the whole run", ""


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
    """Yield round, agent and reason of each update that is not in its round's aggregate, or is not as it was sent."""
    for line in rounds:
        yield from ((line.round, name, "no update before the round closed") for name in line.missing)
        yield from ((line.round, name, f"rejected: {why}") for name, why in line.rejected)
        yield from ((line.round, name, f"left out: {why}") for name, why in line.left_out)
        yield from ((line.round, name, what) for name, what in line.bounded.items())


def megabytes(size: float | None) -> str:
    """Return bytes in MB (millions), or in kB where that is less than one; a dash where it is not known."""
    if size is None:
        return "–"
    if size >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB"


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that a person would use; a dash where it is not known."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}".replace(",", " ")


def _text(value: object) -> str:
    return "–" if value is None else str(value)


def _pretty(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True, default=str)
