"""The coordinator's Python interface: `simulate`, its result, and the export of an encoder from a state folder."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edge_agent.core.config import parse
from edge_agent.core.errors import HeadwaterError, MissingCapability, RunFailed, TrainingFailed, UsageError
from edge_agent.core.own_folders import FolderKind, mark_folder, remove_folder
from edge_agent.core.registry import absolute
from edge_agent.core.storage import check_writable, write_atomic, write_json

from .config import CoordinatorConfig, ExportConfig, HostedConfig
from .loggers.choice import absolute_choice
from .loggers.run_logs import LogChoice, RunLogs, choices_of
from .rounds.request import Request
from .shadowed import check_export
from .simulation.failures import add_note
from .simulation.plan import Plan
from .state.store import StateFolder
from .views.runs import RunRecord, replay

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn
    from typing_extensions import Unpack  # of `typing` since Python 3.11

    from edge_agent.data import Samples
    from edge_agent.methods import Method
    from edge_agent.wire.messages.down import Job
    from export import Report

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


class Rounds(list[dict[str, Any]]):
    """One row for each round: ``round``, ``acc.global``, ``acc.personal``, ``loss``, ``seconds``, bytes."""

    def to_pandas(self) -> pd.DataFrame:
        """Return the same as a table.

        Raises:
            MissingCapability: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingCapability(
                "a table of rounds needs pandas, which is not installed: pip install pandas"
            ) from error
        return pd.DataFrame(list(self))


@dataclass(frozen=True)
class Plot:
    """A picture, which notebooks display."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation. ``summary`` holds all figures, as 'headwater simulate --json' prints them.

    ``clients``: client -> accuracies 0..1 on its own held-out samples after the run: ``acc.local`` (the best model on
    raw inputs alone, which ``summary["local_models"]`` names), ``acc.global`` (the shared model), ``acc.personal``
    (after personalization).
    ``folder``: state of the run, which 'headwater analyze' and 'headwater export --state' read.
    """

    rounds: Rounds
    clients: dict[str, dict[str, float | None]]
    summary: dict[str, Any]
    folder: Path

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the clients after the run, 0..1: of personal models where there are any, else global."""
        last = self.summary["last"]["acc"]
        scope = next((scope for scope in ("personal", "global") if scope in last), None)
        return None if scope is None else float(last[scope]["clients_mean"])

    def plot(self, path: str | Path | None = None) -> Plot:
        """Accuracy by round; with ``path`` also written there, as SVG, PNG or PDF by its suffix.

        Raises:
            UsageError: ``path`` has another suffix, or cannot be written.
        """
        from .report.pictures import format_of
        from .simulation.results import curves

        if path is not None:
            target = Path(path)
            content = curves(self.summary, format_of(target.suffix))
            check_writable(target.parent)
            write_atomic(target, content)
        return Plot(curves(self.summary).decode())

    def export(self, path: str | Path) -> Path:
        """Return the encoder as a bundle file for devices, checked and quantized as 'headwater export' does.

        Raises:
            ExportRejected: the method shares no encoder, or the bundle does not pass its checks.
            UsageError: no file can be written there, or something else called ``export`` is found by Python first.
        """
        check_export()
        target = Path(path)
        check_writable(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        return export_run(self.folder, target, ExportConfig())[0].path


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
    watch: Callable[[Job], None] = lambda _: None,
    on_round: OnRound | None = None,
    log: LogChoice | Sequence[LogChoice] | None = None,
    **settings: Unpack[Settings],
) -> SimulationResult:
    """Run a method on many clients on this machine; the same as 'headwater simulate'.

    ``method``: a name (see 'headwater methods'), ``"path.py:Class"``, or a subclass of `edge_agent.methods.Method`.

    ``data``: a source such as ``"digits"`` (see `edge_agent.data`), several of them for ``partition="domains"``,
    ``"path.py:function"``, or samples: ``(X, y)``, a torch ``Dataset``, or rows like ``{"image": …, "label": …}``, as
    Hugging Face's data sets have them. A mapping client -> samples needs no partition; its clients may also have
    ``(X, y, X_test, y_test)``. X holds images (n, h, w, c) or (n, c, h, w), integers 0..255 or floats 0..1, or windows
    (n, channels, length) of floats; y integers or text.

    ``partition``: a rule (see 'headwater partition'), the file of one, or a mapping: client -> rows of the data, or
    -> ``(training rows, test rows)``.

    ``encoder``: a name, ``"path.py:Name"``, or a class or function that makes a ``torch.nn.Module`` whose result are
    features (n, d); it is called with ``encoder_params``, and with ``task`` where it has such a parameter.

    ``out``: folder of the run; default: a temporary one, removed with the result and kept where the run fails.

    ``watch`` is called after each finished task of a client, ``on_round`` after each closed round, with a
    `coordinator.loggers.records.RoundResult`: accuracies by scope, loss, seconds, bytes, and what each client has
    reported. It may raise `StopRun("why")`: then no further round begins, and the run ends as after its last one.

    ``log``: also log to a name as behind ``--log``, such as ``"csv:FOLDER"``, or an object of a subclass of
    `coordinator.loggers.base.Logger`; or several.

    ``settings``: further fields of `coordinator.simulation.plan.Plan`, such as ``alpha``, ``fraction``, ``engine``,
    ``workers``, ``device``, ``name``, ``tags``, ``note``; those of `coordinator.simulation.settings.Settings`, which
    type checkers know.

    Classes of the calling program, or of a notebook, exist in this process only: they are trained by engine serial (or
    stacked). Put them into a file and give ``"path.py:Name"`` to train in several processes. No script needs an
    ``if __name__ == "__main__"``.

    Raises:
        UsageError: of any kind: names, settings, parameters, data, or things that do not go together.
        TrainingFailed: a client's training has failed.
        RunFailed: the run failed otherwise.
    """
    check_export()
    logs = RunLogs.open(log, out if out is None else Path(out))
    given = {"partition": partition, "clients": clients, "rounds": rounds, "seed": seed, **settings}
    fields = {name: value for name, value in given.items() if value is not None}
    fields |= {"params": dict(params or {}), "folder": str(Path.cwd())}
    # Logs that have a name are kept with the settings, so that a run that is resumed goes on in them.
    names = [absolute_choice(choice) for choice in choices_of(log) if isinstance(choice, str)]
    if names:
        fields["log"] = names
    eyes = Watching(watch, on_round, logs)
    if out is not None:
        return _run(_plan(method, encoder, data, fields, Path(out)), Path(out), eyes)
    # The folder that holds temporary ones may be reached by a link, and `remove_folder` follows none.
    temporary = Path(tempfile.mkdtemp(prefix="headwater-")).resolve()
    mark_folder(temporary, TEMPORARY_RUN, temporary.name)
    try:
        result = _run(_plan(method, encoder, data, fields, temporary / "run"), temporary / "run", eyes)
    except Exception as error:
        is_mistake = isinstance(error, HeadwaterError) and not isinstance(error, TrainingFailed | RunFailed)
        if is_mistake or not (temporary / "run").is_dir():
            remove_folder(temporary, TEMPORARY_RUN)
        else:  # logs and state say more than the message, whatever a user's own part has raised
            add_note(error, f"The folder of this run is kept: {temporary}")
        raise
    except BaseException:
        remove_folder(temporary, TEMPORARY_RUN)
        raise
    weakref.finalize(result, remove_folder, temporary, TEMPORARY_RUN)
    return result


def _plan(
    method: str | type[Method],
    encoder: str | Callable[..., nn.Module] | None,
    data: object,
    fields: dict[str, Any],
    folder: Path,
) -> Plan:
    """Return the plan of a simulation in ``folder``; registers the caller's own parts and writes its samples."""
    from .simulation import own_parts
    from .simulation.setup import read_plan

    if read_plan(folder) is not None:
        raise UsageError(f"{folder} holds a simulation; choose another folder with out=")
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
    return parse(Plan, fields, where="simulate()")


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


def _run(plan: Plan, folder: Path, eyes: Watching) -> SimulationResult:
    import torch

    from .simulation.run import open_simulation
    from .simulation.setup import Prepared

    threads = torch.get_num_threads()
    try:
        prepared = Prepared.of(plan).shared()
        with open_simulation(prepared, folder) as simulation:
            summary = finish(simulation, folder, eyes)
            recorded = simulation.state.run(simulation.run).summary() or {}
    finally:
        torch.set_num_threads(threads)
    scopes = ("local", "global", "personal")
    clients = {
        one["id"]: {f"acc.{scope}": one["acc"].get(scope) for scope in scopes} for one in recorded.get("agents", [])
    }
    rounds = Rounds()
    for one in summary["rounds"]:
        accuracies = {f"acc.{scope}": result["clients_mean"] for scope, result in one["acc"].items()}
        others = {name: one[name] for name in ("loss", "seconds", "bytes_up", "bytes_down")}
        rounds.append({"round": one["round"], **accuracies, **others})
    return SimulationResult(rounds, clients, summary, folder)


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


def finish(simulation: Simulation, folder: Path, eyes: Watching) -> dict[str, Any]:
    """Simulate to the end and write ``curves.svg`` and ``result.json``; returns the content of the latter.

    Raises:
        HeadwaterError: the run failed.
    """
    from .simulation.logged import logged

    with logged(simulation, eyes.logs) as ending:
        if eyes.on_round is not None:
            simulation.observer.add(eyes.on_round)  # after the logs: a round that it fails at is logged
        result = _finish(simulation, folder, eyes.watch)
        outcomes = ending.finish(result)
    if outcomes:
        # Once more, with what the logs have: they got the file as it was without that.
        result["logs"] = [outcome.to_json() for outcome in outcomes]
        write_json(folder / "result.json", result)
    return result


def _finish(simulation: Simulation, folder: Path, watch: Callable[[Job], None]) -> dict[str, Any]:
    """Simulate to the end, write the files of the result, and return that.

    Raises:
        HeadwaterError: The run failed.
    """
    from .simulation.results import curves

    result = simulation.finish(watch)
    picture = folder / "curves.svg"
    run = simulation.state.run(simulation.run)
    write_atomic(picture, curves(result))
    result |= {"folder": str(folder), "report": str(run.report_path), "curves": str(picture)}
    write_json(folder / "result.json", result)
    return result


def federate(
    config: CoordinatorConfig,
    agents: Mapping[str, str],
    method: str = "fedavg",
    *,
    params: Mapping[str, Any] | None = None,
    rounds: int = 10,
    seed: int = 0,
) -> dict[str, Any]:
    """Run a coordinator and agents in this process, over the transport in memory; returns the run's summary.

    ``agents``: id -> data source of a train-tier agent. Every round waits for all of them, and nothing is exported.
    The state of all is in the folder of ``config.state``.

    Raises:
        HeadwaterError: of any kind; the run failed where it is RunFailed.
    """
    from edge_agent import methods
    from edge_agent.core.config import AgentConfig, DataConfig
    from edge_agent.wire.memory import MemoryBroker

    from .hosted.in_memory import agent_in_memory
    from .service.coordinator import Coordinator
    from .service.surroundings import StartOptions
    from .state.journal_location import journal_of, use_database

    if not agents:
        raise UsageError("agents: expected at least one, as a mapping of id -> data source")
    cohort = config.cohort.model_copy(update={"min_agents": len(agents)})
    quiet = config.export.model_copy(update={"after_run": False})
    config = config.model_copy(update={"cohort": cohort, "export": quiet})
    chosen = methods.create(method, params).params.model_dump(mode="json")
    broker = MemoryBroker()
    members = list[_Member]()
    use_database(config.state, config.journal)
    with StateFolder(config.state, journal_of(config.state, config.journal)).open("federate") as state:
        run = state.journal.request_run(Request(method, chosen, rounds, seed, config.run_task).to_fact())
        members.append(Coordinator(config, state, broker.transport(), start=StartOptions(probe_s=0)))
        for name, source in agents.items():
            own = AgentConfig(id=name, state=config.state.parent / name, data=DataConfig(source=source))
            members.append(agent_in_memory(own, broker))
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
        return state.run(run).summary() or {}


def export_run(
    folder: Path,
    out: Path,
    settings: ExportConfig,
    *,
    run: str | None = None,
    calibration: Sequence[str] = (),
    hosted: Sequence[HostedConfig] = (),
) -> tuple[Report, RunRecord]:
    """Freeze the encoder of a run in a state folder, check it, quantize it, and write it as one bundle file.

    ``run``: default: the latest one with a closed round. ``calibration``: labelled data sources, one for each domain,
    that int8 takes its ranges from and is compared on; default: those of the settings and of ``hosted`` clients, or of
    all clients of a simulation.

    Raises:
        UsageError: no run has a closed round.
        ExportRejected: the bundle does not pass its checks.
    """
    check_export()
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, domains_of, synthetic_inputs

    from .runs.calibration import own_domains
    from .runs.lineage import lineage_of
    from .runs.release import NORM_NOTES, sha256_of_encoder, sign
    from .simulation.results import training_samples
    from .simulation.setup import read_plan

    latest = TrainedModel.of(folder, run)
    task = latest.request.task
    method = latest.method
    domains: Mapping[str, Samples] = {}
    if settings.int8 and calibration:
        domains = domains_of(calibration, task)  # as typed; those of the configuration count from its folder
    elif settings.int8:
        plan = read_plan(folder)
        domains = own_domains(task, settings, hosted) or ({} if plan is None else training_samples(plan, folder))
    with StateFolder(folder).look() as state:
        sha256 = sha256_of_encoder({**latest.state, **latest.pooled})
        lineage = lineage_of(state, latest.record.run, latest.request, sha256)
    norm_note = NORM_NOTES[method.norm] if latest.pooled else ""
    classifier = method.global_head(latest.state)
    statistics = method.shared_statistics(latest.state)
    trained = TrainedEncoder(latest.model, method, task, classifier, statistics, norm_note, lineage)
    if domains:
        inputs = Calibration.from_domains(domains, latest.client_ranges)
    else:
        inputs = Calibration.from_inputs(synthetic_inputs(task, seed=latest.request.seed), latest.client_ranges)
    options = BundleOptions(latest.record.run, exporter=settings.exporter, int8=settings.int8)
    report = build_bundle(trained, inputs, out, options)
    sign(out, folder)
    return report, latest.record


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run as its latest checkpoint has it, with batch norm pooled where that stays with clients."""

    record: RunRecord
    request: Request
    method: Method
    model: Any
    state: dict[str, Any]
    pooled: dict[str, Any]
    client_ranges: dict[str, Any]

    def write_weights(self, out: Path) -> str:
        """Write the encoder's tensors by its own names as a safetensors file, and return the hash of the file."""
        from edge_agent.core.storage import write_tensors
        from edge_agent.training.parts import to_arrays

        encoder = self.model.encoder
        metadata = {"run": self.record.run, "round": str(self.record.round)}
        return write_tensors(out, to_arrays(encoder, encoder.state_dict()), metadata)

    @classmethod
    def of(cls, folder: Path, run: str | None = None) -> TrainedModel:
        """That of ``run``, or of the latest run with a closed round.

        Raises:
            UsageError: no run has a closed round.
        """
        from edge_agent import methods
        from edge_agent.wire.tensors import decode
        from export import model_from_state

        from .runs.release import pooled_before, ranges_before
        from .simulation.own_parts import register
        from .simulation.results import pooled_batch_norm
        from .simulation.setup import read_plan

        with StateFolder(folder).look() as state:
            closed = (replay(state.journal, name) for name in ([run] if run else reversed(state.journal.runs())))
            record = next((one for one in closed if one.round and one.checkpoint and (run or not one.is_pruned)), None)
            if record is None:
                which = f"run '{run}' has" if run else "there are no runs with"
                raise UsageError(f"{which} no closed round yet; nothing can be exported before the first one")
            if record.is_pruned:
                raise UsageError(
                    f"the checkpoint of {run} was removed by retention ([retention] runs, 'headwater prune'); "
                    "put the state folder back from a backup, or request the run again"
                )
            weights = decode(state.blobs.read(record.checkpoint or ""))
            pooled = pooled_before(state, record.run, record.round)
            client_ranges = ranges_before(state, record.run, record.round)
        if (plan := read_plan(folder)) is not None:
            register(plan)
        request = Request.from_fact(record.request)
        method = methods.create(request.method_reference, request.params)
        pooled = pooled or pooled_batch_norm(folder, record.run, record.round, method, request.task)
        model = model_from_state(method, request.task, {**weights, **pooled})
        return cls(record, request, method, model, weights, pooled, client_ranges)
