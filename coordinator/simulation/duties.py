"""A simulated client's duties: those of a device, on rows of the common pools, with a model that takes turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_agent import methods
from edge_agent.agent.local_state import ClientStateFiles
from edge_agent.agent.runner import fault
from edge_agent.agent.tasks import TaskRunner, kept_before
from edge_agent.client.session import Arrays, Built, ClientState, Session
from edge_agent.config import AgentConfig, DataConfig, Precision, TrainingConfig
from edge_agent.data import Samples
from edge_agent.data.partition import Division
from edge_agent.errors import HeadwaterError
from edge_agent.methods import Client
from edge_agent.storage import sha256_of
from edge_agent.task import Task, Tensors
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import CHUNK_BYTES
from edge_agent.wire.tensors import pieces
from edge_agent.wire.text import metrics_of

from ..fleet.uploads import reason_of
from .newcomers import fit_head
from .pools import Pools

log = logging.getLogger(__name__)

NOT_KEPT = OSError.__name__
"""The `Fault` of a client whose files could not be read or written: trouble of the machine, not of the client."""

NO_MEMORY = MemoryError.__name__
"""The `Fault` of a client for which there was not enough memory: with more of it the same work may be done."""

Said = TypeVar("Said")

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What torch's allocators say; only the one of GPUs has an error class of its own."""


class HeldOutbox:
    """A client's outbox in memory: what a kill takes is computed again, bit for bit."""

    def __init__(self) -> None:
        self.content: list[bytes | memoryview] = []

    def put(
        self, tensors: Tensors, *, run: str, round_number: int, samples: int, metrics: Mapping[str, float]
    ) -> wire.UpdateManifest:
        """Keep an update, in pieces that belong together, until somebody takes it."""
        self.content = [*pieces(tensors)]
        size = sum(memoryview(piece).nbytes for piece in self.content)
        ref = wire.BlobRef(digest=sha256_of(*self.content), size_bytes=size, chunk_bytes=CHUNK_BYTES)
        return wire.UpdateManifest(run=run, round=round_number, blob=ref, samples=samples, metrics=metrics_of(metrics))


class Sessions:
    """Sessions of one run, of as many clients as their samples fit into so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._held: dict[str, Session] = {}

    def of(self, client: str, make: Callable[[], Session]) -> Session:
        """The client's session: the one from before, or a new one."""
        if client in self._held:
            return self._held[client]
        made = make()
        if made.nbytes <= self._left_bytes:
            self._left_bytes -= made.nbytes
            self._held[client] = made
        return made


@dataclass(frozen=True)
class Shared:
    """What all clients of a process have in common: pools, partition, one model object, and where they keep things.

    ``newcomers`` never train; after the last round they take the frozen encoder and fit a head on it.
    """

    pools: Pools
    division: Division
    model: Built
    folder: Path
    device: str = "auto"
    precision: Precision = "float32"
    evaluate_after: bool = False
    keep_every: int = 0
    newcomers: frozenset[str] = frozenset()
    carried: ClientStateFiles | None = None
    """What the one client whose turn it is keeps, where that lies with somebody else and is carried to and fro."""

    sessions: Sessions | None = None
    """Sessions that stay for the next round; None: samples lie in memory only until a job is done."""

    def state_files(self, client: str, run: str) -> ClientStateFiles:
        """What a client keeps of a run: also of the rounds whose states the coordinator keeps."""
        return self.carried or kept_in(self.folder, client, run, self.keep_every)

    def duties(self, client: str) -> SimulatedDuties:
        """The duties of one client."""
        return SimulatedDuties(self, client)


def kept_in(folder: Path, client: str, run: str, keep_every: int = 0) -> ClientStateFiles:
    """The kept files of one of the clients whose folders are in ``folder``."""
    return ClientStateFiles(folder / client / "runs" / run, keep_every)


class SimulatedDuties(TaskRunner):
    """A device's duties on rows of the common pools, with the common model, which belongs to it only while it works."""

    outbox: HeldOutbox  # type: ignore[assignment]

    def __init__(self, shared: Shared, client: str) -> None:
        config = AgentConfig(
            id=client,
            state=shared.folder / client,
            data=DataConfig(source="simulation:"),
            training=TrainingConfig(device=shared.device, precision=shared.precision),
        )
        super().__init__(config, "train")
        self._shared, self.outbox = shared, HeldOutbox()
        self.samples = len(shared.division.clients[client].train)

    def do(self, job: wire.Job, received: Tensors) -> wire.UpdateManifest | wire.Report:
        """As on devices; somebody new has kept nothing and fits a head on the encoder as it is.

        Raises:
            TrainingFailed: training stopped.
        """
        if job.purpose == "finish" and self.config.id in self._shared.newcomers:
            return self._begin(job, received)
        return super().do(job, received)

    def state_files(self, run: str) -> ClientStateFiles:
        """What this client keeps of a run."""
        return self._shared.state_files(self.config.id, run)

    def begin(self, job: wire.Job, received: Tensors) -> Begun:
        """A client that is ready to be trained, its model loaded; with `end`, `do` in two halves.

        Raises:
            TensorsError: what was received does not fit the model.
            StateError: what was kept is damaged.
        """
        session = self._session_for(job)
        kept = ClientState(*self.state_files(job.run).before(kept_before(job)))
        client = session.before_round(received, kept, round_number=job.round, rounds=job.rounds)
        return Begun(self, job, session, client, session.scores(client) if job.evaluate else {})

    def end(self, begun: Begun) -> wire.UpdateManifest:
        """Keep and tell what came out of plain training, which the model holds now."""
        job, session = begun.job, begun.session
        outcome = session.after_round(begun.client, session.sent(), begun.metrics, evaluate=job.evaluate)
        return self._deliver(job, outcome, self.state_files(job.run))

    def _session_for(self, job: wire.Job) -> Session:
        sessions = self._shared.sessions
        return sessions.of(self.config.id, lambda: self._fresh(job)) if sessions else self._fresh(job)

    def _fresh(self, job: wire.Job) -> Session:
        train, test = self._arrays()
        method = methods.create(job.method, job.params)
        return Session(
            method,
            job.task,
            self.config.id,
            train,
            test,
            seed=job.seed,
            device=self.config.training.device,
            model=self._shared.model,
            evaluate_after=self._shared.evaluate_after,
            precision=self._shared.precision,
        )

    def _arrays(self) -> tuple[Arrays, Arrays]:
        return self._shared.pools.arrays(self._shared.division.clients[self.config.id])

    def _begin(self, job: wire.Job, received: Tensors) -> wire.Report:
        session = self._session_for(job)
        head, overall, personal = fit_head(session, received, rounds=job.rounds)
        return self._told(job, head, overall, personal)

    def _samples(self, task: Task) -> tuple[Samples, Samples]:  # noqa: ARG002 - the pools are of the run's task
        return self._shared.pools.rows_of(self._shared.division.clients[self.config.id])


@dataclass(frozen=True)
class Begun:
    """A client between the two halves of a round: all that is there of it but its model, which others use as well."""

    duties: SimulatedDuties
    job: wire.Job
    session: Session
    client: Client
    metrics: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """What a client says to a job, the bytes of its update in pieces, and how long it worked."""

    said: wire.UpdateManifest | wire.Report | wire.Fault
    content: list[bytes | memoryview]
    seconds: float


def answer(shared: Shared, client: str, job: wire.Job, received: Tensors) -> Answer:
    """Let a client do its job; whatever goes wrong becomes its `Fault`, as on a device."""
    begin, content = time.perf_counter(), list[bytes | memoryview]()

    def work() -> wire.UpdateManifest | wire.Report:
        duties = shared.duties(client)
        said = duties.do(job, received)
        content.extend(duties.outbox.content)
        return said

    said = attempt(client, job, work)
    return Answer(said, content, time.perf_counter() - begin)


def attempt(client: str, job: wire.Job, work: Callable[[], Said]) -> Said | wire.Fault:
    """What comes out of a client's work, or what it says when that went wrong; what nobody foresaw is logged."""
    try:
        return work()
    except OSError as error:
        return wire.Fault(error=NOT_KEPT, message=reason_of(error)[:2000], run=job.run, round=job.round)
    except Exception as error:
        if is_out_of_memory(error):
            return no_memory(client, job, str(error))
        if not isinstance(error, HeadwaterError):
            log.exception("work_broke client=%s", client)
        return fault(error, job.run, job.round)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, on the host or on a GPU."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


def no_memory(client: str, job: wire.Job, reason: str) -> wire.Fault:
    """What a client says for which there was not enough memory."""
    size = job.params.get("batch_size")
    batch = "a smaller batch_size" if size is None else f"a smaller batch_size than {size}"
    first = " ".join(reason.split())[:200] or "the system gave no reason"
    words = (
        f"client '{client}' ran out of memory in round {job.round} ({first}); "
        f"try {batch}, fewer --workers, or a smaller encoder"
    )
    return wire.Fault(error=NO_MEMORY, message=words, run=job.run, round=job.round)
