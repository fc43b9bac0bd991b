"""The coordinator's Python interface: `simulate` and `federate`."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, SupportsIndex, SupportsInt, cast

from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, HeadwaterError, RunFailed, TrainingFailed, UsageError
from edge_agent.core.own_folders import FolderKind, mark_folder, remove_folder
from edge_agent.core.registry import absolute
from edge_agent.core.storage import check_writable, write_atomic, write_json

from .config import CoordinatorConfig
from .loggers.choice import absolute_choice
from .loggers.run_logs import LogChoice, RunLogs, choices_of
from .plain_values import make_plain
from .rounds.request import Request
from .shadowed import check_export
from .simulation.failures import add_note
from .simulation.figures import RESULT
from .simulation.plan import Plan
from .state.store import StateFolder
from .text import counted
from .views.runs import replay

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack  # of `typing` since Python 3.11

    from edge_agent.methods import Method
    from edge_agent.wire.messages.down import Job

    from .runs.run_summary import FederationSummary
    from .simulation.engines.kept_workers import KeptWorkers
    from .simulation.figures import Summary
    from .simulation.notebook.result import SimulationResult
    from .simulation.observer import OnRound
    from .simulation.run import Simulation
    from .simulation.settings import Settings


class _Member(Protocol):
    """The coordinator or an agent of a federation in one process."""

    def start(self) -> None:
        """Connect and begin."""

    def step(self, timeout: float) -> object:
        """Handle what has arrived within ``timeout`` seconds; the result is true where there was something to do."""

    def close(self) -> None:
        """Stop and leave."""


TEMPORARY_RUN = FolderKind("temporary simulation")
"""The folder of a simulation that goes with its result."""


def simulate(
    method: str | type[Method] = "fedavg",
    *,
    data: object,
    partition: str | Mapping[str, Any] | None = None,
    clients: int | None = None,
    rounds: int = 10,
    seed: int = 0,
    params: Mapping[str, Any] | None = None,
    encoder: str | Callable[..., nn.Module] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    pool: KeptWorkers | None = None,
    watch: Callable[[Job], None] = lambda _: None,
    on_round: OnRound | None = None,
    log: LogChoice | Sequence[LogChoice] | None = None,
    **settings: Unpack[Settings],
) -> SimulationResult:
    """Run a method on many clients on this machine; the same as 'headwater simulate'.

    Classes of the calling program, or of a notebook, exist in this process only: they are trained by engine serial (or
    stacked). Put them into a file and give ``"path.py:Name"`` to train in several processes. No script needs an
    ``if __name__ == "__main__"``.

    Example:
        >>> from coordinator import simulate
        >>> result = simulate("fedper", data="digits:optdigits?n=200", clients=4, rounds=2, engine="serial")
        >>> [row["round"] for row in result.rounds]
        [1, 2]
        >>> sorted(result.summary["last"]["acc"])
        ['local', 'personal']
        >>> 0 <= result.clients[3].accuracy <= 1
        True

    Args:
        method: A name (see 'headwater methods'), ``"path.py:Class"``, or a subclass of `edge_agent.methods.Method`.
        data: A source such as ``"digits"`` (see `edge_agent.data`), several of them for ``partition="domains"``,
            ``"path.py:function"``, or samples: ``(X, y)``, a torch ``Dataset`` or ``DataLoader``, or rows like
            ``{"image": …, "label": …}``, as Hugging Face's data sets have them. A mapping client -> samples needs no
            partition; its clients may also have ``(X, y, X_test, y_test)``. X holds images (n, h, w, c) or
            (n, c, h, w), integers 0..255 or floats 0..1, or windows (n, channels, length) of floats; y integers or
            text.
        partition: A rule (see 'headwater partition'), the file of one or of an index table, or a mapping: client ->
            rows of the data, or -> ``(training rows, test rows)``. None: the rule ``iid``.
        clients: How many clients there are, where the data do not say that; None: 20.
        rounds: How many rounds.
        seed: The seed of all that is drawn: the partition, first weights, cohorts and batches.
        params: Parameters of the method; the others have their defaults.
        encoder: A name, ``"path.py:Name"``, or a class or function that makes a ``torch.nn.Module`` whose result are
            features (n, d); it is called with ``encoder_params``, and with ``task`` where it has such a parameter.
            None: one that suits the inputs.
        out: Folder of the run. None: a temporary one, which goes with the result, and is kept where the run fails, or
            is stopped after its first round.
        resume: Continue the simulation that is in ``out``, or begin it where there is none. The settings have to be
            those that it began with, but for ``rounds``: more of them continue also a run that has finished, and the
            result is that of a run which had as many from the beginning. A finished one with the same rounds is read
            from its folder, without workers, and without data that a source names.
        pool: Worker processes that stay after the run, see `coordinator.workers`: of several simulations one after
            another only the first waits for their start. The bits are the same.
        watch: Called after each finished task of a client.
        on_round: Called after each closed round, with a `coordinator.loggers.records.RoundResult`: accuracies by
            scope, loss, seconds, bytes, and what each client has reported. It may raise `StopRun("why")`: then no
            further round begins, and the run ends as after its last one.
        log: Also log to a name as behind ``--log``, such as ``"csv:FOLDER"``, or an object of a subclass of
            `coordinator.loggers.base.Logger`; or several.
        **settings: Further fields of `coordinator.simulation.plan.Plan`, such as ``alpha``, ``fraction``, ``engine``,
            ``workers``, ``device``, ``name``, ``tags``, ``note``; those of `coordinator.simulation.settings.Settings`,
            which type checkers know.

    Raises:
        UsageError: of any kind: names, settings, parameters, data, or things that do not go together.
        TrainingFailed: a client's training has failed.
        RunFailed: the run failed otherwise.
    """
    # 1. Mistakes that need no data are said first.
    check_export()
    _check_call(
        {"params": params, "seed": seed, "pool": pool, "watch": watch, "on_round": on_round, "out": out, **settings}
    )
    if resume and out is None:
        raise UsageError("resume=True continues the simulation in a folder; name it with out=")
    folder = None if out is None else Path(out).expanduser()
    logs = RunLogs.open(log, folder)
    # 2. The settings that were given; the others have their defaults.
    given = {"partition": partition, "clients": clients, "rounds": rounds, "seed": seed, **settings}
    fields = {name: value for name, value in given.items() if value is not None}
    fields |= {"params": dict(params or {}), "folder": str(Path.cwd())}
    for name in _TABLES & fields.keys():
        if isinstance(fields[name], Mapping):  # others are rejected later
            fields[name] = make_plain(fields[name])
    if pool is not None:
        pool.check_open()
        fields = {"engine": "pool", "workers": pool.count, **fields}
        if fields["engine"] != "pool":
            raise UsageError(f"engine = '{fields['engine']}' uses no worker processes of pool=; leave one of them out")
    # Logs that have a name are kept with the settings, so that a run that is resumed goes on in them.
    names = [absolute_choice(choice) for choice in choices_of(log) if isinstance(choice, str)]
    if names:
        fields["log"] = names
    watching = Watching(watch, on_round, logs)
    # 3. The run, in its folder or in a temporary one.
    if folder is not None:
        plan = _plan(method, encoder, data, fields, folder, resume=resume)
        with _saying_how_to_continue(folder):
            # Whether samples in memory are still the same is only seen when they are divided again.
            finished = None if _is_in_memory(data) else read_finished(plan, folder, watching)
            return _run(plan, folder, watching, pool) if finished is None else _opened(folder)
    with _temporary_run() as location:
        result = _run(_plan(method, encoder, data, fields, location), location, watching, pool)
    # Its clients read the folder as well, so that one of them keeps it.
    weakref.finalize(result.clients.run, remove_folder, location.parent, TEMPORARY_RUN)
    return result


_TABLES = frozenset({"params", "encoder_params", "peft_params", "input"})
"""Settings that are mappings, whose values only a method or an encoder knows."""


def _is_pool(value: object) -> bool:
    """Return whether a value is what `workers` returns."""
    from .simulation.engines.kept_workers import KeptWorkers

    return isinstance(value, KeptWorkers)


@dataclass(frozen=True)
class _Expectation:
    """What an argument of `simulate` has to be that is used before the settings are parsed."""

    argument: str
    text: str
    """What is expected, in words."""

    is_met: Callable[[object], bool]
    """Return whether a value is of this kind."""

    may_be_none: bool = True
    """Whether the argument may be None, or be left out."""

    def is_met_by(self, arguments: Mapping[str, object]) -> bool:
        """Return whether the argument is as expected, among all arguments of the call."""
        value = arguments.get(self.argument)
        if value is None:
            return self.may_be_none
        return self.is_met(value)


_EXPECTATIONS = (
    _Expectation("params", "a mapping such as {'lr': 0.05}", lambda value: isinstance(value, Mapping)),
    # Of numbers only text, lists and the like are refused here; the settings have their limits.
    _Expectation("seed", "a whole number", lambda value: isinstance(value, SupportsInt), may_be_none=False),
    _Expectation("test_fraction", "a number from 0 to 1", lambda value: isinstance(value, SupportsFloat)),
    _Expectation("pool", "what coordinator.workers(2) returns", _is_pool),
    _Expectation("watch", "a function of one job; leave it out for none", callable, may_be_none=False),
    _Expectation("on_round", "a function of one round", callable),
    _Expectation("out", "a folder; leave it out for a temporary one", lambda value: value != ""),
)


def _check_call(arguments: Mapping[str, object]) -> None:
    """Check the kinds of those arguments of `simulate` that are used before its settings are parsed.

    Raises:
        ConfigError: Some are of another kind; the message lists all of them.
    """
    mistakes = []
    for expectation in _EXPECTATIONS:
        if not expectation.is_met_by(arguments):
            name = expectation.argument
            mistakes.append(f"{name} = {arguments.get(name)!r}: expected {expectation.text}")
    if mistakes:
        raise ConfigError("simulate()", mistakes)


def _is_in_memory(data: object) -> bool:
    """Return whether the caller holds the samples, and no source names them."""
    from .simulation import own_data

    return not own_data.is_source(data)


def _opened(folder: Path) -> SimulationResult:
    from .simulation.notebook.result import SimulationResult

    return SimulationResult.open(folder)


@contextlib.contextmanager
def _temporary_run() -> Iterator[Path]:
    """Yield the place of a run in a temporary folder, which stays where the run ends well.

    It also stays, and the error says where it is, if the run has failed, or was stopped after its first round. Where
    settings or data are wrong nothing is left.
    """
    # The folder that holds temporary ones may be reached by a link, and `remove_folder` follows none.
    temporary = Path(tempfile.mkdtemp(prefix="headwater-")).resolve()
    mark_folder(temporary, TEMPORARY_RUN, temporary.name)
    location = temporary / "run"
    try:
        yield location
    except Exception as error:
        is_mistake = isinstance(error, HeadwaterError) and not isinstance(error, TrainingFailed | RunFailed)
        if is_mistake or not location.is_dir():
            remove_folder(temporary, TEMPORARY_RUN)
        else:  # logs and state say more than the message, whatever a user's own part has raised
            add_note(error, f"The folder of this run is kept: {temporary}")
        raise
    except BaseException as error:
        if _closed_rounds(location):
            add_note(error, _how_to_continue(location))
        else:
            remove_folder(temporary, TEMPORARY_RUN)
        raise


@contextlib.contextmanager
def _saying_how_to_continue(folder: Path) -> Iterator[None]:
    """Add to a Ctrl-C how far the run in ``folder`` is, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        add_note(error, _how_to_continue(folder))
        raise


def _how_to_continue(folder: Path) -> str:
    closed = counted(_closed_rounds(folder), "closed round")
    return f"Stopped after {closed}, and nothing is lost: simulate(..., out={str(folder)!r}, resume=True) goes on."


def _closed_rounds(folder: Path) -> int:
    """Return how many rounds of the run in ``folder`` are closed; 0 where there is none."""
    # After a Ctrl-C this is said beside it, and must not hide it.
    with contextlib.suppress(HeadwaterError, OSError), StateFolder(folder).look() as state:
        runs = state.journal.runs()
        if runs:
            return replay(state.journal, runs[0]).round
    return 0


def _plan(
    method: str | type[Method],
    encoder: str | Callable[..., nn.Module] | None,
    data: object,
    fields: dict[str, Any],
    folder: Path,
    *,
    resume: bool = False,
) -> Plan:
    """Return the plan of a simulation in ``folder``; registers the caller's own parts and writes its samples.

    With ``resume`` it may be the one that is there.
    """
    from .simulation import own_parts
    from .simulation.resuming import continued
    from .simulation.setup import read_plan

    saved = read_plan(folder)
    if saved is not None and not resume:
        raise UsageError(
            f"{folder} holds a simulation; continue it with resume=True, or choose another folder with out="
        )
    if saved is None:
        check_writable(folder)
    in_process = []  # parts that worker processes cannot import
    for name, part, add in (
        ("method", method, own_parts.add_method),
        ("encoder", encoder, own_parts.add_encoder),
    ):
        if isinstance(part, str):
            fields[name] = absolute(part)
        elif part is not None:
            fields[name], is_loadable = own_parts.reference(part, add)
            in_process += [] if is_loadable else [f"{name} {fields[name]}"]
    if in_process and fields.get("engine") not in {"serial", "stacked"}:
        if fields.get("engine") is not None or fields.get("workers") is not None:
            raise UsageError(
                f"{' and '.join(in_process)}: defined in this program, so worker processes cannot import it; put it "
                "into a file and give 'path.py:Name', or use engine='serial'"
            )
        fields["engine"] = "serial"
    chosen = _data_fields(data, fields, folder.with_name(f"{folder.name}-data"))
    if "partition" in chosen:  # its file has the rows that are held out
        fields.pop("test_fraction", None)
    fields |= chosen
    plan = parse(Plan, fields, where="simulate()")
    return plan if saved is None else continued(saved, plan, folder)


def _data_fields(data: object, fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The plan's fields ``data`` and ``partition``; what the caller holds in memory is written into ``folder``."""
    from .simulation import own_data

    rule = fields.get("partition")
    seed = int(fields.get("seed", 0))
    share = float(fields.get("test_fraction", Plan.model_fields["test_fraction"].default))
    if isinstance(data, Mapping):
        own_data.check_is_clients(data, has_rule="partition" in fields or "clients" in fields)
        if wrong := [name for name in ("partition", "clients") if name in fields]:
            raise UsageError(f"{' and '.join(wrong)}: a mapping of clients is a partition already; leave that out")
        clients = own_data.save_clients(data, folder, test_fraction=share, seed=seed)
        return {"data": (clients.source,), "partition": clients.partition}
    if own_data.is_source(data):
        sources = (absolute(data),) if isinstance(data, str) else tuple(map(absolute, data))
    else:
        sources = (own_data.save_pool(data, folder).source,)
    if not isinstance(rule, Mapping | str | None):
        raise UsageError(
            f"partition: {type(rule).__name__}, expected a rule such as 'iid', the file of a partition, or a mapping "
            "client -> rows ({'a': [0, 1], 'b': [2, 3]})"
        )
    if not isinstance(rule, Mapping):
        return {"data": sources}
    if "clients" in fields:
        raise UsageError("clients: a mapping of client -> rows names the clients already; leave that out")
    if len(sources) > 1:
        raise UsageError(f"partition: a mapping of client -> rows is for one data source, found {len(sources)}")
    base = Path(fields["folder"])
    file = own_data.save_rows(rule, sources[0], folder, base=base, test_fraction=share, seed=seed)
    return {"data": sources, "partition": file}


def _run(plan: Plan, folder: Path, watching: Watching, pool: KeptWorkers | None) -> SimulationResult:
    """Simulate in ``folder`` to the end."""
    import torch

    from .simulation.notebook.result import SimulationResult
    from .simulation.run import open_simulation
    from .simulation.setup import PARTITION, Prepared, read_plan

    threads = torch.get_num_threads()
    try:
        saved = folder / PARTITION
        prepared = Prepared.of(plan, saved if read_plan(folder) is not None else None).shared()
        prepared = replace(prepared, kept=pool)
        with open_simulation(prepared, folder) as simulation:
            summary = finish(simulation, folder, watching)
            recorded = simulation.state.run(simulation.run).summary() or {}
    finally:
        torch.set_num_threads(threads)
    return SimulationResult.of(summary, recorded, folder)


@dataclass(frozen=True)
class Watching:
    """Who sees how a simulation goes on.

    Attributes:
        watch: Called after each finished task of a client.
        on_round: Called after each closed round; None: nobody asks.
        logs: Where it is logged.
    """

    watch: Callable[[Job], None] = lambda _: None
    on_round: OnRound | None = None
    logs: RunLogs = field(default_factory=lambda: RunLogs(()))


def read_finished(plan: Plan, folder: Path, watching: Watching) -> Summary | None:
    """Return the content of ``result.json`` where the run in ``folder`` has finished as planned, else None.

    Neither its data nor an engine are needed. Its logs, and who asks for rounds, get all of them as in a run that is
    resumed.

    Raises:
        HeadwaterError: Files are damaged, a log cannot be used, ``on_round`` has failed, or the source of the user's
            own method or encoder has changed since the run began.
    """
    from edge_agent.data.partition import Division

    from .simulation.finished import FinishedRun
    from .simulation.logged import log_finished
    from .simulation.observer import RoundObserver
    from .simulation.own_sources import check_own_sources
    from .simulation.setup import PARTITION

    finished = FinishedRun.find(folder, plan)
    if finished is None:
        return None
    check_own_sources(finished.record, plan, folder)
    summary = finished.summary
    if watching.on_round is not None:
        division = Division.read(folder / PARTITION)
        with StateFolder(folder).look() as state:
            observer = RoundObserver(state, finished.record.run, division, plan.rounds)
            observer.add(watching.on_round)
            observer.replay(finished.record.round)
    if not watching.logs.is_empty:
        outcomes = log_finished(folder, watching.logs, plan=plan)
        summary["logs"] = [outcome.to_json() for outcome in outcomes]
        write_json(folder / RESULT, summary)
    return summary


def finish(simulation: Simulation, folder: Path, watching: Watching) -> Summary:
    """Simulate to the end and write ``curves.svg`` and ``result.json``; returns the content of the latter.

    Raises:
        HeadwaterError: the run failed.
    """
    from .simulation.logged import logged

    with logged(simulation, watching.logs) as ending:
        if watching.on_round is not None:
            simulation.observer.add(watching.on_round)  # after the logs: a round that it fails at is logged
        result = _finish(simulation, folder, watching.watch)
        outcomes = ending.finish(result)
    if outcomes:
        # Once more, with what the logs have: they got the file as it was without that.
        result["logs"] = [outcome.to_json() for outcome in outcomes]
        write_json(folder / RESULT, result)
    return result


def _finish(simulation: Simulation, folder: Path, watch: Callable[[Job], None]) -> Summary:
    """Simulate to the end, write the files of the result, and return that.

    Raises:
        HeadwaterError: The run failed.
    """
    from .simulation.results import curves

    result = simulation.finish(watch)
    picture = folder / "curves.svg"
    run = simulation.state.run(simulation.run)
    write_atomic(picture, curves(result))
    result["folder"] = str(folder)
    result["report"] = str(run.report_path)
    result["curves"] = str(picture)
    write_json(folder / RESULT, result)
    return result


def _check_federation(arguments: Mapping[str, object]) -> None:
    """Check those arguments of `federate` that no model checks.

    Raises:
        ConfigError: Some are of another kind, or too small; the message lists all of them.
    """
    mistakes = []
    agents = arguments["agents"]
    if not isinstance(agents, Mapping) or not agents:
        mistakes.append("agents: expected at least one, as a mapping of id -> data source")
    mistakes += _mistake_in_number("rounds", arguments["rounds"], least=1)
    mistakes += _mistake_in_number("seed", arguments["seed"], least=0)
    if mistakes:
        raise ConfigError("federate()", mistakes)


def _mistake_in_number(name: str, value: object, *, least: int) -> list[str]:
    """Return a line where an argument is no whole number, or too small; an empty list where it is right."""
    if isinstance(value, SupportsIndex) and index(value) >= least:
        return []
    return [f"{name} = {value!r}: expected a whole number, {least} or more"]


def federate(
    config: CoordinatorConfig,
    agents: Mapping[str, str],
    method: str = "fedavg",
    *,
    params: Mapping[str, Any] | None = None,
    rounds: int = 10,
    seed: int = 0,
) -> FederationSummary:
    """Run a coordinator and agents in this process, over the transport in memory; returns the run's summary.

    Every round waits for all agents, and nothing is exported. The state of all is in the folder of ``config.state``.

    Example:
        >>> from coordinator import CoordinatorConfig, federate
        >>> task = {
        ...     "input": {"kind": "image", "channels": 1, "height": 16, "width": 16},
        ...     "class_names": list("0123456789"),
        ...     "encoder": "small_cnn",
        ... }
        >>> config = CoordinatorConfig.model_validate({"state": "federation/coordinator", "task": task})
        >>> agents = {"kitchen": "digits:inverted?n=60", "porch": "digits:slanted?n=60"}
        >>> summary = federate(config, agents, "fedper", rounds=1)
        >>> [agent["id"] for agent in summary["agents"]], summary["status"]
        (['kitchen', 'porch'], 'finished')

    Args:
        config: The configuration of the coordinator.
        agents: Id of an agent -> its data source, such as ``"digits"``. Each of them trains.
        method: A name, see 'headwater methods'.
        params: Parameters of the method; the others have their defaults.
        rounds: How many rounds.
        seed: The seed of the run.

    Raises:
        HeadwaterError: of any kind; the run failed where it is RunFailed.
    """
    from edge_agent import methods
    from edge_agent.core.config import AgentConfig
    from edge_agent.wire.memory import MemoryBroker

    from .hosted.in_memory import agent_in_memory
    from .service.coordinator import Coordinator
    from .service.surroundings import StartOptions
    from .state.journal_location import journal_of, use_database

    _check_federation({"agents": agents, "rounds": rounds, "seed": seed})
    agent_configs = []
    for name, source in agents.items():
        fields = {"id": name, "state": config.state.parent / name, "data": {"source": source}}
        agent_configs.append(parse(AgentConfig, fields, where=f"agent '{name}'"))
    cohort = config.cohort.model_copy(update={"min_agents": len(agents)})
    quiet = config.export.model_copy(update={"after_run": False})
    config = config.model_copy(update={"cohort": cohort, "export": quiet})
    chosen = methods.create(method, params).params.model_dump(mode="json")
    broker = MemoryBroker()
    members = list[_Member]()
    use_database(config.state, config.journal)
    with StateFolder(config.state, journal_of(config.state, config.journal)).open("federate") as state:
        run = state.journal.request_run(Request(method, chosen, index(rounds), index(seed), config.run_task).to_fact())
        members.append(Coordinator(config, state, broker.transport(), start=StartOptions(probe_s=0)))
        members.extend(agent_in_memory(agent_config, broker) for agent_config in agent_configs)
        for member in members:
            member.start()
        try:
            while state.journal.unfinished():
                events = [member.step(0.0) for member in members]
                if not any(events):
                    members[0].step(0.01)  # wait for a message
        finally:
            for member in members:
                member.close()
        record = replay(state.journal, run)
        if record.status != "finished":
            raise RunFailed(f"{run} {record.status}: {record.reason or 'no reason was noted'}")
        return cast("FederationSummary", state.run(run).summary() or {})
