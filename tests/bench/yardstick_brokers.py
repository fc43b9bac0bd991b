"""The same federation over every broker, single and in a cluster: undisturbed, a node killed, an agent moved.

``python tests/bench/yardstick_brokers.py --json FILE`` measures, and prints the table of
examples/results/brokers.md. Coordinator and agents are stepped by one thread, each with its own connection, so that
times compare brokers and say nothing about devices. Updates are made up: no time goes into training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from broker_clusters import BridgedMosquittos  # noqa: E402
from configured_brokers import NATS, RABBITMQ, FromMosquitto, FromNats, FromRabbitMq  # noqa: E402
from federation_duties import WIDE_TASK  # noqa: E402
from federation_harness import FederationInRealTime  # noqa: E402

from coordinator.broker import EmbeddedBroker, find_mosquitto  # noqa: E402
from edge_agent.core.config import BrokerConfig  # noqa: E402
from edge_agent.wire.failover import order_for  # noqa: E402
from edge_agent.wire.mqtt import MqttTransport  # noqa: E402

ROUNDS = 3
LIMIT_S = 300.0
SAMPLE_S = 0.1
"""Seconds between two looks at the memory of the broker."""


class Amqtt:
    """The embedded broker; it starts again by itself."""

    name = "amqtt"
    nodes = 1
    is_there = True

    def __init__(self, _folder: Path) -> None:
        self.broker = EmbeddedBroker()
        self.start = self.broker.start
        self.stop = self.broker.stop

    def config(self) -> BrokerConfig:
        """How clients connect."""
        return self.broker.config()

    def kill(self, _url: str) -> None:
        """Kill its process."""
        if self.broker.pid is not None:
            os.kill(self.broker.pid, signal.SIGKILL)

    def memory_bytes(self) -> int:
        """Resident memory."""
        return resident_bytes(self.broker.pid)


class FromFile:
    """A broker of `configured_brokers`: a single one that is killed is started again, a node of a cluster is not."""

    name = ""
    nodes = 1
    is_there = True
    kind: Callable[..., Any]

    def __init__(self, folder: Path) -> None:
        self.broker = self.kind(folder) if self.nodes == 1 else self.kind(folder, self.nodes)
        self.start = self.broker.start
        self.stop = self.broker.stop
        self.memory_bytes = self.broker.memory_bytes
        self.config = self.broker.config

    def kill(self, url: str) -> None:
        """Kill the node at ``url``."""
        self.broker.kill(url)
        if self.nodes == 1:
            self.broker.start()


class Mosquitto(FromFile):
    """Mosquitto from configs/mosquitto.conf."""

    name = "Mosquitto"
    is_there = find_mosquitto() is not None
    kind = FromMosquitto


class Bridged:
    """Two Mosquittos with a bridge."""

    name = "Mosquitto"
    nodes = 2
    is_there = find_mosquitto() is not None

    def __init__(self, folder: Path) -> None:
        self.broker = BridgedMosquittos(folder)
        self.start = self.broker.start
        self.stop = self.broker.stop
        self.kill = self.broker.kill

    def config(self) -> BrokerConfig:
        """How clients connect."""
        return BrokerConfig(url=self.broker.url)

    def memory_bytes(self) -> int:
        """Resident memory of both."""
        return sum(resident_bytes(process.pid) for process in self.broker.nodes.values())


class Nats(FromFile):
    """NATS from configs/brokers/nats.conf."""

    name = "NATS"
    is_there = NATS is not None
    kind = FromNats


class NatsCluster(Nats):
    """NATS from configs/brokers/nats-cluster.conf."""

    nodes = 3


class RabbitMq(FromFile):
    """RabbitMQ from configs/brokers/rabbitmq.conf."""

    name = "RabbitMQ"
    is_there = RABBITMQ.exists()
    kind = FromRabbitMq


class RabbitMqCluster(RabbitMq):
    """RabbitMQ from configs/brokers/rabbitmq-cluster.conf."""

    nodes = 3


BROKERS = (Amqtt, Mosquitto, Bridged, Nats, NatsCluster, RabbitMq, RabbitMqCluster)


def resident_bytes(pid: int | None) -> int:
    """Return the resident memory of a process; 0 where it has ended."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


class Network:
    """The clients of one broker, spread over its nodes."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        self.transports: list[MqttTransport] = []

    def transport(self, will: Any = None) -> MqttTransport:
        """Return the connection of one more client."""
        number = len(self.transports)
        config = self.broker.config()
        urls = config.urls
        names = (f"client-{number}-{suffix}" for suffix in range(1000))
        spread_by = next(name for name in names if order_for(name, urls)[0] == urls[number % len(urls)])
        transport = MqttTransport(config, f"client-{number}", will=will, spread_by=spread_by)
        self.transports.append(transport)
        return transport

    def traffic(self) -> tuple[int, int]:
        """Return the bytes and the messages that all clients have published."""
        payload_bytes = sum(transport.traffic.bytes_up for transport in self.transports)
        messages = sum(transport.traffic.messages_up for transport in self.transports)
        return payload_bytes, messages


class Fleet(FederationInRealTime):
    """Agents whose updates are made up, over a network."""

    def __init__(self, folder: Path, network: Network, agents: int, feature_dim: int) -> None:
        task = WIDE_TASK.model_copy(update={"encoder_params": {"feature_dim": feature_dim}})
        super().__init__(folder, agents=(), task=task, cohort={"min_agents": agents})
        self.broker = network

    def kill_node(self) -> None:
        """Kill the node of the coordinator."""
        transport = self.coordinator.transport
        self.broker.broker.kill(transport.broker.url)

    def move_agent(self) -> None:
        """Have one agent go to the next node of its list; where there is a single one, its connection is cut."""
        transport = self.broker.transports[-1]
        transport.leave("it is moved")
        if len(transport.config.urls) == 1:
            transport._client.socket().shutdown(2)


DISTURBANCES: dict[str, Callable[[Fleet], None]] = {
    "undisturbed": lambda _fleet: None,
    "node killed": Fleet.kill_node,
    "agent moved": Fleet.move_agent,
}


@dataclass(frozen=True)
class Run:
    """One run of a federation.

    Attributes:
        broker: Its name.
        nodes: How many nodes it has.
        disturbance: What happens in the middle of the second round.
        sha256: Of the encoder that the run ended with.
        seconds: From the request of the run to its end.
        sent_bytes: Payload that all clients have published meanwhile.
        messages: Messages that all clients have published meanwhile.
        memory_bytes: The largest resident memory of all nodes together.
    """

    broker: str
    nodes: int
    disturbance: str
    sha256: str
    seconds: float
    sent_bytes: int
    messages: int
    memory_bytes: int


@contextlib.contextmanager
def watched_memory(read: Callable[[], int]) -> Iterator[list[int]]:
    """Yield a list that is filled with the memory of a broker until the context ends."""
    samples = [read()]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_S):
            samples.append(read())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield samples
    is_over.set()
    thread.join()


def measure(kind: Any, disturbance: str, agents: int, feature_dim: int) -> Run:
    """Run a federation over a broker that is started for it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "broker").mkdir()
        broker = kind(folder / "broker")
        broker.start()
        try:
            network = Network(broker)
            with Fleet(folder / "fleet", network, agents, feature_dim) as fleet:
                # 1. Everybody is there before the clock starts.
                for number in range(agents):
                    fleet.add(f"a{number}")
                fleet.until(lambda: len(fleet.coordinator.roster.present()) == agents, LIMIT_S)
                before_bytes, before_messages = network.traffic()
                # 2. The run, and what befalls it.
                with watched_memory(broker.memory_bytes) as memory:
                    began = time.monotonic()
                    fleet.request("fedavg", rounds=ROUNDS)
                    fleet.until(lambda: any(entry.round == 2 for entry in fleet.entries("round_opened")), LIMIT_S)
                    DISTURBANCES[disturbance](fleet)
                    fleet.finish(LIMIT_S)
                    seconds = time.monotonic() - began
                # 3. What came of it.
                after_bytes, after_messages = network.traffic()
                return Run(
                    broker=kind.name,
                    nodes=kind.nodes,
                    disturbance=disturbance,
                    sha256=fleet.encoder_sha256,
                    seconds=seconds,
                    sent_bytes=after_bytes - before_bytes,
                    messages=after_messages - before_messages,
                    memory_bytes=max(memory),
                )
        finally:
            broker.stop()


def table(runs: list[Run]) -> str:
    """Return the table: the median of each kind of run, with the smallest and largest number of seconds."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.broker, run.nodes, run.disturbance), []).append(run)
    hashes = sorted({run.sha256 for run in runs})
    lines = [
        "| broker | nodes | | bits | seconds | sent again | broker memory | messages/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (broker, nodes, disturbance), members in groups.items():
        seconds = [run.seconds for run in members]
        undisturbed = groups.get((broker, nodes, "undisturbed"), members)
        needed_bytes = statistics.median(run.sent_bytes for run in undisturbed)
        again_mb = (statistics.median(run.sent_bytes for run in members) - needed_bytes) / 1e6
        letters = sorted({chr(ord("A") + hashes.index(run.sha256)) for run in members})
        memory_mb = statistics.median(run.memory_bytes for run in members) / 1e6
        rate = statistics.median(run.messages / run.seconds for run in members)
        shown_s = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        shown_again = "–" if disturbance == "undisturbed" else f"{max(0.0, again_mb):.1f} MB"
        cells = [broker, str(nodes), disturbance, ", ".join(letters), shown_s, shown_again]
        lines.append(f"| {' | '.join([*cells, f'{memory_mb:.0f} MB', f'{rate:.0f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what the options say, print the table, and write each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--feature-dim", type=int, default=305, help="4096 times so many numbers: 305 are 5 MB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="brokers whose name has this in it")
    parser.add_argument("--json", type=Path, help="file for each run as JSON; runs that are in it are not done again")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    runs: list[Run] = []
    if arguments.json is not None and arguments.json.exists():
        runs = [Run(**run) for run in json.loads(arguments.json.read_text(encoding="utf-8"))]
    for repeat in range(arguments.repeats):
        for kind in BROKERS:
            for disturbance in DISTURBANCES:
                wanted = (kind.name, kind.nodes, disturbance)
                done = [run for run in runs if (run.broker, run.nodes, run.disturbance) == wanted]
                is_wanted = kind.is_there and arguments.only in kind.name
                if not is_wanted or len(done) > repeat:
                    continue
                run = measure(kind, disturbance, arguments.agents, arguments.feature_dim)
                print(f"{run.broker} {run.nodes} {disturbance}: {run.seconds:.1f} s", flush=True)
                runs.append(run)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps([asdict(run) for run in runs]), encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
