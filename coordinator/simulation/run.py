"""A whole federation on one machine: the coordinator's own round loop, its journal, and clients that an engine serves.

Nothing sleeps: the clock of leases and deadlines stands still while anybody works, and moves when nobody has anything
to do. A run that was stopped, however, goes on where it stood, and ends in the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_agent.errors import RunFailed
from edge_agent.storage import sweep, without_syncs
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.messages import Job
from edge_agent.wire.tensors import encode

from ..service.status import STATUS_EVERY_S
from ..state.identity import RunNames
from ..state.store import StateFolder
from ..text import listed
from .clients import GO_ON, Crowd
from .dropouts import Dropouts
from .engines import Engine
from .folder import CLIENTS, PARTITION, begin, check_is_free, computing_as_begun, planned, run_in
from .prepared import LONGEST_SILENCE_S, Prepared
from .strict import StrictCoordinator, files_kept

__all__ = ["Simulation", "open_simulation"]

SHORTEST_PAUSE_S = 0.01
STALLED_S = 5 * LONGEST_SILENCE_S
"""Of the standing clock: when it has moved so far without a word from anybody, nothing is going to happen any more."""


class StandingClock:
    """Seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    """One run in one folder, which this process has locked. `step` until `is_over`."""

    def __init__(self, prepared: Prepared, state: StateFolder, run: str, engine: Engine) -> None:
        self.prepared, self.state, self.run, self.engine = prepared, state, run, engine
        self.clock, broker = StandingClock(), MemoryBroker()
        self.coordinator = StrictCoordinator(
            prepared.config(state.path),
            state,
            broker.transport(),
            clock=self.clock,
            stopwatch=time.perf_counter,
            probe_s=0.0,
            run_ids=RunNames(state.journal),
        )
        plan = prepared.plan
        self.crowd = Crowd(
            broker,
            self.coordinator.topics,
            self.coordinator.distributor,
            engine,
            {client: len(share.train) for client, share in prepared.division.clients.items()},
            newcomers=prepared.newcomers,
            dropouts=Dropouts(plan.dropout, plan.seed) if plan.dropout else None,
            attempt=self._attempt,
            beside=self._pooled_norm,
        )
        self._pooled: tuple[Outgoing, ...] | None = None
        self._is_over = False
        self._silent_s = 0.0

    def start(self) -> None:
        """Everybody connects."""
        self.engine.start()
        self.coordinator.start()
        record = self.state.journal.replay(self.run)
        begun = record.round + (record.open_round is not None)
        self.crowd.start(self.coordinator.roster, is_late=begun >= self.prepared.plan.rounds)

    def close(self) -> None:
        """Leave everything on disk so that it can be gone on with."""
        self.engine.close()
        self.coordinator.close()

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end, good or bad."""
        return self._is_over

    def step(self) -> Job | None:
        """Let everybody say what they have to say, then let clients work; returns the job that one has done.

        Raises:
            RunFailed: a client or the run cannot go on, or nobody has anything left to do.
            StateError: files cannot be read or written, on a full disk for example.
        """
        self.talk()
        return self.work()

    def talk(self) -> None:
        """Let everybody say what they have to say."""
        with files_kept(self.state.path):
            while self.coordinator.step(0) or self.crowd.hear():
                self._silent_s = 0.0
        self.coordinator.catch_up(STATUS_EVERY_S)

    def work(self) -> Job | None:
        """Let clients work until one has done a job, which is returned; where there is none, the clock moves."""
        with files_kept(self.state.path):
            job = self.crowd.work()
        if job is None:
            self._is_over = self.coordinator.loop is None and self.state.journal.replay(self.run).is_over
            self._pass(max(SHORTEST_PAUSE_S, self.coordinator.idle_s()))
        return job

    @property
    def open_round(self) -> int:
        """The round that clients work for; 0 when there is none."""
        collection = self.coordinator.collector.open_round
        return collection.round if collection else 0

    def closed(self) -> int:
        """How many rounds have closed."""
        return len(self.state.journal.entries(self.run, ("round_closed",)))

    def finish(self, watch: Callable[[Job], None] = lambda _: None) -> dict[str, Any]:
        """`step` to the end; ``watch`` hears of each job that was done. Returns the result as JSON.

        Raises:
            TrainingFailed: a client's training has failed, and will again.
            RunFailed: it failed otherwise; the message says why.
            StateError: a file could not be read or written.
        """
        from .results import result_of

        while not self.is_over:
            job = self.step()
            if job is not None:
                watch(job)
        record = self.state.journal.replay(self.run)
        if record.status != "finished":
            raise RunFailed(f"{self.run} {record.status}: {record.outcome.get('reason', 'no reason was noted')}")
        return {**result_of(self.state, self.run, self.prepared), **self.engine.figures}

    def _pass(self, seconds: float) -> None:
        """Let time pass, in which nobody works."""
        self.clock.now += seconds
        self._silent_s += seconds
        if self._silent_s > STALLED_S and not self._is_over:
            waits = self.coordinator.waits
            raise RunFailed(
                f"{self.state.path}: nobody has anything left to do, yet the run waits: {waits.what}, "
                f"for {listed(waits.whom, 'nobody')}; a message was lost, which should not be: report it if it comes "
                f"back{GO_ON}"
            )

    def _pooled_norm(self, job: Job) -> tuple[Outgoing, ...]:
        """Batch norm that stays with clients, pooled as for a bundle: without it newcomers have no encoder."""
        from .pooling import pooled_of

        if self._pooled is None:
            pooled = pooled_of(self.state.path, job.run, job.rounds, self.prepared.method, self.prepared.task)
            self._pooled = (Outgoing.of(encode(pooled)),) if pooled else ()
        return self._pooled

    def _attempt(self, number: int) -> int:
        """Which attempt at a round is under way."""
        opened = self.state.journal.entries(self.run, ("round_opened",), round=number)
        return int(opened[-1].body["attempt"]) if opened else 1


@contextlib.contextmanager
def open_simulation(prepared: Prepared, folder: Path, setup: Sequence[str] = ()) -> Iterator[Simulation]:
    """A started simulation in ``folder``: a new one, or the one that was left there.

    Kills of any process cost nothing. A power cut may cost the run, for nothing waits for the disk before the end.

    ``setup``: functions (``module:function``) that each worker process is to call before it begins.

    Raises:
        UsageError: the folder holds something else, or a run that was asked for otherwise.
        StateError: another process works there, or what lies there is damaged, lost or does not belong together.
    """
    from .engines.making import engine_for

    is_new = planned(folder) is None
    if is_new:
        check_is_free(folder)
    with without_syncs(folder), StateFolder(folder).open("headwater simulate") as state:
        if is_new:
            begin(prepared, folder)
        sweep(folder / CLIENTS)
        run = run_in(state, prepared)
        prepared = computing_as_begun(state, run, prepared)
        engine = engine_for(prepared, folder, partition=PARTITION, clients=CLIENTS, setup=setup)
        simulation = Simulation(prepared, state, run, engine)
        try:
            simulation.start()
            yield simulation
        finally:
            simulation.close()
