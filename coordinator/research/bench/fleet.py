"""What messages of many agents cost one coordinator: CPU by kind, memory, and the bytes that it publishes.

``memory`` runs both sides in one process on a clock that leaps over idle time, and counts the CPU of each message.
Over a broker the coordinator is a separate process, and its CPU is divided by the messages that it received.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from edge_agent.core.errors import MeasuringFailed
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Event, Message, Subscribed, Traffic

from ...config import CoordinatorConfig
from ...rounds.request import Request
from ...service.coordinator import Coordinator
from ...service.surroundings import Runtime, StartOptions
from ...state.status_file import BrokerTraffic, read_status
from ...state.store import StateFolder
from ...views.runs import replay
from .fleet_agents import AgentLink, FleetAgent, Models, Timers
from .measuring import FleetPlan, Measured, Row, Usage, module, usage, wait_for
from .rounds import FEDERATION, PROGRAMS, RUN_LIMIT_S, START_LIMIT_S, broker, round_seconds
from .workloads import NOOP, register

# The phases: all CPU of one, that of timers included, is divided by its messages.
JOINING = "a message of joining"
IDLE = "a message while idle"
ROUNDS = "a message of the rounds"

STATUS_S = 2.0
"""Seconds after which ``status.json`` shows what has happened."""


WELCOME_LIMIT_S = 0.06
"""Seconds for each agent in which all have to be welcomed: ten times what a busy machine of two cores takes."""


def pause(seconds: float) -> None:
    """Wait for some seconds, while other processes work."""
    threading.Event().wait(seconds)


@dataclass(frozen=True)
class Moved:
    """The bytes that have moved so far.

    Attributes:
        published: Bytes that the coordinator has published.
        models: The part of these that were models. The rest are messages to single agents, of which there are more in
            a larger fleet.
        received: Bytes that all agents together have received.
    """

    published: int = 0
    models: int = 0
    received: int = 0

    def since(self, before: Moved) -> Moved:
        """Return what has moved since then."""
        return Moved(self.published - before.published, self.models - before.models, self.received - before.received)


@dataclass(frozen=True)
class Spent:
    """What the coordinator and the broker of a fleet have used so far, or between two moments.

    Attributes:
        messages: Messages that the coordinator has received.
        cpu_s: CPU seconds of the coordinator.
        broker_cpu_s: CPU seconds of the broker; 0 in memory.
        received_bytes: Bytes that the coordinator has received.
        seconds: Seconds of the clock.
    """

    messages: int = 0
    cpu_s: float = 0.0
    broker_cpu_s: float = 0.0
    received_bytes: int = 0
    seconds: float = 0.0

    def since(self, before: Spent) -> Spent:
        """Return what has been used since then."""
        return Spent(
            self.messages - before.messages,
            self.cpu_s - before.cpu_s,
            self.broker_cpu_s - before.broker_cpu_s,
            self.received_bytes - before.received_bytes,
            self.seconds - before.seconds,
        )

    @property
    def message_us(self) -> float:
        """CPU of the coordinator divided by its messages, in microseconds."""
        return 1e6 * self.cpu_s / max(1, self.messages)


@dataclass(frozen=True)
class JournalSize:
    """The size of a journal.

    Attributes:
        rows: Its entries.
        size_bytes: Its bytes on disk, without the space that SQLite's log takes beside it.
    """

    rows: int = 0
    size_bytes: int = 0

    @classmethod
    def of_folder(cls, folder: Path) -> JournalSize:
        """Return the size of the journal in a state folder, which a coordinator may be writing to."""
        with contextlib.closing(sqlite3.connect(f"{(folder / 'journal.db').as_uri()}?mode=ro", uri=True)) as journal:
            (pages,) = journal.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = journal.execute("PRAGMA page_size").fetchone()
        with StateFolder(folder).look() as state:
            return cls(state.journal.last_id(), pages * page_bytes)


@dataclass
class FleetFigures:
    """The figures that were measured of a fleet."""

    transport: str
    plan: FleetPlan
    seconds: list[float]
    cpu_us: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Kind of messages, or phase -> (number of messages, mean CPU of the coordinator for one in microseconds).

    All CPU of a phase, that of timers included, is divided by its messages. Over a broker there are only phases.
    """

    moved: Moved = Moved()
    """Bytes of all rounds."""

    updates: int = 0
    usage: Usage | None = None
    aggregators: list[Usage] = field(default_factory=list)
    """What each aggregator has used, with the CPU of the rounds alone."""

    dropped: int | None = None
    """Messages that the coordinator's transport has dropped; None in memory, where there is none."""

    welcome_s: list[float] = field(default_factory=list)
    """Seconds from hello to welcome of one agent during a flood."""

    phases: dict[str, Spent] = field(default_factory=dict)
    """Phase -> what was used in it."""

    broker_usage: Usage | None = None
    """What the broker has used at the end of the rounds; None in memory."""

    journal: JournalSize = JournalSize()
    """The journal at the end of the rounds."""

    def rows(self) -> list[Row]:
        """Return the figures in the order of the table."""
        # 1. Time, by kind of message and by round.
        rows = [Row(f"CPU, {kind} ({count})", us, "us") for kind, (count, us) in self.cpu_us.items()]
        rows += [Row(f"round {number}", seconds, "s") for number, seconds in enumerate(self.seconds, 1)]
        # 2. Bytes beside what cannot be avoided: each model once, to every agent that needs it. All get the final one.
        rounds = len(self.seconds)
        downloads = rounds * self.plan.cohort_size + self.plan.agents
        payload_mb = self.plan.payload_bytes / 1e6
        published_mb = self.moved.published / 1e6
        models_mb = self.moved.models / 1e6
        received_mb = self.moved.received / 1e6
        rows += [
            Row("updates aggregated", self.updates, ""),
            Row("CPU for each update", self._update_ms, "ms"),
            *self._of_aggregators(),
            Row("models published / needed", models_mb / (rounds + 1) / payload_mb, ""),
            Row("other messages for each agent and round", 1e3 * (published_mb - models_mb) / downloads, "kB"),
            Row("received by agents / needed", received_mb / downloads / payload_mb, ""),
        ]
        # 3. What only some measurements have.
        if self.dropped is not None:
            rows.append(Row("messages dropped by the coordinator", self.dropped, ""))
        if self.welcome_s:
            rows += [
                Row("hello to welcome in a flood, median", median(self.welcome_s), "s"),
                Row("hello to welcome in a flood, longest", max(self.welcome_s), "s"),
            ]
        if self.usage is not None:
            rows += [Row("coordinator now", self.usage.rss_mb, "MB"), Row("coordinator peak", self.usage.peak_mb, "MB")]
        return rows

    def _of_aggregators(self) -> list[Row]:
        """Return the rows of the aggregators; none where there are none."""
        if not self.aggregators:
            return []
        each_ms = 1e3 * sum(used.cpu_s for used in self.aggregators) / max(1, self.updates)
        peak_mb = max(used.peak_mb for used in self.aggregators)
        return [
            Row(f"CPU of {len(self.aggregators)} aggregators for each update", each_ms, "ms"),
            Row("largest aggregator peak", peak_mb, "MB"),
        ]

    @property
    def _update_ms(self) -> float:
        """CPU of the coordinator in all rounds and the final evaluation, divided by the updates, in milliseconds."""
        messages, each_us = self.cpu_us.get(ROUNDS, (0, 0.0))
        return messages * each_us / 1e3 / max(1, self.updates)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {"transport": self.transport, "figures": [row.as_json() for row in self.rows()]}


def request_for(plan: FleetPlan) -> Request:
    """Return the request of the run that is measured."""
    task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="linear")
    return Request(NOOP, {"payload_bytes": plan.payload_bytes}, plan.rounds, 0, task)


def settings(plan: FleetPlan) -> dict[str, Any]:
    """Return the coordinator's configuration, as JSON, without its broker."""
    return {
        "federation": FEDERATION,
        "evaluate_every": 0,
        "task": {"class_names": ["a"]},
        "cohort": {"min_agents": plan.cohort_size, "max_agents": plan.cohort_size},
        "round": {"quorum": 1.0},
        "export": {"after_run": False},
        "aggregators": {"partitions": plan.aggregators},
    }


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write settings as TOML, a line for each: numbers, strings, lists and booleans are written as in JSON."""

    def lines(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from lines(value, f"{above}{name}.")
            else:
                yield f"{above}{name} = {json.dumps(value)}\n"

    path.write_text("".join(lines(values)), encoding="utf-8")


class LeapingClock:
    """A clock of monotonic seconds that can be put forward, where nobody has anything to do."""

    def __init__(self) -> None:
        self._leapt = 0.0

    def __call__(self) -> float:
        """Return the time now, in seconds."""
        return time.monotonic() + self._leapt

    def leap(self, seconds: float) -> None:
        """Put the clock forward by some seconds."""
        self._leapt += seconds


class FleetTransport:
    """The transport of a coordinator whose fleet is in the same process."""

    max_payload_bytes = 122_880

    def __init__(self, clock: Callable[[], float]) -> None:
        self.traffic = Traffic()
        self.inbox: deque[tuple[Event, str, float]] = deque()
        """(Event, kind of its message, seconds of the clock when it came), the oldest first."""

        self.outbox: deque[tuple[str, bytes]] = deque()
        self.kind = ""
        """The kind of the message that was received last; empty: there was none, or the event had no message."""

        self._clock = clock

    def start(self) -> None:
        """Report that the transport is connected, which it is at once."""
        self.add(Connected(1))
        self.add(Subscribed(Topics(FEDERATION).for_coordinator()))

    def add(self, event: Event, kind: str = "") -> None:
        """Put an event into the coordinator's inbox."""
        self.inbox.append((event, kind, self._clock()))

    @property
    def unread_s(self) -> float:
        """Seconds that the oldest event has waited for `receive`; 0 where none waits."""
        if not self.inbox:
            return 0.0
        _, _, came_at = self.inbox[0]
        return self._clock() - came_at

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def subscribe(self, *filters: str) -> None:
        """Do nothing: the fleet sends everything here."""

    def unsubscribe(self, *filters: str) -> None:
        """Do nothing: the fleet sends everything here."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:  # noqa: ARG002 - one quality here
        """Publish a payload to the fleet, which gets it in its turn."""
        self.traffic.bytes_up += len(payload)
        self.traffic.messages_up += 1
        self.outbox.append((topic, payload))

    def receive(self, timeout_s: float) -> Event | None:  # noqa: ARG002 - time leaps instead
        """Return the next event; None where there is none."""
        if not self.inbox:
            self.kind = ""
            return None
        event, self.kind, _ = self.inbox.popleft()
        if isinstance(event, Message):
            self.traffic.bytes_down += len(event.payload)
            self.traffic.messages_down += 1
        return event

    def wake(self) -> None:
        """Do nothing: `receive` never waits."""


class MemoryFleet:
    """A coordinator and its agents in this process, in turns."""

    def __init__(self, plan: FleetPlan, state: StateFolder) -> None:
        config = CoordinatorConfig.model_validate({**settings(plan), "state": state.path})
        self.clock = LeapingClock()
        self.transport = FleetTransport(self.clock)
        self.coordinator = Coordinator(
            config, state, self.transport, runtime=Runtime(clock=self.clock), start=StartOptions(probe_s=0.0)
        )
        self.topics = Topics(FEDERATION)
        models = Models()
        self.subscribers: dict[str, set[FleetAgent]] = defaultdict(set)
        link = AgentLink(self.publish, self._subscribe, self._unsubscribe)
        self.agents: dict[str, FleetAgent] = {}
        for number in range(plan.agents):
            name = f"agent-{number}"
            self.agents[name] = FleetAgent(name, self.topics, models, link, self.clock)
        self.cpu_ns = Counter[str]()
        self.count = Counter[str]()

    def publish(self, topic: str, payload: bytes, kind: str) -> None:
        """Put a message of an agent into the coordinator's inbox."""
        self.transport.add(Message(topic, payload), kind)

    def moved(self) -> Moved:
        """Return the bytes that have moved so far."""
        received = sum(agent.received_bytes for agent in self.agents.values())
        return Moved(self.transport.traffic.bytes_up, self.coordinator.distributor.published_bytes, received)

    def until(self, condition: Callable[[], bool], limit_s: float = RUN_LIMIT_S) -> None:
        """Let both sides work until ``condition()``, which is tested whenever the coordinator has no event left.

        Raises:
            MeasuringFailed: The condition is not true within ``limit_s`` of the leaping clock.
        """
        timers = Timers(list(self.agents.values()))
        until = self.clock() + limit_s
        while True:
            self._turn()
            if timers.run(self.clock()) or self.transport.inbox:
                continue
            if condition():
                return
            if self.clock() > until:
                raise MeasuringFailed(f"the fleet stands still: {self.coordinator.waiting}")
            # Nobody has anything to do before the next timer of either side.
            idle_s = min(self.coordinator.idle_s(), timers.due_in(self.clock()))
            self.clock.leap(max(1e-4, idle_s))

    def _turn(self) -> None:
        """Handle everything that has arrived at either side."""
        step = self.coordinator.step
        clock = time.thread_time_ns
        kinds = self.transport
        is_busy = True
        while is_busy or self.transport.outbox:
            begin = clock()
            is_busy = step(0)
            self.cpu_ns[kinds.kind] += clock() - begin
            self.count[kinds.kind] += 1
            while self.transport.outbox:
                self._deliver(*self.transport.outbox.popleft())

    def _deliver(self, topic: str, payload: bytes) -> None:
        """Hand a message of the coordinator to the agents that its topic reaches."""
        if "/a/" in topic:
            self.agents[topic.split("/")[-2]].received(topic, payload)
        elif "/b/" in topic:
            for agent in tuple(self.subscribers[topic]):
                agent.received(topic, payload)
        elif topic == self.topics.announce:
            for agent in self.agents.values():
                agent.subscribed()

    def _subscribe(self, agent: FleetAgent, topic: str) -> None:
        """Have an agent receive the messages of a topic, which is confirmed at once."""
        self.subscribers[topic].add(agent)
        agent.subscribed(topic.rsplit("/", 1)[-1])

    def _unsubscribe(self, agent: FleetAgent, topic: str) -> None:
        self.subscribers[topic].discard(agent)


@dataclass
class Phases:
    """What was used in each phase of a measurement; a phase lasts from one call of `end` to the next."""

    read: Callable[[], Spent]
    """Returns what has been used so far."""

    before: Spent = Spent()
    """What `read` returned when the phase began."""

    spent: dict[str, Spent] = field(default_factory=dict)
    """Phase -> what was used in it."""

    def end(self, name: str) -> None:
        """End the phase, under this name, and begin the next one."""
        now = self.read()
        self.spent[name] = now.since(self.before)
        self.before = now

    def cpu_us(self) -> dict[str, tuple[int, float]]:
        """Return for each phase the number of messages, and the mean CPU for one in microseconds."""
        return {name: (spent.messages, spent.message_us) for name, spent in self.spent.items()}


def measure_in_memory(plan: FleetPlan, folder: Path) -> FleetFigures:
    """Measure a fleet in this process while it joins, sends heartbeats, and takes part in a run.

    Raises:
        MeasuringFailed: Nothing happened for a long time, or the run failed.
    """
    import torch  # before anything is measured: loading it is no part of a message

    torch.set_num_threads(1)
    register()
    with StateFolder(folder / "coordinator").open("headwater bench fleet") as state:
        fleet = MemoryFleet(plan, state)
        traffic = fleet.transport.traffic
        agents = fleet.agents.values()
        phases = Phases(
            lambda: Spent(
                traffic.messages_down,
                sum(fleet.cpu_ns.values()) / 1e9,
                received_bytes=traffic.bytes_down,
                seconds=fleet.clock(),
            )
        )
        # 1. All agents join, then send heartbeats for a while.
        fleet.coordinator.start()
        fleet.until(lambda: all(agent.welcomed for agent in agents), START_LIMIT_S)
        phases.end(JOINING)
        begin = fleet.clock()
        fleet.until(lambda: fleet.clock() - begin >= plan.idle_s)
        phases.end(IDLE)
        # 2. A run from its request to its end.
        run = state.journal.request_run(request_for(plan).to_fact())
        before = fleet.moved()
        fleet.until(lambda: replay(state.journal, run).is_over)
        phases.end(ROUNDS)
        moved = fleet.moved().since(before)
        fleet.coordinator.close()
        seconds = round_seconds(state.journal, run)
        updates = len(state.journal.entries(run, ("update_accepted",)))
        journal = JournalSize.of_folder(state.path)
    kinds = {}
    for kind, count in sorted(fleet.count.items()):
        if kind:
            kinds[kind] = (count, fleet.cpu_ns[kind] / count / 1000)
    return FleetFigures(
        "memory",
        plan,
        seconds,
        phases.cpu_us() | kinds,
        moved,
        updates,
        usage(os.getpid()),
        phases=phases.spent,
        journal=journal,
    )


class AggregatorProcesses:
    """The aggregators of a measurement, as processes, and what they use."""

    def __init__(self, count: int, config: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        """Start so many aggregators for a coordinator of this configuration; they end with ``stack``."""
        self.running: list[Measured] = []
        for number in range(1, count + 1):
            command = ["aggregate", "--partition", f"{number}/{count}", "--config", str(config)]
            process = module(f"aggregator-{number}", command, folder, module="coordinator")
            self.running.append(stack.enter_context(process))
        self._before: list[Usage] = []

    def wait_until_they_serve(self, state: Path) -> None:
        """Return once each partition has an aggregator of its own, by the coordinator's status.

        Raises:
            MeasuringFailed: An aggregator ended, or nothing happened for a long time.
        """

        def do_serve() -> bool:
            holders = {row.aggregator for row in read_status(state).partitions} - {""}
            return len(holders) == len(self.running)

        wait_for(do_serve, self.running, what="all partitions to be served", limit_s=START_LIMIT_S)

    def begin(self) -> None:
        """Count CPU from now on."""
        self._before = [usage(process.pid) for process in self.running]

    def used(self) -> list[Usage]:
        """Return what each has used since `begin`, and its memory."""
        result = []
        for process, before in zip(self.running, self._before, strict=True):
            after = usage(process.pid)
            result.append(replace(after, cpu_s=after.cpu_s - before.cpu_s))
        return result


def measure(plan: FleetPlan, folder: Path) -> FleetFigures:
    """Measure a fleet in memory, or over a broker with the coordinator and the fleet as processes.

    Raises:
        MeasuringFailed: A process ended, nothing happened for a long time, or the run failed.
        MissingCapability: The broker is not installed.
    """
    if plan.transport == "memory":
        return measure_in_memory(plan, folder)
    state_path = folder / "coordinator"
    with broker(plan.transport) as running, contextlib.ExitStack() as stack:
        address = running.config()
        config = folder / "coordinator.toml"
        write_config(config, {**settings(plan), "state": state_path.name, "broker": {"url": address.url}})
        arguments = ["coordinator", "--config", config]
        coordinator = stack.enter_context(module("coordinator", arguments, folder, module=PROGRAMS))
        coordinator.answer()
        aggregators = AggregatorProcesses(plan.aggregators, config, folder, stack)
        to_agents = [address.host, address.port, plan.agents, FEDERATION]
        fleet = stack.enter_context(module("fleet", to_agents, folder, module=f"{__package__}.fleet_mqtt"))

        def ask_fleet(flood: str = "") -> dict[str, Any]:
            fleet.send(flood)
            return dict(json.loads(fleet.answer()))

        def traffic() -> BrokerTraffic:
            return read_status(state_path).traffic

        def spent() -> Spent:
            counts = traffic()
            return Spent(
                messages=counts.messages_received,
                cpu_s=usage(coordinator.pid).cpu_s,
                broker_cpu_s=usage(running.pid or 0).cpu_s,
                received_bytes=counts.bytes_received,
                seconds=time.monotonic(),
            )

        def moved() -> Moved:
            received = ask_fleet()["received_bytes"]
            counts = traffic()
            return Moved(counts.bytes_published, counts.blob_bytes_published, received)

        def until(condition: Callable[[], bool], what: str, limit_s: float) -> None:
            wait_for(condition, [coordinator, fleet, *aggregators.running], what=what, limit_s=limit_s, every_s=1.0)
            pause(STATUS_S)

        # 1. All agents join, then send heartbeats for a while. The CPU of the start itself is in no figure.
        phases = Phases(spent)
        aggregators.wait_until_they_serve(state_path)
        phases.end(JOINING)
        joining_s = START_LIMIT_S + WELCOME_LIMIT_S * plan.agents
        until(lambda: ask_fleet()["welcomed"] == plan.agents, f"{plan.agents} welcomes", joining_s)
        phases.end(JOINING)
        pause(plan.idle_s)
        phases.end(IDLE)
        # 2. A run from its request to its end.
        before = moved()
        aggregators.begin()
        with StateFolder(state_path).look() as state:
            run = state.journal.request_run(request_for(plan).to_fact())
            ends = ("run_finished", "run_failed", "run_cancelled")
            until(lambda: bool(state.journal.entries(run, ends)), "the run to end", RUN_LIMIT_S)
            phases.end(ROUNDS)
            moved_in_rounds = moved().since(before)
            seconds = round_seconds(state.journal, run)
            updates = len(state.journal.entries(run, ("update_accepted",)))
        used = usage(coordinator.pid)
        of_aggregators = aggregators.used()
        dropped = traffic().dropped
        broker_usage = usage(running.pid or 0)
        journal = JournalSize.of_folder(state_path)
        # 3. A flood, whose CPU is in no figure.
        welcome_s = []
        if plan.flood != "none":
            welcome_s = ask_fleet(plan.flood)["welcome_s"]
    return FleetFigures(
        plan.transport,
        plan,
        seconds,
        phases.cpu_us(),
        moved_in_rounds,
        updates,
        used,
        aggregators=of_aggregators,
        dropped=dropped,
        welcome_s=welcome_s,
        phases=phases.spent,
        broker_usage=broker_usage,
        journal=journal,
    )
