"""What messages of many agents cost one coordinator: CPU by kind, memory, and the bytes that it publishes.

``memory`` runs both sides in one process on a clock that leaps over idle time, and counts the CPU of each message.
Over a broker the coordinator is a separate process, and its CPU is divided by the messages that it received.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from edge_agent.core.errors import MeasuringFailed
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Event, Message, Subscribed, Traffic

from ...config import CoordinatorConfig
from ...runs.request import Request
from ...service.coordinator import Coordinator
from ...service.surroundings import Runtime, StartOptions
from ...state.store import StateFolder, read_status
from ...views.runs import replay
from .fleet_agents import FleetAgent, Models, Timers
from .measuring import FleetPlan, Row, Usage, module, usage, wait_for
from .rounds import FEDERATION, PROGRAMS, RUN_LIMIT_S, START_LIMIT_S, broker, round_seconds
from .workloads import NOOP, register

JOINING, IDLE, ROUNDS = "a message of joining", "a message while idle", "a message of the rounds"
"""The phases: all CPU of one, that of timers included, is divided by its messages."""

STATUS_S = 2.0
"""After this time ``status.json`` shows what has happened."""


def pause(seconds: float) -> None:
    """Let other processes work."""
    threading.Event().wait(seconds)


@dataclass
class FleetFigures:
    """Figures of one fleet."""

    transport: str
    plan: FleetPlan
    seconds: list[float]
    cpu_us: dict[str, tuple[int, float]] = field(default_factory=dict)
    """What -> (messages, mean CPU of the coordinator in microseconds).

    Of a phase, all of its CPU, timers included, is divided by its messages. Over a broker there are only phases.
    """

    published_mb: float = 0.0
    """What the coordinator published in all rounds."""

    models_mb: float = 0.0
    """What of that were models; the rest are messages to single agents, of which there are more in a larger fleet."""

    received_mb: float = 0.0
    """What all agents received together."""

    updates: int = 0
    usage: Usage | None = None
    welcome_s: list[float] = field(default_factory=list)
    """Seconds from hello to welcome of one agent during a flood."""

    def rows(self) -> list[Row]:
        """The figures."""
        rounds = len(self.seconds)
        payload_mb = self.plan.payload_bytes / 1e6
        downloads = rounds * self.plan.cohort_size + self.plan.agents  # all agents get the final model
        rows = [Row(f"CPU, {kind} ({count})", us, "us") for kind, (count, us) in self.cpu_us.items()]
        rows += [Row(f"round {number}", seconds, "s") for number, seconds in enumerate(self.seconds, 1)]
        rows += [
            Row("updates aggregated", self.updates, ""),
            Row("CPU for each update", self._update_ms, "ms"),
            Row("models published / needed", self.models_mb / (rounds + 1) / payload_mb, ""),
            Row(
                "other messages for each agent and round", 1e3 * (self.published_mb - self.models_mb) / downloads, "kB"
            ),
            Row("received by agents / needed", self.received_mb / downloads / payload_mb, ""),
        ]
        if self.welcome_s:
            rows += [
                Row("hello to welcome in a flood, median", median(self.welcome_s), "s"),
                Row("hello to welcome in a flood, longest", max(self.welcome_s), "s"),
            ]
        if self.usage is not None:
            rows += [Row("coordinator now", self.usage.rss_mb, "MB"), Row("coordinator peak", self.usage.peak_mb, "MB")]
        return rows

    @property
    def _update_ms(self) -> float:
        """CPU of the coordinator in all rounds and the final evaluation, divided by the updates, in milliseconds."""
        messages, each_us = self.cpu_us.get(ROUNDS, (0, 0.0))
        return messages * each_us / 1e3 / max(1, self.updates)

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {"transport": self.transport, "figures": [row.as_json() for row in self.rows()]}


def request_for(plan: FleetPlan) -> Request:
    """The run to request."""
    task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="linear")
    return Request(NOOP, {"payload_bytes": plan.payload_bytes}, plan.rounds, 0, task)


def settings(plan: FleetPlan) -> dict[str, Any]:
    """The coordinator's configuration, as JSON, without its broker."""
    return {
        "federation": FEDERATION,
        "evaluate_every": 0,
        "task": {"class_names": ["a"]},
        "cohort": {"min_agents": plan.cohort_size, "max_agents": plan.cohort_size},
        "round": {"quorum": 1.0},
        "export": {"after_run": False},
    }


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write settings as TOML, a line for each: what JSON writes of numbers, strings, lists and booleans is TOML."""

    def lines(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from lines(value, f"{above}{name}.")
            else:
                yield f"{above}{name} = {json.dumps(value)}\n"

    path.write_text("".join(lines(values)), encoding="utf-8")


class LeapingClock:
    """Monotonic seconds that pass as always, and more at once where nobody has anything to do."""

    def __init__(self) -> None:
        self._leapt = 0.0

    def __call__(self) -> float:
        """The time now."""
        return time.monotonic() + self._leapt

    def leap(self, seconds: float) -> None:
        """Let so much time have passed."""
        self._leapt += seconds


class FleetTransport:
    """The coordinator's transport to a fleet in the same process."""

    max_payload_bytes = 122_880

    def __init__(self, clock: Callable[[], float]) -> None:
        self.traffic = Traffic()
        self.inbox: deque[tuple[Event, str, float]] = deque()
        """Events with their kinds, and when they came."""

        self.outbox: deque[tuple[str, bytes]] = deque()
        self.kind = ""
        """Of the message that was received last; empty: of no message."""

        self._clock = clock

    def start(self) -> None:
        """Connected at once."""
        self.add(Connected(1))
        self.add(Subscribed(Topics(FEDERATION).for_coordinator()))

    def add(self, event: Event, kind: str = "") -> None:
        """Put an event into the coordinator's inbox."""
        self.inbox.append((event, kind, self._clock()))

    @property
    def unread_s(self) -> float:
        """Seconds that the oldest event has waited for `receive`; 0 where none waits."""
        return self._clock() - self.inbox[0][2] if self.inbox else 0.0

    def close(self) -> None:
        """Nothing is left to do."""

    def subscribe(self, *filters: str) -> None:
        """The fleet sends everything here."""

    def unsubscribe(self, *filters: str) -> None:
        """The fleet sends everything here."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:  # noqa: ARG002 - one quality here
        """To the fleet, when it has its turn."""
        self.traffic.bytes_up += len(payload)
        self.traffic.messages_up += 1
        self.outbox.append((topic, payload))

    def receive(self, timeout_s: float) -> Event | None:  # noqa: ARG002 - time leaps instead
        """The next event."""
        if not self.inbox:
            self.kind = ""
            return None
        event, self.kind, _ = self.inbox.popleft()
        if isinstance(event, Message):
            self.traffic.bytes_down += len(event.payload)
            self.traffic.messages_down += 1
        return event

    def wake(self) -> None:
        """It never waits."""


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
        self.agents: dict[str, FleetAgent] = {}
        for number in range(plan.agents):
            name = f"agent-{number}"
            self.agents[name] = FleetAgent(
                name, self.topics, models, self.publish, self._subscribe, self._unsubscribe, self.clock
            )
        self.cpu_ns = Counter[str]()
        self.count = Counter[str]()

    def publish(self, topic: str, payload: bytes, kind: str) -> None:
        """A message of an agent."""
        self.transport.add(Message(topic, payload), kind)

    def until(self, condition: Callable[[], bool], limit_s: float = RUN_LIMIT_S) -> None:
        """Go on until ``condition()``, which is tested whenever the coordinator has no event left.

        Raises:
            MeasuringFailed: it is not within ``limit_s`` of the leaping clock.
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
            self.clock.leap(max(1e-4, min(self.coordinator.idle_s(), timers.due_in(self.clock()))))

    def _turn(self) -> None:
        """Everything that has arrived at either side."""
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
        if "/a/" in topic:
            self.agents[topic.split("/")[-2]].received(topic, payload)
        elif "/b/" in topic:
            for agent in tuple(self.subscribers[topic]):
                agent.received(topic, payload)
        elif topic == self.topics.announce:
            for agent in self.agents.values():
                agent.subscribed()

    def _subscribe(self, agent: FleetAgent, topic: str) -> None:
        self.subscribers[topic].add(agent)
        agent.subscribed(topic.rsplit("/", 1)[-1])

    def _unsubscribe(self, agent: FleetAgent, topic: str) -> None:
        self.subscribers[topic].discard(agent)


@dataclass
class Phases:
    """CPU and messages between the calls of `end`."""

    read: Callable[[], tuple[int, float]]
    """Messages that the coordinator has received, and CPU seconds that it has used."""

    before: tuple[int, float] = (0, 0.0)
    figures: dict[str, tuple[int, float]] = field(default_factory=dict)

    def end(self, name: str) -> None:
        """The phase of that name is over, and the next one begins."""
        now = self.read()
        messages = now[0] - self.before[0]
        seconds = now[1] - self.before[1]
        self.figures[name] = (messages, 1e6 * seconds / max(1, messages))
        self.before = now


def measure_in_memory(plan: FleetPlan, folder: Path) -> FleetFigures:
    """Join, a minute of heartbeats, and a run.

    Raises:
        MeasuringFailed: nothing happened for a long time, or the run failed.
    """
    import torch  # now: loading it is no part of a message

    torch.set_num_threads(1)
    register()
    with StateFolder(folder / "coordinator").open("headwater bench fleet") as state:
        both = MemoryFleet(plan, state)
        traffic = both.transport.traffic
        agents = both.agents.values()
        phases = Phases(lambda: (traffic.messages_down, sum(both.cpu_ns.values()) / 1e9))
        both.coordinator.start()
        both.until(lambda: all(agent.welcomed for agent in agents), START_LIMIT_S)
        phases.end(JOINING)
        begin = both.clock()
        both.until(lambda: both.clock() - begin >= plan.idle_s)
        phases.end(IDLE)
        run = state.journal.request_run(request_for(plan).to_fact())
        received = sum(agent.received_bytes for agent in agents)
        published = traffic.bytes_up
        models = both.coordinator.distributor.published_bytes
        both.until(lambda: replay(state.journal, run).is_over)
        phases.end(ROUNDS)
        received = sum(a.received_bytes for a in agents) - received
        published = traffic.bytes_up - published
        models = both.coordinator.distributor.published_bytes - models
        both.coordinator.close()
        seconds = round_seconds(state.journal, run)
        updates = len(state.journal.entries(run, ("update_accepted",)))
    kinds = {kind: (count, both.cpu_ns[kind] / count / 1000) for kind, count in sorted(both.count.items()) if kind}
    megabytes = (published / 1e6, models / 1e6, received / 1e6)
    return FleetFigures("memory", plan, seconds, phases.figures | kinds, *megabytes, updates, usage(os.getpid()))


def measure(plan: FleetPlan, folder: Path) -> FleetFigures:
    """The same over a broker, with the coordinator and the fleet as processes.

    Raises:
        MeasuringFailed: a process ended, nothing happened for a long time, or the run failed.
        MissingCapability: the broker is not installed.
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
        to_agents = [address.host, address.port, plan.agents, FEDERATION]
        fleet = stack.enter_context(module("fleet", to_agents, folder, module=f"{__package__}.fleet_mqtt"))

        def asked(flood: str = "") -> dict[str, Any]:
            fleet.send(flood)
            return dict(json.loads(fleet.answer()))

        def traffic() -> dict[str, int]:
            return dict(read_status(state_path)["traffic"])

        def until(condition: Callable[[], bool], what: str, limit_s: float) -> None:
            wait_for(condition, [coordinator, fleet], what=what, limit_s=limit_s, every_s=1.0)
            pause(STATUS_S)

        phases = Phases(lambda: (traffic()["messages_received"], usage(coordinator.pid).cpu_s))
        phases.end(JOINING)
        until(lambda: asked()["welcomed"] == plan.agents, f"{plan.agents} welcomes", START_LIMIT_S)
        phases.end(JOINING)
        pause(plan.idle_s)
        phases.end(IDLE)
        received = asked()["received_bytes"]
        published = traffic()["bytes_published"]
        models = traffic()["blob_bytes_published"]
        with StateFolder(state_path).look() as state:
            run = state.journal.request_run(request_for(plan).to_fact())
            ends = ("run_finished", "run_failed", "run_cancelled")
            until(lambda: bool(state.journal.entries(run, ends)), "the run to end", RUN_LIMIT_S)
            phases.end(ROUNDS)
            received = asked()["received_bytes"] - received
            published = traffic()["bytes_published"] - published
            models = traffic()["blob_bytes_published"] - models
            seconds = round_seconds(state.journal, run)
            updates = len(state.journal.entries(run, ("update_accepted",)))
        used = usage(coordinator.pid)
        welcome_s = asked(plan.flood)["welcome_s"] if plan.flood != "none" else []
    megabytes = (published / 1e6, models / 1e6, received / 1e6)
    return FleetFigures(plan.transport, plan, seconds, phases.figures, *megabytes, updates, used, welcome_s)
