"""Hosted clients that compute on a Ray cluster: one process here, and workers wherever the cluster has room.

The clients are agents in this process, as others are: messages, state and outboxes stay on this machine. Their long
computations go to workers, which are actors of the cluster, with all that they depend on; see `remote_session`. A
worker that ends, with its machine or alone, is replaced, and what it was computing is computed again by another one,
from the same state. Its first computation has left nothing behind, so nothing is lost and nothing counts twice.

This process ends when the cluster cannot be used; its owner reports why, and starts it again. Every machine of the
cluster needs the same Headwater, and the same torch where bits are to be equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from edge_agent import __version__
from edge_agent.agent.own_method import method_for
from edge_agent.agent.tasks.resources import Resources
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.children import Worker
from edge_agent.core.config import AgentConfig, Precision
from edge_agent.core.errors import HeadwaterError, RunFailed, TrainingCancelled, TrainingFailed
from edge_agent.core.task import Tensors
from edge_agent.wire.messages.down import Job
from edge_agent.wire.tensors import decode, pieces

from ..config import HostedRayConfig
from ..processes.cluster import Bytes, as_bytes, connect_to_cluster, reason_of_loss
from ..processes.compute import described_error, error_from
from ..processes.pipe import Pipe
from ..processes.supervisor import MAX_CRASHES
from .agents import HostedResources, Location, ProcessResources, serve_clients
from .lanes import Lanes
from .placement import RAY_ADVICE
from .transport import WAITING_TOPIC

if TYPE_CHECKING:
    from edge_agent.client import Session

    from .remote_session import Computation, Computed, IsCancelled, SessionHost

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between two looks at whether a computation was cancelled."""

SILENCE_S = 10.0
"""Seconds without a worker after which the owner is told what is waited for."""

Report = Callable[[str], None]
"""Receives what all clients wait for; empty: nothing."""


# --- on a machine of the cluster -------------------------------------------------------------------------------------


class Actor:
    """A worker on a machine of the cluster; no file of a client is there."""

    def __init__(self) -> None:
        self._host: SessionHost | None = None

    def ready(self) -> dict[str, str]:
        """Return the versions of the worker's software."""
        import torch

        return {"software": __version__, "torch": torch.__version__}

    def compute(self, computation: str, samples: Bytes, received: Bytes, kept: Bytes) -> tuple[str, Bytes]:
        """Do a `Computation`, given as JSON; the result is a `Computed` as JSON, and its tensors."""
        from .remote_session import Computation, Computed, SessionHost

        if self._host is None:
            self._host = SessionHost()
        request = Computation.model_validate_json(computation)
        try:
            tensors = [decode(content.data) for content in (samples, received, kept)]
            computed, result = self._host.compute(request, *tensors)
        except Exception as error:  # a method of a user's may raise anything
            if not isinstance(error, HeadwaterError):
                log.exception("computation_broke client=%s", request.session.client)
            computed = Computed(error=described_error(error))
            result = {}
        return computed.model_dump_json(), as_bytes(pieces(result))


# --- in the process of the clients -----------------------------------------------------------------------------------


class Workers:
    """The workers on a cluster: each does one computation at a time, and is replaced when it ends."""

    def __init__(self, ray: Any, settings: HostedRayConfig, report: Report, clock: Callable[[], float]) -> None:
        """Prepare the workers; `start` starts them.

        Args:
            ray: The package, connected to a cluster.
            settings: How many there are, and what each of them gets.
            report: Receives what is waited for, where no worker has started yet or none is left.
            clock: Seconds of a clock that never goes back.
        """
        self._ray = ray
        self._settings = settings
        self._report = report
        self._clock = clock
        self._options: dict[str, Any] = {}
        self._count = 0
        self._changed = threading.Condition()
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}
        """Reference to the answer of a worker that starts -> the worker."""

        self._failed_starts = 0

    def start(self, clients: int, threads: int) -> None:
        """Start the workers, and wait for the first one.

        Args:
            clients: How many clients there are.
            threads: The most torch threads of a client.

        Raises:
            RunFailed: Workers cannot start, or have another version of this program.
        """
        cpus = max(1, threads)
        gpus = self._settings.gpus
        self._options = {"num_cpus": cpus, "num_gpus": gpus or None, "max_restarts": 0}
        room = int(self._ray.cluster_resources().get("CPU", 0)) // cpus
        if gpus:
            room = min(room, int(self._ray.cluster_resources().get("GPU", 0) / gpus))
        self._count = self._settings.workers or max(1, min(room, clients))
        for _ in range(self._count):
            self._spawn()
        self._give_back(self.take(lambda: False))
        log.info("workers_started count=%d cpus_each=%d gpus_each=%g room=%d", self._count, cpus, gpus, room)

    @property
    def count(self) -> int:
        """How many workers there are, those that are starting included."""
        return self._count

    def take(self, is_cancelled: IsCancelled) -> Any:
        """Wait for an idle worker, and return it; it is given back, or replaced.

        Raises:
            TrainingCancelled: Nobody needs it any more.
            RunFailed: Workers cannot start, or have another version of this program.
        """
        begin = self._clock()
        reported = False
        while True:
            with self._changed:
                if self._idle:
                    worker = self._idle.pop()
                    break
                starting = list(self._starting)
                are_all_starting = len(starting) == self._count
            if is_cancelled():
                raise TrainingCancelled("the round was over before a worker of the cluster was free")
            # What nobody computes for is worth a report; that all workers are busy is not.
            waited_s = self._clock() - begin
            if are_all_starting and waited_s >= SILENCE_S:
                self._report(self._describe_wait(waited_s))
                reported = True
            if not starting:
                with self._changed:
                    self._changed.wait(LOOK_S)
                continue
            done, _ = self._ray.wait(starting, num_returns=1, timeout=LOOK_S)
            for answer in done:
                self._admit(answer)
        if reported:
            self._report("")
        return worker

    def finish(self, worker: Any, reply: Any, is_cancelled: IsCancelled) -> Any:
        """Wait for the reply of a worker, and return it; the worker is given back, or replaced.

        Raises:
            TrainingCancelled: Nobody needs the reply any more.
            Exception: The worker has ended: an error of Ray's.
        """
        try:
            while not self._ray.wait([reply], num_returns=1, timeout=LOOK_S)[0]:
                if is_cancelled():
                    raise TrainingCancelled("the round was over before the cluster had computed")
            result = self._ray.get(reply)
        except BaseException:
            self._replace(worker)
            raise
        self._give_back(worker)
        return result

    def _spawn(self) -> None:
        """Start a worker; it is not waited for."""
        worker = self._ray.remote(Actor).options(**self._options).remote()
        with self._changed:
            self._starting[worker.ready.remote()] = worker

    def _replace(self, worker: Any) -> None:
        """End a worker, and start another one."""
        self._ray.kill(worker)
        self._spawn()

    def _give_back(self, worker: Any) -> None:
        with self._changed:
            self._idle.append(worker)
            self._changed.notify()

    def _admit(self, answer: Any) -> None:
        """Take note of a worker that has started, or has failed to.

        Raises:
            RunFailed: Workers fail to start again and again, or this one has another version of this program.
        """
        with self._changed:
            worker = self._starting.pop(answer, None)
        if worker is None:  # another thread was quicker
            return
        try:
            versions = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            reason = reason_of_loss(error)
            log.warning("worker_did_not_start reason=%s", reason)
            self._replace(worker)
            self._failed_starts += 1
            if self._failed_starts >= MAX_CRASHES:
                self._failed_starts = 0
                raise RunFailed(
                    f"workers on the Ray cluster at '{self._settings.address}' cannot start: the last one ended with "
                    f"{reason}; install the same Headwater, with torch, on all machines of the cluster"
                ) from error
            return
        self._failed_starts = 0
        if versions["software"] != __version__:
            self._replace(worker)
            raise RunFailed(
                f"a worker on the Ray cluster at '{self._settings.address}' has Headwater {versions['software']}, this "
                f"is {__version__}; install the same on all machines of the cluster"
            )
        self._compare_torch(versions["torch"])
        self._give_back(worker)

    def _compare_torch(self, theirs: str) -> None:
        """Log that a worker has another torch, and so other bits."""
        from importlib import metadata

        ours = metadata.version("torch")
        if theirs.partition("+")[0] != ours.partition("+")[0]:
            log.warning("torch_differs worker_has=%s here=%s: results may differ in their last bits", theirs, ours)

    def _describe_wait(self, waited_s: float) -> str:
        """Return that no worker has started, and what of the cluster is free."""
        free = self._ray.available_resources().get("CPU", 0)
        wanted = f"{self._options['num_cpus']} CPUs"
        if self._settings.gpus:
            wanted += f" and {self._settings.gpus:g} GPUs"
        return (
            f"the Ray cluster at '{self._settings.address}' has started none of {self._count} workers for "
            f"{waited_s:.0f} s; each needs {wanted}, {free:g} CPUs are free; it is waited for"
        )


class OnCluster:
    """`remote_session.Elsewhere`: the workers of a cluster, for one computation of each client at a time."""

    def __init__(self, ray: Any, workers: Workers, lanes: Lanes) -> None:
        self._ray = ray
        self._workers = workers
        self._lanes = lanes
        self._received: tuple[str, Any] | None = None
        """Digest and reference of the last model that was received: most clients of a round receive the same."""

    def put_samples(self, samples: Tensors) -> Any:
        """Put samples into Ray's store."""
        return self._ray.put(as_bytes(pieces(samples)))

    def compute(
        self, computation: Computation, samples: Any, received: Tensors, kept: Tensors, is_cancelled: IsCancelled
    ) -> tuple[Computed, Tensors]:
        """Have a worker do a computation, another one where that has ended; see `Elsewhere.compute`."""
        from .remote_session import Computed

        request = computation.model_dump_json()
        model = self._put_received(received)
        state = as_bytes(pieces(kept))
        client = computation.session.client
        reason = ""
        for attempt in range(1, MAX_CRASHES + 1):
            # Others of this process have their turn while this one waits.
            with self._lanes.waiting():
                worker = self._workers.take(is_cancelled)
                reply = worker.compute.remote(request, samples, model, state)
                try:
                    answer, tensors = self._workers.finish(worker, reply, is_cancelled)
                except self._ray.exceptions.RayError as error:
                    reason = reason_of_loss(error)
                    log.warning("worker_lost client=%s attempt=%d reason=%s", client, attempt, reason)
                    continue
            computed = Computed.model_validate_json(answer)
            if computed.error is not None:
                raise error_from(computed.error)
            return computed, decode(tensors.data)
        raise TrainingFailed(
            f"{MAX_CRASHES} workers of the Ray cluster ended while client '{client}' computed in round "
            f"{computation.round}, the last with {reason}; where that does not say why, memory ran out: give the "
            "machines more, or use a smaller batch_size"
        )

    def _put_received(self, received: Tensors) -> Any:
        """Return the reference of what a client has received, which is put into the store once for all that do."""
        content = pieces(received)
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
        name = digest.hexdigest()
        if self._received is None or self._received[0] != name:
            self._received = (name, self._ray.put(as_bytes(content)))
        return self._received[1]


class RemoteResources(HostedResources):
    """The resources of a client whose session computes on a cluster."""

    def __init__(self, config: AgentConfig, shared: ProcessResources, device: str, elsewhere: OnCluster) -> None:
        """Prepare them.

        Args:
            config: The client's configuration, by which this process does what it does itself, on the CPU.
            shared: Model and pools of the process.
            device: The device that the client computes on, as a worker names it.
            elsewhere: Who computes.
        """
        super().__init__(config, shared)
        self._device = device
        self._elsewhere = elsewhere
        self._job: Job | None = None

    def session(self, job: Job, make: Callable[[], Session]) -> Session:
        """Return the session of the job's run, which computes on the cluster."""
        self._job = job
        return super().session(job, lambda: self._remote(make()))

    def precision(self, run: str, session: Session) -> Precision:
        """Return the precision of a run, which is timed on the device that computes."""
        return super().precision(run, self._remote(session))

    def _remote(self, session: Session) -> Session:
        """Return the session of the job at hand as one that computes on the cluster."""
        from .remote_session import RemoteSession, SessionSpec, samples_to_put

        if isinstance(session, RemoteSession):
            return session
        job = self._job
        if job is None:
            raise RunFailed("internal error: a session without a job; please report this")
        spec = SessionSpec(
            client=session.client,
            method=method_for(self.config.training, job),
            params=job.params,
            task=session.task,
            seed=session.seed,
            device=self._device,
            threads=self.config.training.threads,
            evaluate_after=self.evaluate_after,
        )
        samples = self._elsewhere.put_samples(samples_to_put(*self.samples(session.task)))
        return RemoteSession(session, spec, samples, self._elsewhere)


class ClusterLocation:
    """The location (`agents.Location`) that is a cluster."""

    def __init__(self, elsewhere: OnCluster, lanes: Lanes, gpus: float) -> None:
        self._elsewhere = elsewhere
        self._lanes = lanes
        self._gpus = gpus
        self._shared = ProcessResources()

    def worker(self) -> Worker:
        """Return a lane of the client's own: several clients compute at a time."""
        return self._lanes.lane()

    def tasks(self, config: AgentConfig) -> TaskRunner:
        """Return a task runner whose sessions compute on the cluster."""
        device = device_on_cluster(config.training.device, self._gpus)
        local = config.model_copy(update={"training": config.training.model_copy(update={"device": "cpu"})})
        resources: Resources = RemoteResources(local, self._shared, device, self._elsewhere)
        return TaskRunner(local, "train", resources=resources)


def device_on_cluster(device: str, gpus: float) -> str:
    """Return the device of a client, as a worker with so many GPUs names it."""
    if device == "auto" and not gpus:
        return "cpu"  # Ray may let a worker without a share see GPUs, which are others'
    return device


@contextlib.contextmanager
def open_location(
    settings: HostedRayConfig, configs: Sequence[AgentConfig], wake: Callable[[], None], report: Report
) -> Iterator[Location]:
    """Connect to the cluster, start workers, and yield the location where clients compute.

    Args:
        settings: The cluster.
        configs: The clients.
        wake: Called when a job of a client has finished.
        report: Receives what is waited for.

    Raises:
        MissingCapability: Ray is not installed.
        RunFailed: There is no cluster, or its workers cannot start.
    """
    report(f"its process connects to the Ray cluster at '{settings.address}'")
    with connect_to_cluster(settings.address, RAY_ADVICE) as ray:
        # As in `worker_main`: signals of a stop are left to the owner. Ray has set a handler of its own.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        workers = Workers(ray, settings, report, time.monotonic)
        workers.start(len(configs), max(config.training.threads for config in configs))
        report("")
        # One job more than there are workers: what it needs is ready when a worker is.
        lanes = Lanes(workers.count + 1, wake)
        yield ClusterLocation(OnCluster(ray, workers, lanes), lanes, settings.gpus)


def serve(pipe: Pipe, settings: str) -> None:
    """The child process whose clients compute on the cluster of the settings, given as JSON."""
    cluster = HostedRayConfig.model_validate_json(settings)

    def report(waits_for: str) -> None:
        if waits_for:
            log.info("ray_awaited for=%s", waits_for)
        pipe.send(WAITING_TOPIC, waits_for.encode())

    try:
        serve_clients(pipe, lambda configs, wake: open_location(cluster, configs, wake, report))
    except HeadwaterError as error:
        # The owner reports the last line of the log; a cluster that is away is no mistake of the program.
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(1)
