"""A relay at a site: agents behind it take part as others do, and each model comes to the site once."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from aggregator_harness import PartitionedFederation
from faulty_broker import Faults
from federation_duties import WIDE_TASK, FakeDuties, TinyDuties, quick_params
from federation_harness import Federation, Killed
from relay_harness import SiteFederation

from coordinator.state.command_keys import CommandKeys
from edge_agent.core.config import AgentBrokerConfig, BrokerConfig, parse
from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.relay import app
from edge_agent.relay.members import SILENT_S, Member, Members
from edge_agent.relay.relay import Relay
from edge_agent.relay.settings import RelayConfig
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.messages.fields import HTTP_BLOBS, HTTP_UPLOADS

FOUR = ("a0", "a1", "a2", "a3")
MODEL_BYTES = 525_132
"""The model of `WIDE_TASK` with the heads of its chunks."""


def run_of(fed, method="fedavg", rounds=2):
    with fed:
        fed.request(method, rounds=rounds, params=quick_params(method))
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        return fed.record.checkpoint


@pytest.mark.parametrize("method", ["fedavg", "fedper", "repper", "fedpac", "afl"])
def test_a_run_through_a_relay_gives_the_same_bits(tmp_path, method):
    alone = run_of(Federation(tmp_path / "alone", agents=FOUR, tasks=TinyDuties), method)
    fed = SiteFederation(tmp_path / "site", {"north": FOUR[:3]}, others=FOUR[3:], tasks=TinyDuties, keyed=True)
    assert run_of(fed, method) == alone


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of three rounds of a model of several chunks without any relay."""
    with wide(Federation, tmp_path_factory.mktemp("undisturbed"), agents=FOUR) as fed:
        return finished(fed)


def wide(kind, folder, *arguments, **options):
    return kind(folder, *arguments, tasks=FakeDuties, task=WIDE_TASK, **options)


def finished(fed, rounds=3):
    fed.request(rounds=rounds)
    fed.finish(3600)
    return fed.encoder_sha256


def test_each_model_comes_to_the_site_once(tmp_path, undisturbed):
    with wide(SiteFederation, tmp_path, {"north": FOUR}, keyed=True) as fed:
        assert finished(fed) == undisturbed
        blobs = fed.relays["north"].blobs
        assert 3.9 * MODEL_BYTES < blobs.fetched_bytes < 4.1 * MODEL_BYTES
        assert blobs.served_bytes > 3.9 * blobs.fetched_bytes
        assert sum(fed.coordinator.distributor.bytes_to.values()) < 4.1 * MODEL_BYTES


def test_two_sites_and_an_agent_of_its_own_are_one_federation(tmp_path, undisturbed):
    sites = {"north": FOUR[:2], "south": FOUR[2:3]}
    with wide(SiteFederation, tmp_path, sites, others=FOUR[3:], keyed=True) as fed:
        assert finished(fed) == undisturbed
        for relay in fed.relays.values():
            assert relay.blobs.fetched_bytes < 4.1 * MODEL_BYTES
        relays = {row["id"]: row["relay"] for row in fed.coordinator.status()["agents"]}
        assert relays == {"a0": "north", "a1": "north", "a2": "south", "a3": ""}


def test_updates_pass_to_the_aggregators(tmp_path):
    class Both(SiteFederation, PartitionedFederation):
        def __init__(self, folder, sites, **options):
            options.pop("partitions", None)
            self.relays = {}
            PartitionedFederation.__init__(self, folder, 2, agents=(), **options)
            everybody = tuple(agent for agents in sites.values() for agent in agents)
            self._first = everybody
            self.sites = sites
            self.site_brokers = {site: type(self.broker)() for site in sites}
            self.upstream = {}
            self.hook = lambda *_: None

        def __enter__(self):
            SiteFederation.__enter__(self)
            for number in (1, 2):
                self.add_aggregator(number)
            self.settle()
            return self

    alone = run_of(Federation(tmp_path / "alone", agents=FOUR, tasks=TinyDuties))
    fed = Both(tmp_path / "both", {"north": FOUR}, tasks=TinyDuties)
    assert run_of(fed) == alone
    assert sum(aggregator.stored for aggregator in fed.aggregators.values()) == 4 * 2


# --- disturbed -------------------------------------------------------------------------------------------------------


def test_a_relay_is_killed_at_any_moment(tmp_path, undisturbed):
    """Its agents see nothing but a pause; what had arrived of a model is not fetched again."""
    rng = np.random.default_rng(7)
    for attempt in range(12):
        with wide(SiteFederation, tmp_path / str(attempt), {"north": FOUR}, keyed=True) as fed:
            steps = int(rng.integers(5, 120))
            counted = {"steps": 0}

            def kill(site, relay, steps=steps, counted=counted):
                counted["steps"] += 1
                if counted["steps"] == steps:
                    raise Killed

            fed.hook = kill
            fed.after_kill = fed.add_relay
            assert finished(fed) == undisturbed, f"killed after {steps} steps"
            assert counted["steps"] > steps


def test_connections_are_cut_at_any_moment(tmp_path, undisturbed):
    rng = np.random.default_rng(8)
    for attempt in range(8):
        with wide(SiteFederation, tmp_path / str(attempt), {"north": FOUR}, keyed=True) as fed:
            moments = set(rng.integers(5, 150, size=4).tolist())
            counted = {"steps": 0}

            def cut(site, relay, moments=moments, counted=counted):
                counted["steps"] += 1
                if counted["steps"] in moments:
                    transport = relay._upstream if counted["steps"] % 2 else relay._site
                    transport.cut()
                    transport.start()

            fed.hook = cut
            assert finished(fed) == undisturbed, f"cut after {sorted(moments)} steps"


def test_the_agent_in_whose_name_a_model_comes_leaves(tmp_path, undisturbed):
    with wide(SiteFederation, tmp_path, {"north": FOUR}, keyed=True, round={"quorum": 1.0}) as fed:
        killed = []

        def leave(site, relay):
            fetches = list(relay.blobs._fetches.values())
            if not killed and fetches and len(fetches[0].waiting) > 1 and relay.blobs.fetched_bytes > 50_000:
                killed.append(fetches[0].agent)
                fed.kill(killed[0])

        fed.hook = leave
        fed.request(rounds=3)
        fed.until(lambda: killed)
        fed.wait(2)
        relay = fed.relays["north"]
        assert relay.members.online == 3
        fed.add(killed[0])
        fed.finish(3600)
        assert fed.encoder_sha256 == undisturbed
        assert relay.blobs.fetched_bytes < 4.5 * MODEL_BYTES, "what had arrived came again"


@pytest.mark.parametrize("fault", ["lose", "duplicate", "reorder", "flip"])
def test_messages_are_lost_repeated_reordered_and_damaged_on_both_sides(tmp_path, undisturbed, fault):
    with wide(SiteFederation, tmp_path, {"north": FOUR[:3]}, others=FOUR[3:], keyed=True) as fed:
        fed.broker.faults = Faults(np.random.default_rng(1), **{fault: 0.05})
        fed.site_brokers["north"].faults = Faults(np.random.default_rng(2), **{fault: 0.05})
        assert finished(fed) == undisturbed


def test_the_coordinator_is_killed_and_back(tmp_path, undisturbed):
    with wide(SiteFederation, tmp_path, {"north": FOUR}, keyed=True) as fed:
        fed.request(rounds=3)
        fed.until(lambda: fed.relays["north"].blobs.served_bytes > 100_000)
        fed.kill_coordinator()
        fed.wait(3)
        fed.start_coordinator()
        fed.finish(3600)
        assert fed.encoder_sha256 == undisturbed


def test_a_damaged_model_in_the_cache_is_fetched_again(tmp_path, undisturbed):
    with wide(SiteFederation, tmp_path, {"north": FOUR}, keyed=True) as fed:
        fed.request(rounds=3)
        relay = fed.relays["north"]
        fed.until(lambda: relay.blobs.served_bytes > 4 * MODEL_BYTES)
        for path in (tmp_path / "relay-north" / "cache").glob("*"):
            if path.is_file():
                path.write_bytes(bytes(path.stat().st_size))
        relay.blobs._blobs.clear()
        fed.kill("a0")
        fed.agents["a1"].cache.make_room(1 << 40)
        fed.add("a0")
        fed.finish(3600)
        assert fed.encoder_sha256 == undisturbed


def test_a_model_that_the_disk_does_not_take_passes_through(tmp_path, undisturbed, monkeypatch):
    with wide(SiteFederation, tmp_path, {"north": FOUR}, keyed=True) as fed:
        relay = fed.relays["north"]

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(relay.blobs._cache, "receive", full)
        assert finished(fed) == undisturbed
        assert relay.blobs.served_bytes == 0


def test_a_model_larger_than_the_cache_passes_through(tmp_path, undisturbed):
    with wide(SiteFederation, tmp_path, {"north": FOUR}, keyed=True) as fed:
        fed.relays["north"].blobs._cache.limit_bytes = 1000
        assert finished(fed) == undisturbed
        assert fed.relays["north"].blobs.fetched_bytes == 0


# --- what it refuses -------------------------------------------------------------------------------------------------


def small_relay(tmp_path, upstream=None, site=None, **settings):
    config = RelayConfig(
        id="north",
        state=tmp_path / "relay",
        broker=AgentBrokerConfig(url="mqtt://center"),
        site=BrokerConfig(url="mqtt://north"),
        **settings,
    )
    upstream = upstream or MemoryBroker()
    site = site or MemoryBroker()
    relay = Relay(config, upstream.transport(), site.transport(), lambda: 0.0, lambda: 0.0)
    relay.start()
    rest(relay)
    return relay


def rest(relay):
    while relay.step(0):
        pass


def hello(**changes):
    return up.Hello(software="1", tier="head", samples=1, boot="b1", connection=1, **changes)


def test_one_broker_for_both_sides_is_refused_in_the_configuration():
    with pytest.raises(ConfigError, match=r"mqtt://b: *.*both name|both name mqtt://b"):
        parse(RelayConfig, {"id": "n", "broker": {"url": "mqtt://b"}, "site": {"url": "mqtt://b"}}, where="relay.toml")


def test_two_names_of_one_broker_end_the_relay_at_the_first_hello(tmp_path):
    broker = MemoryBroker()
    relay = small_relay(tmp_path, broker, broker)
    agent = broker.transport()
    agent.start()
    agent.publish(relay.topics.up("a0"), codec.encode(hello()))
    with pytest.raises(UsageError, match="one broker or share their messages"):
        rest(relay)


def test_it_says_through_which_relay_an_agent_comes_and_that_it_fetches_nothing_by_http(tmp_path):
    upstream, site = MemoryBroker(), MemoryBroker()
    relay = small_relay(tmp_path, upstream, site)
    heard = upstream.transport()
    heard.subscribe(relay.topics.up("+"))
    heard.start()
    agent = site.transport()
    agent.start()
    agent.publish(
        relay.topics.up("a0"), codec.encode(hello(facts={HTTP_BLOBS: True, HTTP_UPLOADS: True, "board": "pi"}))
    )
    rest(relay)
    payloads = []
    while (event := heard.receive(0)) is not None:
        payloads.append(getattr(event, "payload", b""))
    said = [codec.parse_from_agent(payload) for payload in payloads if payload]
    assert [one.facts for one in said] == [{"board": "pi", "relay": "north"}]


def test_more_agents_than_may_be_are_turned_away_until_one_is_offline(tmp_path):
    site = MemoryBroker()
    relay = small_relay(tmp_path, site=site, most_agents=2)
    agent = site.transport()
    agent.start()
    for name in ("a0", "a1", "a2"):
        agent.publish(relay.topics.up(name), codec.encode(hello()))
    rest(relay)
    assert [name for name, _ in relay.members] == ["a0", "a1"]
    agent.publish(relay.topics.presence("a1"), b"offline b1 1")
    agent.publish(relay.topics.up("a2"), codec.encode(hello()))
    rest(relay)
    assert [name for name, _ in relay.members] == ["a0", "a2"]


def test_the_end_of_an_earlier_connection_takes_nobody_offline():
    member = Member(hello=hello())
    assert not member.is_end_of_connection(b"offline b1 0")
    assert not member.is_end_of_connection(b"online b1 1")
    assert member.is_end_of_connection(b"offline b1 1")


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff" * 100, b'{"v":4,"type":"want"}', b"[" * 40_000, b"x" * 100_000])
def test_what_strangers_send_costs_their_message_alone(tmp_path, payload):
    upstream, site = MemoryBroker(), MemoryBroker()
    relay = small_relay(tmp_path, upstream, site)
    stranger, coordinator = site.transport(), upstream.transport()
    stranger.start()
    coordinator.start()
    stranger.publish(relay.topics.up("a0"), codec.encode(hello()))
    rest(relay)
    for topic in (
        relay.topics.up("a0"),
        relay.topics.up("a b"),
        relay.topics.presence("a0"),
        relay.topics.up_chunks("a0"),
    ):
        stranger.publish(topic, payload)
    for topic in (relay.topics.down("a0"), relay.topics.down_chunks("a0"), relay.topics.announce):
        coordinator.publish(topic, payload)
    rest(relay)
    assert relay.members.online == 1


def test_a_want_with_ranges_outside_the_blob_is_refused(tmp_path):
    upstream, site = MemoryBroker(), MemoryBroker()
    relay = small_relay(tmp_path, upstream, site)
    stranger = site.transport()
    stranger.start()
    stranger.publish(relay.topics.up("a0"), codec.encode(hello()))
    rest(relay)
    relay.blobs.named([down.BlobRef(digest="0" * 64, size_bytes=4000, chunk_bytes=1000)])
    refused = relay.refused
    relay.blobs._blobs["0" * 64] = SimpleNamespace(count=4, ref=SimpleNamespace(chunk_bytes=1000))
    stranger.publish(relay.topics.up("a0"), codec.encode(up.Want(digest="0" * 64, ranges=((0, 400),), boot="b1")))
    rest(relay)
    assert relay.refused == refused + 1


def test_members_are_bounded(tmp_path):
    members = Members(tmp_path, 1, now=0.0)
    assert members.add("a0", 0.0)[0] is not None
    members.said_hello("a0", hello())
    assert members.add("a1", 1.0) == (None, "")


def test_an_agent_without_a_hello_makes_room_for_others(tmp_path):
    """Anybody can send a chunk under a new name; only who says hello counts as online."""
    site = MemoryBroker()
    relay = small_relay(tmp_path, site=site, most_agents=2)
    agent = site.transport()
    agent.start()
    for number in range(50):
        agent.publish(relay.topics.heartbeat(f"x{number}"), b"x")
    for name in ("a0", "a1"):
        agent.publish(relay.topics.up(name), codec.encode(hello()))
    rest(relay)
    assert [name for name, _ in relay.members] == ["a0", "a1"]
    agent.publish(relay.topics.heartbeat("x7"), b"x")
    rest(relay)
    assert [name for name, _ in relay.members] == ["a0", "a1"]


def test_an_agent_that_fell_silent_makes_room_for_others_and_leaves_no_file(tmp_path):
    """A broker that was killed has told nobody who left meanwhile."""
    members = Members(tmp_path, 1, now=0.0)
    members.add("a0", 0.0)
    members.said_hello("a0", hello())
    member, left = members.add("a1", SILENT_S + 1)
    assert (member is not None, left) == (True, "a0")
    assert not list(tmp_path.glob("a0.*"))


@pytest.mark.parametrize("has_key", [False, True])
def test_a_relay_that_ends_leaves_no_thread_and_no_open_file(tmp_path, has_key):
    key = {}
    if has_key:
        path = tmp_path / "north.key"
        path.write_text(CommandKeys.of(tmp_path / "center", "home").of_agent("north").text())
        path.chmod(0o600)
        key = {"command_key_file": path}
    config = RelayConfig(
        id="north",
        state=tmp_path / "north",
        # Nobody answers at these ports.
        broker=AgentBrokerConfig(url="mqtt://127.0.0.1:9", **key),
        site=BrokerConfig(url="mqtt://127.0.0.1:10"),
    )
    before = set(threading.enumerate())
    with app.relay(config) as relay, contextlib.closing(app.renewal(config)) as certificate:
        assert (relay.sums is not None) is has_key
        relay.step(0)
        certificate.tick()
        begun = set(threading.enumerate()) - before
        assert begun
    for thread in begun:
        thread.join(20)
        assert not thread.is_alive(), thread.name
