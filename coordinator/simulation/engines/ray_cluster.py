"""Engine ``ray``: workers on the machines of a Ray cluster, one torch thread and one model each.

The cluster is an existing one, or a new one on this machine that ends with this process. Samples go to each
machine once. A client's state travels with its job and comes back with the reply, so no folder has to be shared: all
files stay with this process. Every machine needs the same Headwater, and the same torch where bits are to be equal.

Left to itself Ray reports its usage, opens a web page, writes to the home folder and prints to standard output, which
is ours for JSON: all of that is switched off here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import __version__
from edge_agent.agent.tasks.table import state_before
from edge_agent.core.errors import RunFailed, UsageError
from edge_agent.core.task import Tensors
from edge_agent.data.partition import Division
from edge_agent.run_folder.client_state import ClientStateFiles, merge, split
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Job
from edge_agent.wire.tensors import decode, pieces

from ..client_tasks import Answer, answer, state_files_in
from ..setup import Prepared
from .base import Work, decode_blobs, import_ray
from .pool import Worker, shared_from, worker_init

log = logging.getLogger(__name__)

SILENCE_S = 30.0
"""Seconds without a reply after which the log says what is waited for."""

NAMESPACE = "headwater"
CONNECT_TIMEOUT_S = 10.0

SMALLEST_STORE_BYTES = 80 * 1024**2
"""Ray rejects less than 75 MiB."""

SPARE_STORE_BYTES = 512 * 1024**2
"""Store beside the samples, for models in transit; Ray itself moves what exceeds it to disk."""

Bytes = np.ndarray
"""Bytes (n,) uint8: Ray passes arrays on without copying them."""


def as_bytes(content: Sequence[bytes | memoryview]) -> Bytes:
    """Join pieces of bytes into one array."""
    return np.frombuffer(b"".join(content), np.uint8)


# --- on a machine of the cluster -------------------------------------------------------------------------------------


class CarriedState(ClientStateFiles):
    """A client's state that arrives with its job and returns with the reply."""

    def __init__(self, both: Bytes) -> None:
        super().__init__(Path(os.devnull))
        self._both = both
        self.round: int | None = None
        self.after: Bytes = as_bytes([])

    def before(self, round_number: int) -> tuple[Tensors, Tensors]:  # noqa: ARG002 - chosen by who has the files
        """Return the state that arrived."""
        return split(decode(self._both.data))

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Hold it until the reply."""
        self.round = round_number
        self.after = as_bytes(pieces(merge(personal, memory)))


class Actor:
    """A worker: the pools mapped from the store of its machine, and no file."""

    def __init__(self, init: str, pools: Bytes) -> None:
        fields = json.loads(init)
        division = Division.model_validate(fields["division"])
        self._shared = shared_from(fields, pools.data, division, Path(os.devnull))

    def ready(self) -> dict[str, Any]:
        """Return the actor's process id and versions."""
        import torch

        return {"pid": os.getpid(), "software": __version__, "torch": torch.__version__}

    def work(self, client: str, job: str, state: Bytes, *blobs: Bytes) -> tuple[str, Bytes, Bytes]:
        """Do a client's job. Returns: reply as JSON, update, client state after it."""
        carried = CarriedState(state)
        shared = replace(self._shared, carried=carried)
        result = answer(shared, client, Job.model_validate_json(job), decode_blobs([blob.data for blob in blobs]))
        fields = {**result.to_json(), "state_round": carried.round}
        return json.dumps(fields), as_bytes(result.content), carried.after


# --- in this process -------------------------------------------------------------------------------------------------


class RayWorkers:
    """The workers of a pool as actors of a Ray cluster."""

    def __init__(self, prepared: Prepared, clients: Path, setup: Sequence[str]) -> None:
        """``clients``: the folder of the clients' states."""
        self._prepared = prepared
        self._clients = clients
        division = prepared.division.model_dump(mode="json")
        self._init = json.dumps({**worker_init(prepared, setup), "division": division})
        self._stack = contextlib.ExitStack()
        self._ray: Any = None
        self._workers: list[Worker[Any]] = []
        self._pending: dict[Any, tuple[Worker[Any], Work | None]] = {}
        """Reference of a reply -> worker and work; None: it is starting."""

    def start(self, count: int) -> int:
        """Connect, and hand out the samples. ``count`` 0: as many as there are CPUs for, and no more than clients.

        Raises:
            MissingCapability: Ray is not installed.
            RunFailed: there is no cluster.
            UsageError: the cluster has fewer CPUs than requested.
        """
        plan = self._prepared.plan
        content = self._prepared.pools.content()
        self._cpus = max(1, plan.threads)
        store = sum(memoryview(piece).nbytes for piece in content) + SPARE_STORE_BYTES
        link = connect_to_cluster(plan.address, cpus=count * self._cpus, store_bytes=store)
        self._ray = self._stack.enter_context(link)
        self._stack.callback(self._kill_all)
        available = int(self._ray.cluster_resources().get("CPU", 0)) // self._cpus
        if count > available:
            raise UsageError(f"{count} workers, but the cluster has CPUs for {available}; reduce --workers")
        count = count or max(1, min(available, len(self._prepared.division.clients)))
        self._gpus = 0.0  # an actor without a share does not see the GPUs
        if plan.device.startswith("cuda"):
            self._gpus = min(1.0, float(self._ray.cluster_resources().get("GPU", 0)) / count)
        self._pools = self._ray.put(as_bytes(content))
        return count

    def spawn(self, number: int) -> Worker[Any]:
        """Start an actor on a machine of the cluster."""
        options = {"num_cpus": self._cpus, "num_gpus": self._gpus or None, "max_restarts": 0}
        actor = self._ray.remote(Actor).options(**options).remote(self._init, self._pools)
        worker = Worker[Any](number, actor)
        self._workers.append(worker)
        self._pending[actor.ready.remote()] = (worker, None)
        return worker

    def log_of(self, worker: Worker[Any]) -> str:  # noqa: ARG002 - Ray has the logs, on the machines of the cluster
        """Return no file: none is on this machine."""
        return ""

    def put(self, blob: Outgoing) -> Any:
        """Put a blob into Ray's store."""
        return self._ray.put(as_bytes([blob.data]))

    def submit(self, worker: Worker[Any], work: Work, blobs: Sequence[Any]) -> None:
        """Send a job with the client's state.

        Raises:
            StateError: the state cannot be read.
        """
        state = as_bytes(pieces(merge(*self._state_files(work).before(state_before(work.job)))))
        reply = worker.handle.work.remote(work.client, work.job.model_dump_json(), state, *blobs)
        self._pending[reply] = (worker, work)

    def wait(self) -> Iterable[tuple[Worker[Any], Answer | str | None]]:
        """Return replies, and why some actors have exited.

        Raises:
            RunFailed: a worker has another version of Headwater.
        """
        pending = list(self._pending)
        done, _ = self._ray.wait(pending, num_returns=1, timeout=SILENCE_S)
        if not done:
            free = self._ray.available_resources().get("CPU", 0)
            starting = sum(work is None for _, work in self._pending.values())
            log.warning("waiting_for actors=%d starting=%d free_cpus=%g", len(pending), starting, free)
        return [self._report(reply, *self._pending.pop(reply)) for reply in done]

    def close(self) -> None:
        """Kill all actors, and end the cluster if it is ours."""
        self._pending.clear()
        self._stack.close()

    def _report(self, reply: Any, worker: Worker[Any], work: Work | None) -> tuple[Worker[Any], Answer | str | None]:
        """Return what a worker has replied.

        Args:
            reply: Ray's reference to the reply, which has arrived.
            worker: The worker.
            work: What it was given; None: it was asked whether it is ready.

        Returns:
            The worker with its answer, with the reason why it has ended, or with None where it is ready.

        Raises:
            RunFailed: The worker has another version of this program.
        """
        try:
            result = self._ray.get(reply)
        except self._ray.exceptions.RayError as error:
            self._workers.remove(worker)
            self._ray.kill(worker.handle)
            lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()] or ["no reason was given"]
            reason = " / ".join(dict.fromkeys((lines[0], lines[-1])))  # what failed, and the error that it ends with
            return worker, f"{type(error).__name__}: {reason}"
        if work is not None:
            fields = json.loads(result[0])
            update = result[1]
            state = result[2]
            if fields["state_round"] is not None:  # on disk before the coordinator receives the update
                self._state_files(work).write(fields["state_round"], *split(decode(state.data)))
            return worker, Answer.from_json(fields, update.data)
        import torch

        worker.pid = result["pid"]
        if result["software"] != __version__:
            raise RunFailed(
                f"worker {worker.number} has Headwater {result['software']}, this is {__version__}; "
                "install the same on all machines of the cluster"
            )
        if result["torch"] != torch.__version__:
            log.warning("torch_differs worker=%d has=%s here=%s", worker.number, result["torch"], torch.__version__)
        return worker, None

    def _state_files(self, work: Work) -> ClientStateFiles:
        return state_files_in(self._clients, work.client, work.job.run, self._prepared.plan.keep_every)

    def _kill_all(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker.handle)
        self._workers.clear()


def _prepare_own_cluster(stack: contextlib.ExitStack, folder: str, cpus: int, store_bytes: int) -> dict[str, Any]:
    """Prepare this process to start a cluster of its own, and return the options of ``ray.init`` for it.

    Args:
        stack: Undoes with its context what is changed in this process.
        folder: Folder of the cluster's files.
        cpus: Number of processor cores of the cluster.
        store_bytes: Bytes that its object store has to hold at least.
    """
    options = {
        "address": "local",
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": max(store_bytes, SMALLEST_STORE_BYTES),
        "_temp_dir": folder,
    }
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    stack.callback(os.environ.update, {name: os.environ[name] for name in environment if name in os.environ})
    for name, value in environment.items():
        stack.callback(os.environ.pop, name, None)
        os.environ[name] = value
    logger = logging.getLogger("ray")  # it would advise on permanent clusters
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    return options


@contextlib.contextmanager
def connect_to_cluster(address: str | None, *, cpus: int, store_bytes: int) -> Iterator[Any]:
    """Yield the package ``ray``, connected; a connection that this process has already is used and left as it is.

    Without an ``address`` a cluster of ``cpus`` is started here, with a store for ``store_bytes``. It leaves no files,
    and only this process can use it: actors run whatever they are sent.

    Raises:
        MissingCapability: Ray is not installed.
        RunFailed: nothing answers at the address, or no cluster could be started.
    """
    ray = import_ray()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if ray.is_initialized():
            yield ray
            return
        options: dict[str, Any] = {"address": address}
        if address is None:
            folder = tempfile.TemporaryDirectory(prefix="headwater-ray-", ignore_cleanup_errors=True)
            options = _prepare_own_cluster(stack, stack.enter_context(folder), cpus, store_bytes)
        if threading.current_thread() is threading.main_thread():  # Ray replaces the handler
            stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        try:
            _check_answers(address)
            stack.callback(ray.shutdown)
            ray.init(**options, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            if address is None:
                message = f"no Ray cluster could be started on this machine ({reason}); try --engine pool"
                raise RunFailed(message) from error
            raise RunFailed(
                f"no Ray cluster can be used at '{address}' ({reason}); run this on one of its machines "
                "('ray start --head' makes one), or leave --address out"
            ) from error
        yield ray


def _check_answers(address: str | None) -> None:
    """Require that something answers at an address HOST:PORT, because Ray tries for minutes before it fails.

    Raises:
        OSError, OverflowError: Nothing does, or the port is no possible one.
    """
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
