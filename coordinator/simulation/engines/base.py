"""The contract of engines, which take clients' jobs and return the replies in any order; the choice; engine ``serial``.

An engine decides where and when clients compute, never what: each job starts from the client's state and from what it
receives, so the same seed gives the same bits on every engine and with any number of workers.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from edge_agent.client import choose_device
from edge_agent.core.capabilities import cores
from edge_agent.core.errors import MissingCapability, RunFailed
from edge_agent.core.task import Tensors
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import decode

from ...processes.cluster import Advice, import_ray
from ..client_tasks import Answer, Reply, Shared, answer
from ..failures import NONE, Failure
from ..figures import EngineFigures
from ..plan import EngineName, Plan

ADVICE = Advice("engine ray", without_ray="try --engine pool", without_address="leave --address out")
"""What errors about a cluster advise: the options of a simulation."""


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its number of workers; 0: as many as a cluster has room for."""

    engine: EngineName = "serial"
    workers: int = 1

    @classmethod
    def of(cls, plan: Plan, clients: int) -> EngineChoice:
        """Choose what the plan says; by default several workers where several cores can serve several clients.

        Raises:
            MissingCapability: Processes cannot share memory on this system, or Ray is not installed.
        """
        workers = min(plan.workers or cores(), clients)
        engine = plan.engine
        if engine is None:
            engine = _default_engine(plan, workers)
        if engine in {"serial", "stacked"}:
            return cls(engine)
        if engine == "fastest":  # settled by a trial once the folder of the run is known
            return cls("fastest", workers)
        if engine == "ray":
            import_ray(ADVICE)
            # A running cluster says itself for how many workers it has room.
            if plan.address is not None:
                workers = min(plan.workers or 0, clients)
            return cls("ray", workers)
        if not _can_share_memory():
            raise MissingCapability(
                "engine pool needs sockets that pass file descriptors (Linux, macOS); use --engine serial"
            )
        return cls(engine, workers)


def _default_engine(plan: Plan, workers: int) -> EngineName:
    """Return the engine of a plan that names none, on a machine with so many useful workers."""
    if plan.workers:
        return "pool"
    # One process for a GPU: several would share it, and each would need its own context.
    if workers > 1 and can_use_pool(choose_device(plan.device)):
        return "pool"
    return "serial"


def can_use_pool(device: torch.device) -> bool:
    """Return whether several worker processes can share this system's memory, and need not share one GPU."""
    return _can_share_memory() and device.type == "cpu"


def _can_share_memory() -> bool:
    """Return whether processes of this system can pass each other the memory that holds the samples."""
    return hasattr(socket, "send_fds")


@dataclass(frozen=True)
class Work:
    """One client's job, and the blobs that it starts from."""

    client: str
    job: Job
    blobs: tuple[Outgoing, ...]

    def received(self) -> Tensors:
        """Return the tensors of all blobs."""
        return decode_blobs([blob.data for blob in self.blobs])


@dataclass(frozen=True)
class Done:
    """A job that is done: the client's reply, its update if it made one, and how long it took.

    ``failure``: where the unexpected error came from that the reply tells of.
    """

    work: Work
    reply: Reply
    blob: Outgoing | None
    seconds: float
    failure: Failure = NONE

    @classmethod
    def of(cls, work: Work, answer: Answer, log: str = "") -> Done:
        """Describe what a client has computed; ``log`` is the file of the worker that did."""
        reply = answer.reply
        blob = None
        if isinstance(reply, UpdateManifest):
            content = answer.content[0]
            if len(answer.content) > 1:  # one piece, as from another process, is not copied
                content = b"".join(answer.content)
            blob = Outgoing(reply.blob, memoryview(content))
        failure = answer.failure
        if failure.trace:
            failure = replace(failure, log=log)
        return cls(work, reply, blob, answer.seconds, failure)


def decode_blobs(blobs: Sequence[memoryview]) -> Tensors:
    """Return the tensors of several blobs together; a later blob wins."""
    tensors: Tensors = {}
    for data in blobs:
        tensors.update(decode(data))
    return tensors


class Engine(ABC):
    """Where clients compute. Call `take` where `is_busy`, and `give` only where there is `room`."""

    name: str
    workers = 1

    def __init__(self, most: int = 1) -> None:
        """``most``: how many jobs it accepts at a time."""
        self._most = most
        self._given: list[Work] = []
        self._done = deque[Done]()
        self.start_s = 0.0
        """Seconds from the start of the engine until it could compute; no round's time contains them."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of its workers, as far as they are known."""
        return ()

    @property
    def pids_here(self) -> tuple[int, ...]:
        """Process ids of those of its workers that are on this machine."""
        return self.pids

    @property
    def figures(self) -> EngineFigures:
        """What it adds to the result of the simulation."""
        return {}

    @property
    def room(self) -> int:
        """How many jobs it accepts now."""
        return max(0, self._most - len(self._given))

    @property
    def is_busy(self) -> bool:
        """Whether any job that was given has not been taken back."""
        return bool(self._given or self._done)

    @abstractmethod
    def start(self) -> None:
        """Get ready; called once before the first job."""

    def wait_until_ready(self) -> None:
        """Wait until a job that is given is computed at once; called once, before the first round is opened.

        Raises:
            RunFailed: the engine cannot start.
        """
        self.start_s = 0.0  # an engine of this process is ready at once

    def give(self, work: Work) -> None:
        """Queue a job for the engine."""
        self._given.append(work)

    def take(self) -> Done:
        """Wait for the next job that is done, and return it.

        Raises:
            RunFailed: the engine cannot continue.
        """
        if not self.is_busy:
            raise RunFailed("internal error: no job was queued; please report this")
        while not self._done:
            self._advance()
        return self._done.popleft()

    @abstractmethod
    def close(self) -> None:
        """Stop at once; jobs that were given are lost."""

    @abstractmethod
    def _advance(self) -> None:
        """Work until some job is done, or any other change."""


class Serial(Engine):
    """Everything in this process, one client after another: the other engines must give the same bits."""

    name = "serial"

    def __init__(self, shared: Shared, most: int = 1) -> None:
        super().__init__(most)
        self._shared = shared

    def start(self) -> None:
        """Nothing has to be started."""

    def close(self) -> None:
        """Nothing runs beside the caller."""

    def _advance(self) -> None:
        self._run(self._given.pop(0))

    def _run(self, work: Work) -> None:
        self._done.append(Done.of(work, answer(self._shared, work.client, work.job, work.received())))
