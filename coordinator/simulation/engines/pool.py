"""Engine ``pool``: jobs on worker processes, one torch thread and one model each, with the pools in shared memory.

Two one-thread workers are a quarter faster than one worker with two threads (measured). What many clients of a round
receive is put into shared memory once. When a worker exits, its job is done again by another one, from the same client
state and with the same bits. `WorkerPool` does this for any `Workers`; engine ``ray`` has others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import queue
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from edge_agent import methods
from edge_agent.client import Built
from edge_agent.core.errors import HeadwaterError, RunFailed
from edge_agent.core.storage import without_syncs
from edge_agent.core.task import Task
from edge_agent.data.partition import Division
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.faults import fault
from edge_agent.wire.messages.down import Job

from ...processes.pipe import Frame, Pipe, SharedBuffer
from ...processes.supervisor import MAX_CRASHES, ChildProcess, Limits, worker_command
from ...processes.worker_main import listen
from ..client_tasks import Answer, Shared, answer, worker_exited
from ..datasets import Pools
from ..failures import is_of_user
from ..figures import EngineFigures
from ..own_parts import register
from ..plan import Plan
from ..setup import CLIENTS, PARTITION, Prepared
from .base import Done, Engine, Work, decode_blobs
from .kept_workers import FileMark, KeptWorker, KeptWorkers, mark_of

log = logging.getLogger(__name__)

COMMAND = worker_command("coordinator.simulation.engines.pool:serve")

Placed = TypeVar("Placed")
Handle = TypeVar("Handle")


@dataclass(eq=False)
class Worker(Generic[Handle]):
    """One worker: a process or an actor. ``pid``: of its process; 0 while it is not known."""

    number: int
    handle: Handle
    pid: int = 0


class Workers(Protocol[Handle, Placed]):
    """Where the workers of a pool run."""

    are_here: bool
    """Whether that is this machine, so that it knows their process ids."""

    def start(self, count: int) -> int:
        """Get ready for ``count`` workers; returns how many there will be."""

    def spawn(self, number: int) -> Worker[Handle]:
        """Start a worker; it is not waited for."""

    def put(self, blob: Outgoing) -> Placed:
        """Put a blob where workers can read it; it is freed with the last reference."""

    def submit(self, worker: Worker[Handle], work: Work, blobs: Sequence[Placed]) -> None:
        """Send a job to an idle worker.

        Raises:
            HeadwaterError: the client's state cannot be read.
        """

    def wait(self) -> Iterable[tuple[Worker[Handle], Answer | str | None]]:
        """Return what workers report, as soon as one does: None when it is ready, a reply, or why it has exited."""

    def log_of(self, worker: Worker[Handle]) -> str:
        """Return the file with what a worker has printed; empty: it is not on this machine."""

    def close(self) -> None:
        """End all workers at once."""


class WorkerPool(Engine, Generic[Handle, Placed]):
    """An engine that gives each idle worker one job."""

    def __init__(self, name: str, hosts: Workers[Handle, Placed], workers: int) -> None:
        super().__init__()
        self.name = name
        self.workers = workers
        self._hosts = hosts
        self._all: list[Worker[Handle]] = []
        self._starting: list[Worker[Handle]] = []
        self._busy: dict[Worker[Handle], Work] = {}
        self._placed: dict[str, Placed] = {}
        """Digest of a blob -> where workers read it: what many clients receive is there once."""

        self._crashes = Counter[tuple[str, int, str]]()
        self._crashes_at_start = 0
        self._started_s = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, as far as they are known; they may be on other machines."""
        return tuple(worker.pid for worker in self._all if worker.pid)

    @property
    def pids_here(self) -> tuple[int, ...]:
        """The workers' process ids where they are on this machine; elsewhere the same number is another process."""
        if not self._hosts.are_here:
            return ()
        return self.pids

    @property
    def figures(self) -> EngineFigures:
        """How many workers there are."""
        return {"workers": self.workers}

    @property
    def room(self) -> int:
        """Workers without a job, those that are starting included, and one job that waits for the first idle worker."""
        return self.workers + 1 - len(self._busy) - len(self._given)

    @property
    def is_busy(self) -> bool:
        """Whether any job that was given has not been taken back."""
        return bool(self._busy) or super().is_busy

    def start(self) -> None:
        """Start all workers; none is waited for.

        Raises:
            HeadwaterError: workers cannot run there.
        """
        self._started_s = time.perf_counter()
        self.workers = self._hosts.start(self.workers)
        for number in range(self.workers):
            self._spawn(number)

    def wait_until_ready(self) -> None:
        """Wait for the first worker: what follows is work, and what came before is no part of the first round.

        Raises:
            RunFailed: workers cannot start.
        """
        while len(self._starting) == len(self._all):
            self._advance()
        self.start_s = time.perf_counter() - self._started_s

    def give(self, work: Work) -> None:
        """Submit to an idle worker, or to the first that is ready."""
        super().give(work)
        self._submit()

    def close(self) -> None:
        """End all workers at once."""
        self._hosts.close()
        self._all.clear()
        self._placed.clear()

    def _spawn(self, number: int) -> None:
        worker = self._hosts.spawn(number)
        self._all.append(worker)
        self._starting.append(worker)

    def _submit(self) -> None:
        idle = [worker for worker in self._all if worker not in self._busy and worker not in self._starting]
        while idle and self._given:
            work = self._given.pop(0)
            try:
                self._hosts.submit(idle[0], work, self._place(work))
            except HeadwaterError as error:
                self._done.append(Done(work, fault(error, work.job.run, work.job.round), None, 0.0))
            else:
                self._busy[idle.pop(0)] = work

    def _place(self, work: Work) -> list[Placed]:
        """Place the work's blobs. What no job needs any more is released before new ones are placed."""
        new = [blob for blob in work.blobs if blob.ref.digest not in self._placed]
        if new:
            works = (work, *self._given, *self._busy.values())
            needed = {blob.ref.digest for unfinished in works for blob in unfinished.blobs}
            self._placed = {digest: placed for digest, placed in self._placed.items() if digest in needed}
        self._placed |= {blob.ref.digest: self._hosts.put(blob) for blob in new}
        return [self._placed[blob.ref.digest] for blob in work.blobs]

    def _advance(self) -> None:
        """Take what workers report: that they have ended (a text), have started (None), or have done their work."""
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
                self._done.append(Done.of(work, report, self._hosts.log_of(worker)))

    def _on_exit(self, worker: Worker[Handle], reason: str) -> None:
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
                self._given.insert(0, work)
            else:
                reply = worker_exited(work.client, work.job, MAX_CRASHES, reason)
                self._done.append(Done(work, reply, None, 0.0))
        self._spawn(worker.number)


# --- what a worker needs, wherever it runs ---------------------------------------------------------------------------


def worker_init(prepared: Prepared, setup: Sequence[str]) -> dict[str, Any]:
    """Return what a worker needs beside samples and partition, as JSON; it calls the functions ``setup`` first."""
    return {
        "plan": prepared.plan.model_dump(mode="json", exclude_unset=True),
        "params": prepared.method.params.model_dump(mode="json"),
        "task": prepared.task.model_dump(mode="json"),
        "setup": list(setup),
    }


def shared_from(init: Mapping[str, Any], memory: memoryview, division: Division, clients: Path) -> Shared:
    """Make what the clients of a worker have in common. ``memory`` holds the pools, and is not copied."""
    import torch

    plan = Plan.model_validate(init["plan"])
    task = Task.model_validate(init["task"])
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


# --- worker processes on this machine --------------------------------------------------------------------------------


class LocalWorkers:
    """The workers of a pool as child processes on this machine."""

    are_here = True

    def __init__(
        self,
        init: Mapping[str, Any],
        pools: SharedBuffer,
        logs: Path,
        limits: Limits,
        kept: KeptWorkers | None = None,
    ) -> None:
        """Name what workers need, where their logs are, and whose processes they are; None: they end with the run."""
        self._init = init
        self._pools = pools
        self._logs = logs
        self._limits = limits
        self._kept = kept
        self._held: dict[Worker[ChildProcess], KeptWorker] = {}
        self._at_work = set[Worker[ChildProcess]]()
        """Workers that have a job, so that they are not kept."""

        self._selector = selectors.DefaultSelector()

    @classmethod
    def of(cls, prepared: Prepared, folder: Path, setup: Sequence[str]) -> LocalWorkers:
        """Describe the workers of the simulation in ``folder``; `start` and `spawn` begin them."""
        init = {**worker_init(prepared, setup), "folder": str(folder.absolute())}
        memory = prepared.memory or SharedBuffer.of(*prepared.pools.content(), on_disk=prepared.pools.is_on_disk)
        # Workers that call functions first are not like others afterwards.
        kept = None if setup else prepared.kept
        return cls(init, memory, folder / "workers", Limits(threads=prepared.plan.threads or None), kept)

    def start(self, count: int) -> int:
        """Return as many workers as requested; nothing limits processes on this machine."""
        return count

    def spawn(self, number: int) -> Worker[ChildProcess]:
        """Start a worker and send what it needs."""
        if self._kept is None:
            child = ChildProcess(COMMAND, self._log(number), self._limits)
            worker = Worker(number, child, child.pid)
        else:
            held = self._kept.take(COMMAND, self._limits)
            child = held.child
            worker = Worker(number, child, child.pid)
            self._held[worker] = held
            held.turn += 1
        self._send(worker, "init", {**self._init, "turn": self._turn_of(worker)}, [self._pools])
        self._selector.register(child.pipe, selectors.EVENT_READ, worker)
        return worker

    def _turn_of(self, worker: Worker[ChildProcess]) -> int:
        """Return how many simulations a kept worker has begun with; 0 for one that is of this run alone."""
        held = self._held.get(worker)
        return 0 if held is None else held.turn

    def _note_own_files(self, worker: Worker[ChildProcess], marks: Iterable[Sequence[Any]]) -> None:
        held = self._held.get(worker)
        if held is not None:
            held.own_files = tuple((str(path), int(changed), int(size)) for path, changed, size in marks)

    def log_of(self, worker: Worker[ChildProcess]) -> str:
        """Return the worker's own file in the folder of the run; empty for a kept worker, whose file goes with it."""
        return "" if worker in self._held else str(self._log(worker.number))

    def _log(self, number: int) -> Path:
        return self._logs / f"worker-{number}.log"

    def put(self, blob: Outgoing) -> SharedBuffer:
        """Put a blob into shared memory."""
        return SharedBuffer.of(blob.data)

    def submit(self, worker: Worker[ChildProcess], work: Work, blobs: Sequence[SharedBuffer]) -> None:
        """Send a job; the worker reads the client's state itself."""
        self._at_work.add(worker)
        self._send(worker, "job", {"client": work.client, "job": work.job.model_dump_json()}, blobs)

    def wait(self) -> Iterable[tuple[Worker[ChildProcess], Answer | str | None]]:
        """Yield what workers have sent, and why some have exited."""
        for key, _ in self._selector.select():
            worker: Worker[ChildProcess] = key.data
            child = worker.handle
            try:
                frame = child.pipe.receive()
            except (EOFError, OSError):
                self._selector.unregister(child.pipe)
                reason = child.exit_reason()
                child.close()
                self._held.pop(worker, None)
                yield worker, reason
                continue
            if frame.topic == "loaded":
                self._note_own_files(worker, json.loads(frame.payload)["own_files"])
                continue
            self._at_work.discard(worker)
            content = frame.buffers[0].map() if frame.buffers else memoryview(b"")
            if frame.topic == "ready":
                ready = json.loads(frame.payload)
                # A worker that was kept while it started may still report on the run before.
                if ready["turn"] == self._turn_of(worker):
                    self._note_own_files(worker, ready["own_files"])
                    yield worker, None
                continue
            yield worker, Answer.from_json(json.loads(frame.payload), content)

    def _send(
        self, worker: Worker[ChildProcess], topic: str, fields: Mapping[str, Any], buffers: Sequence[SharedBuffer]
    ) -> None:
        """Send JSON; a worker that has exited does not receive it, which `wait` reports."""
        with contextlib.suppress(OSError):
            worker.handle.pipe.send(topic, json.dumps(fields).encode(), buffers)

    def close(self) -> None:
        """Kill all workers, whatever they do; those that are kept go back where they have nothing to do."""
        for key in list((self._selector.get_map() or {}).values()):
            self._selector.unregister(key.fileobj)
            worker: Worker[ChildProcess] = key.data
            held = self._held.get(worker)
            if self._kept is None or held is None or worker in self._at_work:
                worker.handle.close()
            else:
                self._kept.give_back(held)
        self._selector.close()


def serve(pipe: Pipe) -> None:
    """Run a worker process: report that it is ready for a simulation, then do one job of it after another.

    A worker that is kept rests between two simulations, and holds nothing of either then.
    """
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    shared: Shared | None = None
    modules = 0
    with without_syncs():
        while True:
            frame = frames.get()
            if frame.topic == "rest":
                shared = None
                gc.collect()
            elif frame.topic == "init":
                shared = _begin(pipe, frame, is_over=lambda: not frames.empty())
                modules = len(sys.modules)
            elif shared is not None:
                modules = _do_job(pipe, shared, frame, modules)


def _begin(pipe: Pipe, frame: Frame, is_over: Callable[[], bool]) -> Shared | None:
    """Make what a simulation needs, and report that; None where it is over already, and its folder gone perhaps.

    ``is_over``: whether another message has come. No job is sent before the report, so it is that the run is over.

    Raises:
        HeadwaterError: Files are damaged, or the user's own cannot be loaded.
    """
    if is_over():
        return None
    init = json.loads(frame.payload)
    folder = Path(init["folder"])
    try:
        shared = shared_from(init, _map_buffers(frame)[0], Division.read(folder / PARTITION), folder / CLIENTS)
    except HeadwaterError:
        if is_over():
            return None
        raise
    pipe.send("ready", json.dumps({"turn": init["turn"], "own_files": _own_files()}).encode(), [])
    return shared


def _do_job(pipe: Pipe, shared: Shared, frame: Frame, modules: int) -> int:
    """Do a job, and send what came of it.

    Args:
        pipe: Where it is sent.
        shared: What all clients have in common.
        frame: The job.
        modules: How many modules this process had imported when it last reported the user's own files.

    Returns:
        How many it has imported now.
    """
    fields = json.loads(frame.payload)
    job = Job.model_validate_json(fields["job"])
    result = answer(shared, fields["client"], job, decode_blobs(_map_buffers(frame)))
    buffers = []
    if result.content:
        buffers.append(SharedBuffer.of(*result.content))
    # A file that a function of the user's imports at work counts like one that was there at the beginning.
    if len(sys.modules) != modules:
        pipe.send("loaded", json.dumps({"own_files": _own_files()}).encode(), [])
    pipe.send("done", json.dumps(result.to_json()).encode(), buffers)
    return len(sys.modules)


def _own_files() -> list[FileMark]:
    """Return the files of the user's own that this process has loaded."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted(mark_of(Path(file)) for file in set(loaded) if file and is_of_user(file))


def _map_buffers(frame: Frame) -> list[memoryview]:
    """Return what the buffers of a frame hold, and close these."""
    views = [buffer.map() for buffer in frame.buffers]
    for buffer in frame.buffers:
        buffer.close()
    return views
