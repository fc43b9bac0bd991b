"""A whole federation on one machine: the coordinator's round loop and journal, and clients that an engine runs.

Nothing sleeps: the clock of leases and deadlines stands still while clients work, and advances when nothing is left to
do. A run that was stopped, however that was, is resumed where it stopped, and ends in the same bits.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from edge_agent.client import choose_device
from edge_agent.core.errors import ChunkError, HeadwaterError, RunFailed, StateError
from edge_agent.core.storage import sweep, without_syncs, write_json
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.messages.down import Job
from edge_agent.wire.tensors import encode
from edge_agent.wire.transport import Message

from ..fleet.run_ids import RunNames
from ..journal.entries import RoundOpened
from ..journal.store import facts_of
from ..rounds.buffered import BufferedCollection
from ..rounds.context import RunContext
from ..runs.run_queue import Runs
from ..service.coordinator import Coordinator
from ..service.status import STATUS_EVERY_S
from ..service.surroundings import Runtime, StartOptions
from ..state.store import StateFolder
from ..text import listed, reason_of
from ..views.runs import replay
from .client_pool import RESUMABLE, CoordinatorServices, Dropouts, Population, SimulatedClients
from .client_tasks import Sessions, Shared
from .device_speeds import Speeds, read_speeds
from .engines.base import Engine, Serial
from .engines.fastest import EngineTrial, settle_engine
from .engines.pool import LocalWorkers, WorkerPool
from .engines.ray_cluster import RayWorkers
from .engines.stacked import Stacked
from .failures import Failure
from .figures import EngineFigures, Summary
from .memory_plan import MemoryPlan, fit_memory
from .memory_watch import MemoryWatch
from .observer import RoundObserver
from .results import describe, pooled_batch_norm, result_of
from .setup import (
    CLIENTS,
    ENGINE,
    LONGEST_SILENCE_S,
    Prepared,
    begin,
    check_is_free,
    computing_as_begun,
    read_plan,
    run_in,
)
from .timed_clients import TIMES, SimulatedTimes, TimedClients

SHORTEST_PAUSE_S = 0.01
STALLED_S = 5 * LONGEST_SILENCE_S
"""Of the simulated clock: when it has advanced so far without a message, nothing will happen any more."""


class Simulation:
    """A simulated run in a folder that this process has locked. Call `step` until `is_over`."""

    def __init__(
        self,
        prepared: Prepared,
        state: StateFolder,
        run: str,
        engine: Engine,
        memory: MemoryPlan | None = None,
        trial: EngineTrial | None = None,
    ) -> None:
        self.prepared = prepared
        self.state = state
        self.run = run
        self.engine = engine
        self.memory = memory
        """How the simulation fits into memory; None where that is not known."""

        self.trial = trial
        """How the engine was chosen; None where it was named."""

        self.watch = MemoryWatch(prepared.plan.max_memory_bytes, lambda: self.engine.pids_here)
        self.clock_s = 0.0
        self.observer = RoundObserver(state, run, prepared.division, prepared.plan.rounds, self._admit_new_clients)
        """Shows each closed round to the caller's functions."""

        broker = MemoryBroker()  # a clock that stands still until it is advanced
        self.coordinator = StrictCoordinator(
            prepared.config(state.path),
            state,
            broker.transport(),
            runtime=Runtime(clock=lambda: self.clock_s, stopwatch=time.perf_counter, hooks=self.observer),
            start=StartOptions(probe_s=0.0, run_ids=RunNames(state.journal)),
        )
        services = CoordinatorServices(self.coordinator.topics, self.coordinator.distributor, self.coordinator.roster)
        population = _population_of(prepared)
        self.times: SimulatedTimes | None = None
        """The simulated clock; None where the speed of devices is not simulated."""

        kind = SimulatedClients if prepared.plan.speeds is None else TimedClients
        self.clients = kind(broker, services, engine, population, attempt=self._attempt, beside=self._pooled_norm)
        if isinstance(self.clients, TimedClients):
            self.times = SimulatedTimes(state.path / TIMES, lambda: _speeds_of(prepared))
            self.clients.keep_time(self.times)
        self._pooled: tuple[Outgoing, ...] | None = None
        self._silent_s = 0.0
        self._has_invited = False
        self.is_over = False
        """Whether the run has finished or failed."""

    def start(self) -> None:
        """Start the engine and the coordinator, and connect all clients."""
        self.engine.start()
        self.coordinator.start()
        self.engine.wait_until_ready()  # while the workers start, the coordinator reads its journal
        record = replay(self.state.journal, self.run)
        begun = record.round + (record.open_round is not None)
        self.clients.start(is_late=begun >= self.prepared.plan.rounds)

    def close(self) -> None:
        """Stop; everything that is needed to resume is on disk."""
        self.engine.close()
        self.coordinator.close()

    def step(self) -> Job | None:
        """Exchange all messages, then let clients work; returns the job that one has done.

        Raises:
            RunFailed: a client or the run cannot continue, or no client has a job left.
            StateError: files cannot be read or written, on a full disk for example.
        """
        self.talk()
        return self.work()

    def talk(self) -> None:
        """Exchange all messages between the coordinator and its clients."""
        with translate_file_errors(self.state.path):
            self._exchange()
            if self.times is not None and self._invite_busy_clients():
                self._exchange()
        self.coordinator.catch_up(STATUS_EVERY_S)

    def _exchange(self) -> None:
        """Deliver messages both ways until there are none, all that wait on one side before those on the other."""
        is_quiet = False
        while not is_quiet:
            while self.coordinator.step(0):
                self._silent_s = 0.0
            is_quiet = True
            while self.clients.receive():
                self._silent_s = 0.0
                is_quiet = False

    def _invite_busy_clients(self) -> bool:
        """Ask once more, after a restart, those who worked on a job of an earlier round; returns whether anybody did.

        Devices that work on when a coordinator restarts deliver by themselves. Here they have lost their job with it.
        """
        collection = self.coordinator.collector.open_round
        loop = self.coordinator.loop
        if self._has_invited or collection is None or loop is None:
            return False
        self._has_invited = True
        busy: list[str] = []
        if isinstance(collection, BufferedCollection):
            busy += [client for client in collection.outstanding if client in collection.asked_in]
        for client in busy:
            loop.invite(client)
        return bool(busy)

    def work(self) -> Job | None:
        """Let clients work until one has done a job, which is returned; without jobs the clock advances.

        Raises:
            RunFailed: the run waits for clients, and none has a job left; or as `SimulatedClients.work`.
            TrainingFailed, StateError: as `SimulatedClients.work`.
        """
        self.watch.check(str(self.state.path))
        with translate_file_errors(self.state.path):
            job = self.clients.work()
        if job is not None:
            return job
        self.is_over = self.coordinator.loop is None and replay(self.state.journal, self.run).is_over
        seconds = max(SHORTEST_PAUSE_S, self.coordinator.idle_s())
        self.clock_s += seconds
        self._silent_s += seconds
        if self._silent_s > STALLED_S and not self.is_over:
            waits = self.coordinator.waiting
            raise RunFailed(
                f"{self.state.path}: the run waits, but no client has a job left: {waits.what}, "
                f"for {listed(waits.whom)}; a message was lost; please report this if it happens "
                f"again{RESUMABLE}"
            )
        return None

    @property
    def open_round(self) -> int:
        """The round that clients work for; 0 when there is none."""
        collection = self.coordinator.collector.open_round
        return collection.round if collection else 0

    def finish(self, watch: Callable[[Job], None] = lambda _: None) -> Summary:
        """`step` to the end, and call ``watch`` with each job that was done. Returns the figures of the run.

        Raises:
            TrainingFailed: a client's training has failed, and will again.
            RunFailed: it failed otherwise; the message says why.
            StateError: a file could not be read or written.
        """
        self.observer.replay(replay(self.state.journal, self.run).round)
        while not self.is_over:
            job = self.step()
            if job is not None:
                watch(job)
        record = replay(self.state.journal, self.run)
        if record.status != "finished":
            raise RunFailed(f"{self.run} {record.status}: {record.reason or 'no reason was noted'}")
        with translate_file_errors(self.state.path):
            describe(self.state, self.run, self.prepared)
        result = result_of(self.state, self.run, self.prepared)
        if self.times is not None:
            for figures in result["rounds"]:
                figures["simulated_s"] = self.times.closed.get(figures["round"])
        start_s = round(self.engine.start_s, 3)
        summary = {**result, "start_s": start_s, **self.engine.figures, **self._chosen_figures()}
        return cast("Summary", summary)

    def _chosen_figures(self) -> EngineFigures:
        """Return memory in bytes where a limit was given, and how the engine was chosen where a trial did that."""
        figures: EngineFigures = {}
        if self.memory is not None and self.prepared.plan.max_memory is not None:
            figures["memory_bytes"] = {
                "limit": self.memory.limit,
                "expected": self.memory.expected,
                "peak": self.watch.peak,
            }
        if self.trial is not None:
            figures["engine_trial"] = {**self.trial.model_dump(mode="json"), "reason": self.trial.reason()}
        return figures

    def _admit_new_clients(self) -> None:
        """Register the clients that never train, before all are asked for their results."""
        self.clients.admit_new_clients()

    def _pooled_norm(self, job: Job) -> tuple[Outgoing, ...]:
        """Return batch norm that stays with clients, pooled as for a bundle: without it new clients have no encoder."""
        if self._pooled is None:
            pooled = pooled_batch_norm(self.state.path, job.run, job.rounds, self.prepared.method, self.prepared.task)
            self._pooled = ()
            if pooled:
                self._pooled = (Outgoing.of(encode(pooled)),)
        return self._pooled

    def _attempt(self, number: int) -> int:
        """Return which attempt at a round runs."""
        opened = self.state.journal.entries(self.run, ("round_opened",), round=number)
        facts = facts_of(opened, RoundOpened)
        if not facts:
            return 1
        return facts[-1].attempt


def _speeds_of(prepared: Prepared) -> Speeds:
    """Return the speed of each client, as the plan and its seed give them."""
    plan = prepared.plan
    return Speeds.draw(read_speeds(plan.speeds or "", plan.folder), tuple(prepared.division.clients), plan.seed)


def _population_of(prepared: Prepared) -> Population:
    """Return who the clients of a simulation are."""
    plan = prepared.plan
    samples = {client: len(share.train) for client, share in prepared.division.clients.items()}
    dropouts = None
    if plan.dropout:
        dropouts = Dropouts(plan.dropout, plan.seed)
    return Population(samples, prepared.new_clients, prepared.head_clients, dropouts)


@contextlib.contextmanager
def open_simulation(prepared: Prepared, folder: Path, setup: Sequence[str] = ()) -> Iterator[Simulation]:
    """Start a simulation in ``folder``: a new one, or the one that was left there.

    Kills of any process cost nothing. A power cut may cost the run, for nothing waits for the disk before the end.

    ``setup``: functions (``module:function``) that each worker process is to call before it begins.

    Raises:
        UsageError: the folder holds something else, a run with other settings, or it does not fit into memory.
        RunFailed: it was stopped before memory ran out.
        StateError: another process uses it, or files are damaged, missing or of another run.
    """
    is_new = read_plan(folder) is None
    if is_new:
        check_is_free(folder)
    prepared, trial = settle_engine(prepared, folder)
    memory = fit_memory(prepared)
    if memory is not None:
        prepared = replace(prepared, choice=memory.choice)
    with without_syncs(folder), StateFolder(folder).open("headwater simulate") as state:
        if trial is not None:
            write_json(folder / ENGINE, trial.model_dump(mode="json"))
        if is_new:
            begin(prepared, folder)
        sweep(folder / CLIENTS)
        run = run_in(state, prepared)
        prepared = computing_as_begun(state, run, prepared)
        engine = create_engine(prepared, folder, setup, memory, trial)
        simulation = Simulation(prepared, state, run, engine, memory, trial)
        with simulation.watch.watching(str(folder)):
            try:
                simulation.start()
                yield simulation
            finally:
                simulation.close()


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class StrictRuns(Runs):
    """Runs that errors do not end: when the run is resumed, the same step is tried again."""

    def fail(self, run: str, error: BaseException) -> None:
        """Raise the error; nothing is noted in the journal.

        Raises:
            RunFailed: the run cannot continue.
        """
        if isinstance(error, RunFailed):
            raise error
        where = ""
        if isinstance(error, Exception) and not isinstance(error, HeadwaterError):
            where = Failure.of(error).where  # such as the line of an own method's `aggregate`
        raise RunFailed(f"{run} cannot continue: {reason_of(error)}{where}") from error

    def stall(self, run: str, error: BaseException) -> None:  # noqa: ARG002 - one run is all there is
        """Raise the error: files cannot be read or written."""
        raise error

    def trouble(self, error: StateError | OSError) -> None:
        """Raise the error, as `stall` does."""
        raise error


class StrictCoordinator(Coordinator):
    """A coordinator that raises errors instead of counting them, logging them, or ending the run.

    In a simulation no message comes twice, so any error is a problem of this machine, to be solved before resuming.
    """

    make_runs = StrictRuns

    def _on_message(self, event: Message) -> None:
        agent, kind = self.topics.sender(event.topic)
        try:
            self.handle(agent, kind, event.payload)
        except (HeadwaterError, OSError):
            raise
        # An own method's `objection`, which is asked about each update, may raise anything.
        except Exception as error:
            raise RunFailed(f"a message of {agent}: {reason_of(error)}{Failure.of(error).where}") from error

    def _plan(self, begin: float, pump_s: float | None) -> None:
        """Plan the next look at timers and the run: after all messages that wait, for the clock stands still meanwhile.

        Other coordinators wait by the seconds that a look takes. Here these are none, and a look would follow each
        message: half of the time in which an update's chunks are taken.
        """
        super()._plan(begin, pump_s)
        self._advance_at = self._due_at

    def run_context(self) -> RunContext:
        """Return the context of a run as every coordinator has it, but a failing client ends the run."""
        return replace(super().run_context(), excludes_failing=False, is_simulation=True)


@contextlib.contextmanager
def translate_file_errors(folder: Path) -> Iterator[None]:
    """Turn errors of files of the simulation in ``folder``, raised inside, into one that says what to do.

    Raises:
        StateError: A file could not be read or written.
    """
    try:
        yield
    except (OSError, ChunkError, StateError) as error:  # a chunk that the disk does not take is a ChunkError
        reason = str(error).rstrip(".")
        if isinstance(error, OSError):
            reason = reason_of(error)
        remedy = "mend that (make room on a full disk)"
        if getattr(error, "errno", None) in _NO_ROOM:
            remedy = "make room"
        raise StateError(f"{folder}: the simulation has stopped: {reason}; {remedy}{RESUMABLE}") from error


SPARE_BYTES = 1 << 30
"""Of the host's memory, for samples that stay with their clients between rounds."""


def create_engine(
    prepared: Prepared,
    folder: Path,
    setup: Sequence[str],
    memory: MemoryPlan | None = None,
    trial: EngineTrial | None = None,
) -> Engine:
    """Make the engine that was chosen, for the simulation in ``folder``; workers call the functions ``setup`` first."""
    plan = prepared.plan
    choice = prepared.choice
    clients = folder / CLIENTS
    if choice.engine == "ray":
        return WorkerPool("ray", RayWorkers(prepared, clients, setup), choice.workers)
    if choice.engine == "pool":
        return WorkerPool("pool", LocalWorkers.of(prepared, folder, setup), choice.workers)
    shared = Shared(plan, prepared.pools, prepared.division, prepared.model, clients)
    if choice.engine == "serial":
        return Serial(shared)
    device = choose_device(plan.device)
    spare_bytes = SPARE_BYTES
    most = None
    if memory is not None:
        spare_bytes = min(spare_bytes, memory.spare)
        most = 1 + memory.spare // max(1, memory.need.client)
    if device.type == "cuda":  # a quarter of a GPU, where samples would otherwise be sent again in each round
        spare_bytes = int(torch.cuda.get_device_properties(device).total_memory) // 4
        most = None
    shared = replace(shared, sessions=Sessions(spare_bytes))
    if trial is not None:  # it has timed stacks of the cohort's size
        return Stacked(shared, always=True, convolutions=trial.convolutions, most=most)
    return Stacked(shared, always=plan.stacked_always, most=most)
