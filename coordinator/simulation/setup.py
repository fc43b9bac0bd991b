"""A simulation before its first step: data, partition, method and model, and the coordinator's configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_agent import methods, models
from edge_agent.client import Built, supported
from edge_agent.core.config import Precision, parse
from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.own_folders import MARK, FolderKind, holds_only, mark_folder
from edge_agent.core.storage import read_json, read_regular, write_atomic, write_json
from edge_agent.core.task import Task
from edge_agent.data.partition import Division
from edge_agent.methods import Method
from edge_agent.run_folder.client_state import LAST_ROUND
from edge_agent.training.precision import time_steps
from edge_agent.training.weights import read_weights

from ..config import NO_BOUNDS, CoordinatorConfig
from ..journal.entries import RunExtended, Simulated
from ..processes.pipe import SharedBuffer
from ..rounds.request import Request, Weights
from ..state.store import StateFolder
from ..views.runs import RunRecord, replay
from .client_tasks import state_files_in
from .datasets import Pools, prepare
from .device_heads import check_head
from .device_speeds import read_speeds
from .engines.base import EngineChoice
from .engines.kept_workers import KeptWorkers
from .own_parts import register
from .own_sources import check_own_sources, own_sources
from .plan import Plan

PLAN = "simulation.json"
"""File with the settings in the folder of a simulation."""

PARTITION = "partition.json"
"""File with each client's rows in the folder of a simulation."""

ENGINE = "engine.json"
"""File with the engine that a trial has chosen, and why, in the folder of a simulation."""

CLIENTS = "clients"
"""Folder of the clients' states in the folder of a simulation."""

FEDERATION = "simulation"
WEIGHTS = "weights.safetensors"
LONGEST_ROUND_S = 7 * 86_400.0
LEASE_S = 3600.0
GRACE_S = 0.01
"""Grace period by the simulated clock. It advances only when nothing is left to do: who has not delivered will not."""

LONGEST_SILENCE_S = 1.0
"""Deadline of a round by the same clock, where clients may drop out."""

LOWEST_QUORUM = 1e-6
"""Quorum where clients drop out: one update is enough."""

MANY_ATTEMPTS = 100


@dataclass(frozen=True)
class Prepared:
    """A simulation whose settings have been checked; nothing has been written."""

    plan: Plan
    method: Method
    pools: Pools
    division: Division
    task: Task
    model: Built
    choice: EngineChoice = field(default_factory=EngineChoice)
    memory: SharedBuffer | None = None
    """The pools in shared memory, where workers share them."""

    kept: KeptWorkers | None = None
    """Worker processes that stay after the run; None: they are of this run alone."""

    @classmethod
    def of(cls, plan: Plan, saved: Path | None = None) -> Prepared:
        """Make data, partition, method and model of a plan. ``saved``: the partition of a run that is resumed.

        Raises:
            UsageError: Names, parameters, data, or a combination of them is not possible.
        """
        import torch

        if plan.threads:
            torch.set_num_threads(plan.threads)
        register(plan)
        method = methods.create(plan.method_name, plan.params, paper=plan.paper, paper_for=plan.paper_for)
        pools, division, task = prepare(plan, saved)
        if plan.new_clients >= len(division.clients):
            raise UsageError(
                f"new_clients = {plan.new_clients} of {len(division.clients)} clients; at least one client must train"
            )
        most = len(division.clients) - plan.new_clients
        if plan.head_clients > most:
            raise UsageError(f"head_clients = {plan.head_clients}, but only {most} clients take part; give fewer")
        if plan.head_clients and not method.takes_contributions():
            raise UsageError(
                f"head_clients = {plan.head_clients}, and method '{method.name}' has no half for devices without "
                "torch; leave it out, or choose a method that has one, such as afl"
            )
        check_head(plan)
        if plan.speeds is not None and saved is None:  # a run that is resumed has the devices that it began with
            read_speeds(plan.speeds, plan.folder)
        weights_path = plan.weights_path
        if weights_path is not None:
            # A simulation that is resumed has a copy of its own: the original may have changed since.
            if saved is not None and (saved.parent / WEIGHTS).exists():
                weights_path = saved.parent / WEIGHTS
            weights, _ = read_weights(models.create(task), weights_path)
            pools = replace(pools, weights=weights)
        model = Built.of(method, task, seed=plan.seed, device=plan.device, weights=pools.weights)
        return cls(plan, method, pools, division, task, model, EngineChoice.of(plan, len(division.clients)))

    def with_params(self, params: dict[str, Any]) -> Prepared:
        """Return a copy with these parameters of the method, and the model for them.

        Raises:
            ConfigError: unknown or impossible parameters, all of them listed.
        """
        method = methods.create(self.plan.method_name, params)
        plan = self.plan
        if method.params == self.method.params:
            return self
        model = Built.of(method, self.task, seed=plan.seed, device=plan.device, weights=self.pools.weights)
        return replace(self, method=method, model=model)

    def shared(self) -> Prepared:
        """Return a copy with its pools in shared memory, where worker processes share them; drop the original."""
        if self.choice.engine != "pool":
            return self
        buffer = SharedBuffer.of(*self.pools.content(), on_disk=self.pools.is_on_disk)
        pools = replace(Pools.from_memory(buffer.map(), self.task), owners=self.pools.owners)
        return replace(self, memory=buffer, pools=pools)

    @property
    def new_clients(self) -> tuple[str, ...]:
        """Clients that never train, and get a head after the last round."""
        return self.plan.new_clients_of(tuple(self.division.clients))

    @property
    def head_clients(self) -> tuple[str, ...]:
        """Clients without torch."""
        return self.plan.head_clients_of(tuple(self.division.clients))

    def settled_precision(self) -> Precision:
        """Choose the precision of training steps: as planned, but float32 where bfloat16 is not faster here.

        All workers follow this one decision: their results must not depend on who trained whom.

        Raises:
            DataError: this GPU has no bfloat16.
        """
        if self.plan.precision == "float32":
            return "float32"
        import torch

        model = self.model.model
        device = next(model.parameters()).device
        supported(self.plan.precision, device)
        train, _ = self.pools.arrays(max(self.division.clients.values(), key=lambda share: len(share.train)))
        inputs = torch.from_numpy(train.inputs[: self.method.params.batch_size]).to(device)
        times = time_steps(model, inputs)
        times.log()
        return times.chosen

    def request(self) -> Request:
        """Return the request of the run, as the journal records it."""
        params = self.method.params.model_dump(mode="json")
        plan = self.plan
        return Request(plan.method_name, params, plan.rounds, plan.seed, self.task, plan.keep_every)

    def config(self, folder: Path) -> CoordinatorConfig:
        """Return the configuration of a coordinator that waits for every client that can still deliver."""
        plan = self.plan
        closing: dict[str, Any] = {"quorum": 1.0, "max_attempts": 1, "deadline_s": LONGEST_ROUND_S}
        if plan.dropout:
            closing = {
                "quorum": LOWEST_QUORUM,
                "max_attempts": MANY_ATTEMPTS,
                "grace_s": GRACE_S,
                "deadline_s": LONGEST_SILENCE_S,
            }
        kind = {"mode": plan.mode, "buffer": plan.buffer, "max_staleness": plan.max_staleness}
        closing |= {name: value for name, value in kind.items() if value is not None}
        raw = {
            "federation": FEDERATION,
            "state": folder,
            "task": self.task.with_peft(None),  # the request of the run says what of the encoder learns
            "cohort": {
                "tier": "any" if plan.head_clients else "train",
                "fraction": plan.fraction,
                "fraction_max": plan.fraction_max,
                "full_last_round": plan.full_last_round,
            },
            "round": {"lease_s": LEASE_S, **closing},
            # The papers' own means; nobody is hostile here.
            "aggregation": {**NO_BOUNDS, "max_loss": None},
            "export": {"after_run": False},
            "evaluate_every": plan.evaluate_every,
        }
        return parse(CoordinatorConfig, raw, where="the simulation's coordinator")


# --- the folder of a simulation --------------------------------------------------------------------------------------
# Plan and partition are written first, then the journal records the run; client states and checkpoints follow from the
# journal. So a folder without a run is a beginning, unless it holds more than that leaves.

_LOCK = "lock"
_JOURNAL = ("journal.db", "journal.db-journal", "journal.db-shm", "journal.db-wal")
_LEFT_BY_A_BEGINNING = {_LOCK, *_JOURNAL, PLAN, PARTITION, WEIGHTS, ENGINE, MARK}
_LEFT_BY_ROUNDS = (CLIENTS, "blobs", "runs")

_RECORDS = ("result.json", "failed.json", "curves.svg", "status.json", "workers", "logs", "simulated-times.json")
"""What is written beside the state of a simulation while it runs and when it ends."""

_TOP_LEVEL = re.compile(
    "|".join(map(re.escape, (*sorted(_LEFT_BY_A_BEGINNING), *_LEFT_BY_ROUNDS, *_RECORDS))) + r"|\..+\.tmp"
)


def _is_earlier_simulation(folder: Path) -> bool:
    return holds_only(folder, _TOP_LEVEL)


SIMULATION_FOLDER = FolderKind("simulation", _is_earlier_simulation)


def read_plan(folder: Path) -> Plan | None:
    """Return the plan of the simulation in ``folder``; None where there is none, or one that was torn at its start.

    Raises:
        UsageError: There is a file instead of the folder.
        ConfigError: The plan has mistakes.
        StateError: The plan of a run is damaged.
    """
    for path in (folder, *folder.parents):
        if path.is_file():
            raise UsageError(f"{path} is a file; choose another --out")
    try:
        content = read_json(folder / PLAN)
    except StateError as error:
        if _is_beginning(folder):
            return None
        raise StateError(
            f"{folder / PLAN}: damaged; put it back from a backup, or remove {folder} to start again"
        ) from error
    return None if content is None else parse(Plan, content, where=str(folder / PLAN))


def begin(prepared: Prepared, folder: Path) -> None:
    """Write what is needed to resume the run: partition, weights, and the plan last."""
    plan = prepared.plan
    prepared.division.write(folder / PARTITION)
    if plan.weights_path is not None:
        write_atomic(folder / WEIGHTS, read_regular(plan.weights_path))
    mark_folder(folder, SIMULATION_FOLDER, folder.name)
    write_json(folder / PLAN, _as_json(plan))


def check_is_free(folder: Path) -> None:
    """Check that a simulation can begin, or begin again after it was killed before its run began.

    Raises:
        UsageError: the folder holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not _is_beginning(folder):
        raise UsageError(f"{folder} is not empty and holds no simulation; choose another with --out")


def _is_beginning(folder: Path) -> bool:
    """Return whether a folder holds only what a simulation leaves that was killed before its run was requested."""
    names = {path.name for path in folder.iterdir()}
    lasting = {name for name in names if not (name.startswith(".") and name.endswith(".tmp"))}
    if _LOCK not in lasting or not lasting <= _LEFT_BY_A_BEGINNING:
        return False
    if "journal.db" not in lasting:
        return True
    with StateFolder(folder).look() as state:
        return state.journal.last_id() == 0


def run_in(state: StateFolder, prepared: Prepared) -> str:
    """Return the run in the journal of the folder, or request one there.

    Raises:
        UsageError: Plan, partition, or the user's own method or encoder differ from those that the run began with.
        StateError: The journal was lost, or replaced by an older one.
    """
    runs = state.journal.runs()
    if runs:
        record = replay(state.journal, runs[0])
        check_own_sources(record, prepared.plan, state.path)
        if prepared.plan.rounds > record.request.rounds:
            record = _extended(state, record, prepared)
        _check_is_requested(state.path, record, prepared)
        _check_is_newest(state.path, record, prepared)
        return runs[0]
    left_by_rounds = [name for name in _LEFT_BY_ROUNDS if any((state.path / name).glob("*"))]
    if left_by_rounds:
        raise StateError(
            f"{state.path}: its journal knows of no run, but there are {', '.join(left_by_rounds)}: it was lost, in a "
            f"power cut perhaps; remove {state.path} to start again, or choose another folder with --out"
        )
    weights = None
    plan = prepared.plan
    if plan.weights is not None:
        weights = Weights.of(state.path / WEIGHTS)
    simulated = Simulated(
        plan=_as_json(plan),
        partition_sha256=prepared.division.sha256,
        precision=prepared.settled_precision(),
    )
    sources = own_sources(method=plan.method, encoder=plan.encoder)
    if sources:  # without them earlier versions can read the journal, too
        simulated = simulated.changed(own_sources=sources)
    request = replace(prepared.request(), weights=weights).to_fact()
    return state.journal.request_run(request.changed(simulation=simulated))


def _extended(state: StateFolder, record: RunRecord, prepared: Prepared) -> RunRecord:
    """Give a run more rounds, whether it has finished or not, and return where it stands then.

    A round computes from the state before it, the seed and its number alone: the state after round 10 of 20 is that
    after the last of 10. Only the end differs: personal models that were made after the last round go, and clients make
    them again at the new end.

    Raises:
        UsageError: A step of the run depends on the number of rounds.
    """
    before = record.request.rounds
    rounds = prepared.plan.rounds
    tied = why_tied(record, prepared.plan, prepared.method)
    if tied:
        raise UsageError(
            f"{state.path}: {before} rounds cannot become {rounds}: {tied}; start a new run with {rounds} rounds in "
            "another folder"
        )
    # The order makes a kill harmless: until the journal says so, the next start does all of this again.
    write_json(state.path / PLAN, _as_json(prepared.plan))
    for client in prepared.division.clients:
        state_files_in(state.path / CLIENTS, client, record.run).remove(LAST_ROUND)
    state.journal.append(RunExtended(rounds=rounds), run=record.run)
    return replay(state.journal, record.run)


def why_tied(record: RunRecord, plan: Plan, method: Method) -> str:
    """Return why a run cannot have more rounds without other numbers; empty: it can have them.

    Args:
        record: Where the run stands.
        plan: Its settings, with more rounds.
        method: Its method.
    """
    if method.tied_to_rounds:
        return f"method '{method.name}' depends on their number: {method.tied_to_rounds}"
    begun = record.round
    if record.open_round is not None:
        begun += 1
    has_begun_last = begun >= record.request.rounds
    if plan.full_last_round and has_begun_last:
        return f"with full_last_round all clients take part in round {record.request.rounds}, and that has begun"
    # Devices that are at work at the end of a buffered run deliver no more.
    if plan.mode == "buffered" and (has_begun_last or record.stopped):
        return "its last round has begun, and with mode buffered clients that are at work at the end lose their updates"
    return ""


def computing_as_begun(state: StateFolder, run: str, prepared: Prepared) -> Prepared:
    """Return a copy with the precision and parameters that the run began with, whatever the machine or version.

    The plan has only parameters that were given; the journal has all of them, as the jobs of clients do.

    Raises:
        ConfigError: the method has no such parameters any more.
    """
    request = replay(state.journal, run).request
    plan = prepared.plan
    if request.simulation is not None and request.simulation.precision:
        plan = plan.model_copy(update={"precision": request.simulation.precision})
    return replace(prepared, plan=plan).with_params(request.params)


def _as_json(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json", exclude_defaults=True)


def _check_is_requested(folder: Path, record: RunRecord, prepared: Prepared) -> None:
    """Check that a run continues with the settings and samples that it began with.

    Raises:
        UsageError: Other settings, or other samples of the clients.
    """
    # Runs of earlier versions do not record their settings.
    requested = record.request.simulation
    if requested is None:
        return
    begun = parse(Plan, requested.plan, where=f"the plan in {folder}'s journal")
    # Data may be moved: the partition has their hash, and the request that of the weights.
    differences = begun.differences(prepared.plan, but=("data", "weights"))
    if differences:
        raise UsageError(
            f"{folder}: its settings differ from those in {PLAN} ({'; '.join(differences[:5])}); "
            "restore it, or choose another folder with --out"
        )
    partition_sha256 = prepared.division.sha256
    if requested.partition_sha256 != partition_sha256:
        raise UsageError(
            f"{folder}: {PARTITION} gives clients other samples (hash {partition_sha256[:16]}) than the run began with "
            f"({requested.partition_sha256[:16]}); restore it, or choose another folder with --out"
        )


def _check_is_newest(folder: Path, record: RunRecord, prepared: Prepared) -> None:
    """Check that no client has state of a round that has not been opened.

    Raises:
        StateError: A client has, so that the journal is an older one.
    """
    if record.is_over:
        return
    newest = record.round + 1
    if record.round >= record.request.rounds or record.stopped:
        newest = LAST_ROUND
    for client in prepared.division.clients:
        rounds = state_files_in(folder / CLIENTS, client, record.run).rounds()
        if rounds and rounds[-1] > newest:
            when = "the end" if rounds[-1] == LAST_ROUND else f"round {rounds[-1]}"
            raise StateError(
                f"{folder}: its journal is in round {newest}, but client '{client}' has state of {when}: "
                f"the journal is an older one; put back the newer one, or remove {folder} to start again, or choose "
                "another folder with --out"
            )
