"""A whole federation in one thread: broker in memory, coordinator, agents, and a clock that only tests move.

Nothing sleeps. `Federation.until` steps everybody until nobody has anything to do, then moves the clock a little, and
so on. Whoever is "killed" is dropped as it stands: nothing is closed, only what lies on disk is left.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from faulty_broker import Faults, FaultyBroker
from federation_duties import TASK, FakeDuties

from coordinator.config import CoordinatorConfig
from coordinator.journal.entries import fact_of
from coordinator.processes.compute import Compute, InlineCompute
from coordinator.rounds.request import Request
from coordinator.service.coordinator import Coordinator
from coordinator.service.surroundings import Access, Runtime, StartOptions
from coordinator.state.command_keys import CommandKeys
from coordinator.state.starts import Takeover
from coordinator.state.store import StateFolder
from coordinator.views.runs import replay
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.core.children import InlineWorker, Worker
from edge_agent.core.config import AgentBrokerConfig, AgentConfig, DataConfig, PrivacyConfig
from edge_agent.core.errors import TrainingCancelled
from edge_agent.core.task import Task, Tensors
from edge_agent.wire.memory import MemoryTransport
from edge_agent.wire.messages import codec, down, fields
from edge_agent.wire.tensors import decode
from edge_agent.wire.topics import Topics

LONGEST_PAUSE_S = 0.5
"""The most seconds by which the clock moves at once, unless a federation says otherwise."""
SHORTEST_PAUSE_S = 0.01
"""The least seconds by which the clock moves, although somebody would look around earlier."""
NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
"""The wall clock of a federation when it begins."""


class Killed(BaseException):
    """The process is gone at this very line; no ``except Exception`` may stop it."""


class Clock:
    """Monotonic seconds that stand still until they are moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class TimedWorker:
    """Work that takes ``seconds`` of the simulated clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self._jobs: list[tuple[float, Callable[[], Any], Any]] = []

    def submit(self, name: str, job: Callable[[], Any], done: Any) -> None:
        self._jobs.append((self.clock() + self.seconds, job, done))

    def collect(self) -> None:
        due = [item for item in self._jobs if item[0] <= self.clock()]
        self._jobs = [item for item in self._jobs if item[0] > self.clock()]
        for _, job, done in due:
            InlineWorker().submit("", job, done)

    def close(self) -> None:
        self._jobs.clear()


class TrainingWorker(TimedWorker):
    """A training takes its share of ``seconds``, and ends when it is cancelled; all other work takes no time."""

    def __init__(self, clock: Clock, seconds: float, tasks: Any) -> None:
        super().__init__(clock, seconds)
        self.tasks = tasks

    def submit(self, name: str, job: Any, done: Any) -> None:
        asked = job.args[0] if name == "job" else None
        if asked is None or asked.purpose != "train":
            InlineWorker().submit(name, job, done)
            return
        self._jobs.append((self.clock() + self.seconds * asked.work, job, done))

    def collect(self) -> None:
        for item in list(self._jobs):
            _, job, done = item
            if getattr(self.tasks, "cancelled", None) == down.job_key(job.args[0]):
                self._jobs.remove(item)
                done(None, TrainingCancelled("its round is over"))
        super().collect()


class Federation:
    """Everybody, and the means to disturb them. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        agents: int | tuple[str, ...] = 3,
        faults: Faults | None = None,
        capture: bool = False,
        task: Task = TASK,
        tasks: Callable[..., Any] = FakeDuties,
        cohort: dict[str, Any] | None = None,
        round: dict[str, Any] | None = None,  # noqa: A002 - the name of the section
        export: dict[str, Any] | None = None,
        retention: dict[str, Any] | None = None,
        aggregation: dict[str, Any] | None = None,
        heartbeat_s: float = 15.0,
        probe_s: float = 0.0,
        keyed: bool = False,
        compute: Compute | None = None,
    ) -> None:
        """``keyed``: agents have keys, and obey authentic commands only."""
        self.folder = folder
        self.task = task
        self.make_tasks = tasks
        self.heartbeat_s = heartbeat_s
        self.clock = Clock()
        self.longest_pause_s = LONGEST_PAUSE_S
        self.shortest_pause_s = SHORTEST_PAUSE_S
        self.probe_s = probe_s
        self.keyed = keyed
        self.compute = compute
        self.now = lambda: NOON + timedelta(seconds=self.clock() - 1000)
        self.broker = FaultyBroker(faults, capture=capture)
        self.topics = Topics("home")
        names = tuple(f"a{i}" for i in range(agents)) if isinstance(agents, int) else agents
        self.config = CoordinatorConfig.model_validate(
            {
                "state": folder / "coordinator",
                "task": task,
                "cohort": {"min_agents": max(1, len(names)), **(cohort or {})},
                "round": {"quorum": 1.0, **(round or {})},
                "export": {"after_run": False, "release": "each_run", **(export or {})},
                "retention": retention or {},
                "aggregation": aggregation or {},
            }
        )
        self.agents: dict[str, Agent] = {}
        self.tasks: dict[str, Any] = {}
        self.boots = 0
        self.coordinator: Coordinator | None = None
        self.state = StateFolder(self.config.state)
        self._opened: contextlib.ExitStack | None = None
        self._first = names
        self.run = ""
        self._run_ids: dict[str, str] = {}
        self._looked_at = -1
        self._over = False

    def __enter__(self) -> Federation:
        self.start_coordinator()
        for name in self._first:
            self.add(name)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_coordinator()
        for name in list(self.agents):
            self.kill(name)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def start_coordinator(
        self, prepare: Callable[[Coordinator], None] = lambda _: None, takeover: Takeover | None = None
    ) -> Coordinator:
        """``takeover``: the coordinator that it replaces, as a standby or an operator has decided."""
        self.state = StateFolder(self.config.state)
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(self.state.open("test"))
        self.boots += 1
        self.coordinator = Coordinator(
            self.config,
            self.state,
            self.broker.transport(),
            runtime=Runtime(clock=self.clock, now=lambda: self.now(), compute=self.compute or InlineCompute()),
            access=Access(keys=self.keys()),
            start=StartOptions(boot=f"c{self.boots}", probe_s=self.probe_s, takeover=takeover),
        )
        prepare(self.coordinator)
        self.coordinator.start()
        return self.coordinator

    def keys(self) -> CommandKeys | None:
        return CommandKeys.of(self.config.state, self.config.federation) if self.keyed else None

    def kill_coordinator(self) -> None:
        """As kill -9 does: nothing is said or saved. (The lock and the database go with a process.)"""
        if self.coordinator is not None:
            vanish(self.coordinator.transport)
        if self._opened is not None:
            self._opened.close()
        self.coordinator = self._opened = None

    def request(
        self,
        method: str = "fedavg",
        *,
        rounds: int = 2,
        seed: int = 0,
        params: dict[str, Any] | None = None,
        keep_updates: bool = False,
    ) -> str:
        wanted = Request(method, params or {}, rounds, seed, self.task, keep_updates=keep_updates)
        self.run = self.state.journal.request_run(fact_of("run_requested", wanted.body()))
        self._looked_at = -1
        self._run_ids[self.run] = self.record.request.id
        return self.run

    @property
    def run_id(self) -> str:
        """What agents know the run by; also once the journal is closed, if it was asked for before."""
        if self.run not in self._run_ids:
            self._run_ids[self.run] = self.record.request.id
        return self._run_ids[self.run]

    def order(self, message: fields.Command, **stamp: Any) -> bytes:
        """A message as the coordinator that serves now would send it."""
        assert self.coordinator is not None
        who = {"federation": self.coordinator.federation_id, "epoch": self.coordinator.commands.epoch}
        return codec.encode(message.model_copy(update={"boot": "c9", "seq": 1, **who, **stamp}))

    # --- agents ----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        tier: str = "train",
        *,
        seconds: float | None = None,
        training_s: float | None = None,
        channel: str = "stable",
        privacy: PrivacyConfig | None = None,
        **options: Any,
    ) -> Agent:
        """An agent that is new, or starts again on what it has on disk.

        ``seconds``: of each of its jobs; ``training_s``: of a whole training, of which it may do a share.
        """
        broker = AgentBrokerConfig()
        if (keys := self.keys()) is not None:
            path = self.folder / f"{name}.commands.key"
            path.write_text(keys.of_agent(name).text())
            broker = AgentBrokerConfig(command_key_file=path)
        config = AgentConfig(
            id=name,
            state=self.folder / name,
            heartbeat_s=self.heartbeat_s,
            broker=broker,
            data=DataConfig(source="none:"),
            channel=channel,
            privacy=privacy or PrivacyConfig(),
        )
        self.boots += 1
        boot = f"b{self.boots}"
        tasks = self.tasks[name] = self.make_tasks(config, tier, **options)
        worker: Worker = InlineWorker() if seconds is None else TimedWorker(self.clock, seconds)
        if training_s is not None:
            worker = TrainingWorker(self.clock, training_s, tasks)
        transport = self.broker_of(name).transport(will_of(config, boot))
        runtime = AgentRuntime(clock=self.clock, worker=worker, boot=boot)
        agent = self.agents[name] = Agent(config, transport, tasks, runtime)
        agent.start()
        return agent

    def broker_of(self, name: str) -> FaultyBroker:
        """The broker that an agent connects to."""
        return self.broker

    def kill(self, name: str, *, will: bool = True) -> None:
        """An agent's process is gone; the broker says so unless the whole device has lost its network."""
        transport = self.agents.pop(name).transport
        if will:
            transport.cut()
        else:
            vanish(transport)

    # --- time ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Until nobody has an event left."""
        for _ in range(200_000):
            if not self.step():
                return
        raise AssertionError("the federation does not come to rest")

    def step(self) -> bool:
        """One step of everybody; True when anybody had something to do."""
        busy = self.coordinator is not None and self._step_coordinator()
        for name in list(self.agents):
            if (agent := self.agents.get(name)) is not None:
                busy = self._step_agent(name, agent) or busy
        return busy

    def until(self, condition: Callable[[], object], limit_s: float = 900.0) -> float:
        """Go on until ``condition``; returns the simulated seconds that it took."""
        begin = self.clock.now
        while True:
            self.settle()
            if condition():
                return self.clock.now - begin
            if self.clock.now - begin > limit_s:
                status = self.coordinator.status() if self.coordinator else None
                raise AssertionError(f"did not happen within {limit_s} simulated seconds: {status}")
            self.clock.now += self._pause()

    def finish(self, limit_s: float = 900.0) -> float:
        """Until the run is over; returns the simulated seconds that it took."""
        return self.until(self._is_over, limit_s)

    def _is_over(self) -> bool:
        newest = self.state.journal.last_id()
        if newest != self._looked_at:
            self._looked_at = newest
            self._over = self.record.is_over
        return self._over

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = self.clock.now + seconds
        self.until(lambda: self.clock.now >= end)

    def _pause(self) -> float:
        parties = [*self.agents.values(), *([self.coordinator] if self.coordinator else [])]
        due_s = min((party.idle_s() for party in parties), default=1.0)
        return min(self.longest_pause_s, max(self.shortest_pause_s, due_s))

    def _step_coordinator(self) -> bool:
        try:
            return self.coordinator.step(0)
        except Killed:
            self.kill_coordinator()
            return True

    def _step_agent(self, name: str, agent: Agent) -> bool:
        try:
            return agent.step(0)
        except Killed:
            self.kill(name)
            return True

    # --- looking ---------------------------------------------------------------------------------------------------

    @property
    def record(self) -> Any:
        return replay(self.state.journal, self.run)

    @property
    def encoder_sha256(self) -> str:
        record = self.record
        assert record.status == "finished", record.end
        return record.encoder_sha256

    @property
    def final(self) -> Tensors:
        """The run's last checkpoint."""
        return decode(self.state.blobs.read(self.record.checkpoint))

    def entries(self, *kinds: str, **wanted: Any) -> list[Any]:
        return self.state.journal.entries(self.run, kinds or None, **wanted)

    def metrics(self) -> list[dict[str, Any]]:
        return [m for m in self.state.run(self.run).metrics() if m["kind"] == "round"]

    def published(self, topic: str) -> list[bytes]:
        """Payloads that were published on a topic, in order (with ``capture``)."""
        return [payload for where, payload in self.broker.captured if where == topic]

    def messages(self, topic: str, kind: type[fields.Control]) -> list[Any]:
        """Control messages of one kind on a topic, in order (with ``capture``)."""
        parse = codec.parse_from_agent if topic.endswith("/up") or "/h/" in topic else codec.parse_from_coordinator
        return [message for p in self.published(topic) if isinstance(message := parse(p), kind)]


def undisturbed_hash(fleet: Callable[[Path], Any], folder: Path, rounds: int = 3) -> str:
    """Hash of the final encoder of a run of a ``fleet`` in which nothing happens."""
    with fleet(folder) as fed:
        fed.request(rounds=rounds)
        fed.finish()
        return fed.encoder_sha256


class FederationInRealTime(Federation):
    """The harness over a real broker: whoever is killed closes its connection, and waiting takes time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.clock = time.monotonic
        self._nap = threading.Event()

    def kill(self, name: str, *, will: bool = True) -> None:
        self.agents.pop(name).close()

    def keys(self) -> CommandKeys | None:
        return CommandKeys.of(self.config.state, self.config.federation) if self.keyed else None

    def kill_coordinator(self) -> None:
        self.coordinator.close()
        self._opened.close()

    def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> float:
        begin = self.clock()
        while not condition():
            assert self.clock() - begin < limit_s, (self.coordinator.status(), self.record if self.run else None)
            if not self.step():
                self._nap.wait(0.001)
        return self.clock() - begin


def vanish(transport: MemoryTransport) -> None:
    """A connection is gone without a word, and what was under way to it is lost."""
    transport._connected = False
    transport._events = queue.SimpleQueue()
    transport.broker.detach(transport, politely=True)
