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
from edge_agent.core.next_steps import NextStep

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
"""The most rows of the table of agents; ``metrics.jsonl`` has all of them."""

MOST_INCIDENTS = 200
"""The most rows of the table of missing and rejected updates; the journal has all of them."""

FIRST_INCIDENTS = 10
"""How many rows of the table of missing and rejected updates are open at first; the others are folded."""

_CARDS: Mapping[Scope, tuple[str, str]] = {
    "personal": ("personal", "shared encoder, personal head or model"),
    "local": ("alone", "best model that each fits alone"),
    "global": ("shared", "the shared model"),
}
"""Name and description of each card of an accuracy, in the order of the web view."""

_GAIN_STYLES = {Gain.ABOVE: "lead gain", Gain.BELOW: "lead loss", Gain.WITHIN: "lead even", Gain.UNKNOWN: "lead"}
_DETAILS = {
    "tags": "Tags",
    "note": "Note",
    "bundle": "Bundle",
    "encoder_sha256": "Weights (SHA-256)",
    "params": "Parameters of the method",
    "peft": "What of the encoder learned",
    "peft_params": "Parameters of that",
    "privacy": "Privacy",
}


def render(run: RunFigures, releases: Sequence[ReleaseRow] = ()) -> str:
    """Return the whole page as HTML. It loads nothing, and runs only scripts of its own.

    Args:
        run: The figures of the run.
        releases: The releases of the run's bundle.
    """
    summary = run.summary
    is_simulation = bool(run.simulation)
    columns = _columns_of_agents(run)
    agent_rows = [_agent_row(agent)[: len(columns)] for agent in run.agents[:MOST_AGENTS]]
    cost, cost_charts = run_charts.cost(run.rounds)
    scores = list[tuple[str, ...]]()
    for release in releases:
        scores.extend(_score_rows(release))
    return render_page(
        "run.html",
        kind="Headwater simulation" if is_simulation else "Headwater run",
        title=_title(run),
        run=run,
        summary=summary,
        status=_text(summary.get("status", "running")),
        of_rounds=_of_rounds(run),
        closed=_closed_rounds(run),
        member="client" if is_simulation else "agent",
        agent_count=run.agent_count,
        data=_names_of_data(run),
        warm_start=_warm_start(summary.get("warm_start")),
        warnings=_warnings(summary.get("warnings")),
        next_steps=_next_steps(summary.get("next_steps")),
        cards=list(_cards(run)),
        benefit_sentence=run_charts.benefit_sentence(run.agents),
        benefit=_figures([run_charts.benefit(run.agents)], "benefit"),
        curves=_figures([run_charts.accuracy(run), run_charts.loss(run.rounds)], "curves"),
        cost=cost,
        cost_figures=_figures(cost_charts, "cost"),
        partition=_figures([_partition(run)], "partition"),
        agent_columns=[(name, _ALIGNMENTS.get(name, "n")) for name in columns],
        agent_rows=agent_rows,
        most_agents=MOST_AGENTS,
        incidents=sorted(_incidents(run.rounds)),
        first_incidents=FIRST_INCIDENTS,
        most=MOST_INCIDENTS,
        releases=[_release_row(release) for release in releases],
        scores=scores,
        commands=list(_commands(run)),
        details=[(name, _pretty(summary[key])) for key, name in _DETAILS.items() if summary.get(key)],
    )


_AGENT_COLUMNS = (
    *("agent", "tier", "samples", "acc.local", "alone", "acc.global", "acc.personal", "head", "memory"),
    *("torch", "sent", "received", "note"),
)
_ALIGNMENTS = dict.fromkeys(("agent", "tier", "alone", "head", "torch", "note"), "")
"""Column of text -> its CSS class; the others are columns of numbers."""


def _columns_of_agents(run: RunFigures) -> tuple[str, ...]:
    """Return the columns of the table of agents; that of notes is the last one, and there only if an agent has any."""
    has_notes = any(agent.notes for agent in run.agents)
    return _AGENT_COLUMNS if has_notes else _AGENT_COLUMNS[:-1]


def _of_rounds(run: RunFigures) -> str:
    """Return " of N" for a run of N rounds; empty where the number is not known."""
    rounds = as_number(run.summary.get("rounds"))
    if rounds is None:
        return ""
    return f" of {rounds:g}"


def _closed_rounds(run: RunFigures) -> str:
    """Return the number of closed rounds that the summary states, or else of those that have figures."""
    closed = as_number(run.summary.get("round"))
    if closed is None:
        closed = len(run.rounds)
    return f"{closed:g}"


def _warnings(value: object) -> list[dict[str, Any]]:
    """Return the warnings of a summary; none where the value has another form."""
    if not isinstance(value, list):
        return []
    return [warning for warning in value if isinstance(warning, dict)]


def _next_steps(value: object) -> list[str]:
    """Return the messages of the next steps of a summary; none where the value has another form."""
    if not isinstance(value, list):
        return []
    return [NextStep.from_json(step).message for step in value if isinstance(step, (dict, str))]


def _names_of_data(run: RunFigures) -> str:
    """Return the names of a simulation's data sources; empty for a federation."""
    return ", ".join(map(source_name, run.simulation.get("data", [])))


def _title(run: RunFigures) -> str:
    """Return what was done, by which method on what: one run among many is recognised by it."""
    method = _text(run.summary.get("method"))
    name = run.summary.get("name")
    if isinstance(name, str) and name:
        method = f"{name}: {method}"
    simulation = run.simulation
    if simulation:
        rule = simulation.get("partition", {}).get("rule", "")
        return clean(f"{method} on {_names_of_data(run)}, {counted(run.agent_count, 'client')}, {rule}", 160)
    parts = [method]
    rounds = as_number(run.summary.get("rounds"))
    if rounds is not None:
        parts.append(counted(int(rounds), "round"))
    parts.append(counted(run.agent_count, "agent"))
    return clean(", ".join(parts), 160)


def source_name(source: object) -> str:
    """Return a data source without the folders of its path: ``windows:watch.npz``."""
    kind, colon, path = str(source).partition(":")
    return f"{kind}{colon}{path.rpartition('/')[2]}"


def _figures(charts: Sequence[Chart | None], name: str) -> list[str]:
    """Return the HTML of those charts that are not None; the id of each is ``name`` with its index."""
    return [figure_html(chart, f"{name}-{index}", level=3) for index, chart in enumerate(charts) if chart is not None]


def _partition(run: RunFigures) -> Chart | None:
    """Return the chart of who has which samples; None where that is not known.

    For a simulation it has the samples of each class. Of agents only their number is known.
    """
    shown = run.simulation.get("partition")
    if shown and shown.get("clients"):
        return run_charts.partition({**shown, "data": _names_of_data(run)})
    sizes = [(agent.id, agent.samples) for agent in run.agents if agent.samples is not None]
    if not sizes:
        return None
    return run_charts.sample_counts(sizes)


def _commands(run: RunFigures) -> Iterator[tuple[str, str]]:
    """Yield what a reader may do with the run next, and the command or the settings for it."""
    # 1. A simulation is repeated from its settings.
    plan = run.simulation.get("plan")
    if isinstance(plan, dict):
        yield "Settings: save them as simulation.toml", _toml(plan)
        yield (
            "The same simulation again: same seed, same bits",
            "headwater simulate --config simulation.toml --out again",
        )
        yield "Measures of its features and its partition", "headwater analyze again"
        return
    # 2. A run of a federation is repeated by a request with the same parameters.
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
        if summary.get("peft"):
            arguments += ["--peft", str(summary["peft"])]
            for name, value in summary.get("peft_params", {}).items():
                arguments += ["--peft-param", f"{name}={json.dumps(value)}"]
        yield "The same run again, at a coordinator with the same agents", shlex.join(["headwater", "run", *arguments])
    yield "This page again", shlex.join(["headwater", "report", "--run", run.run])


def _toml(plan: Mapping[str, Any]) -> str:
    """Return settings as TOML; values are JSON, whose scalars, lists and strings TOML shares."""
    # Tables come last, because what follows the head of a table belongs to it. Empty ones say nothing.
    lines = list[str]()
    tables = dict[str, dict[str, Any]]()
    for key, value in plan.items():
        if isinstance(value, dict):
            tables[key] = value
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    for key, table in tables.items():
        if not table:
            continue
        lines.append(f"\n[{key}]")
        lines.extend(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in table.items())
    return "\n".join(lines)


def _release_row(row: ReleaseRow) -> tuple[str, ...]:
    """Return the row of a release in the table of releases, with how many agents had each outcome."""
    counts = [row.outcomes.get(name, 0) for name in ("ok", "failed", "declined", "unable")]
    cells = (
        row.number,
        row.plan.channel,
        row.standing.stage,
        row.release.author or "the run",
        (row.origin.parent or "none")[:12],
        *counts,
        row.plan.note,
    )
    return tuple(map(str, cells))


def _score_rows(row: ReleaseRow) -> Iterator[tuple[str, ...]]:
    """Yield a row for each agent that a release has results of: its accuracy before and after, and the outcome."""
    for agent, result in row.results.items():
        before = _percent_or_empty(result.before)
        after = _percent_or_empty(result.acc)
        yield str(row.number), agent, result.outcome, before, after, str(result.support), result.reason


def _percent_or_empty(share: float | None) -> str:
    """Return a share (0..1) as a percentage; empty where it is not known."""
    if share is None:
        return ""
    return percent(share)


def render_page(template: str, **content: Any) -> str:
    """Return a self-contained page from one of the templates; values that are not HTML are escaped."""
    return _templates().get_template(template).render(assets=_assets(), **content)


@functools.cache
def _assets() -> InlineAssets:
    """Return the style sheet and the scripts of the pages, with the styles that only they have."""
    return inline_assets(files(__package__).joinpath("templates/report.css").read_text(encoding="utf-8"))


@functools.cache
def _templates() -> jinja2.Environment:
    """Return the templates of this package, with the filters that only they use."""
    templates = templates_of(__package__)
    templates.filters.update({"text": _text, "number": as_number})
    return templates


def templates_of(package: str, shown: Callable[[Any], Any] | None = None) -> jinja2.Environment:
    """Return a package's templates with the filters of all pages; each value goes through ``shown`` and is escaped."""
    import jinja2  # only when the first page is written: an idle coordinator does not need it

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
    scored = [agent for agent in run.agents if agent.acc]
    chart = run_charts.benefit(scored)
    if chart is None:
        raise StateError(f"{folder.folder}: no device has reported accuracies yet; try again after the run")
    devices = [f"{agent.id}: {_list_accuracies(agent)}" for agent in scored]
    summary = f"Accuracy of each device. {'; '.join(devices)}"
    axis = Axis(run_charts.ACCURACY, low=0.0, high=1.0)
    return picture([replace(chart, title=_title(run), summary=summary, value=axis)])


def _list_accuracies(agent: AgentFigures) -> str:
    """Return the accuracies that a device has reported, as text."""
    return ", ".join(f"acc.{scope} {agent.acc[scope]:.3f}" for scope in SCOPES if scope in agent.acc)


def _warm_start(record: object) -> str:
    """Return half a sentence on the warm start that a summary records; empty where there was none."""
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
    # 1. What the devices gain, which is what most readers look for.
    compared = run_charts.gains(run.agents)
    if compared:
        mean_gain = fmean(gain for gain, _ in compared)
        kind = run_charts.classify_mean(run.agents)
        note = f"percentage points, personal over alone; mean over {counted(len(compared), member)}"
        if kind is Gain.WITHIN:
            note += "; within noise"
        yield "gain", points(mean_gain), note, _GAIN_STYLES[kind]
    # 2. The accuracies that the gain is the difference of, and that of the shared model.
    for scope, (name, description) in _CARDS.items():
        mean = run.final_mean(scope)
        if mean is None:
            continue
        scored = [agent for agent in run.agents if scope in agent.acc]
        over = "mean over agents, last round"
        if scored:
            over = f"mean over {counted(len(scored), member)}"
        yield name, percent(mean), f"{description} (acc.{scope}); {over}", scope
    if run.proxy:
        last = run.proxy[-1]
        note = f"the shared model after round {last.round}, on {_count(last.samples)} samples of the coordinator"
        yield "acc.proxy", percent(last.acc), f"{note}, by {last.by}", "plain"
    # 3. What it cost.
    totals = {"from agents": run.total("bytes_up"), "to agents": run.total("bytes_down")}
    for name, total in totals.items():
        if total is not None:
            yield name, megabytes(total), "payload of the whole run", ""


_TORCH_LOADED = {True: "loaded", False: "no", None: "–"}


def _agent_row(agent: AgentFigures) -> tuple[str, ...]:
    """Return the row of an agent in the table of agents, with a cell for each of `_AGENT_COLUMNS`."""
    memory = "–"
    if agent.rss_mb is not None:
        memory = f"{agent.rss_mb:.0f} MB"
    return (
        agent.id,
        agent.tier or "–",
        _count(agent.samples),
        percent(agent.acc.get("local")),
        agent.local_model or "–",
        percent(agent.acc.get("global")),
        percent(agent.acc.get("personal")),
        agent.head or "–",
        memory,
        _TORCH_LOADED[agent.torch_loaded],
        megabytes(agent.bytes_up),
        megabytes(agent.bytes_down),
        "; ".join(agent.notes),
    )


def _incidents(rounds: Sequence[RoundFigures]) -> Iterator[tuple[int, str, str]]:
    """Yield round, agent and reason of each update that is not in its round's aggregate, or is not as it was sent."""
    for figures in rounds:
        for agent in figures.missing:
            yield figures.round, agent, "no update before the round closed"
        for agent, reason in figures.rejected:
            yield figures.round, agent, f"rejected: {reason}"
        for agent, reason in figures.left_out:
            yield figures.round, agent, f"left out: {reason}"
        for agent, note in figures.bounded.items():
            yield figures.round, agent, note


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
    """Return a number as text, its thousands apart; a dash where it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}".replace(",", " ")


def _text(value: object) -> str:
    """Return a value as text; a dash for None."""
    if value is None:
        return "–"
    return str(value)


def _pretty(value: object) -> str:
    """Return a text as it is, and anything else as indented JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=1, sort_keys=True, default=str)
