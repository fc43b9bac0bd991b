"""The coordinator's two halves of transport by themselves: its distributor and its collector, without a round loop.

Its own process: it asks agents (with `NoopTasks`) to fetch a blob, and then to send one each, and prints how
long it took. Uploads are checked, synced and journalled as in service; their receipts end the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coordinator.fleet.collection import Collection
from coordinator.fleet.downloads import Distributor
from coordinator.fleet.uploads import Collector
from coordinator.journal.entries import fact_of
from coordinator.research.bench.measuring import lines, send_line
from coordinator.research.bench.workloads import NOOP
from coordinator.state.store import StateFolder
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import MeasuringFailed
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.blobs.chunks import Outgoing, decode_frame
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.tensors import Spec, encode
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Message

LIMIT_S = 120.0
RUN = "run-0001"


class Hub:
    """A coordinator that only moves blobs. `start`, then `broadcast` and `upload`."""

    def __init__(self, state: StateFolder, transport: MqttTransport, topics: Topics) -> None:
        self.transport = transport
        self.topics = topics
        self.distributor = Distributor(topics, transport.publish, self.send, time.monotonic)
        self.collector = Collector(state.blobs, state.journal, self.send, time.monotonic)
        self.agents: set[str] = set()
        self.holders: set[str] = set()
        self.manifests: dict[str, up.UpdateManifest] = {}
        self.reports: set[str] = set()
        self._seq = 0
        self._federation = fields.new_id()

    def start(self, count: int) -> None:
        """Listen until so many agents have said hello."""
        self.transport.subscribe(*self.topics.for_coordinator())
        self.transport.start()
        self.until(lambda: len(self.agents) == count)

    def broadcast(self, number: int, size_bytes: int) -> float:
        """Seconds until every agent has fetched and checked a new blob."""
        array = np.random.default_rng(number).integers(0, 255, size_bytes, np.uint8)
        blob = Outgoing.of(encode({"array": array}))
        self.holders = set()
        self.reports = set()
        begin = time.monotonic()
        self.distributor.offer(blob, self.agents)
        self._ask(number, blob, "personalize", {})
        self.until(lambda: self.holders == self.agents)
        seconds = time.monotonic() - begin
        self.until(lambda: self.reports == self.agents)
        self.distributor.withdraw({blob.ref.digest})
        return seconds

    def upload(self, number: int, size_bytes: int) -> float:
        """Seconds until every agent has its receipt for an update of that size, all of them announced before."""
        expected = {"array": Spec(np.dtype("<f4"), (size_bytes // 4,))}
        blob = Outgoing.of(encode({"round": np.array([number])}))
        self.manifests = {}
        self.distributor.offer(blob, self.agents)
        self._ask(number, blob, "train", {"upload_bytes": size_bytes})
        self.until(lambda: self.manifests.keys() == self.agents)
        collection = Collection(RUN, number, tuple(sorted(self.agents)), expected)
        begin = time.monotonic()
        self.collector.open(collection)
        for agent, manifest in self.manifests.items():
            self.collector.manifest(agent, manifest)
        self.until(lambda: not collection.outstanding)
        seconds = time.monotonic() - begin
        self.collector.close()
        if collection.rejected:
            raise MeasuringFailed(f"updates were rejected: {collection.rejected}")
        return seconds

    def until(self, done: Callable[[], bool]) -> None:
        """Handle what arrives until ``done()``.

        Raises:
            MeasuringFailed: it is not after a long time.
        """
        limit = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > limit:
                raise MeasuringFailed(
                    f"transport stands still; here are {sorted(self.agents)}, done {sorted(self.holders)}"
                )
            wait = self.distributor.pump()
            event = self.transport.receive(0.05 if wait is None else min(wait, 0.05))
            if isinstance(event, Message):
                self._on_message(event)
            elif isinstance(event, Connected):
                self.transport.publish(self.topics.announce, self._stamped(down.Announce(software="bench")))
            self.collector.tick()

    def send(self, agent: str, message: fields.Control) -> None:
        """One control message to one agent."""
        self.transport.publish(self.topics.down(agent), self._stamped(message))

    def _stamped(self, message: fields.Control) -> bytes:
        self._seq += 1
        stamp = {"boot": "hub", "seq": self._seq, "federation": self._federation, "epoch": 1}
        return codec.encode(message.model_copy(update=stamp))

    def _ask(self, number: int, blob: Outgoing, purpose: str, params: dict[str, int]) -> None:
        task = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"))
        for agent in sorted(self.agents):
            job = down.Job.model_validate(
                {"purpose": purpose, "run": RUN, "round": number, "rounds": 1 << 16, "seed": 0, "method": NOOP}
                | {"params": params, "task": task, "blobs": (blob.ref,), "deadline_s": LIMIT_S}
            )
            self.send(agent, job)

    def _on_message(self, event: Message) -> None:
        agent, kind = self.topics.sender(event.topic)
        if kind == "ub":
            self.collector.chunk(agent, decode_frame(event.payload))
        elif kind == "up":
            self._on_control(agent, codec.parse_from_agent(event.payload))

    def _on_control(self, agent: str, message: fields.Control) -> None:
        if isinstance(message, up.Hello):
            self.agents.add(agent)
            self.send(agent, down.Welcome(software="bench", lease_s=LIMIT_S))
        elif isinstance(message, up.Want):
            self.distributor.want(agent, message)
        elif isinstance(message, up.Progress):
            self.distributor.progress(agent, message)
        elif isinstance(message, up.Have):
            self.distributor.have(agent, message.digest)
            self.holders.add(agent)
        elif isinstance(message, up.Report):
            self.reports.add(agent)
        elif isinstance(message, up.Fault):
            raise MeasuringFailed(f"{agent}: {message.error}: {message.message}")
        elif isinstance(message, up.UpdateManifest):
            self.manifests[agent] = message
            if self.collector.open_round is not None:
                self.collector.manifest(agent, message)


def main() -> None:
    """Print "ready" when all agents are here; then, for each line that comes in, do what it says and print seconds."""
    parser = argparse.ArgumentParser()
    for name, kind in (("url", str), ("federation", str), ("state", Path), ("agents", int), ("size", int)):
        parser.add_argument(name, type=kind)
    given = parser.parse_args()
    transport = MqttTransport(BrokerConfig(url=given.url), f"{given.federation}-coordinator")
    with StateFolder(given.state).open("bench") as state:
        state.journal.request_run(fact_of("run_requested", {}))
        hub = Hub(state, transport, Topics(given.federation))
        hub.start(given.agents)
        send_line("ready")
        for number, line in enumerate(lines(), 1):
            work = hub.broadcast if line == "broadcast" else hub.upload
            send_line(json.dumps(work(number, given.size)))
        transport.close()


if __name__ == "__main__":
    main()
