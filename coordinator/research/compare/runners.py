"""Where the simulations of a comparison run: in this process, in worker processes, or on a Ray cluster.

A runner takes simulations while it has room, and gives back how many rounds they have done and what they have found.
All of them write the same files below the folder of the comparison, which another runner may continue.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import selectors
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.core.errors import HeadwaterError, RunFailed, StateError
from edge_agent.core.limits import available_bytes
from edge_agent.core.storage import write_json

from ...processes.cluster import Advice, connect_to_cluster, reason_of_loss
from ...processes.compute import described_error, error_from
from ...processes.pipe import Frame, Pipe
from ...processes.supervisor import MAX_CRASHES, ChildProcess, Limits, worker_command
from ...processes.worker_main import listen
from .simulated_runs import Meter, RunOutcome, RunSpec, simulate_run

log = logging.getLogger(__name__)

COMMAND = worker_command(f"{__name__}:serve")

LOGS = "workers"
"""Folder of the workers' output in the folder of a comparison."""

FIRST_NEED_BYTES = 1 << 30
"""Memory that a worker is assumed to need before one was measured: torch alone takes a third of it."""

MARGIN = 1.25
"""Memory that has to be free for a further worker, in units of the largest worker so far."""

ADVICE = Advice(
    "engine ray", without_ray="leave --engine out and give --parallel", without_address="leave --address out"
)
"""What errors about a cluster advise: the options of a comparison."""


@dataclass(frozen=True)
class Event:
    """Something that has happened to a simulation: rounds were closed, or it is over."""

    spec: RunSpec
    rounds: int = 0
    """Rounds that are closed, where it is not over."""

    outcome: RunOutcome | None = None


class Runner(ABC):
    """Runs simulations. Call `start` where there is `has_room`, then `wait`, and `close` in the end."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether a further simulation can be started now."""

    @abstractmethod
    def start(self, spec: RunSpec) -> None:
        """Begin a simulation."""

    @abstractmethod
    def wait(self) -> Iterable[Event]:
        """Wait until something has happened, and return it.

        Raises:
            StateError, OSError: Files cannot be read or written.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop at once. What was not over is resumed by its folder."""


class Inline(Runner):
    """Everything in this process, one simulation after another: for methods that exist in this process only."""

    def __init__(self, base: Path, watch: Callable[[Event], object]) -> None:
        """``watch``: called with the rounds of the simulation at work, which `wait` does not return."""
        self._base = base
        self._watch = watch
        self._given = deque[RunSpec]()
        self._meter = Meter()

    @property
    def has_room(self) -> bool:
        """Whether another simulation can be taken now."""
        return not self._given

    def start(self, spec: RunSpec) -> None:
        """Queue a simulation, which `wait` runs."""
        self._given.append(spec)

    def wait(self) -> Iterable[Event]:
        """Run the simulation that was started."""
        spec = self._given.popleft()
        self._meter.read()
        outcome = simulate_run(spec, self._base, self._meter, lambda rounds: self._watch(Event(spec, rounds)))
        return [Event(spec, outcome=outcome)]

    def close(self) -> None:
        """Nothing runs beside the caller."""


class _Worker:
    """A worker process, and the simulation that it works on."""

    def __init__(self, number: int, child: ChildProcess) -> None:
        self.number = number
        self.child = child
        self.spec: RunSpec | None = None


class LocalWorkers(Runner):
    """Worker processes on this machine, each with one simulation at a time and many after each other.

    A further worker is started only where as much memory is free as the largest one has taken. A worker that exits is
    replaced, and its simulation resumed; after some crashes at the same simulation that one counts as failed.
    """

    def __init__(
        self,
        base: Path,
        most: int,
        *,
        say: Callable[[str], object] = lambda _: None,
        free_bytes: Callable[[], int | None] = available_bytes,
    ) -> None:
        """Describe the workers, which `start` begins.

        Args:
            base: Folder of the comparison.
            most: Number of workers at most.
            say: Called with what a user should know.
            free_bytes: Memory that is free on this machine; None: that is not known.
        """
        self._base = base
        self._most = most
        self._say = say
        self._free_bytes = free_bytes
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._crashes = Counter[str]()
        self._need_bytes = FIRST_NEED_BYTES
        self._was_short = False
        self._started = 0

    @property
    def has_room(self) -> bool:
        """Whether a worker is idle, or a further one may be started."""
        if any(worker.spec is None for worker in self._workers):
            return True
        return len(self._workers) < self._most and self._has_memory()

    def _has_memory(self) -> bool:
        """Return whether a further worker fits into memory; the first one is always started."""
        if not self._workers:
            return True
        free = self._free_bytes()
        if free is None or free >= MARGIN * self._need_bytes:
            return True
        if not self._was_short:
            self._was_short = True
            self._say(
                f"{len(self._workers)} of {self._most} workers run: {free / 1e9:.1f} GB of memory are free, and a "
                f"worker may take {self._need_bytes / 1e9:.1f} GB; more are started when there is room"
            )
        return False

    def start(self, spec: RunSpec) -> None:
        """Give a simulation to an idle worker, or to a new one."""
        idle = [worker for worker in self._workers if worker.spec is None]
        worker = idle[0] if idle else self._spawn()
        worker.spec = spec
        with contextlib.suppress(OSError):  # a worker that has exited does not receive it, which `wait` notices
            worker.child.pipe.send("run", json.dumps(spec.to_json()).encode())

    def _spawn(self) -> _Worker:
        """Start a worker process."""
        number = self._started
        self._started += 1
        output = self._base / LOGS / f"worker-{number}.log"
        child = ChildProcess((*COMMAND, str(self._base.absolute())), output, Limits(threads=1))
        worker = _Worker(number, child)
        self._workers.append(worker)
        self._selector.register(child.pipe, selectors.EVENT_READ, worker)
        return worker

    def wait(self) -> Iterable[Event]:
        """Wait for the workers, and return what they have sent."""
        events = list[Event]()
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            try:
                frame = worker.child.pipe.receive()
            except (EOFError, OSError):
                events.extend(self._on_exit(worker))
                continue
            events.extend(self._on_frame(worker, frame))
        return events

    def _on_frame(self, worker: _Worker, frame: Frame) -> Iterator[Event]:
        """Yield what a worker has sent.

        Raises:
            StateError, OSError: The worker cannot read or write its files.
        """
        spec = worker.spec
        if spec is None:
            return
        content = json.loads(frame.payload)
        if frame.topic == "round":
            yield Event(spec, content["rounds"])
            return
        worker.spec = None
        if frame.topic == "failed":
            raise error_from(content)
        self._need_bytes = max(self._need_bytes, content["peak_bytes"])
        outcome = spec.read(self._base)
        if outcome is None or not outcome.is_over:
            raise StateError(f"{spec.outcome_path(self._base)}: was removed while the comparison ran; run it again")
        yield Event(spec, outcome=outcome)

    def _on_exit(self, worker: _Worker) -> Iterator[Event]:
        """Replace a worker that has exited; yield its simulation as failed where workers have crashed repeatedly."""
        self._selector.unregister(worker.child.pipe)
        self._workers.remove(worker)
        reason = worker.child.exit_reason()
        worker.child.close()
        spec = worker.spec
        log.warning("worker_exited number=%d reason=%s", worker.number, reason)
        if spec is None:
            return
        self._crashes[spec.location] += 1
        if self._crashes[spec.location] < MAX_CRASHES:
            self.start(spec)
            return
        failure = f"its worker ended {MAX_CRASHES} times, the last time with {reason}; if that does not say why, "
        failure += "memory probably ran out: try a smaller --parallel"
        yield Event(spec, outcome=_record_failure(spec, self._base, failure))

    def close(self) -> None:
        """Kill all workers, whatever they do."""
        for worker in self._workers:
            worker.child.close()
        self._workers = []
        self._selector.close()


def _record_failure(spec: RunSpec, base: Path, reason: str) -> RunOutcome:
    """Write that a simulation failed whose process could not say so, and return its outcome."""
    before = spec.read(base)
    plan = spec.plan.model_dump(mode="json", exclude_unset=True)
    spent = RunOutcome(plan=plan) if before is None else before
    outcome = spent.model_copy(update={"is_over": True, "failure": reason})
    write_json(spec.outcome_path(base), outcome.model_dump(mode="json"))
    return outcome


def serve(pipe: Pipe, base: str) -> None:
    """Run as a worker process: one simulation after another in the folder ``base``."""
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    meter = Meter(from_start=True)
    while True:
        spec = RunSpec.from_json(json.loads(frames.get().payload))
        meter.leave_out_wait()

        def report(rounds: int) -> None:
            pipe.send("round", json.dumps({"rounds": rounds}).encode())

        topic = "done"
        answer: dict[str, Any] = {}
        try:
            simulate_run(spec, Path(base), meter, report)
            answer["peak_bytes"] = _peak_bytes()
        except (HeadwaterError, OSError) as error:
            topic = "failed"
            answer = described_error(error)
        pipe.send(topic, json.dumps(answer).encode())


def _peak_bytes() -> int:
    """Return the most memory that this process has had; 0 where that is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- on a Ray cluster ------------------------------------------------------------------------------------------------


class RayActor:
    """A worker on a machine of the cluster, which sees the folder of the comparison."""

    def __init__(self, base: str) -> None:
        self._base = Path(base)
        self._meter = Meter()

    def run(self, spec: str) -> str:
        """Run a simulation; returns an error as JSON, or an empty object.

        Raises:
            RunFailed: This machine does not see the folder.
        """
        if not self._base.is_dir():
            return json.dumps(described_error(RunFailed(f"{self._base} does not exist on a machine of the cluster")))
        self._meter.read()
        try:
            simulate_run(RunSpec.from_json(json.loads(spec)), self._base, self._meter)
        except (HeadwaterError, OSError) as error:
            return json.dumps(described_error(error))
        return "{}"


class RayRuns(Runner):
    """Workers on the machines of a Ray cluster, one simulation each; all of them see the folder of the comparison.

    The cluster is a running one, or a new one on this machine. It needs a file system that its machines share.
    """

    def __init__(self, base: Path, most: int, address: str | None) -> None:
        """Connect to a cluster.

        Args:
            base: Folder of the comparison.
            most: Number of workers at most.
            address: HOST:PORT of a running cluster, or ``auto``; None: a new one on this machine.

        Raises:
            MissingCapability: Ray is not installed.
            RunFailed: There is no cluster.
        """
        self._base = base.absolute()
        self._most = most
        self._stack = contextlib.ExitStack()
        self._ray = self._stack.enter_context(connect_to_cluster(address, ADVICE, cpus=most))
        self._actor = self._ray.remote(num_cpus=1)(RayActor)
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, RunSpec]] = {}
        """Reference of a result -> the worker and its simulation."""

        self._crashes = Counter[str]()

    @property
    def has_room(self) -> bool:
        """Whether a worker is idle, or a further one may be started."""
        return len(self._busy) < self._most

    def start(self, spec: RunSpec) -> None:
        """Give a simulation to an idle worker, or to a new one."""
        worker = self._idle.pop() if self._idle else self._actor.remote(str(self._base))
        self._busy[worker.run.remote(json.dumps(spec.to_json()))] = (worker, spec)

    def wait(self) -> Iterable[Event]:
        """Wait for one of the workers."""
        ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        events = list[Event]()
        for reference in ready:
            worker, spec = self._busy.pop(reference)
            try:
                answer = json.loads(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                events.extend(self._on_loss(spec, reason_of_loss(error)))
                continue
            self._idle.append(worker)
            if answer:
                raise error_from(answer)
            events.append(Event(spec, outcome=self._outcome_of(spec)))
        return events

    def _outcome_of(self, spec: RunSpec) -> RunOutcome:
        """Return what a worker has written.

        Raises:
            RunFailed: It is not here: the folder is not shared.
        """
        outcome = spec.read(self._base)
        if outcome is None or not outcome.is_over:
            raise RunFailed(
                f"{self._base}: what another machine has written is not here; choose a folder on a file system that "
                "all machines of the cluster share with --out"
            )
        return outcome

    def _on_loss(self, spec: RunSpec, reason: str) -> Iterator[Event]:
        """Run a simulation again whose worker was lost, unless workers were lost at it repeatedly."""
        log.warning("worker_lost run=%s reason=%s", spec.location, reason)
        self._crashes[spec.location] += 1
        if self._crashes[spec.location] < MAX_CRASHES:
            self.start(spec)
            return
        failure = f"its worker was lost {MAX_CRASHES} times, the last time by {reason}"
        yield Event(spec, outcome=_record_failure(spec, self._base, failure))

    def close(self) -> None:
        """Leave the cluster; a cluster of this process ends."""
        self._stack.close()
