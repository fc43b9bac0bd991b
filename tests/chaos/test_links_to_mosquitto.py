"""Rounds over a real Mosquitto behind bad links: the same bits whatever happens, and little is sent twice.

Coordinator and agents are stepped in turn by one thread; the broker, the network threads and time are real.
"""

from __future__ import annotations

import os
import signal

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation, FederationInRealTime
from mqtt_harness import NEEDS_MOSQUITTO
from proxy import Proxy

from coordinator.broker import MosquittoBroker
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.core.config import AgentConfig, BrokerConfig, DataConfig
from edge_agent.wire.messages import down as down_module
from edge_agent.wire.mqtt import MqttTransport

pytestmark = [pytest.mark.broker, NEEDS_MOSQUITTO]

MODEL = WIDE_TASK.model_copy(update={"encoder_params": {"feature_dim": 67}})
"""1.1 MB: 4096 * 67 numbers and some more."""

ROUND = {"quorum": 1.0, "deadline_s": 3000}
PROBE_S = 3.1


class Linked(FederationInRealTime):
    """The harness over a real broker; each agent connects through a proxy of its own."""

    def __init__(self, folder, *agents, task=WIDE_TASK, keepalive_s=60, **options):
        super().__init__(folder, agents=agents, task=task, round=ROUND, **options)
        self.process = MosquittoBroker()
        self.process.start()
        self.proxies = {name: Proxy(("127.0.0.1", self.process.port), seed=1) for name in agents}
        for proxy in self.proxies.values():
            proxy.__enter__()
        self.keepalive_s = keepalive_s
        self.slowest_control_s = 0.0
        self._probed_at = 0.0
        self._probe = 0
        self.broker = self

    def __exit__(self, *error):
        super().__exit__(*error)
        for proxy in self.proxies.values():
            proxy.__exit__(*error)
        self.process.stop()

    def transport(self):
        """The coordinator's: its link is a good one."""
        return MqttTransport(self.process.config(), "home-coordinator")

    def add(self, name, tier="train", **options):
        config = AgentConfig(id=name, state=self.folder / name, data=DataConfig(source="none:"))
        self.boots += 1
        boot = f"b{self.boots}"
        url = f"mqtt://127.0.0.1:{self.proxies[name].port}"
        transport = MqttTransport(BrokerConfig(url=url, keepalive_s=self.keepalive_s), name, will=will_of(config, boot))
        tasks = self.tasks[name] = self.make_tasks(config, tier, **options)
        agent = self.agents[name] = Agent(config, transport, tasks, AgentRuntime(boot=boot))
        agent.start()
        return agent

    def present(self, count):
        self.until(lambda: len(self.coordinator.roster.present()) == count)

    def probe(self, name):
        """Send a control message now and then, and note how long it takes until the agent handles it."""
        cancel = self.agents[name].jobs.on_cancel

        def heard(message):
            cancel(message)
            if message.reason.startswith("probe"):
                self.slowest_control_s = max(self.slowest_control_s, self.clock() - float(message.reason[6:]))

        self.agents[name]._work[down_module.Cancel] = heard

        def send():
            now = self.clock()
            if now - self._probed_at >= PROBE_S:
                self._probed_at = now
                self.coordinator.send(name, down_module.Cancel(run="run-0000", round=1, reason=f"probe {now}"))
            return self.entries("round_closed")

        return send


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The encoder after a round of agents a0 and a1 without any fault."""
    with Federation(tmp_path_factory.mktemp("undisturbed"), agents=2, task=WIDE_TASK) as fed:
        fed.request(rounds=1)
        fed.finish()
        return fed.encoder_sha256


@pytest.mark.slow
@pytest.mark.parametrize("rate", [8_000, 40_000, 200_000])
def test_a_round_over_a_slow_link_sends_each_byte_once_and_lets_control_messages_pass(tmp_path, rate):
    with Linked(tmp_path, "a0", task=MODEL) as fed:
        proxy = fed.proxies["a0"]
        fed.present(1)
        proxy.up.rate = proxy.down.rate = rate
        proxy.up.delay_s = proxy.down.delay_s = 0.03
        up = proxy.up.bytes
        down = proxy.down.bytes
        fed.request(rounds=1)
        took_s = fed.until(fed.probe("a0"), 1.5 * 2 * 1_100_000 / rate + 20)
        size = len(fed.state.blobs.read(fed.record.checkpoint))
        sent = (proxy.down.bytes - down) / size, (proxy.up.bytes - up) / size
        ideal = took_s / (2 * size / rate)
        control_s = fed.slowest_control_s
        print(f"\n{rate // 1000} kB/s: {took_s:.1f} s, {ideal:.3f} of ideal, sent {sent}, control {control_s:.2f} s")
        assert ideal < 1.25
        assert max(sent) < 1.1
        assert control_s < 2.0
        fed.finish(600)


def test_a_connection_that_is_reset_after_every_200_kb_delivers_the_same_bits(tmp_path, undisturbed):
    with Linked(tmp_path, "a0", "a1") as fed:
        fed.present(2)
        proxy = fed.proxies["a1"]
        proxy.down.cut_every = proxy.up.cut_every = 200_000
        up = proxy.up.bytes
        down = proxy.down.bytes
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"), 120)
        assert proxy.down.cuts >= 2
        assert proxy.up.cuts >= 2
        assert proxy.down.bytes - down < 3 * 524_000
        assert proxy.up.bytes - up < 3 * 524_000
        proxy.down.cut_every = proxy.up.cut_every = 0
        fed.finish(60)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.slow
def test_a_stall_longer_than_the_keepalive_and_a_half_open_connection_cost_little(tmp_path, undisturbed):
    """Keepalive 5 s: agent and broker each find out by themselves that the other one is away."""
    with Linked(tmp_path, "a0", "a1", keepalive_s=5) as fed:
        fed.present(2)
        proxy = fed.proxies["a1"]
        proxy.up.rate = proxy.down.rate = 200_000
        fed.request(rounds=1)
        begin = proxy.down.bytes
        fed.until(lambda: proxy.down.bytes - begin > 150_000)
        proxy.up.is_hole = proxy.down.is_hole = True
        stalled_at = fed.clock()
        fed.until(lambda: fed.clock() - stalled_at > 10)
        proxy.up.is_hole = proxy.down.is_hole = False
        fed.until(lambda: proxy.down.bytes - begin > 300_000)
        proxy.half_open()
        fed.until(lambda: fed.entries("round_closed"), 60)
        assert proxy.down.bytes - begin < 2 * 524_000
        fed.finish(60)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.slow
def test_flipped_bits_end_connections_and_change_nothing(tmp_path, undisturbed):
    """One flipped bit in 200 kB, wherever it hits: a chunk, a control message, or MQTT itself."""
    with Linked(tmp_path, "a0", "a1") as fed:
        fed.present(2)
        proxy = fed.proxies["a1"]
        proxy.up.flip = proxy.down.flip = 1 / 200_000
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"), 120)
        proxy.up.flip = proxy.down.flip = 0.0
        fed.finish(60)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize(
    "share", [pytest.param(0.1, marks=pytest.mark.slow), 0.5, pytest.param(0.9, marks=pytest.mark.slow)]
)
def test_a_broker_killed_in_the_middle_of_a_transfer_costs_what_was_under_way(tmp_path, undisturbed, way, share):
    with Linked(tmp_path, "a0", "a1") as fed:
        fed.present(2)
        for proxy in fed.proxies.values():
            proxy.up.rate = proxy.down.rate = 400_000
        begin = {name: getattr(proxy, way).bytes for name, proxy in fed.proxies.items()}
        fed.request(rounds=1)
        fed.until(lambda: getattr(fed.proxies["a1"], way).bytes - begin["a1"] > share * 524_000)
        os.kill(fed.process.pid, signal.SIGKILL)
        fed.until(lambda: fed.entries("round_closed"), 60)
        for name, proxy in fed.proxies.items():
            assert getattr(proxy, way).bytes - begin[name] < 1.1 * 524_000 + 500_000
        fed.finish(60)
        assert fed.encoder_sha256 == undisturbed
