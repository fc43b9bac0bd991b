"""The same federation over each broker: in memory, amqtt, Mosquitto, NATS, RabbitMQ, and over clusters of the last two.

The result has the same bits everywhere. Over a cluster, agents and coordinator are at different nodes, and the node of
the coordinator is killed in the middle of a round.
"""

from __future__ import annotations

import itertools

import pytest
from configured_brokers import NEEDS_NATS, NEEDS_RABBITMQ, FromMosquitto, FromNats, FromRabbitMq
from federation_harness import FederationInRealTime
from mqtt_harness import NEEDS_MOSQUITTO
from process_site import LARGE

from coordinator.broker import EmbeddedBroker
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.wire.failover import order_for
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.mqtt import MqttTransport

NAMES = ("a0", "a1", "a2", "a3")
ROUNDS = 3
TASK = LARGE.model_copy(update={"encoder_params": {"feature_dim": 64}})
"""4096 * 64 numbers: 1 MB, 17 chunks each way for each agent."""

SINGLE = {"amqtt": EmbeddedBroker, "mosquitto": FromMosquitto, "nats": FromNats, "rabbitmq": FromRabbitMq}
BROKERS = [
    pytest.param("amqtt", marks=pytest.mark.broker),
    pytest.param("mosquitto", marks=[pytest.mark.broker, NEEDS_MOSQUITTO]),
    pytest.param("nats", marks=[pytest.mark.broker, NEEDS_NATS]),
    pytest.param("rabbitmq", marks=[pytest.mark.broker, NEEDS_RABBITMQ]),
]
CLUSTERS = [
    pytest.param("nats", marks=[pytest.mark.broker, pytest.mark.slow, NEEDS_NATS]),
    pytest.param("rabbitmq", marks=[pytest.mark.broker, pytest.mark.slow, NEEDS_RABBITMQ]),
]


class Network:
    """Clients of one real broker, spread over its nodes: each has its own transport, as processes have."""

    def __init__(self, broker):
        self.process = broker
        self.transports = []

    def transport(self, will=None):
        number = len(self.transports)
        spread_by = self._id_of_first_node(number)
        transport = MqttTransport(self.process.config(), f"client-{number}", will=will, spread_by=spread_by)
        self.transports.append(transport)
        return transport

    def _id_of_first_node(self, number):
        """An id whose hash puts one node first after the other; ports, and hashes with them, differ from run to run."""
        urls = self.process.config().urls
        candidates = (f"client-{number}-{suffix}" for suffix in itertools.count())
        return next(name for name in candidates if order_for(name, urls)[0] == urls[number % len(urls)])


class Fleet(FederationInRealTime):
    """Agents that train on digits, over a network of this test."""

    def __init__(self, folder, network):
        super().__init__(folder, agents=(), task=TASK, cohort={"min_agents": len(NAMES)})
        self.broker = network

    def add(self, name, **_):
        number = NAMES.index(name)
        source = f"digits:optdigits?n=240&client={number}&clients={len(NAMES)}"
        config = AgentConfig(id=name, state=self.folder / name, data=DataConfig(source=source))
        self.tasks[name] = TaskRunner(config, "train")
        transport = self.broker.transport(will_of(config, name))
        self.agents[name] = Agent(config, transport, self.tasks[name], AgentRuntime(boot=f"boot-{name}"))
        self.agents[name].start()


def result(folder, network, disturb=None):
    """SHA-256 of the encoder after a run; ``disturb`` is called in the middle of its second round."""
    with Fleet(folder, network) as fleet:
        for name in NAMES:
            fleet.add(name)
        fleet.until(lambda: len(fleet.coordinator.roster.present("train")) == len(NAMES), 120.0)
        fleet.request("fedavg", rounds=ROUNDS, params={"batch_size": 8})
        if disturb is not None:
            fleet.until(lambda: any(entry.round == 2 for entry in fleet.entries("round_opened")), 120.0)
            disturb(fleet)
        fleet.finish(240.0)
        assert fleet.record.status == "finished", fleet.record.end
        attempts = [(entry.round, entry.body["attempt"]) for entry in fleet.entries("round_opened")]
        assert attempts == [(number, 1) for number in range(1, ROUNDS + 1)]
        return fleet.encoder_sha256


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    return result(tmp_path_factory.mktemp("memory"), MemoryBroker())


def started(kind, folder):
    return SINGLE[kind]() if kind == "amqtt" else SINGLE[kind](folder)


@pytest.mark.parametrize("kind", BROKERS)
def test_a_federation_ends_with_the_same_bits_over_each_broker(kind, tmp_path, in_memory):
    with started(kind, tmp_path / "broker") as broker:
        assert result(tmp_path / "fleet", Network(broker)) == in_memory


@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_cluster_that_loses_the_coordinators_node_in_a_round_ends_with_the_same_bits(kind, tmp_path, in_memory):
    def kill_node_of_coordinator(fleet):
        of_coordinator = fleet.coordinator.transport
        urls = {transport.broker.url for transport in network.transports}
        assert len(urls) > 1, "the clients are at different nodes"
        cluster.kill(of_coordinator.broker.url)

    with SINGLE[kind](tmp_path / "broker", 3) as cluster:
        network = Network(cluster)
        assert result(tmp_path / "fleet", network, kill_node_of_coordinator) == in_memory
