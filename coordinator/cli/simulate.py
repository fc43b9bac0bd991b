"""``headwater simulate``."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent import methods
from edge_agent.bundle.starter import bundle_path
from edge_agent.core.config import parse
from edge_agent.core.errors import UsageError
from edge_agent.core.registry import absolute
from edge_agent.core.storage import check_writable, read_toml

from ..api import Watching, finish, read_finished
from ..loggers.choice import absolute_choice
from ..loggers.delivery import LogOutcome
from ..loggers.run_logs import RunLogs
from ..simulation.plan import HOW_NOT_WHAT, Plan, is_saved_partition
from ..state.store import StateFolder
from ..text import about_time, counted, encoder_named
from ..views.runs import replay
from .methods import said_by
from .options import INTERRUPTED, Given, Json, Verbose, from_model
from .output import console, is_live, present, set_up_logging, sigterm_as_ctrl_c, table
from .reading import shown_reading
from .start_from import bundle_start, notes_on_frozen_encoder

if TYPE_CHECKING:
    from rich.table import Table

    from edge_agent.wire.messages.down import Job

    from ..simulation.figures import RoundFigures, Scores, Summary
    from ..simulation.run import Simulation

Fraction = Annotated[
    str | None,
    typer.Option("--fraction", help="Share of the clients in a round, or 0.1:1.0 = drawn for each round; default: 1."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; default: named after the settings.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="Begin with the encoder of a bundle file, or of starter, the one for pictures that comes with this "
        "package; the simulation has its network and inputs.",
    ),
]
_NO_SETTINGS = frozenset({"out", "resume", "config", "json", "verbose"})
"""Options that are not settings of a simulation: they are given on the command line, never in a file."""

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume the run in --out with the settings saved there; a larger --rounds continues a finished one.",
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file with these settings; options override it.")
]


@from_model(Plan, without=("folder", "starts", "fraction", "fraction_max"))
def simulate(
    given: Given,
    source: From = None,
    fraction: Fraction = None,
    out: Out = None,
    resume: Resume = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a method on many clients on this machine: the coordinator's own rounds, the devices' own method files.

    On a CPU the same seed gives the same bits on every engine but stacked, with any number of workers. Data sources are
    those of devices. Accuracies of a round are those of the model that clients received, before they trained.
    Ctrl-C or SIGTERM stops a run so that --resume can continue it (exit code 130).

    Example: headwater simulate -m fedper -d digits --partition domains --set local_epochs=1 --rounds 5 --out sim
    """
    set_up_logging(verbose=verbose, quiet=True)
    given |= shares(fraction)
    if source is not None:
        if resume:
            raise UsageError(f"--from {source}: a resumed simulation has an encoder already; leave it out")
        given |= bundle_start(source).options(given)
    if "weights" in given:
        given["weights"] = bundle_path(given["weights"]).absolute()
    given |= {name: absolute(given[name]) for name in ("method", "encoder") if name in given}
    if "data" in given:
        given["data"] = tuple(map(absolute, given["data"]))
    if "log" in given:
        given["log"] = tuple(map(absolute_choice, given["log"]))
    _make_files_absolute(given)
    plan, folder = _resumed(given, config, out) if resume else _planned(given, config, out)
    # A method in a file of the user's is loaded by the run itself; until then nothing is known of it.
    if plan.method_name in methods.names():
        method = methods.create(plan.method_name)
        for note in notes_on_frozen_encoder(method, plan.rounds, began_trained=plan.weights is not None):
            console.print(f"note: {note}", soft_wrap=True)
    try:
        with sigterm_as_ctrl_c():
            result = run_plan(plan, folder, resume=resume)
    except KeyboardInterrupt:
        console.print(_how_to_resume(folder), soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    present(result, [rounds_table(result), *reading(result)], as_json=as_json)


def sources(given: Any) -> Any:
    """Return the data sources that were given; a file may hold one as text. Other values stay, to be rejected later.

    Raises:
        UsageError: none was given.
    """
    if not given:
        raise UsageError("no data: give a source, for example --data digits, or --data idx:FOLDER")
    return (given,) if isinstance(given, str) else given


def shares(text: str | None) -> dict[str, float]:
    """Return fields of a plan from ``0.1`` or ``0.1:1.0``.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return {}
    try:
        least, *most = (float(word) for word in text.split(":", 1))
    except ValueError as error:
        raise UsageError(f"--fraction '{text}': expected a share such as 0.1, or two of them: 0.1:1.0") from error
    return {"fraction": least, **({"fraction_max": most[0]} if most else {})}


def _planned(given: dict[str, Any], config: Path | None, out: Path | None) -> tuple[Plan, Path]:
    """Return the plan and the folder of a new simulation; options override the values of the file."""
    from ..simulation.setup import read_plan

    # 1. The values of the file, whose paths are relative to its folder.
    raw: dict[str, Any] = {"folder": str(Path.cwd())}
    if config is not None:
        folder = config.absolute().parent
        settings = read_toml(config)
        _refuse_options(settings, config)
        source = settings.pop("from", None)
        raw = {"folder": str(folder), **settings}
        raw |= _from_folder(raw, folder)
        if "log" in raw:
            raw["log"] = _logs_in(raw["log"], folder)
        # An encoder from the command line (--from, --weights) replaces the one that the file names.
        if source is not None and "weights" not in given:
            raw |= bundle_start(_source_in(source, folder)).options({**raw, **given})
        if "data" in given:
            raw["folder"] = str(Path.cwd())
    # 2. The options override them; tables, such as parameters, are merged.
    for name, value in given.items():
        if isinstance(value, dict) and name in raw:  # a value in the file that is no table stays, to be reported
            raw[name] = {**raw[name], **value} if isinstance(raw[name], dict) else raw[name]
        else:
            raw[name] = value
    raw["data"] = sources(raw.get("data"))
    plan = parse(Plan, raw, where=str(config or "the simulation"))
    # 3. The folder, which no other simulation has.
    folder = out or Path(f"simulation-{plan.method_name}-{Path(plan.partition).stem}-seed{plan.seed}")
    if read_plan(folder) is not None:
        raise UsageError(f"{folder} holds a simulation; resume it with --resume, or choose another folder with --out")
    check_writable(folder)
    return plan, folder


def _make_files_absolute(given: dict[str, Any]) -> None:
    """Replace the paths of a partition and of a table of devices, which count from the current folder."""
    for name, suffix in (("speeds", ".csv"), ("partition", ".json")):
        if str(given.get(name, "")).endswith(suffix):
            given[name] = str(Path(given[name]).expanduser().absolute())


def _refuse_options(settings: Mapping[str, Any], config: Path) -> None:
    """Require that a file holds settings of a simulation alone, and no options that say where it goes and how it runs.

    Raises:
        UsageError: The file holds such an option; all of them are named.
    """
    options = sorted(_NO_SETTINGS & settings.keys())
    if options:
        flags = ", ".join(f"--{name}" for name in options)
        raise UsageError(f"{config}: {', '.join(options)}: no setting of a file; give it on the command line ({flags})")


def _source_in(source: object, folder: Path) -> str:
    """Return the encoder that ``from`` in a file names: that of the package by its name, or a path from ``folder``."""
    name = str(source)
    is_name = bundle_path(name) != Path(name)
    if is_name:
        return name
    return str(folder / Path(name).expanduser())


def _from_folder(raw: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the paths among the values of a file, which are relative to the file's folder."""
    texts = {name: value for name, value in raw.items() if isinstance(value, str) and value}
    paths = dict[str, str]()
    # 1. A method and an encoder are names, or files of Python code.
    for name in ("method", "encoder"):
        if name in texts:
            paths[name] = absolute(texts[name], folder)
    # 2. Weights are a file, a run's folder, or the name of a bundle that comes with the package.
    if "weights" in texts:
        paths["weights"] = str(folder / bundle_path(Path(texts["weights"]).expanduser()))
    # 3. The folder of the data is always a path; a partition only where it is a saved one, and not the name of a rule.
    if "folder" in texts:
        paths["folder"] = str(folder / Path(texts["folder"]).expanduser())
    if "partition" in texts and is_saved_partition(texts["partition"]):
        paths["partition"] = str(folder / Path(texts["partition"]).expanduser())
    return paths


def _logs_in(value: object, folder: Path) -> object:
    """Return the logs that a file names, one as text or several; their relative paths count from the file's folder."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):  # to be rejected later
        return value
    return [absolute_choice(name, folder) if isinstance(name, str) else name for name in names]


def _resumed(given: dict[str, Any], config: Path | None, out: Path | None) -> tuple[Plan, Path]:
    """Return the plan of the simulation in ``out``, with more rounds where those were given.

    Other options may differ from it only where they change no results.
    """
    from ..simulation.resuming import rounds_to_resume
    from ..simulation.setup import read_plan

    if out is None or config is not None:
        raise UsageError(
            "--resume resumes the simulation in a folder: name the folder with --out, and give no other options"
        )
    plan = read_plan(out)
    if plan is None:
        raise UsageError(f"{out} holds no simulation; start one without --resume")
    differing = []
    how = {}
    for name, value in given.items():
        saved = getattr(plan, name)
        is_path = name in {"partition", "weights"} and saved is not None
        if name == "rounds":
            how["rounds"] = rounds_to_resume(plan, value, out)
        elif name in HOW_NOT_WHAT or saved == value or (is_path and Path(saved).resolve() == Path(value).resolve()):
            continue
        else:
            differing.append(f"{name} is {saved}, {value} was given")
    if differing:
        raise UsageError(
            f"--resume keeps the settings of the run in {out}: {'; '.join(differing)}; leave out what differs"
        )
    how |= {name: value for name, value in given.items() if name in HOW_NOT_WHAT}
    return parse(Plan, {**plan.model_dump(exclude_unset=True), **how}, where="--resume"), out


def run_plan(plan: Plan, folder: Path, *, resume: bool, later_rounds: int = 0) -> Summary:
    """Simulate to the end, showing how far it is; all files of the result are in ``folder``.

    Args:
        plan: What is simulated.
        folder: Where the simulation is, or will be.
        resume: Whether a simulation in ``folder`` is continued; one that has finished as planned is read.
        later_rounds: Rounds of the simulations that follow this one; the time that is left counts them, too.

    Raises:
        HeadwaterError: it cannot be done, or failed.
        KeyboardInterrupt: it was stopped, and can be resumed.
    """
    from ..simulation.run import open_simulation
    from ..simulation.setup import PARTITION, Prepared

    # Before data are read: a log that cannot be used is refused at once.
    logs = RunLogs.open(plan.log, folder)
    finished = read_finished(plan, folder, Watching(logs=logs)) if resume else None
    if finished is not None:
        return finished
    with shown_reading():
        prepared = Prepared.of(plan, folder / PARTITION if resume else None).shared()
    with open_simulation(prepared, folder) as simulation, shown(simulation, later_rounds) as watch:
        return finish(simulation, folder, Watching(watch, logs=logs))


def _how_to_resume(folder: Path) -> str:
    from ..simulation.setup import read_plan

    plan = read_plan(folder)
    if plan is None:
        return "stopped before the run began; the same command begins it"
    with StateFolder(folder).look(create=True) as state:
        runs = state.journal.runs()
        closed = replay(state.journal, runs[0]).round if runs else 0
    where = f"stopped with {closed} of {counted(plan.rounds, 'round')} closed"
    return f"{where}, nothing is lost; resume with: headwater simulate --resume --out {shlex.quote(str(folder))}"


AT_THE_END = 0.25
"""What evaluating a client after the last round costs, measured in its training of a round."""


class _RunProgress:
    """Progress of a run, in trainings of a client; the final evaluation of a client counts `AT_THE_END`."""

    def __init__(self, simulation: Simulation, later_rounds: int = 0) -> None:
        self._simulation = simulation
        plan = simulation.prepared.plan
        clients = len(simulation.prepared.division.clients)
        share = (plan.fraction + (plan.fraction_max or plan.fraction)) / 2
        cohort = max(1, round(share * (clients - plan.new_clients)))
        self.rounds = plan.rounds
        self.total = plan.rounds * cohort + AT_THE_END * clients
        self._later = self.total * later_rounds / plan.rounds
        record = replay(simulation.state.journal, simulation.run)
        self._closed = record.round
        updates = len(record.open_round.updates) if record.open_round is not None else 0
        self._begun = self.done = float(record.round * cohort + updates)
        self._began_at = time.monotonic()

    def count(self, job: Job) -> RoundFigures | None:
        """Count one more job; returns the figures of the previous round when this job is the first of the next one."""
        self.done += 1.0 if job.purpose == "train" else AT_THE_END
        closed = job.round - 1 if job.purpose == "train" else self._closed_rounds()
        if closed <= self._closed:
            return None
        self._closed = closed
        from ..simulation.results import round_of

        simulation = self._simulation
        return round_of(simulation.state, simulation.run, closed, simulation.prepared.division)

    def _closed_rounds(self) -> int:
        """Return how many rounds are closed: a run that was asked to end early has fewer than planned."""
        return replay(self._simulation.state.journal, self._simulation.run).round

    def left_s(self) -> float:
        """Return an estimate of the seconds that the rest of this simulation takes."""
        return self._seconds_for(self.total - self.done)

    def time_left(self) -> str:
        """Return the time that the rest takes; with simulations that follow, that of all of them beside it."""
        text = f"about {about_time(self.left_s())} left"
        if not self._later:
            return text
        # Later simulations have other methods: their rounds are taken to cost what those of this one do.
        return f"{text}, {about_time(self._seconds_for(self.total - self.done + self._later))} with all that follow"

    def _seconds_for(self, trainings: float) -> float:
        """Return how long so many trainings take, if they take as long as those so far."""
        done = max(AT_THE_END, self.done - self._begun)
        return (time.monotonic() - self._began_at) / done * trainings


def _scores(figures: RoundFigures) -> str:
    result = [f"acc.{scope} {acc['clients_mean']:.3f}" for scope, acc in figures["acc"].items()]
    loss = [] if figures["loss"] is None else [f"loss {figures['loss']:.3f}"]
    return ", ".join([*result, *loss])


@contextlib.contextmanager
def shown(simulation: Simulation, later_rounds: int = 0) -> Iterator[Callable[[Job], None]]:
    """Yield what to call after each job while the context lasts: it prints a line a round, or updates a bar."""
    run_progress = _RunProgress(simulation, later_rounds)

    def print_line(job: Job) -> None:
        if (figures := run_progress.count(job)) is not None:
            seconds = "" if figures["seconds"] is None else f"{figures['seconds']:.1f} s; "
            scores = f"{_scores(figures)}, " if _scores(figures) else ""
            line = f"round {figures['round']} of {run_progress.rounds}: {scores}{seconds}"
            console.print(f"{line}{run_progress.time_left()}", soft_wrap=True)

    if not is_live(console):
        yield print_line
        return
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    text = "{task.description}"
    scores = "{task.fields[scores]}"
    columns = (text, BarColumn(), scores, TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=run_progress.total, completed=int(run_progress.done), scores="")

        def update(job: Job) -> None:
            figures = run_progress.count(job)
            is_training = job.purpose == "train"
            text = f"round {job.round} of {run_progress.rounds}" if is_training else "clients evaluate the end"
            if later_rounds:
                text = f"{text}; {run_progress.time_left()};"
            progress.update(bar, completed=run_progress.done, description=text)
            if figures is not None:
                progress.update(bar, scores=_scores(figures))

        yield update


SHOWN_ROUNDS = 20


def rounds_table(result: Summary) -> Table:
    """Return a table of about twenty rounds at equal distances, and the final accuracies."""
    rounds = result["rounds"]
    step = max(1, -(-len(rounds) // SHOWN_ROUNDS))
    scopes = ("acc.\nglobal", "acc.\npersonal", "std", "worst\n10 %", "after\ntraining")
    columns = ("round", *scopes, "loss", "s", "up\nMB", "down\nMB")
    rows: list[tuple[object, ...]] = []
    for figures in rounds:
        number = figures["round"]
        if number % step == 0 or number in {1, len(rounds)}:
            rows.append((number, *_score_cells(figures["acc"]), *_work_cells(figures)))
    rows.append(("end", *_score_cells(result["last"]["acc"]), None, None, None, None))
    title = f"{result['run_id']}: {result['method']}, {result['clients']} clients, partition {result['partition']}"
    return table(title, columns, rows)


def reading(result: Summary) -> Iterator[str]:
    """Yield lines about what the numbers are, and where the rest is."""
    yield from _about_accuracies(result)
    yield from _about_trouble(result)
    yield from _about_work(result)


def _about_accuracies(result: Summary) -> Iterator[str]:
    """Yield lines about accuracies: the last ones, those of each client alone, and the best ones."""
    yield "acc: mean over clients of what they received in that round; end: after the last round and personalizing"
    for scope, last in result["last"]["acc"].items():
        yield (
            f"last {_NAMES[scope]}: {last['clients_mean']:.4f} ± {last['std']:.4f} over clients, "
            f"{last['samples_mean']:.4f} over samples, worst tenth {last['worst10']:.4f}"
        )
    if models := result["local_models"]:
        yield f"acc.local is of the best model that each client can fit alone: {models}"
    for best_scope, best in result["best"].items():
        after = counted(int(best["rounds_done"]), "round")
        chosen_on = f"chosen on the {result['scored_on']} samples"
        yield f"best {_NAMES[best_scope]}: {best['clients_mean']:.4f} after {after}, {chosen_on}"


def _about_trouble(result: Summary) -> Iterator[str]:
    """Yield lines about warnings, published values in use, clients that are missing, an early end, and the logs."""
    yield from _about_warnings(result)
    published = result.get("published")
    if published:
        values = ", ".join(f"{name} {value['value']} ({said_by(value)})" for name, value in published.items())
        yield f"published values in use: {values}; 'headwater methods {result['method']}' says where"
    for client, reason in result["failed"].items():
        yield f"missing at the end: client '{client}': {reason}"
    if result.get("stopped"):
        done = counted(result["last"]["rounds_done"], "round")
        yield f"ended early, after {done}: {result['stopped']}"
    yield from _about_logs(result)


def _about_warnings(result: Summary) -> Iterator[str]:
    """Yield a line for each warning, and one for each thing to try next."""
    from edge_agent.core.next_steps import NextStep

    from ..runs.result_notes import ResultWarning, describe_warnings

    warnings = [ResultWarning.from_json(warning) for warning in result["warnings"]]
    for line in describe_warnings(warnings, 0):
        yield f"warning: {line}"
    for step in result.get("next_steps", ()):
        yield f"to try next: {NextStep.from_json(step).message}"


def _about_logs(result: Summary) -> Iterator[str]:
    """Yield a line for each log, and how what it lacks is logged later."""
    outcomes = [LogOutcome.from_json(outcome) for outcome in result.get("logs", ())]
    for outcome in outcomes:
        yield outcome.describe()
    if not all(outcome.is_complete for outcome in outcomes):
        yield f"what is missing can be logged later: headwater simulate --resume --out {shlex.quote(result['folder'])}"


def _about_work(result: Summary) -> Iterator[str]:
    """Yield lines about how the rounds were computed: engine, first weights, memory."""
    workers = f" with {counted(result['workers'], 'worker')}" if result["workers"] > 1 else ""
    start = f", {result['start_s']:.1f} s to start it" if result.get("start_s", 0.0) >= 0.1 else ""  # 0: it had none
    yield (
        f"{result['seconds']:.1f} s of rounds on engine {result['engine']}{workers}{start}, "
        f"partition {result['partition_hash'][:16]}, {encoder_named(result['encoder_sha256'])}"
    )
    if result["weights"]:
        yield f"the encoder began with {result['weights']['path']} (SHA-256 {result['weights']['sha256'][:16]})"
    if trial := result.get("engine_trial"):
        yield f"engine: {trial['reason']}"
    if memory := result.get("memory_bytes"):
        taken = f"{memory['peak'] / 1e9:.2f} GB seen at most, {memory['expected'] / 1e9:.2f} GB expected"
        yield f"memory: {taken}, {memory['limit'] / 1e9:.2f} GB allowed"
    if figures := result.get("stacked"):
        jobs = f"{figures['jobs']} of {counted(figures['of'], 'job')} of training in one pass on {figures['device']}"
        bits = "" if figures["bits_of_serial"] else "; equal to one after another up to rounding, not bit for bit"
        yield f"stacked: {jobs} ({figures['because']}){bits}"
    yield f"curves: {result['curves']}; page: {result['report']}; all figures: {result['folder']}/result.json"


_NAMES = {
    "global": "acc.global",
    "personal": "acc.personal",
    "local": "acc.local (each client alone)",
    "after": "acc.personal after local training",
    "new": "acc.new (clients that never trained: a head on the frozen encoder)",
    "new_global": "acc.global of clients that never trained",
}


def _score_cells(acc: Mapping[Any, Scores]) -> tuple[float | None, ...]:
    """Return means of the scopes and the spread of personal models; None where a scope was not evaluated."""
    means = {scope: scores["clients_mean"] for scope, scores in acc.items()}
    std = worst = None
    if "personal" in acc:
        std = acc["personal"]["std"]
        worst = acc["personal"]["worst10"]
    return means.get("global"), means.get("personal"), std, worst, means.get("after")


def _work_cells(figures: RoundFigures) -> tuple[float | str | None, ...]:
    """Return loss, seconds, and megabytes both ways of a round; None where something was not recorded."""
    seconds = figures["seconds"]
    shown_s = None if seconds is None else f"{seconds:.1f}"
    return figures["loss"], shown_s, _megabytes(figures["bytes_up"]), _megabytes(figures["bytes_down"])


def _megabytes(size: int | None) -> str | None:
    return None if size is None else f"{size / 1e6:.1f}"
