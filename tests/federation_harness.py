"""A whole federation in one thread: broker in memory, coordinator, agents, and a clock that only tests move.

Nothing sleeps. `Federation.until` steps everybody until nobody has anything to do, then moves the clock a little, and
so on. Whoever is "killed" is dropped as it stands: nothing is closed, only what lies on disk is left.
"""

from __future__ import annotations

import contextlib
import queue
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.config import CoordinatorConfig
from coordinator.request import Request
from coordinator.service import Coordinator
from coordinator.store import StateFolder
from edge_agent import methods
from edge_agent.agent import Agent, will_of
from edge_agent.agent.duties import Duties
from edge_agent.agent.uploads import Outbox
from edge_agent.config import AgentConfig, DataConfig
from edge_agent.data import Samples
from edge_agent.errors import HeadwaterError
from edge_agent.task import ImageInput, Task, Tensors
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import CHUNK_BYTES, Outgoing
from edge_agent.wire.memory import Faults, MemoryBroker, MemoryTransport
from edge_agent.wire.tensors import decode, encode
from edge_agent.wire.topics import Topics
from edge_agent.work import InlineWorker

TASK = Task(
    input=ImageInput(channels=1, height=4, width=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 4},
)
"""One chunk: 16 * 4 + 4 + 4 * 3 + 3 = 83 numbers."""

WIDE_TASK = TASK.model_copy(
    update={"input": ImageInput(channels=1, height=64, width=64), "encoder_params": {"feature_dim": 32}}
)
"""Nine chunks: 4096 * 32 numbers and some more, 524 kB."""

LONGEST_PAUSE_S = 0.5

SMALL = {"local_epochs": 1, "batch_size": 8, "lr": 0.05}
QUICK = {"augment": False, "local_steps": 2, "tune_epochs": 1, "tune_rounds": 1, "head_epochs": 1, "ala_most_epochs": 2}


def quick_params(method: str) -> dict[str, Any]:
    """Parameters of a method with which a dozen samples are trained on in no time."""
    fields = methods.get(method).Params.model_fields
    head = {"head": "prototype"} if method == "repper" else {}
    return {**SMALL, **{name: value for name, value in QUICK.items() if name in fields}, **head}


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
        self.clock, self.seconds = clock, seconds
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


def step_of(agent: str) -> float:
    """How far `FakeDuties` of this agent moves each number in round 1; twice as far in round 2, and so on."""
    return (zlib.crc32(agent.encode()) % 9973 + 1) / 4096


class FakeDuties:
    """Training without training: every received number moves by a step that depends on agent and round alone."""

    def __init__(self, config: AgentConfig, tier: str = "train", samples: int = 10) -> None:
        self.config, self.tier, self.samples = config, tier, samples
        self.fingerprint = self.rolled_back = ""
        self.outbox = Outbox(config.state / "outbox")
        self.done: list[tuple[str, int, str]] = []
        self.installed: list[str] = []
        self.before: Callable[[wire.Job], None] = lambda job: None
        self.after: Callable[[wire.Job], None] = lambda job: None

    def facts(self) -> dict[str, Any]:
        return {"cores": 1}

    def do(self, job: wire.Job, received: Tensors) -> wire.UpdateManifest | wire.Report:
        self.before(job)
        self.done.append((job.run, job.round, job.purpose))
        if job.purpose == "finish":
            return wire.Report(run=job.run, samples=self.samples, acc_personal=0.5)
        move = np.float32(step_of(self.config.id) * job.round)
        tensors = {name: array + move for name, array in received.items()}
        manifest = self.outbox.put(
            tensors, run=job.run, round_number=job.round, samples=self.samples, metrics={"loss": 1.0}
        )
        self.after(job)
        return manifest

    def install(self, message: wire.Install, path: Path) -> wire.Report:
        self.installed.append(message.fingerprint)
        self.fingerprint = message.fingerprint
        return wire.Report(
            run=message.run,
            about=message.fingerprint,
            samples=self.samples,
            fingerprint=message.fingerprint,
            acc_personal=0.5,
        )


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
        duties: Callable[..., Any] = FakeDuties,
        cohort: dict[str, Any] | None = None,
        round: dict[str, Any] | None = None,  # noqa: A002 - the name of the section
        export: dict[str, Any] | None = None,
        heartbeat_s: float = 15.0,
    ) -> None:
        self.folder, self.task, self.make_duties, self.heartbeat_s = folder, task, duties, heartbeat_s
        self.clock = Clock()
        self.broker = MemoryBroker(faults, capture=capture)
        self.topics = Topics("home")
        names = tuple(f"a{i}" for i in range(agents)) if isinstance(agents, int) else agents
        self.config = CoordinatorConfig.model_validate(
            {
                "state": folder / "coordinator",
                "task": task,
                "cohort": {"min_agents": max(1, len(names)), **(cohort or {})},
                "round": {"quorum": 1.0, **(round or {})},
                "export": {"after_run": False, **(export or {})},
            }
        )
        self.agents: dict[str, Agent] = {}
        self.duties: dict[str, Any] = {}
        self.boots = 0
        self.coordinator: Coordinator | None = None
        self.state = StateFolder(self.config.state)
        self._opened: contextlib.ExitStack | None = None
        self._first = names
        self.run = ""
        self._looked_at, self._over = -1, False

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

    def start_coordinator(self, prepare: Callable[[Coordinator], None] = lambda _: None) -> Coordinator:
        self.state = StateFolder(self.config.state)
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(self.state.open("test"))
        self.boots += 1
        boot = f"c{self.boots}"
        self.coordinator = Coordinator(self.config, self.state, self.broker.transport(), clock=self.clock, boot=boot)
        prepare(self.coordinator)
        self.coordinator.start()
        return self.coordinator

    def kill_coordinator(self) -> None:
        """As kill -9 does: nothing is said or saved. (The lock and the database go with a process.)"""
        if self.coordinator is not None:
            vanish(self.coordinator.transport)
        if self._opened is not None:
            self._opened.close()
        self.coordinator = self._opened = None

    def request(
        self, method: str = "fedavg", *, rounds: int = 2, seed: int = 0, params: dict[str, Any] | None = None
    ) -> str:
        wanted = Request(method, params or {}, rounds, seed, self.task)
        self.run, self._looked_at = self.state.journal.request_run(wanted.body()), -1
        return self.run

    # --- agents ----------------------------------------------------------------------------------------------------

    def add(self, name: str, tier: str = "train", *, seconds: float | None = None, **options: Any) -> Agent:
        """An agent that is new, or starts again on what it has on disk."""
        config = AgentConfig(
            id=name,
            state=self.folder / name,
            heartbeat_s=self.heartbeat_s,
            data=DataConfig(source="none:"),
        )
        self.boots += 1
        boot = f"b{self.boots}"
        worker = InlineWorker() if seconds is None else TimedWorker(self.clock, seconds)
        duties = self.duties[name] = self.make_duties(config, tier, **options)
        transport = self.broker.transport(will_of(config, boot))
        agent = self.agents[name] = Agent(config, transport, duties, clock=self.clock, worker=worker, boot=boot)
        agent.start()
        return agent

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
            self._looked_at, self._over = newest, self.record.is_over
        return self._over

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = self.clock.now + seconds
        self.until(lambda: self.clock.now >= end)

    def _pause(self) -> float:
        parties = [*self.agents.values(), *([self.coordinator] if self.coordinator else [])]
        return min(LONGEST_PAUSE_S, max(0.01, min((party.idle_s() for party in parties), default=1.0)))

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
        return self.state.journal.replay(self.run)

    @property
    def encoder_sha256(self) -> str:
        record = self.record
        assert record.status == "finished", record.outcome
        return record.outcome["encoder_sha256"]

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

    def messages(self, topic: str, kind: type[wire.Control]) -> list[Any]:
        """Control messages of one kind on a topic, in order (with ``capture``)."""
        parse = wire.parse_from_agent if topic.endswith("/up") or "/h/" in topic else wire.parse_from_coordinator
        return [message for p in self.published(topic) if isinstance(message := parse(p), kind)]


class Stranger:
    """Somebody with a bare connection who says what they like and hears what an agent of that name would hear."""

    def __init__(self, federation: Federation, name: str, tier: str = "train", samples: int = 10) -> None:
        self.federation, self.name, self.tier, self.samples = federation, name, tier, samples
        self.topics = federation.topics
        self.transport = federation.broker.transport()
        self.transport.subscribe(*self.topics.for_agent(name), f"{self.topics.root}/b/+")
        self.transport.start()
        self.seq = 0

    def hello(self) -> None:
        self.say(wire.Hello(software="x", tier=self.tier, samples=self.samples))

    def say(self, message: wire.Control) -> None:
        self.seq += 1
        stamped = message.model_copy(update={"boot": f"boot-{self.name}", "seq": self.seq})
        self.raw(wire.encode(stamped))

    def raw(self, payload: bytes, topic: str | None = None) -> None:
        self.transport.publish(topic or self.topics.up(self.name), payload)

    def chunk(self, frame: bytes) -> None:
        self.raw(frame, self.topics.up_chunks(self.name))

    def offer(
        self,
        tensors: Tensors | bytes,
        *,
        round: int = 1,  # noqa: A002 - the word of the vocabulary
        run: str | None = None,
        samples: int = 10,
        metrics: dict[str, float] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Outgoing:
        """Announce an update; returns the blob, of which nothing is sent."""
        data = tensors if isinstance(tensors, bytes) else encode(tensors)
        blob = Outgoing.of(data, chunk_bytes)
        run = run if run is not None else self.federation.run
        self.say(wire.UpdateManifest(run=run, round=round, blob=blob.ref, samples=samples, metrics=metrics or {}))
        return blob

    def send(self, blob: Outgoing) -> None:
        """All chunks, without waiting for a grant."""
        for index in range(blob.count):
            self.chunk(blob.frame(index))

    def deliver(self, tensors: Tensors | bytes, **options: Any) -> wire.Receipt:
        """Announce and send an update as an honest agent would; returns the receipt."""
        self.heard()
        blob = self.offer(tensors, **options)
        self.federation.settle()
        answers = self.heard(wire.Grant, wire.Receipt)
        if isinstance(answers[-1], wire.Grant):
            self.send(blob)
            self.federation.settle()
            answers = self.heard(wire.Receipt)
        return answers[-1]

    def heard(self, *kinds: type[wire.Control]) -> list[Any]:
        """Control messages that have come since the last call."""
        found = []
        while (event := self.transport.receive(0)) is not None:
            if getattr(event, "topic", None) == self.topics.down(self.name):
                found.append(wire.parse_from_coordinator(event.payload))
        return [message for message in found if not kinds or isinstance(message, kinds)]


def vanish(transport: MemoryTransport) -> None:
    """A connection is gone without a word, and what was under way to it is lost."""
    transport._connected = False
    transport._events = queue.SimpleQueue()
    transport.broker.detach(transport, politely=True)


def restart_broker(federation: Federation) -> None:
    """The broker dies and comes back: all connections break, what was under way is lost, no will is published."""
    parties = [*federation.agents.values(), *([federation.coordinator] if federation.coordinator else [])]
    transports = [party.transport for party in parties]
    for transport in transports:
        vanish(transport)
    for transport in transports:
        transport.start()


def lose(transport: MemoryTransport, is_lost: Callable[[wire.Control], bool], times: int = 1) -> list[wire.Control]:
    """The first ``times`` control messages for which ``is_lost`` go nowhere; returns the list that they are put in."""
    real, lost = transport.publish, list[wire.Control]()

    def publish(topic: str, payload: bytes, **options: Any) -> None:
        message = None
        for parse in (wire.parse_from_agent, wire.parse_from_coordinator):
            with contextlib.suppress(HeadwaterError):
                message = message or parse(payload)
        if message is not None and len(lost) < times and is_lost(message):
            lost.append(message)
        else:
            real(topic, payload, **options)

    transport.publish = publish
    return lost


@contextlib.contextmanager
def killed_at_append(federation: Federation, number: int, *, before: bool) -> Iterator[None]:
    """The next coordinator dies just before, or just after, its ``number``-th entry into the journal (0: the first)."""
    journal = federation.state.journal
    real, count = journal.append, [0]

    def append(*args: Any, **columns: Any) -> Any:
        count[0] += 1
        if count[0] == number + 1 and before:
            raise Killed
        entry = real(*args, **columns)
        if count[0] == number + 1:
            raise Killed
        return entry

    journal.append = append
    try:
        yield
    finally:
        journal.append = real


class TinyDuties(Duties):
    """The real duties on 24 made-up images of three classes, different for each agent."""

    def _samples(self, task: Task) -> tuple[Samples, Samples]:
        if self._data is None:
            rng = np.random.default_rng(sum(map(ord, self.config.id)))
            labels = np.arange(24, dtype=np.int64) % 3
            inputs = rng.normal(size=(24, *task.input_shape)).astype(np.float32) + labels[:, None, None, None]
            every = Samples(inputs, labels, task.class_names, task.input)
            rows = np.arange(24)
            self._data, self.samples = (task, every.take(rows[:18]), every.take(rows[18:])), 18
        return self._data[1], self._data[2]

    def _report(self, job: wire.Job, session: Any, outcome: Any, files: Any) -> wire.Report:
        files.write(9_999_999, outcome.kept.personal, outcome.kept.memory)
        return wire.Report(run=job.run, samples=18, acc_personal=outcome.metrics["acc.personal"])
