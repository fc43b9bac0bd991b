"""``headwater run``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_agent.errors import UsageError

from ..config import CoordinatorConfig, RunConfig, load_config
from ..report.figures import notes_of
from ..runs.request import Request, Weights
from ..runs.result_notes import lines, metric_lines
from ..service.app import coordinator, stop_on_signals
from ..service.preflight import checked_method, fresh_on_devices, overlaps
from ..state.journal import RunRecord
from ..state.store import StateFolder
from ..text import counted, listed
from .follow import Place, ahead_of, behind, follow, is_serving, result_of, standing
from .options import INTERRUPTED, Config, Given, Json, State, Verbose, flag, from_model
from .output import console, print_json, set_up_logging, show, table

Paper = Annotated[
    bool,
    typer.Option(
        "--paper", help="Parameters have the paper's values where our defaults differ; 'headwater methods NAME' shows."
    ),
]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="RUN", help="Resume this run instead of starting a new one.")
]
NoWeights = Annotated[bool, typer.Option("--no-weights", help="Start without the configuration's run.weights.")]
NoWarmStart = Annotated[bool, typer.Option("--no-warm-start", help="Start without the configuration's [warm_start].")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Only put the run into the queue, which needs no broker, and return.")
]


@from_model(
    RunConfig,
    help={
        "method": "Method; default: run.method of the configuration.",
        "rounds": "Number of rounds; default: run.rounds.",
        "seed": "Seed of weights, cohorts and agents; default: run.seed.",
        "keep_every": "Keep the states of every so many rounds, for 'headwater analyze'; default: run.keep_every.",
        "weights": "Safetensors file with the encoder's first weights; default: run.weights.",
    },
    bounds=True,
)
def run(
    given: Given,
    config: Config = None,
    state: State = None,
    paper: Paper = False,
    resume: Resume = None,
    no_weights: NoWeights = False,
    no_warm_start: NoWarmStart = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start a run and follow it to its end.

    Where 'headwater serve' works on the same state folder, it does the run; else this command serves the federation
    itself until the run is over. Runs are done in the order in which they were requested; an unfinished one goes first.
    Ctrl-C stops following, never the run of a serving coordinator. A run of this command itself stays in the queue:
    'headwater run --resume RUN' or 'headwater serve' continues it, 'headwater cancel RUN' ends it.

    Example: headwater run -c coordinator.toml --method repper --rounds 5
    """
    settings = load_config(config, state)
    settings = settings.model_copy(update={"warm_start": None}) if no_warm_start else settings
    settings = _with_weights(settings, given.get("weights"), fresh=no_weights)
    set_up_logging(verbose=verbose, quiet=True)
    if resume is not None:
        switches = {"paper": paper, "no_wait": no_wait, "no_weights": no_weights, "no_warm_start": no_warm_start}
        _check_resumed(
            settings, resume, [flag(name) for name in (*given, *(name for name, is_set in switches.items() if is_set))]
        )
        request = None
    else:
        request = request_for(
            settings,
            given.get("method"),
            given.get("rounds"),
            given.get("seed"),
            given.get("params", {}),
            given.get("keep_every"),
            paper=paper,
        )
    if request is not None and no_wait:
        _put_into_queue(settings, request, Place(config, state), as_json=as_json)
        return
    record = _follow(settings, request, resume, Place(config, state))
    tell(result_of(StateFolder(settings.state), record), as_json=as_json)


def _with_weights(settings: CoordinatorConfig, weights: Path | None, *, fresh: bool) -> CoordinatorConfig:
    if fresh and weights is not None:
        raise UsageError(f"--weights {weights} and --no-weights contradict each other; leave one out")
    if weights is None and not fresh:
        return settings
    return settings.model_copy(update={"run": settings.run.model_copy(update={"weights": weights})})


def _check_resumed(settings: CoordinatorConfig, run: str, wishes: list[str]) -> None:
    if wishes:
        raise UsageError(f"--resume {run} keeps the settings of the run; leave out {', '.join(wishes)}")
    with StateFolder(settings.state).look() as folder:
        record = folder.journal.replay(run)
    if record.is_over:
        raise UsageError(f"{run} is {record.status} already; ask for another run without --resume")


def _put_into_queue(settings: CoordinatorConfig, request: Request, place: Place, *, as_json: bool) -> None:
    """Ask for the run in the journal, which lasts, and say who will do it."""
    serving = is_serving(settings.state)
    with StateFolder(settings.state).look(create=True) as folder:
        run = folder.journal.request_run(request.body())
        ahead, first = ahead_of(folder.journal, run), behind(folder.journal, run, place)
    if as_json:
        print_json({"run_id": run, "serving": serving, "queued_behind": ahead})
        return
    takers = f"{place.command('serve')} or {place.command(f'run --resume {run}')}"
    taker = "the coordinator at work here does it" if serving else f"no coordinator is serving; {takers} does it"
    show(f"{run} is in the queue: {taker}", *([first] if first else []))


def _follow(settings: CoordinatorConfig, request: Request | None, resume: str | None, place: Place) -> RunRecord:
    """The run's end; leaves the command with `INTERRUPTED` when a signal comes first."""
    serving = is_serving(settings.state)
    with stop_on_signals() as stop, _at_work(settings, serving=serving) as (folder, step):
        if stop.is_set():
            raise typer.Exit(INTERRUPTED)
        run = resume if request is None else folder.journal.request_run(request.body())
        if first := behind(folder.journal, run or "", place):
            console.print(first, soft_wrap=True)
        record = follow(folder, run or "", step, stop)
    if record.is_over:
        return record
    console.print(_interrupted(record, place, serving=serving), soft_wrap=True)
    raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _at_work(
    settings: CoordinatorConfig, *, serving: bool
) -> Iterator[tuple[StateFolder, Callable[[], object] | None]]:
    """The state folder, and what makes the run go on where this process is the coordinator itself."""
    if serving:
        with StateFolder(settings.state).look() as folder:
            yield folder, None
    else:
        with coordinator(settings) as service:
            yield service.state, lambda: service.step(service.idle_s())


def _interrupted(record: RunRecord, place: Place, *, serving: bool) -> str:
    run, cancels = record.run, place.command(f"cancel {record.run}")
    if serving:
        return f"{run} continues without this command; {place.command('status')} shows its state, {cancels} ends it"
    resumes = f"{place.command(f'run --resume {run}')} or {place.command('serve')}"
    return f"{run} {standing(record)} and stays in the queue; {resumes} resumes it, {cancels} removes it"


def request_for(
    settings: CoordinatorConfig,
    method: str | None,
    rounds: int | None,
    seed: int | None,
    params: dict[str, Any],
    keep_every: int | None = None,
    *,
    paper: bool = False,
) -> Request:
    """What is asked for: the file's defaults, with the command line's wishes on top; checked before anybody works.

    ``paper``: below both, the paper's values of the method's parameters.

    Raises:
        UsageError: an unknown method or encoder, parameters that they do not have, data that are not there; all
            mistakes are told at once.
    """
    defaults = settings.run
    name = method or defaults.method
    base = defaults.params if name == defaults.method else {}
    made = checked_method(settings, name, {**base, **params}, paper=paper)
    for overlap in overlaps(settings):
        console.print(f"note: {overlap}", soft_wrap=True)
    if defaults.weights is not None and (staying := fresh_on_devices(made, settings.task)):
        told = f"{counted(len(staying), 'tensor')} that stay on devices begin fresh there, not from {defaults.weights}"
        console.print(f"note: {told}: {listed(staying)}", soft_wrap=True)
    return Request(
        method=name,
        params=made.params.model_dump(mode="json"),
        rounds=rounds if rounds is not None else defaults.rounds,
        seed=seed if seed is not None else defaults.seed,
        task=settings.task,
        keep_every=defaults.keep_every if keep_every is None else keep_every,
        warm_start=settings.warm_start,
        weights=None if defaults.weights is None else Weights.of(defaults.weights),
    )


def tell(summary: dict[str, Any], *, as_json: bool) -> None:
    """A run's result: one JSON object, or a table for people."""
    if as_json:
        print_json(summary)
        return
    bundle = summary.get("bundle")
    why_not = summary.get("bundle_why_not", "not exported")
    made = f"bundle {bundle['bundle_id'][:12]} in {bundle['path']}" if bundle else f"no bundle ({why_not})"
    took = f"{summary['seconds']:.1f} s, {made}"
    # Clients of one class have a footnote each.
    warned = [one for one in summary.get("warnings", []) if one["kind"] != "one_class"]
    warnings = (f"warning: {line}" for line in lines(warned))
    show(agents_table(summary), *footnotes(summary), *warnings, *metric_lines(summary), took)


def agents_table(summary: dict[str, Any]) -> Table:
    """What each device got; narrow enough for 80 columns."""
    scopes = ("local", "global", "personal")
    columns = (
        "agent",
        "tier",
        "head",
        "samples",
        *(f"acc.\n{scope}" for scope in scopes),
        "RSS\nMB",
        "up\nMB",
        "down\nMB",
    )
    rows = [
        (
            f"{a['id']} *" if notes_of(a) else a["id"],
            *(a[key] for key in ("tier", "head", "samples")),
            *(a["acc"][scope] for scope in scopes),
            f"{a['rss_mb']:.0f}",
            *(f"{a[key] / 1e6:.1f}" for key in ("bytes_up", "bytes_down")),
        )
        for a in summary.get("agents", [])
    ]
    title = f"{summary.get('run_id')}: {summary.get('method')}, {counted(summary.get('rounds', 0), 'round')}"
    return table(title, columns, rows, left=3)


def footnotes(summary: dict[str, Any]) -> Iterator[str]:
    """What has to be known about devices, and what went wrong on them, one line each."""
    yield from (f"{a['id']} *: {note}" for a in summary.get("agents", []) for note in notes_of(a))
    yield from (f"{agent} failed: {reason}" for agent, reason in summary.get("faults", {}).items())
    for agent, one in summary.get("left_out", {}).items():
        rounds = [str(number) for number in one["rounds"]]
        yield f"{agent} was left out of {counted(len(rounds), 'round')} ({listed(rounds)}): {one['reason']}"
