"""The tasks of simulated clients: those of a device, with the samples, the model and the memory of a shared process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter

from edge_agent.agent.tasks.resources import Resources
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.agent.tasks.table import state_before
from edge_agent.agent.transfers import Outbox, manifest_of
from edge_agent.client import Built, ClientState, Session
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig, Precision, PrivacyConfig, TrainingConfig
from edge_agent.core.errors import HeadwaterError
from edge_agent.core.task import Task, Tensors
from edge_agent.data import Samples
from edge_agent.data.partition import Division
from edge_agent.methods import Client
from edge_agent.run_folder.client_state import ClientStateFiles
from edge_agent.wire.faults import fault
from edge_agent.wire.messages import down, up
from edge_agent.wire.messages import fields as fields_module
from edge_agent.wire.tensors import pieces

from ..text import reason_of
from .datasets import Pools
from .device_heads import contribute, fit_head
from .failures import NONE, Failure
from .out_of_memory import is_out_of_memory
from .plan import Plan

log = logging.getLogger(__name__)

NOT_KEPT = OSError.__name__
"""The `Fault` of a client whose files could not be read or written: a problem of the machine, not of the client."""

NO_MEMORY = MemoryError.__name__
"""The `Fault` of a client for which there was not enough memory: with more memory the job may succeed."""

WORKER_EXITED = "WorkerExited"
"""The `Fault` of a client whose workers ended again and again before it was done."""

Reply: TypeAlias = Annotated[up.UpdateManifest | up.Report | up.Fault, Field(discriminator="type")]
"""What a client replies to a job."""

_REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A client's reply to a job, the bytes of its update in pieces, and how long it took.

    ``failure``: where the unexpected error came from that the reply tells of.
    """

    reply: Reply
    content: Sequence[bytes | memoryview]
    seconds: float
    failure: Failure = NONE

    def to_json(self) -> dict[str, Any]:
        """Return the reply without its update as JSON for another process; `from_json` reads it."""
        return {"reply": self.reply.model_dump_json(), "seconds": self.seconds, "failure": self.failure.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], content: memoryview) -> Answer:
        """Read the reply of another process, with its update as one piece."""
        failure = Failure(**fields.get("failure", {}))
        return cls(_REPLY.validate_json(fields["reply"]), [content], float(fields["seconds"]), failure)


class MemoryOutbox(Outbox):
    """An outbox in memory: an update that a kill takes is computed again, bit for bit."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), PrivacyConfig())
        self.content: list[bytes | memoryview] = []

    def put(
        self,
        tensors: Tensors,
        about: fields_module.JobKey,
        samples: int,
        metrics: Mapping[str, float],
        asked: down.Noise | None = None,  # noqa: ARG002 - nothing waits here for another job
    ) -> up.UpdateManifest:
        """Hold an update, in pieces, until it is taken."""
        self.content = [*pieces(tensors)]
        return manifest_of(self.content, about, samples, metrics)


class Sessions:
    """Sessions of one run that stay in memory, as long as their samples fit into ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._held: dict[str, Session] = {}

    def of(self, client: str, make: Callable[[], Session]) -> Session:
        """Return the client's session, made by ``make`` where there is none."""
        if client in self._held:
            return self._held[client]
        session = make()
        if session.nbytes <= self._left_bytes:
            self._left_bytes -= session.nbytes
            self._held[client] = session
        return session


@dataclass(frozen=True)
class Shared:
    """What all clients of a process share: the plan, pools, partition, one model object, and the folder of states."""

    plan: Plan
    pools: Pools
    division: Division
    model: Built
    folder: Path
    carried: ClientStateFiles | None = None
    """The state of the client whose turn it is, where the files are on another machine."""

    sessions: Sessions = field(default_factory=lambda: Sessions(0))
    """Sessions that stay for the next round; without room for any, samples are in memory only until a job is done."""

    @property
    def new_clients(self) -> tuple[str, ...]:
        """Clients that never train; after the last round they fit a head on the frozen encoder."""
        return self.plan.new_clients_of(tuple(self.division.clients))

    @property
    def head_clients(self) -> tuple[str, ...]:
        """Clients without torch; after the last round they fit a head on the frozen encoder."""
        return self.plan.head_clients_of(tuple(self.division.clients))


def state_files_in(folder: Path, client: str, run: str, keep_every: int = 0) -> ClientStateFiles:
    """Return the state files of one of the clients whose folders are in ``folder``."""
    return ClientStateFiles(folder / client / "runs" / run, keep_every)


class SimulatedResources(Resources):
    """What the tasks of a client work with: rows of the common pools, the common model, and an outbox in memory."""

    outbox: MemoryOutbox
    counts_updates = False
    logs_better_alone = False  # the result of the run names all such clients in one line

    def __init__(self, shared: Shared, client: str) -> None:
        plan = shared.plan
        config = AgentConfig(
            id=client,
            state=shared.folder / client,
            data=DataConfig(source="simulation:"),
            head=HeadConfig(local=plan.local),
            training=TrainingConfig(device=plan.device, precision=plan.precision, threads=plan.threads, checkpoint_s=0),
            privacy=PrivacyConfig(min_class_count=1, statistics=("*",)),  # whatever a paper asks for
        )
        super().__init__(config)
        self._shared = shared
        self.outbox = MemoryOutbox()
        self.evaluate_after = plan.evaluate_after
        self.augmentation = plan.augment or ""

    def samples(self, task: Task) -> tuple[Samples, Samples]:  # noqa: ARG002 - the pools are of the run's task
        """Return the client's rows of the pools, copied."""
        return self._shared.pools.rows_of(self._shared.division.clients[self.config.id])

    def model(self, job: down.Job) -> Built:  # noqa: ARG002 - there is one run
        """Return the model of the process."""
        return self._shared.model

    def state_files(self, run: str) -> ClientStateFiles:
        """Return the client's state files, with those of all rounds whose checkpoints the coordinator keeps."""
        shared = self._shared
        return shared.carried or state_files_in(shared.folder, self.config.id, run, shared.plan.keep_every)

    def session(self, job: down.Job, make: Callable[[], Session]) -> Session:  # noqa: ARG002 - there is one run
        """Return a new session, or one that stayed."""
        return self._shared.sessions.of(self.config.id, make)

    def tasks(self) -> TaskRunner:
        """Return the client's task runner."""
        return TaskRunner(self.config, "train", resources=self)

    def precision(self, run: str, session: Session) -> Precision:  # noqa: ARG002 - one decision for all workers
        """Return the precision of the plan, which was chosen before the first client trained."""
        return session.precision


@dataclass(frozen=True)
class HalfRound:
    """A client between the two halves of a round of standard training, without its model, which others use as well."""

    resources: SimulatedResources
    tasks: TaskRunner
    job: down.Job
    session: Session
    client: Client
    metrics: dict[str, float]

    @classmethod
    def begin(cls, shared: Shared, client: str, job: down.Job, received: Tensors) -> HalfRound:
        """Make a client ready to train, with its state loaded into the model.

        Raises:
            TensorsError: what was received does not fit the model.
            StateError: its state is damaged.
        """
        resources = SimulatedResources(shared, client)
        tasks = resources.tasks()
        session = tasks.session(job)
        state = ClientState(*resources.state_files(job.run).before(state_before(job)))
        ready = session.before_round(received, state, round_number=job.round, rounds=job.rounds)
        return cls(resources, tasks, job, session, ready, session.scores(ready) if job.evaluate else {})

    def end(self) -> up.UpdateManifest:
        """Save the client's state, and put what the model has learned into the outbox."""
        job = self.job
        session = self.session
        outcome = session.after_round(self.client, session.sent(), self.metrics, evaluate=job.evaluate)
        return self.tasks.deliver(job, outcome)


def answer(shared: Shared, client: str, job: down.Job, received: Tensors) -> Answer:
    """Run a client's job; any error becomes its `Fault`, as on a device."""
    begin = time.perf_counter()
    content = list[bytes | memoryview]()

    def work() -> up.UpdateManifest | up.Report:
        resources = SimulatedResources(shared, client)
        tasks = resources.tasks()
        # 1. Clients that fit a head after the run report on it, and send nothing else.
        if job.purpose == "personalize" and client in {*shared.new_clients, *shared.head_clients}:
            session = tasks.session(job)
            contributors = _contributors(shared, client)
            fitted = fit_head(session, received, rounds=job.rounds, head=shared.plan.head, contributors=contributors)
            return tasks.report(job, fitted.name, fitted.shared_accuracy, fitted.is_right)
        # 2. All others do what devices do, without torch or with it, and may have put an update into the outbox.
        reply = contribute(tasks, job, received) if job.purpose == "contribute" else tasks.do(job, received)
        content.extend(resources.outbox.content)
        return reply

    reply, failure = attempt(client, job, work)
    return Answer(reply, content, time.perf_counter() - begin, failure)


def _contributors(shared: Shared, client: str) -> int:
    """Return the number of clients that the shared model has learned from; 0 where ``client`` is not one of them."""
    if client in shared.new_clients:
        return 0
    return len(shared.division.clients) - len(shared.new_clients)


def attempt(client: str, job: down.Job, work: Callable[[], T]) -> tuple[T | up.Fault, Failure]:
    """Return the result of a client's work, or its `Fault`, and where an unexpected error came from (it is logged)."""
    try:
        return work(), NONE
    # A method of a user's may raise anything.
    except Exception as error:  # noqa: BLE001
        return failed_reply(client, job, error)


def failed_reply(client: str, job: down.Job, error: Exception) -> tuple[up.Fault, Failure]:
    """Return the `Fault` of a client for an error that was caught, and where an unexpected one came from."""
    if isinstance(error, OSError):
        return up.Fault(error=NOT_KEPT, message=reason_of(error)[:2000], run=job.run, round=job.round), NONE
    if is_out_of_memory(error):
        return no_memory(client, job, str(error)), NONE
    failure = NONE
    if not isinstance(error, HeadwaterError):
        log.error("work_broke client=%s", client, exc_info=error)
        failure = Failure.of(error)
    return fault(error, job.run, job.round), failure


def no_memory(client: str, job: down.Job, reason: str) -> up.Fault:
    """Return the `Fault` of a client for which memory ran out."""
    first = " ".join(reason.split())[:200] or "the system gave no reason"
    message = f"client '{client}' ran out of memory in round {job.round} ({first}); {_memory_advice(job)}"
    return up.Fault(error=NO_MEMORY, message=message, run=job.run, round=job.round)


def worker_exited(client: str, job: down.Job, times: int, reason: str) -> up.Fault:
    """Return the `Fault` of a client at whose job workers ended, for example by ``sys.exit`` in a user's method."""
    last = " ".join(reason.split())[:500]
    message = (
        f"{times} workers ended while client '{client}' worked in round {job.round}, the last with {last}; where that "
        f"does not say why, memory ran out: {_memory_advice(job)}"
    )
    return up.Fault(error=WORKER_EXITED, message=message, run=job.run, round=job.round)


def _memory_advice(job: down.Job) -> str:
    size = job.params.get("batch_size")
    batch = "a smaller batch_size" if size is None else f"a smaller batch_size than {size}"
    return f"try {batch}, fewer --workers, or a smaller encoder"
