"""Engine ``ray``: workers on the machines of a Ray cluster, one torch thread and one model each.

The cluster is an existing one, or a new one on this machine that ends with this process. Samples go to each
machine once. A client's state travels with its job and comes back with the reply, so no folder has to be shared: all
files stay with this process. Every machine needs the same Headwater, and the same torch where bits are to be equal.

How this process and Ray get along is in `processes.cluster`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_agent import __version__
from edge_agent.agent.tasks.table import state_before
from edge_agent.core.errors import RunFailed, UsageError
from edge_agent.core.task import Tensors
from edge_agent.data.partition import Division
from edge_agent.run_folder.client_state import ClientStateFiles, merge, split
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Job
from edge_agent.wire.tensors import decode, pieces

from ...processes.cluster import Bytes, as_bytes, connect_to_cluster, reason_of_loss
from ..client_tasks import Answer, answer, state_files_in
from ..setup import Prepared
from .base import ADVICE, Work, decode_blobs
from .pool import Worker, shared_from, worker_init

log = logging.getLogger(__name__)

SILENCE_S = 30.0
"""Seconds without a reply after which the log says what is waited for."""

SPARE_STORE_BYTES = 512 * 1024**2
"""Store beside the samples, for models in transit; Ray itself moves what exceeds it to disk."""

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

    are_here = False

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
        link = connect_to_cluster(plan.address, ADVICE, cpus=count * self._cpus, store_bytes=store)
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
            return worker, reason_of_loss(error)
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
