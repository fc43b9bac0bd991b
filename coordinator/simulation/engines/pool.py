"""Engine ``pool``: jobs on worker processes, one torch thread and one model each, with the pools in shared memory.

Two one-thread workers are a quarter faster than one worker with two threads (measured). What many clients of a round
receive is put into shared memory once. When a worker exits, its job is done again by another one, from the same client
state and with the same bits. `WorkerPool` does this for any `Workers`; engine ``ray`` has others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import queue
import selectors
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from edge_agent import methods
from edge_agent.agent.runner import fault
from edge_agent.client import Built
from edge_agent.data.partition import Division
from edge_agent.errors import HeadwaterError, RunFailed
from edge_agent.storage import without_syncs
from edge_agent.task import Task
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Job, UpdateManifest

from ...processes.pipe import Frame, Pipe, SharedBuffer
from ...processes.supervisor import MAX_CRASHES, ChildProcess, Limits, worker_command
from ...processes.worker_main import listen
from ..client_tasks import Shared, answer, no_memory
from ..datasets import Pools
from ..own_parts import register
from ..plan import Plan
from ..setup import CLIENTS, PARTITION, Prepared
from .base import ANSWERS, Done, Work, received

log = logging.getLogger(__name__)

COMMAND = worker_command("coordinator.simulation.engines.pool:serve")

Placed = TypeVar("Placed")
W = TypeVar("W", bound="Worker")


class Worker(Protocol):
    """One worker."""

    number: int

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is not known."""


@dataclass(frozen=True)
class Reply:
    """What a worker sends back for a job; ``content`` is the update of an `UpdateManifest`."""

    said: Any
    content: memoryview
    seconds: float

    @classmethod
    def of(cls, words: Mapping[str, Any], content: memoryview) -> Reply:
        """From the JSON of `reply_words`."""
        return cls(ANSWERS[words["type"]].model_validate_json(words["said"]), content, float(words["seconds"]))


class Workers(Protocol[W, Placed]):
    """Where the workers of a pool run."""

    def start(self, count: int) -> int:
        """Get ready for ``count`` workers; returns how many there will be."""

    def spawn(self, number: int) -> W:
        """Start a worker; it is not waited for."""

    def place(self, blob: Outgoing) -> Placed:
        """Put a blob where workers can read it; it is free when nobody refers to it any more."""

    def submit(self, worker: W, work: Work, blobs: Sequence[Placed]) -> None:
        """Send a job to an idle worker.

        Raises:
            HeadwaterError: the client's state cannot be read.
        """

    def wait(self) -> Iterable[tuple[W, Reply | str | None]]:
        """What workers report, after some has: None when it is ready, a reply, or why it has exited."""

    def close(self) -> None:
        """End all workers at once."""


class WorkerPool(Generic[W, Placed]):
    """An engine of workers."""

    def __init__(self, name: str, hosts: Workers[W, Placed], workers: int) -> None:
        self.name, self.workers, self._hosts = name, workers, hosts
        self._placement = BlobPlacement[Placed](hosts.place)
        self._all: list[W] = []
        self._starting: list[W] = []
        self._busy: dict[W, Work] = {}
        self._waiting: list[Work] = []
        self._done: list[Done] = []
        self._crashes = Counter[tuple[str, int, str]]()
        self._crashes_at_start = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Those of the workers, as far as they are known; they may be on other machines."""
        return tuple(worker.pid for worker in self._all if worker.pid)

    @property
    def figures(self) -> dict[str, Any]:
        """How many workers there are."""
        return {"workers": self.workers}

    @property
    def room(self) -> int:
        """Workers without a job, those that are starting included, and one job that waits for the first idle worker."""
        return self.workers + 1 - len(self._busy) - len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether any work has not been taken back."""
        return bool(self._busy or self._waiting or self._done)

    def start(self) -> None:
        """Start all workers; none is waited for.

        Raises:
            HeadwaterError: workers cannot run there.
        """
        self.workers = self._hosts.start(self.workers)
        for number in range(self.workers):
            self._spawn(number)

    def give(self, work: Work) -> None:
        """Submit to an idle worker, or to the first that is ready."""
        self._placement.expect(work)
        self._waiting.append(work)
        self._submit()

    def take(self) -> Done:
        """The next work that is done; waits for it.

        Raises:
            RunFailed: workers exit before they are ready, or are of another version.
        """
        while not self._done:
            self._wait()
        return self._done.pop(0)

    def close(self) -> None:
        """End all workers at once."""
        self._hosts.close()
        self._all.clear()
        self._placement.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _spawn(self, number: int) -> None:
        worker = self._hosts.spawn(number)
        self._all.append(worker)
        self._starting.append(worker)

    def _submit(self) -> None:
        idle = [worker for worker in self._all if worker not in self._busy and worker not in self._starting]
        while idle and self._waiting:
            work = self._waiting.pop(0)
            try:
                self._hosts.submit(idle[0], work, self._placement.take(work))
            except HeadwaterError as error:
                self._finish(Done(work, fault(error, work.job.run, work.job.round), None, 0.0))
            else:
                self._busy[idle.pop(0)] = work

    def _wait(self) -> None:
        for worker, report in self._hosts.wait():
            if isinstance(report, str):
                self._on_exit(worker, report)
            elif report is None:
                self._starting.remove(worker)
                self._crashes_at_start = 0
                self._submit()
            else:
                work = self._busy.pop(worker)
                self._submit()  # before anything else: no worker is idle while this reply is processed
                blob = Outgoing(report.said.blob, report.content) if isinstance(report.said, UpdateManifest) else None
                self._finish(Done(work, report.said, blob, report.seconds))

    def _finish(self, done: Done) -> None:
        self._placement.forget(done.work)
        self._done.append(done)

    def _on_exit(self, worker: W, reason: str) -> None:
        """Start another worker, and do the job again unless workers have crashed at it repeatedly."""
        log.warning("worker_exited number=%d reason=%s", worker.number, reason)
        self._all.remove(worker)
        if worker in self._starting:
            self._starting.remove(worker)
            self._crashes_at_start += 1
            if self._crashes_at_start >= MAX_CRASHES:
                raise RunFailed(f"workers cannot start: the last one ended with {reason}; try --engine serial")
        elif worker in self._busy:
            work = self._busy.pop(worker)
            key = (work.client, work.job.round, work.job.purpose)
            self._crashes[key] += 1
            if self._crashes[key] < MAX_CRASHES:
                self._waiting.insert(0, work)
            else:
                said = no_memory(work.client, work.job, f"{MAX_CRASHES} workers crashed at it, the last with {reason}")
                self._finish(Done(work, said, None, 0.0))
        self._spawn(worker.number)


class BlobPlacement(Generic[Placed]):
    """Digest -> where ``put`` has put that blob: what many clients receive is there once."""

    def __init__(self, put: Callable[[Outgoing], Placed]) -> None:
        self._put = put
        self.places: dict[str, Placed] = {}
        self._needed = Counter[str]()

    def expect(self, work: Work) -> None:
        """This work will need its blobs."""
        self._needed.update(blob.ref.digest for blob in work.blobs)

    def take(self, work: Work) -> list[Placed]:
        """Where the work's blobs are. Those that are not needed any more are let go before new ones are put."""
        new = [blob for blob in work.blobs if blob.ref.digest not in self.places]
        if new:
            self.places = {digest: place for digest, place in self.places.items() if self._needed[digest]}
        self.places.update({blob.ref.digest: self._put(blob) for blob in new})
        return [self.places[blob.ref.digest] for blob in work.blobs]

    def forget(self, work: Work) -> None:
        """This work is done."""
        self._needed.subtract(blob.ref.digest for blob in work.blobs)
        self._needed = +self._needed

    def close(self) -> None:
        """Let all blobs go."""
        self.places.clear()


# --- what a worker needs, wherever it runs ---------------------------------------------------------------------------


def worker_init(prepared: Prepared, setup: Sequence[str]) -> dict[str, Any]:
    """What a worker is told first, as JSON, beside samples and partition; ``setup``: functions to call before."""
    return {
        "plan": prepared.plan.model_dump(mode="json", exclude_unset=True),
        "params": prepared.method.params.model_dump(mode="json"),
        "task": prepared.task.model_dump(mode="json"),
        "setup": list(setup),
    }


def shared_from(init: Mapping[str, Any], memory: memoryview, division: Division, clients: Path) -> Shared:
    """What the clients of a worker have in common. ``memory`` holds the pools, and is not copied."""
    import torch

    plan, task = Plan.model_validate(init["plan"]), Task.model_validate(init["task"])
    for name in init["setup"]:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
    if plan.threads:
        torch.set_num_threads(plan.threads)
    register(plan)
    method = methods.create(plan.method_name, init["params"])
    pools = Pools.from_memory(memory, task)
    model = Built.of(method, task, seed=plan.seed, device=plan.device, weights=pools.weights)
    return Shared(plan, pools, division, model, clients)


def reply_words(found: Any) -> dict[str, Any]:
    """An `Answer` without its update, as JSON; `Reply.of` reads it."""
    return {"type": found.said.type, "said": found.said.model_dump_json(), "seconds": found.seconds}


# --- worker processes on this machine --------------------------------------------------------------------------------


class LocalWorker(ChildProcess):
    """One worker process."""

    def __init__(self, number: int, log_file: Path, limits: Limits) -> None:
        self.number = number
        super().__init__(COMMAND, log_file, limits)

    def tell(self, topic: str, words: Mapping[str, Any], buffers: Sequence[SharedBuffer]) -> None:
        """Send JSON; a worker that has exited does not receive it, which `LocalWorkers.wait` reports."""
        with contextlib.suppress(OSError):
            self.pipe.send(topic, json.dumps(words).encode(), buffers)


class LocalWorkers:
    """`Workers` as child processes."""

    def __init__(self, init: Mapping[str, Any], pools: SharedBuffer, logs: Path, limits: Limits) -> None:
        self._init, self._pools, self._logs, self._limits = init, pools, logs, limits
        self._selector = selectors.DefaultSelector()

    @classmethod
    def of(cls, prepared: Prepared, folder: Path, setup: Sequence[str]) -> LocalWorkers:
        """For the simulation in ``folder``."""
        init = {**worker_init(prepared, setup), "folder": str(folder.absolute())}
        memory = prepared.memory or SharedBuffer.of(*prepared.pools.content())
        return cls(init, memory, folder / "workers", Limits(threads=prepared.plan.threads or None))

    def start(self, count: int) -> int:
        """As many as wanted."""
        return count

    def spawn(self, number: int) -> LocalWorker:
        """Start a worker and tell it what it needs."""
        worker = LocalWorker(number, self._logs / f"worker-{number}.log", self._limits)
        worker.tell("init", self._init, [self._pools])
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)
        return worker

    def place(self, blob: Outgoing) -> SharedBuffer:
        """In shared memory."""
        return SharedBuffer.of(blob.data)

    def submit(self, worker: LocalWorker, work: Work, blobs: Sequence[SharedBuffer]) -> None:
        """Send a job; the worker reads the client's state itself."""
        worker.tell("job", {"client": work.client, "job": work.job.model_dump_json()}, blobs)

    def wait(self) -> Iterable[tuple[LocalWorker, Reply | str | None]]:
        """Frames and exits."""
        return [(key.data, self._report(key.data)) for key, _ in self._selector.select()]

    def close(self) -> None:
        """Kill all workers."""
        for key in list((self._selector.get_map() or {}).values()):
            self._selector.unregister(key.fileobj)
            key.data.close()
        self._selector.close()

    def _report(self, worker: LocalWorker) -> Reply | str | None:
        try:
            frame = worker.pipe.receive()
        except (EOFError, OSError):
            self._selector.unregister(worker.pipe)
            reason = worker.exit_reason()
            worker.close()
            return reason
        if frame.topic == "ready":
            return None
        content = frame.buffers[0].map() if frame.buffers else memoryview(b"")
        return Reply.of(json.loads(frame.payload), content)


def serve(pipe: Pipe) -> None:
    """The child process: report that it is ready, then do one job after another."""
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    with without_syncs():
        frame = frames.get()
        init, folder = json.loads(frame.payload), Path(json.loads(frame.payload)["folder"])
        shared = shared_from(init, _mapped(frame)[0], Division.read(folder / PARTITION), folder / CLIENTS)
        pipe.send("ready")
        while True:
            frame = frames.get()
            words = json.loads(frame.payload)
            result = answer(shared, words["client"], Job.model_validate_json(words["job"]), received(_mapped(frame)))
            buffers = [SharedBuffer.of(*result.content)] if result.content else []
            pipe.send("done", json.dumps(reply_words(result)).encode(), buffers)


def _mapped(frame: Frame) -> list[memoryview]:
    """What the buffers of a frame hold; they are closed."""
    views = [buffer.map() for buffer in frame.buffers]
    for buffer in frame.buffers:
        buffer.close()
    return views
