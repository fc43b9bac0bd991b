"""Hosted clients: several agents in one child process, each with its state folder. Where they compute is a `Location`.

The location `Here` is this process, in which all clients have one worker and one model. Torch is imported with the
first job, as on a device. The process exits as soon as its owner does: what its clients have saved is complete on disk,
and the rest could not be delivered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.own_method import method_for
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.agent.tasks.resources import Resources
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.children import ThreadWorker, Worker
from edge_agent.core.config import AgentConfig, TrainingConfig
from edge_agent.core.locks import folder_lock
from edge_agent.core.storage import sweep
from edge_agent.core.task import Task, Tensors
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.up import Report, UpdateManifest
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message, Transport

from ..processes.pipe import Frame, Pipe
from ..processes.worker_main import listen
from .transport import TASK_TOPIC

if TYPE_CHECKING:
    from edge_agent.client import Built
    from edge_agent.data import Samples
    from edge_agent.data.partition import Pools

Note = Callable[[str, Job | None], None]
"""Called with a client and its job before the job starts, and with the client and None when it is done."""


class ProcessResources:
    """The model of the run, which the clients of one process use in turn, and the pool of samples that they share."""

    def __init__(self) -> None:
        self._model: tuple[tuple[str, str], Built] | None = None
        self._pools: tuple[tuple[str, Path, Task], Pools] | None = None

    def model(self, job: Job, training: TrainingConfig) -> Built:
        """Return the model of the job's run, which is built once."""
        from edge_agent import methods
        from edge_agent.client import Built

        device = training.device
        key = (job.run, device)
        if self._model is None or self._model[0] != key:
            method = methods.create(method_for(training, job), job.params)
            built = Built.of(method, job.task, seed=job.seed, device=device)
            self._model = (key, built)
        return self._model[1]

    def pools(self, source: str, folder: Path, task: Task) -> Pools:
        """Return the samples of a source; only those of the last source are kept."""
        from edge_agent.data.partition import read_pools

        key = (source, folder, task)
        if self._pools is None or self._pools[0] != key:
            self._pools = None  # before others are read: both at once may be more than fits
            self._pools = (key, read_pools(source, task.input, task.class_names, folder=folder))
        return self._pools[1]


class HostedResources(Resources):
    """The resources of one client; model and pool are those of the process."""

    def __init__(self, config: AgentConfig, shared: ProcessResources) -> None:
        super().__init__(config)
        self._shared = shared

    def model(self, job: Job) -> Built:
        """Return the model of the process."""
        return self._shared.model(job, self.config.training)

    def read(self, task: Task) -> tuple[Samples, Samples]:
        """Return the samples that the configuration names, out of the process's pool where there is a partition."""
        from edge_agent.data.partition import Own

        config = self.config.data
        if config.partition is None:
            return super().read(task)
        own = Own.of(config.partition, config.client or self.config.id)
        return own.taken_from(self._shared.pools(config.source, config.folder, task))


class HostedTaskRunner(TaskRunner):
    """A task runner that calls ``note`` before and after each task."""

    def __init__(self, config: AgentConfig, shared: ProcessResources, note: Note = lambda *_: None) -> None:
        super().__init__(config, "train", resources=HostedResources(config, shared))
        self._note = note

    def do(self, job: Job, received: Tensors, encoder: Path | None = None) -> UpdateManifest | Report:
        """Do a job as on a device, and note its beginning and end.

        Raises:
            HeadwaterError: as on a device.
        """
        self._note(self.config.id, job)
        try:
            return super().do(job, received, encoder)
        finally:
            self._note(self.config.id, None)


class Location(Protocol):
    """Where the clients of one process compute."""

    def worker(self) -> Worker:
        """Return what does the jobs of one client."""

    def tasks(self, config: AgentConfig) -> TaskRunner:
        """Return what a client does for its jobs."""


class Here:
    """The location that is this process: one job at a time, with one model."""

    def __init__(self, worker: Worker, note: Note = lambda *_: None) -> None:
        self._worker = worker
        self._note = note
        self._shared = ProcessResources()

    def worker(self) -> Worker:
        """Return the worker that all clients share."""
        return self._worker

    def tasks(self, config: AgentConfig) -> TaskRunner:
        """Return a task runner that computes in this process."""
        return HostedTaskRunner(config, self._shared, self._note)


class HostedAgents:
    """Agents on a broker in memory. `start`, then `step` again and again."""

    def __init__(
        self,
        configs: Sequence[AgentConfig],
        location: Location,
        *,
        clock: Callable[[], float] = time.monotonic,
        broker: MemoryBroker | None = None,
    ) -> None:
        self.broker = MemoryBroker() if broker is None else broker
        self.agents = []
        for config in configs:
            boot = secrets.token_hex(8)
            transport = self.broker.transport(will_of(config, boot))
            runtime = AgentRuntime(clock=clock, worker=location.worker(), boot=boot)
            self.agents.append(Agent(config, transport, location.tasks(config), runtime))

    def start(self) -> None:
        """Connect all agents."""
        for agent in self.agents:
            agent.start()

    def step(self) -> bool:
        """Do one step of each agent; return whether any of them had something to do."""
        were_busy = [agent.step(0) for agent in self.agents]
        return any(were_busy)

    def idle_s(self) -> float:
        """Return the seconds in which nothing is due unless a message arrives."""
        return min(agent.idle_s() for agent in self.agents)


OpenLocation = Callable[[Sequence[AgentConfig], Callable[[], None]], contextlib.AbstractContextManager[Location]]
"""Opens the location of some clients; the function that it gets wakes their loop when a job has finished."""


def serve(pipe: Pipe) -> None:
    """The child process whose clients compute in it."""

    def note(client: str, job: Job | None) -> None:
        task = None if job is None else [job.run, job.round, job.purpose]
        pipe.send(TASK_TOPIC, json.dumps([client, task]).encode())

    def open_here(_configs: Sequence[AgentConfig], wake: Callable[[], None]) -> contextlib.nullcontext[Location]:
        return contextlib.nullcontext(Here(ThreadWorker(wake), note))

    serve_clients(pipe, open_here)


def serve_clients(pipe: Pipe, open_location: OpenLocation) -> None:
    """Receive the configurations of clients, then forward messages between the owner and these clients."""
    logging.getLogger().setLevel(logging.INFO)
    configs = [AgentConfig.model_validate(one) for one in json.loads(pipe.receive().payload)]
    wake = threading.Event()
    broker = MemoryBroker()

    def on_frame(frame: Frame) -> None:
        broker.route(frame.topic, frame.payload)
        wake.set()

    with contextlib.ExitStack() as stack:
        # Two processes must not work in one client's folder: after a crash, the former one may still be ending.
        for config in configs:
            stack.enter_context(folder_lock(config.state, f"hosted client {config.id}"))
            sweep(config.state)
        gate = broker.transport()
        gate.subscribe(*Topics(configs[0].federation).for_coordinator())
        gate.start()
        # From here on this process ends with its owner, also while the location is still being opened.
        listen(pipe, on_frame)
        agents = HostedAgents(configs, stack.enter_context(open_location(configs, wake.set)), broker=broker)
        agents.start()
        while True:
            wake.clear()  # before the step: what arrives during it is not missed
            is_busy = agents.step()
            _forward(gate, pipe)
            if not is_busy:
                wake.wait(agents.idle_s())


def _forward(gate: Transport, pipe: Pipe) -> None:
    """Send to the owner all that the agents have published since the last call."""
    while True:
        event = gate.receive(0)
        if event is None:
            return
        if isinstance(event, Message):
            pipe.send(event.topic, event.payload)
