"""``headwater run``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_agent.bundle.starter import bundle_path
from edge_agent.core.children import stop_on_signals
from edge_agent.core.errors import StartStopped, UsageError
from edge_agent.core.registry import PinnedFile, is_reference

from ..config import CoordinatorConfig, RunConfig, load_config
from ..text import counted, listed
from ..views.runs import replay
from .options import INTERRUPTED, Config, Given, Json, Logs, State, Verbose, flag, from_model
from .output import console, present, set_up_logging, table

if TYPE_CHECKING:
    from ..rounds.request import Request
    from ..runs.result_notes import ResultWarning
    from ..runs.run_summary import RunSummary
    from ..service.coordinator import Coordinator
    from ..views.runs import RunRecord
    from .follow import Invocation


Paper = Annotated[
    bool,
    typer.Option(
        "--paper", help="Parameters have the paper's values where our defaults differ; 'headwater methods NAME' shows."
    ),
]
PaperFor = Annotated[
    str | None,
    typer.Option(
        "--paper-for",
        metavar="SET",
        help="As --paper, with the values for this data set, such as pacs, where those of several differ.",
    ),
]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="RUN", help="Resume this run instead of starting a new one.")
]
NoWeights = Annotated[bool, typer.Option("--no-weights", help="Start without the configuration's run.weights.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="Begin with the encoder of an earlier run, of a bundle file, or of starter, the one for pictures that "
        "comes with this package; the run has its network and inputs, and the classes of the configuration.",
    ),
]
NoWarmStart = Annotated[bool, typer.Option("--no-warm-start", help="Start without the configuration's [warm_start].")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Only put the run into the queue, which needs no broker, and return.")
]


@from_model(
    RunConfig,
    help={
        "method": "Method, or FILE.py:CLASS, which agents need, too; default: run.method of the configuration.",
        "rounds": "Number of rounds; default: run.rounds.",
        "seed": "Seed of weights, cohorts and agents; default: run.seed.",
        "keep_every": "Keep the states of every so many rounds, for 'headwater analyze'; default: run.keep_every.",
        "keep_updates": "Keep updates and checkpoints of all rounds, for 'headwater audit'; default: run.keep_updates.",
        "weights": "The encoder's first weights: a safetensors file, a bundle of the same encoder, or starter; "
        "default: run.weights.",
        "peft": "What of the encoder learns and travels: lora, bn or last_block; default: run.peft.",
    },
    bounds=True,
)
def run(
    given: Given,
    config: Config = None,
    state: State = None,
    paper: Paper = False,
    paper_for: PaperFor = None,
    resume: Resume = None,
    source: From = None,
    no_weights: NoWeights = False,
    no_warm_start: NoWarmStart = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    verbose: Verbose = False,
    log_format: Logs = "text",
) -> None:
    """Start a run and follow it to its end.

    Where 'headwater serve' works on the same state folder, it does the run; else this command serves the federation
    itself until the run is over. Runs are done in the order in which they were requested; an unfinished one goes first.
    Ctrl-C stops following, never the run of a serving coordinator. A run of this command itself stays in the queue:
    'headwater run --resume RUN' or 'headwater serve' continues it, 'headwater cancel RUN' ends it.

    Example: headwater run -c coordinator.toml --from starter --method repper --rounds 5
    """
    from ..state.store import StateFolder
    from .follow import Invocation, result_of

    settings = load_config(config, state)
    settings = settings.model_copy(update={"warm_start": None}) if no_warm_start else settings
    # What the run trains and begins with goes into the settings; what is left of the options goes into the request.
    peft: dict[str, Any] = {name: given.pop(name) for name in ("peft", "peft_params") if name in given}
    weights = given.pop("weights", None)
    settings = _with_peft(settings, peft)
    settings = _with_weights(settings, weights, source, no_weights=no_weights)
    set_up_logging(verbose=verbose, quiet=True, log_format=log_format)
    if source is not None and resume is None:
        settings = _begin_from(source, settings)
    invocation = Invocation(config, state)
    target: Request | str
    if resume is None:
        target = request_for(settings, **given, paper=paper, paper_for=paper_for)
        if no_wait:
            _put_into_queue(settings, target, invocation, as_json=as_json)
            return
    else:
        switches = {
            "paper": paper,
            "paper_for": paper_for,
            "no_wait": no_wait,
            "no_weights": no_weights,
            "no_warm_start": no_warm_start,
        }
        options = [*given, *peft, *(["weights"] if weights else []), *(["from"] if source else [])]
        options += [name for name, is_set in switches.items() if is_set]
        _check_resumable(settings, resume, options)
        target = resume
    record = _follow(settings, target, invocation)
    summary = result_of(StateFolder(settings.state), record)
    from ..runs.run_summary import RunSummary

    shown = RunSummary.from_json(summary)
    parts = [*result_parts(shown), *next_steps(settings.state, shown, invocation)]
    present(summary, parts, as_json=as_json)


def _with_peft(settings: CoordinatorConfig, peft: dict[str, Any]) -> CoordinatorConfig:
    """Return the settings with the part of the encoder that the command line lets learn.

    Parameters of peft in the configuration belong to the choice there, and go with it.
    """
    if "peft" in peft:
        peft = {"peft_params": {}, **peft}
    return settings.model_copy(update={"run": settings.run.model_copy(update=peft)})


def _with_weights(
    settings: CoordinatorConfig, weights: Path | None, source: str | None, *, no_weights: bool
) -> CoordinatorConfig:
    """Return the settings with what the command line says that the encoder begins with, a source of --from aside.

    Raises:
        UsageError: It says so twice.
    """
    beginnings = {"--weights": weights is not None, "--no-weights": no_weights, "--from": source is not None}
    named = [name for name, is_named in beginnings.items() if is_named]
    if len(named) > 1:
        raise UsageError(
            f"{' and '.join(named)} contradict each other: each says what the encoder begins with; give one"
        )
    if weights is None and not no_weights:
        return settings
    path = None if weights is None else bundle_path(weights)
    return settings.model_copy(update={"run": settings.run.model_copy(update={"weights": path})})


def _check_resumable(settings: CoordinatorConfig, run: str, options: Sequence[str]) -> None:
    """Require that a run can be resumed, with none of the options that belong to a new one.

    Raises:
        UsageError: The run has ended, or an option was given.
    """
    from ..state.store import StateFolder

    if options:
        leave_out = ", ".join(map(flag, options))
        raise UsageError(f"--resume {run} keeps the settings of the run; leave out {leave_out}")
    with StateFolder(settings.state).look() as folder:
        record = replay(folder.journal, run)
    if record.is_over:
        raise UsageError(f"{run} is {record.status} already; ask for another run without --resume")


def next_steps(state: Path, summary: RunSummary, invocation: Invocation) -> Iterator[str]:
    """Yield the commands that bring a run's bundle to devices, where it does not go to them by itself."""
    from ..fleet.release_commands import releases_of_run
    from ..state.store import StateFolder

    bundle = summary.bundle
    if bundle is None or summary.run_id is None:
        return
    with StateFolder(state).look() as folder:
        if any(row.release.bundle_id == bundle.bundle_id for row in releases_of_run(folder, summary.run_id)):
            return
    from ..state.release_keys import ReleaseKeys

    create = invocation.command(f"release create {summary.run_id}")
    keys = ReleaseKeys(state)
    if keys.sign_alone:
        yield f"next: {create} releases it to devices"
        return
    who = keys.newest().roles["targets"]
    sign = f"'headwater keys sign {bundle.path} --key FILE'"
    yield f"next: {who.threshold} of {len(who.keyids)} people sign it ({sign}), then {create} releases it to devices"


def _put_into_queue(settings: CoordinatorConfig, request: Request, invocation: Invocation, *, as_json: bool) -> None:
    """Request the run in the journal, which is durable, and say which command will do it."""
    from ..state.store import StateFolder
    from .follow import ahead_of, behind, is_serving

    serving = is_serving(settings.state)
    if serving:
        _note_other_settings(settings)
    with StateFolder(settings.state).look(create=True) as folder:
        run = folder.journal.request_run(request.to_fact())
        ahead = ahead_of(folder.journal, run)
        first = behind(folder.journal, run, invocation)
    takers = f"{invocation.command('serve')} or {invocation.command(f'run --resume {run}')}"
    taker = "the coordinator at work here does it" if serving else f"no coordinator is serving; {takers} does it"
    shown = [f"{run} is in the queue: {taker}", *([first] if first else [])]
    present({"run_id": run, "serving": serving, "queued_behind": ahead}, shown, as_json=as_json)


def _note_other_settings(settings: CoordinatorConfig) -> None:
    """Say where this command's configuration is not the one that the coordinator at work has read at its start."""
    from ..state.status_file import read_status

    known = read_status(settings.state).settings
    own = settings.digests()
    changed = [f"[{name}]" for name, digest in own.items() if known is not None and known.get(name) != digest]
    if changed:
        console.print(
            f"note: the coordinator at work began with other values of {listed(changed)}, and the run goes by those; "
            "restart 'headwater serve' to change them",
            soft_wrap=True,
        )


def _step(service: Coordinator) -> None:
    """Let a coordinator in this process do what is due, and wait for what comes next."""
    service.step(service.idle_s())


def _follow(settings: CoordinatorConfig, run: Request | str, invocation: Invocation) -> RunRecord:
    """Return the record of a new run, or of one to resume, at its end; a signal ends the command with `INTERRUPTED`."""
    from ..processes.compute import InlineCompute
    from ..rounds.request import Request
    from ..runs.result_notes import describe_progress
    from ..service.app import coordinator
    from ..state.store import StateFolder
    from .follow import behind, follow, is_serving

    serving = is_serving(settings.state)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        step = None
        if serving:
            _note_other_settings(settings)
            folder = stack.enter_context(StateFolder(settings.state).look())
        else:  # this process is the coordinator, for this run
            compute = InlineCompute()  # the request has loaded torch
            try:
                service = stack.enter_context(coordinator(settings, stop, compute))
            except StartStopped:
                console.print("stopped; nothing was started")
                raise typer.Exit(INTERRUPTED) from None
            folder = service.state
            step = functools.partial(_step, service)
        if stop.is_set():
            raise typer.Exit(INTERRUPTED)
        run = folder.journal.request_run(run.to_fact()) if isinstance(run, Request) else run
        if first := behind(folder.journal, run, invocation):
            console.print(first, soft_wrap=True)
        record = follow(folder, run, step, stop)
    if record.is_over:
        return record
    cancels = invocation.command(f"cancel {run}")
    line = f"{run} continues without this command; {invocation.command('status')} shows its state, {cancels} ends it"
    if not serving:
        resumes = f"{invocation.command(f'run --resume {run}')} or {invocation.command('serve')}"
        line = f"{run} {describe_progress(record)} and stays in the queue; {resumes} resumes it, {cancels} removes it"
    console.print(line, soft_wrap=True)
    raise typer.Exit(INTERRUPTED)


def _begin_from(source: str, settings: CoordinatorConfig) -> CoordinatorConfig:
    """Return the configuration with the encoder that ``--from`` names, and print in what it replaces the settings."""
    from .start_from import find_start

    start = find_start(source, settings.state)
    changes = start.differences(settings.task)
    if changes:
        console.print(f"note: as in {source}, this run has {changes}", soft_wrap=True)
    return start.configure(settings)


def request_for(
    settings: CoordinatorConfig,
    method: str | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    params: dict[str, Any] | None = None,
    keep_every: int | None = None,
    keep_updates: bool | None = None,
    *,
    paper: bool = False,
    paper_for: str | None = None,
) -> Request:
    """Return the run to request: the configuration's defaults under what the command line gives, all of it checked.

    ``paper``: below both, the paper's values of the method's parameters; ``paper_for``: those for that data set.

    Raises:
        UsageError: an unknown method or encoder, parameters that they do not have, data that are not there; all
            mistakes are listed.
    """
    from ..rounds.request import Request, Weights
    from ..service.preflight import checked_method, fresh_on_devices, overlaps
    from .start_from import notes_on_frozen_encoder, notes_on_weights

    defaults = settings.run
    name = method or defaults.method
    base = defaults.params if name == defaults.method else {}
    method_file = ""
    if is_reference(name):
        method_file = str(PinnedFile.of("method", name))
        name = method_file
    made = checked_method(settings, name, {**base, **(params or {})}, paper=paper, paper_for=paper_for)
    for overlap in overlaps(settings):
        console.print(f"note: {overlap}", soft_wrap=True)
    if defaults.weights is not None and (staying := fresh_on_devices(made, settings.run_task)):
        note = f"{counted(len(staying), 'tensor')} that stay on devices begin fresh there, not from {defaults.weights}"
        console.print(f"note: {note}: {listed(staying)}", soft_wrap=True)
    if defaults.weights is not None:
        for note in notes_on_weights(defaults.weights, settings.run_task):
            console.print(f"note: {note}", soft_wrap=True)
    has_weights = defaults.weights is not None or settings.warm_start is not None
    asked_rounds = rounds if rounds is not None else defaults.rounds
    for note in notes_on_frozen_encoder(made, asked_rounds, began_trained=has_weights):
        console.print(f"note: {note}", soft_wrap=True)
    return Request(
        method=made.name,
        method_file=method_file,
        params=made.params.model_dump(mode="json"),
        rounds=asked_rounds,
        seed=seed if seed is not None else defaults.seed,
        task=settings.run_task,
        keep_every=defaults.keep_every if keep_every is None else keep_every,
        keep_updates=defaults.keep_updates if keep_updates is None else keep_updates,
        warm_start=settings.warm_start,
        weights=None if defaults.weights is None else Weights.of(defaults.weights),
    )


def result_parts(summary: RunSummary) -> Iterator[Table | str]:
    """Yield a run's result for people: a table of the devices, then what else has to be known."""
    from ..runs.result_notes import describe_warnings

    exported = f"no bundle ({summary.bundle_why_not})"
    if summary.bundle is not None:
        exported = f"bundle {summary.bundle.bundle_id[:12]} in {summary.bundle.path}"
    yield agents_table(summary)
    yield from footnotes(summary)
    # Clients of one class have a footnote each; why an agent was left out of the last round is said there, too.
    explained = summary.without_update
    warnings = []
    for warning in summary.warnings:
        is_explained = warning.kind == "left_out" and explained.issuperset(warning.clients)
        if warning.kind != "one_class" and not is_explained:
            warnings.append(warning)
    yield from (f"warning: {line}" for line in describe_warnings(_without_known_reasons(warnings, summary)))
    yield from (f"to try next: {next_step.message}" for next_step in summary.next_steps)
    yield from summary.metrics.lines()
    yield f"{summary.seconds:.1f} s, {exported}"


def _without_known_reasons(warnings: Sequence[ResultWarning], summary: RunSummary) -> list[ResultWarning]:
    """Return the warnings; those on agents whose failure is a footnote of the table do not repeat its reason."""
    explained = {*summary.faults, *summary.left_out}
    result = []
    for warning in warnings:
        short = warning.without_reason
        if short and explained.issuperset(warning.clients):
            result.append(replace(warning, message=f"{short} (the reason is above)"))
        else:
            result.append(warning)
    return result


def agents_table(summary: RunSummary) -> Table:
    """Return the figures of each device; narrow enough for 80 columns."""
    scopes = ("local", "global", "personal")
    columns = ("agent", "tier", "head", "samples", *(f"acc.\n{scope}" for scope in scopes))
    rows = [
        (
            f"{agent.id} *" if agent.notes else agent.id,
            agent.tier,
            agent.head,
            agent.samples,
            *(agent.acc[scope] for scope in scopes),
            None if agent.rss_mb is None else f"{agent.rss_mb:.0f}",
            f"{agent.bytes_up / 1e6:.1f}",
            f"{agent.bytes_down / 1e6:.1f}",
        )
        for agent in summary.agents
    ]
    title = f"{summary.run_id}: {summary.method}, {counted(summary.rounds, 'round')}"
    return table(title, (*columns, "RSS\nMB", "up\nMB", "down\nMB"), rows, left=3)


def footnotes(summary: RunSummary) -> Iterator[str]:
    """Yield which models ``acc.local`` is of, then notes on devices and their failures, one line each."""
    from ..runs.result_notes import local_models

    models = local_models(summary.agents)
    if models:
        yield f"acc.local, alone and without the federation: {models}"
    for agent in summary.agents:
        yield from (f"{agent.id} *: {note}" for note in agent.notes)
    explained = summary.without_update
    for name, reason in summary.faults.items():
        # The line about the last round's updates, or the one about the rounds below, gives the same reason.
        left_out = summary.left_out.get(name)
        is_said_below = left_out is not None and reason == left_out.reason
        if name not in explained and not is_said_below:
            yield f"{name} failed: {reason}"
    if summary.incomplete:
        yield f"incomplete: {summary.incomplete}"
    if summary.stopped:
        yield f"ended early: {summary.stopped}"
    if summary.privacy is not None:
        yield summary.privacy.text
    yield from _notes_on_rounds(summary)


def _notes_on_rounds(summary: RunSummary) -> Iterator[str]:
    """Yield which rounds left an agent out, but for the last round, and in which ones its update was bounded."""
    for name, left_out in summary.left_out.items():
        if name in summary.without_update:
            continue
        rounds = [str(number) for number in left_out.rounds]
        yield f"{name} was left out of {counted(len(rounds), 'round')} ({listed(rounds)}): {left_out.reason}"
    for name, bounded in summary.bounded.items():
        rounds = [str(number) for number in bounded.rounds]
        number = counted(len(rounds), "round")
        yield f"{name}: its updates were bounded in {number} ({listed(rounds)}); last: {bounded.last}"
