"""Comparisons and searches as Python calls; the commands call the same steps."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.bundle.starter import bundle_path
from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, HeadwaterError, UsageError
from edge_agent.core.locks import shared_folder_lock
from edge_agent.core.registry import absolute
from edge_agent.core.storage import check_writable, read_json, write_json

from ...loggers.choice import absolute_choice
from ...loggers.delivery import LogOutcome
from ...shadowed import check_export
from ...simulation.own_sources import changed_sources
from ...simulation.plan import Plan, is_saved_partition
from ...text import counted, listed
from .comparing import RECORD, Comparing, Setting
from .logged import check_logs, log_comparison
from .outputs import PAGE, summary_lines, write_outputs
from .records import Comparison, Trial
from .runners import Event, Inline, LocalWorkers, RayRuns, Runner
from .settings import (
    ALWAYS,
    VALIDATION,
    Arguments,
    Contender,
    check_fields,
    check_plan,
    checked_seeds,
    choices_of,
    command_of,
    contenders_of,
    own_sources_of,
    run_plan,
    tuner_named,
)
from .simulated_runs import RunSpec, forget_method

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of `typing` since Python 3.11

    from edge_agent.methods import Method

    from .shared_settings import SharedSettings

ARGUMENTS = "arguments.json"
"""File with the arguments in the folder of a comparison."""

MOST_NAMED = 6
"""The most methods whose names stand in the title of a comparison."""

_HOW_TO_GO_ON = (
    "continue it with the same arguments, to which methods and, behind its first seed, seeds may be added, or choose "
    "another folder with --out"
)


@dataclass(frozen=True)
class Progress:
    """How far a comparison is, in rounds of simulations."""

    done_rounds: int
    total_rounds: int
    """An estimate while a search may still propose fewer."""

    event: str
    """What was done last, in words."""

    is_over: bool = False
    """Whether a simulation has ended; otherwise one has done a round."""


@dataclass(frozen=True)
class Running:
    """Where and how the simulations of a comparison run; it does not change what they find.

    Attributes:
        parallel: Number of simulations at a time.
        engine: ``ray``: on a Ray cluster; any other: in worker processes here, with this engine of a simulation.
        address: Address of a running Ray cluster; None: a new one here.
        in_process: Whether everything runs in this process, as methods need that exist nowhere else.
        again: Whether failed simulations are run again, and all of those methods whose source has changed.
        watch: Called when a simulation has done rounds or is over.
        say: Called with what a user should know.
    """

    parallel: int = 1
    engine: str = "serial"
    address: str | None = None
    in_process: bool = False
    again: bool = False
    watch: Callable[[Progress], object] = lambda _: None
    say: Callable[[str], object] = lambda _: None

    def check(self) -> None:
        """Require that the settings go together.

        Raises:
            UsageError: They do not.
        """
        if self.parallel < 1:
            raise UsageError(f"parallel = {self.parallel}; expected at least 1")
        if self.address is not None and self.engine != "ray":
            raise UsageError(f"address = {self.address} has no effect on engine {self.engine} (only on ray)")
        if self.in_process and (self.parallel > 1 or self.engine == "ray"):
            raise UsageError(
                "a method is defined in this program, so that other processes cannot import it; put it into a file and "
                "give 'path.py:Name', or leave parallel and engine out"
            )

    def runner(self, base: Path, watch: Callable[[Event], object]) -> Runner:
        """Return what runs the simulations: this process, worker processes, or a Ray cluster.

        Raises:
            MissingCapability: Ray is not installed.
            RunFailed: There is no cluster.
        """
        if self.in_process:
            return Inline(base, watch)
        if self.engine == "ray":
            return RayRuns(base, self.parallel, self.address)
        return LocalWorkers(base, self.parallel, say=self.say)


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """A comparison and its folder."""

    comparison: Comparison
    folder: Path
    logs: tuple[LogOutcome, ...] = ()
    """What the logs have of it, where some were asked for."""

    def __repr__(self) -> str:
        return "\n".join([*summary_lines(self.comparison), f"page: {self.folder / PAGE}"])

    @property
    def failures(self) -> tuple[str, ...]:
        """A line for each run that failed; failed trials are no failure while another trial was scored."""
        lines = list[str]()
        for method in self.comparison.methods:
            failed = [run for run in (*method.runs, *method.untuned) if run.failure]
            lines.extend(f"{method.name}, seed {run.seed}: {run.failure}" for run in failed)
        return tuple(lines)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The trials of a search, by their numbers, and the best of them; None: all have failed."""

    method: str
    trials: tuple[Trial, ...]
    best: Trial | None
    folder: Path

    def __repr__(self) -> str:
        count = counted(len(self.trials), "trial")
        if self.best is None:
            return f"{self.method}: {count}, all of which failed; folder: {self.folder}"
        params = ", ".join(f"{name}={value}" for name, value in self.best.params.items()) or "the defaults"
        return (
            f"{self.method}: {count} on validation samples; the best, trial {self.best.number}: {params}, "
            f"accuracy {self.best.score:.4f}; folder: {self.folder}"
        )


def compare(
    methods: Sequence[str | type[Method]],
    *,
    data: str | Sequence[str],
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    tune: int = 12,
    search: str = "random",
    space: Mapping[str, str] | None = None,
    params: Mapping[str, Any] | None = None,
    validation: float = VALIDATION,
    tune_seed: int | None = None,
    untuned: bool = False,
    out: str | Path = "comparison",
    running: Running | None = None,
    log: str | Sequence[str] = (),
    **settings: Unpack[SharedSettings],
) -> ComparisonResult:
    """Compare methods: the same number of trials for each on validation samples, then runs with paired seeds.

    The same as 'headwater compare'. Called again with the same arguments, it continues where it was stopped; with more
    seeds or methods, or with ``untuned``, it runs what is missing.

    Args:
        methods: Names, ``"path.py:Class"``, or subclasses of `edge_agent.methods.Method`. ``local``, ``fedavg``,
            ``fedavg_ft`` and ``linear_probe`` are always compared, too.
        data: A data source, or several for ``partition="domains"``.
        seeds: Seeds of the runs; with one seed all methods have the same partition.
        tune: Trials of each method, the defaults among them; 0: nothing is tuned.
        search: How parameters are searched: random, halving or optuna.
        space: ``parameter`` or ``method.parameter`` -> its values, such as ``"0.001:0.1:log"``; else the method's own.
        params: ``parameter`` or ``method.parameter`` -> a value that all its simulations have.
        validation: Share of the training samples that trials are scored on.
        tune_seed: Seed of the trials; None: the first of ``seeds``, whose test samples no trial sees.
        untuned: Whether the defaults are run, too, to show what tuning was worth.
        out: Folder of the comparison.
        running: Where and how the simulations run.
        log: Also log the comparison and its runs, once it is over, to names as behind ``simulate --log``.
        settings: Further fields of `coordinator.simulation.plan.Plan`, such as ``partition``, ``clients``, ``rounds``;
            those of `coordinator.research.compare.shared_settings.SharedSettings`, which type checkers know.

    Raises:
        UsageError: Arguments, data or methods do not go together, or the folder holds another comparison.
        StateError: Files cannot be read or written; then the same call continues.
    """
    check_export()
    logs = [absolute_choice(choice) for choice in ((log,) if isinstance(log, str) else log)]
    check_logs(logs, Path(out))
    how = running or Running()
    references, is_local = _references(methods)
    how = dataclasses.replace(how, in_process=how.in_process or is_local)
    checked = checked_seeds(seeds, "seeds")
    choices = choices_of(references, params or {}, always=ALWAYS)
    plan = _plan_fields(data, settings, how)
    fields = {
        "methods": choices,
        "plan": plan,
        "own_sources": own_sources_of(choices, plan.get("encoder")),
        "seeds": checked,
        "trials": tune,
        "search": search,
        "space": dict(space or {}),
        "validation": validation,
        "tune_seed": checked[0] if tune_seed is None else tune_seed,
        "untuned": untuned,
    }
    arguments = parse(Arguments, fields, where="the arguments of the comparison")
    if tune and not tuner_named(search).fits_comparisons:
        raise UsageError(f"search {search}: each method would get another number of trials; it is for sweep alone")
    if not tune and space:
        raise UsageError(f"space of {listed(list(space))}: nothing is searched with tune = 0; leave one of them out")
    if not tune and untuned:
        raise UsageError("untuned: nothing is tuned with tune = 0, so that all runs have the defaults; leave it out")
    result = run_comparison(arguments, Path(out), how)
    if not logs:
        return result
    return dataclasses.replace(result, logs=tuple(log_comparison(logs, result.comparison, Path(out))))


def sweep(
    method: str | type[Method],
    space: Mapping[str, str] | None = None,
    *,
    data: str | Sequence[str],
    trials: int = 12,
    search: str = "random",
    points: int = 3,
    params: Mapping[str, Any] | None = None,
    validation: float = VALIDATION,
    seed: int = 0,
    out: str | Path = "sweep",
    running: Running | None = None,
    **settings: Unpack[SharedSettings],
) -> SweepResult:
    """Search the parameters of one method on validation samples: the first half of `compare`.

    Args:
        method: A name, ``"path.py:Class"``, or a subclass of `edge_agent.methods.Method`.
        space: Parameter -> its values, such as ``"0.001:0.1:log"``; None: the method's own.
        data: A data source, or several for ``partition="domains"``.
        trials: Number of trials, the defaults among them; a grid has as many as it has points.
        search: How parameters are searched: random, halving, grid or optuna.
        points: Values of each range in a grid.
        params: Parameter -> a value that all trials have.
        validation: Share of the training samples that trials are scored on.
        seed: Seed of the trials and of the search.
        out: Folder of the trials. The same call continues there.
        running: Where and how the simulations run.
        settings: Further fields of `coordinator.simulation.plan.Plan`, as in `compare`.

    Raises:
        UsageError: Arguments, data or the method do not go together, or the folder holds something else.
        StateError: Files cannot be read or written; then the same call continues.
    """
    check_export()
    how = running or Running()
    references, is_local = _references([method])
    how = dataclasses.replace(how, in_process=how.in_process or is_local)
    if trials < 1:
        raise UsageError(f"trials = {trials}; expected at least 1")
    choices = choices_of(references, params or {}, always=())
    plan = _plan_fields(data, settings, how)
    fields = {
        "methods": choices,
        "plan": plan,
        "own_sources": own_sources_of(choices, plan.get("encoder")),
        "seeds": checked_seeds((seed,), "seed"),
        "trials": trials,
        "search": search,
        "points": points,
        "space": dict(space or {}),
        "validation": validation,
        "tune_seed": seed,
    }
    arguments = parse(Arguments, fields, where="the arguments of the search")
    (contender,) = contenders_of(arguments)
    if not contender.space:
        raise UsageError(
            f"nothing to search: {contender.choice.name} has no parameter with values to search, or all of them are "
            "set; name some in space, for example --space lr=0.001:0.1:log"
        )
    return run_sweep(arguments, Path(out), how)


def run_comparison(arguments: Arguments, out: Path, running: Running) -> ComparisonResult:
    """Run a comparison, or continue it, and write its tables.

    Raises:
        UsageError, StateError: See `compare`.
    """
    comparison = _run(arguments, out, running, command=shlex.join(command_of(arguments, out)), has_runs=True)
    return ComparisonResult(comparison, out)


def run_sweep(arguments: Arguments, out: Path, running: Running) -> SweepResult:
    """Run the search of one method, or continue it.

    Raises:
        UsageError, StateError: See `sweep`.
    """
    comparison = _run(arguments, out, running, command="", has_runs=False)
    record = comparison.methods[0]
    best = next((trial for trial in record.trials if trial.number == record.chosen), None)
    return SweepResult(record.name, record.trials, best, out)


def read_comparison(folder: Path) -> Comparison:
    """Return the comparison in a folder.

    Raises:
        UsageError: There is none.
        ConfigError: The file has mistakes.
    """
    content = read_json(folder / RECORD)
    if content is None:
        raise UsageError(f"{folder} holds no comparison; 'headwater compare' makes one")
    return parse(Comparison, content, where=str(folder / RECORD))


def _references(kinds: Sequence[str | type[Method]]) -> tuple[list[str], bool]:
    """Return how methods are named, and whether one of them exists in this process only."""
    from ...simulation import own_parts

    names = []
    is_local = False
    for kind in kinds:
        if isinstance(kind, str):
            names.append(absolute(kind))
            continue
        name, is_loadable = own_parts.reference(kind, own_parts.add_method)
        # A method that ships is known by its name, wherever its class is from.
        names.append(name)
        is_local = is_local or not is_loadable
    return names, is_local


def _plan_fields(data: str | Sequence[str], settings: Mapping[str, Any], running: Running) -> dict[str, Any]:
    """Return the fields of all simulations as JSON, checked.

    Raises:
        ConfigError: A field is unknown, has an impossible value, or is one that a comparison sets itself.
    """
    running.check()
    sources = (data,) if isinstance(data, str) else tuple(data)
    fields = {name: value for name, value in settings.items() if value is not None}
    check_fields(fields)
    fields |= {"data": [absolute(source) for source in sources], "folder": str(Path.cwd())}
    if running.engine != "ray":
        fields["engine"] = running.engine
    else:
        fields["engine"] = "serial"
    if "encoder" in fields:
        fields["encoder"] = absolute(fields["encoder"])
    if "weights" in fields:
        fields["weights"] = str(bundle_path(Path(fields["weights"]).expanduser()).absolute())
    if is_saved_partition(fields.get("partition")):
        fields["partition"] = str(Path(fields["partition"]).expanduser().absolute())
    check_plan(fields)
    return fields


def _run(arguments: Arguments, out: Path, running: Running, *, command: str, has_runs: bool) -> Comparison:
    """Run all simulations that are due, in the folder that this process locks, and write the record after each."""
    tuner_named(arguments.search)
    contenders = contenders_of(arguments)
    check_writable(out)
    with shared_folder_lock(out, f"headwater {'compare' if has_runs else 'sweep'}"):
        # 1. All mistakes are found before the first file is written: then other arguments can still be given.
        begun = _read_begun(arguments, out, has_runs=has_runs)
        outdated_names = [] if begun is None else _outdated(begun, arguments, out, running)
        setting = _setting(arguments, contenders, command, has_runs=has_runs)
        comparing = Comparing(arguments, contenders, setting, out, has_runs=has_runs, again=running.again)
        # 2. From here on the folder is one of these arguments, whatever stops the simulations.
        for contender in contenders:
            if contender.choice.name in outdated_names:
                forget_method(contender.slug, out)
        _keep_arguments(arguments, begun, out, running)
        try:
            _run_all(comparing, out, running, has_runs=has_runs)
        except KeyboardInterrupt:
            _write_tables(comparing, out, has_runs=has_runs)
            raise
        return _write_tables(comparing, out, has_runs=has_runs)


def _write_tables(comparing: Comparing, out: Path, *, has_runs: bool) -> Comparison:
    """Write the tables of what is known so far, and return the record."""
    record = comparing.record()
    if has_runs:
        write_outputs(record, out)
    return record


def _keep_arguments(arguments: Arguments, begun: Arguments | None, out: Path, running: Running) -> None:
    """Write the arguments into the folder, unless it has them, and tell the user what they add to those it has."""
    if begun is None:
        write_json(out / ARGUMENTS, arguments.model_dump(mode="json"))
        return
    additions = begun.additions(arguments)
    if additions:
        running.say(f"{out}: the comparison now also has {listed(additions)}")
    # A source that Python cannot find this time stays noted as it was.
    own_sources = {**begun.own_sources, **arguments.own_sources}
    if additions or own_sources != begun.own_sources:
        noted = arguments.model_copy(update={"own_sources": own_sources})
        write_json(out / ARGUMENTS, noted.model_dump(mode="json"))


def _read_begun(arguments: Arguments, out: Path, *, has_runs: bool) -> Arguments | None:
    """Return the arguments of the comparison in a folder, which ``arguments`` continue; None: the folder is empty.

    Raises:
        UsageError: It holds something else, or a comparison that they do not continue; the message says what differs.
    """
    content = read_json(out / ARGUMENTS)
    if content is None:
        strangers = sorted(path.name for path in out.iterdir() if path.name != "lock" and path.suffix != ".tmp")
        if strangers:
            raise UsageError(
                f"{out} is not empty ({', '.join(strangers[:3])}) and holds no comparison; choose another folder"
            )
        return None
    begun = parse(Arguments, content, where=str(out / ARGUMENTS))
    if has_runs and begun.is_search:
        raise UsageError(
            f"{out} holds the search of {begun.methods[0].name}, which 'headwater sweep' continues; choose another "
            "folder with --out"
        )
    differences = begun.extended_by(arguments).differences(arguments)
    if differences:
        raise UsageError(f"{out} holds a comparison with other arguments: {'; '.join(differences)}; {_HOW_TO_GO_ON}")
    return begun


def _outdated(begun: Arguments, arguments: Arguments, out: Path, running: Running) -> list[str]:
    """Return the names of the methods whose results in the folder are of another source, and are to be removed.

    Raises:
        UsageError: There are such methods, and nobody has asked to run them again.
    """
    names = begun.outdated_methods(arguments)
    if not names:
        return []
    changes = changed_sources(begun.own_sources, arguments.own_sources)
    changed = listed(list(changes.values()))
    if not running.again:
        raise UsageError(
            f"{out}: its results are of another source of {changed}; --again (in Python Running(again=True)) replaces "
            f"those of {listed(names)}; else put the source back as it was, or choose another folder with --out"
        )
    running.say(f"{out}: another source of {changed}; all simulations of {listed(names)} run again")
    return names


def _setting(arguments: Arguments, contenders: Sequence[Contender], command: str, *, has_runs: bool) -> Setting:
    """Read the data once, and check that every method can do the task with its defaults.

    Raises:
        UsageError: Data and settings do not go together.
        ConfigError: A method cannot do the task; all of them are listed.
    """
    from edge_agent import methods as registry

    from ...simulation.datasets import prepare
    from ...simulation.own_parts import register

    # 1. The data and who gets which of them, with the first seed.
    first = run_plan(arguments, contenders[0].choice, {}, arguments.seeds[0])
    register(first)
    pools, division, task = prepare(first)
    notes: tuple[str, ...] = ()
    if (
        has_runs
        and arguments.trials
        and _draws_test_samples_by_seed(first, has_test=pools.test is not None, seeds=arguments.seeds)
    ):
        notes = (_SHARED_TEST.format(seed=arguments.tune_seed, share=first.test_fraction),)
    # 2. What single methods cannot do is said before hours are spent on the others.
    mistakes = []
    for contender in contenders:
        plan = run_plan(arguments, contender.choice, {}, arguments.seeds[0])
        try:
            register(plan)
            method = registry.create(plan.method_name, plan.params, paper=plan.paper, paper_for=plan.paper_for)
            method.check(task)
            method.check_peft(task)
        except ConfigError as error:
            mistakes += [f"{contender.choice.name}: {mistake}" for mistake in error.mistakes]
        except HeadwaterError as error:
            mistakes.append(f"{contender.choice.name}: {error}")
    if mistakes:
        raise ConfigError(f"methods for {', '.join(first.data)}", mistakes)
    names = [contender.choice.name for contender in contenders]
    compared = ", ".join(names)
    if len(names) > MOST_NAMED:
        compared = counted(len(names), "method")
    # Each seed has a partition of its own, and where the data have a test part nothing is held out.
    without_effect = {"seed"}
    if pools.test is not None:
        without_effect.add("test_fraction")
    settings = {name: value for name, value in division.settings.items() if name not in without_effect}
    return Setting(
        title=f"{compared} on {', '.join(first.data)}",
        data=first.data,
        partition=division.rule,
        partition_settings=settings,
        clients=len(division.clients),
        rounds=first.rounds,
        command=command,
        encoder=task.encoder,
        partition_hash=division.sha256,
        notes=notes,
    )


def _draws_test_samples_by_seed(plan: Plan, *, has_test: bool, seeds: Sequence[int]) -> bool:
    """Return whether each of several seeds has other test samples, because the data have no test part of their own."""
    return not has_test and plan.saved_partition is None and len(seeds) > 1


_SHARED_TEST = (
    "the data have no test part, and each seed holds out {share:g} of each client's samples: no trial has seen the "
    "test samples of seed {seed}, but some test samples of other seeds were training or validation samples of trials, "
    "the same for all methods"
)


def _run_all(comparing: Comparing, out: Path, running: Running, *, has_runs: bool) -> None:
    """Run what is due until nothing is; write the record after each simulation, and the tables after each part.

    Parts are the trials of all methods, and each seed: so a comparison of days can be read before it is over.

    Raises:
        StateError: Files cannot be read or written; all that is over is recorded.
    """
    rounds: dict[str, int] = {}

    def tell(event: Event) -> None:
        location = event.spec.location
        text = location
        if event.outcome is None:
            rounds[location] = event.rounds
        else:
            rounds.pop(location, None)
            text = f"{location}: {_result_text(event)}"
        done = comparing.done_rounds + sum(rounds.values())
        running.watch(Progress(done, max(done, comparing.total_rounds), text, is_over=event.outcome is not None))

    waiting = list(comparing.due())
    comparing.write()
    if not waiting:
        return
    parts = comparing.finished_parts
    with contextlib.closing(running.runner(out, tell)) as runner:
        is_busy = 0
        while waiting or is_busy:
            while waiting and runner.has_room:
                runner.start(waiting.pop(0))
                is_busy += 1
            for event in runner.wait():
                if event.outcome is not None:
                    is_busy -= 1
                    comparing.take(event.spec, event.outcome)
                    waiting = sorted((*waiting, *comparing.due()), key=_urgency)
                    comparing.write()
                tell(event)
            if comparing.finished_parts > parts:
                parts = comparing.finished_parts
                _write_tables(comparing, out, has_runs=has_runs)


def _urgency(spec: RunSpec) -> tuple[bool, int]:
    """Return a key by which trials come first, then the runs seed by seed; equal ones stay in their order."""
    return (not spec.is_trial, spec.plan.seed)


def _result_text(event: Event) -> str:
    """Return what a simulation has found, in words."""
    outcome = event.outcome
    if outcome is None:
        return ""
    if outcome.failure:
        return f"failed: {outcome.failure}"
    return f"{outcome.score:.4f} in {outcome.cpu_s:.1f} CPU s"
