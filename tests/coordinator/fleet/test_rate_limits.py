"""A flood from one agent is dropped before it is read, and all others are answered as ever."""

from __future__ import annotations

import pytest
from federation_harness import Clock, Federation

from coordinator.fleet import uploads
from coordinator.fleet.rate_limits import LEAST_BUCKETS, OTHER, RATES, RateLimits
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

TOPICS = Topics("home")


def hello(boot="b1"):
    return codec.encode(up.Hello(software="x", tier="train", samples=1, boot=boot, seq=1, connection=1))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limits(clock):
    return RateLimits(TOPICS, clock)


def admitted(limits, agent, payload, count, kind="up"):
    topic = TOPICS.presence(agent) if kind == "s" else f"fl/1/home/a/{agent}/{kind}"
    return sum(limits.admits(topic, payload) for _ in range(count))


def test_hellos_beyond_ten_at_once_and_two_a_second_are_dropped(limits, clock):
    assert admitted(limits, "a", hello(), 100) == 10
    clock.now += 0.4
    assert admitted(limits, "a", hello(), 100) == 0
    clock.now += 0.1
    assert admitted(limits, "a", hello(), 100) == 1
    clock.now += 3600
    assert admitted(limits, "a", hello(), 100) == 10
    assert limits.dropped() == {("a", "hello"): 90 + 100 + 99 + 90}
    assert not limits.dropped(), "counted once"


def test_each_agent_and_each_kind_has_a_limit_of_its_own(limits):
    assert admitted(limits, "a", b"junk", 5000) == OTHER.at_once
    assert admitted(limits, "a", b'{"type":"invented"}', 5000) == 0, "unknown types share one limit"
    assert admitted(limits, "a", hello(), 5) == 5
    assert admitted(limits, "b", b"junk", 5) == 5
    assert limits.admits(TOPICS.heartbeat("a"), b"")


def test_topics_that_are_not_of_agents_have_no_limit(limits):
    assert all(limits.admits(TOPICS.coordinators, b"x") for _ in range(5000))


def test_types_are_recognised_in_every_message_of_an_agent(limits):
    """A type that were not found would share the low limit of junk."""
    digest = "0" * 64
    ref = fields.BlobRef(digest=digest, size_bytes=100, chunk_bytes=100)
    stamp = {"boot": "f" * 32, "seq": 1 << 60, "federation": "f" * 32}
    messages = [
        up.Have(digest=digest, **stamp),
        up.Want(digest=digest, ranges=((0, 1),), **stamp),
        up.Progress(digest=digest, missing=((0, 1),), **stamp),
        up.UpdateManifest(run="run-0001", round=1, blob=ref, samples=1, **stamp),
        up.Report(run="run-0001", samples=1, **stamp),
        up.Fault(error="x", message="y", **stamp),
        up.Bye(**stamp),
        up.Hello(software="x", tier="train", samples=1, **stamp),
    ]
    for message in messages:
        assert admitted(limits, "a", codec.encode(message), 10_000) == RATES[message.type].at_once


def test_invalid_chunks_use_up_the_limit_faster(limits):
    """Twenty for one: an upload that was cancelled may leave a window of 16, a flood of 3,000 may not."""
    topic = TOPICS.up_chunks("a")
    handled = 0
    while limits.admits(topic, b"junk"):
        limits.refused(topic)
        handled += 1
    assert handled == pytest.approx(3000 / 21, abs=1)


def test_what_is_known_of_idle_agents_is_forgotten(limits, clock):
    for number in range(3 * LEAST_BUCKETS):
        limits.admits(TOPICS.heartbeat(f"agent-{number}"), b"")
        clock.now += 0.01
    assert len(limits._buckets) <= LEAST_BUCKETS + 1


COST_S = {"junk": 0.00014, "hello": 0.0067, "update": 0.0189, "want": 0.0001}
"""CPU of one message on a busy machine, as it was measured before there were limits."""


class Flooded:
    """A coordinator on a clock on which each message takes its CPU, and an agent that sends 5,000 a second."""

    def __init__(self, fed, kind, *, is_limited):
        self.fed = fed
        self.kind = kind
        self.payload = self.flood_message()
        transport = fed.coordinator.transport
        limits = RateLimits(fed.topics, fed.clock)
        accept = transport.accept
        receive = transport.receive
        if is_limited:
            transport.accept = lambda m: accept(m) if limits.admits(m.topic, m.payload) else None
            fed.coordinator.limits = limits

        def costly(timeout_s):
            event = receive(timeout_s)
            if isinstance(event, Message):
                is_flood = "/mallory/" in event.topic
                fed.clock.now += COST_S[kind] if is_flood else COST_S["hello"]
            return event

        transport.receive = costly
        self.sent = 0
        self.begin = fed.clock.now

    def flood_message(self):
        if self.kind == "junk":
            return b"junk" * 50
        if self.kind == "hello":
            return hello("b9")
        stale = fields.BlobRef(digest="1" * 64, size_bytes=1000, chunk_bytes=1000)
        manifest = up.UpdateManifest(run=self.fed.run_id, round=1, blob=stale, samples=1, boot="b9", seq=1)
        return codec.encode(manifest)

    def step(self):
        while self.sent < (self.fed.clock.now - self.begin) * 5000:
            self.fed.broker.route(self.fed.topics.up("mallory"), self.payload)
            self.sent += 1
        if not self.fed.coordinator.step(0):
            self.fed.clock.now += 0.001

    def welcome_s(self, limit_s):
        """Seconds until an honest hello is answered."""
        self.fed.broker.captured.clear()
        at = self.fed.clock.now
        self.fed.broker.route(self.fed.topics.up("honest"), hello("b2"))
        while not self.fed.messages(self.fed.topics.down("honest"), down.Welcome):
            self.step()
            self.fed.broker.captured[:] = [
                (topic, payload) for topic, payload in self.fed.broker.captured if "/honest/dn" in topic
            ]
            if self.fed.clock.now - at > limit_s:
                break
        return self.fed.clock.now - at


@pytest.fixture
def fed(tmp_path):
    """A federation after a run of one round."""
    with Federation(tmp_path, agents=2, capture=True) as federation:
        federation.request(rounds=1)
        federation.finish()
        yield federation


@pytest.mark.parametrize("kind", ["junk", "hello", "update"])
def test_an_honest_agent_is_welcomed_within_a_second_of_a_flood(fed, kind):
    flooded = Flooded(fed, kind, is_limited=True)
    for _ in range(3):
        until = fed.clock.now + 1.0
        while fed.clock.now < until:
            flooded.step()
        assert flooded.welcome_s(5.0) < 1.0


def test_without_limits_a_flood_of_hellos_delays_the_welcome(fed):
    """The simulated flood is one: otherwise the test above would show nothing."""
    flooded = Flooded(fed, "hello", is_limited=False)
    until = fed.clock.now + 0.5
    while fed.clock.now < until:
        flooded.step()
    assert flooded.welcome_s(5.0) > 1.0


def test_the_status_names_who_floods(fed):
    flooded = Flooded(fed, "hello", is_limited=True)
    until = fed.clock.now + 1.0
    while fed.clock.now < until:
        flooded.step()
    status = fed.coordinator.status()
    assert status["rejected_most"]["messages"]["mallory: MessageError"] > 4000
    assert status["rejected_messages"] == pytest.approx(5000, abs=60)


def test_a_run_stays_within_the_limits(tmp_path):
    """Three agents, three rounds, no time at all between messages; nothing is dropped."""
    with Federation(tmp_path, agents=3) as federation:
        limits = RateLimits(federation.topics, federation.clock)
        transport = federation.coordinator.transport
        accept = transport.accept
        transport.accept = lambda m: accept(m) if limits.admits(m.topic, m.payload) else None
        federation.request(rounds=3)
        federation.finish()
        assert not limits.dropped()
        assert federation.record.status == "finished"


def test_many_agents_that_flood_joins_and_heartbeats_cost_no_round(tmp_path):
    """30 agents with valid ids, 16 messages each at every step; the model is that of a run without them."""
    with Federation(tmp_path / "alone", agents=3) as alone:
        alone.request(rounds=2)
        alone.finish()
        undisturbed = alone.encoder_sha256
    with Federation(tmp_path / "flooded", agents=(), cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=3.0)
        fed.request(rounds=2)
        fed.until(lambda: fed.coordinator.collector.open_round)
        limits = RateLimits(fed.topics, fed.clock)
        transport = fed.coordinator.transport
        accept = transport.accept
        admitted = []

        def limited(message):
            if limits.admits(message.topic, message.payload):
                admitted.append(message)
                accept(message)

        transport.accept = limited
        fed.coordinator.limits = limits
        begin = fed.clock.now

        def flood():
            for number in range(30):
                for _ in range(8):
                    fed.broker.route(fed.topics.up(f"m{number}"), head_hello)
                    fed.broker.route(fed.topics.heartbeat(f"m{number}"), heartbeat)
            return fed.record.is_over

        head_hello = codec.encode(up.Hello(software="x", tier="head", samples=1, boot="b9", connection=1))
        heartbeat = codec.encode(up.Heartbeat(boot="b9"))
        fed.until(flood)
        assert fed.encoder_sha256 == undisturbed
        seconds = fed.clock.now - begin
        flooding = [message for message in admitted if "/m" in message.topic]
        most = sum(RATES[kind].at_once + RATES[kind].per_s * seconds for kind in ("hello", "h"))
        assert len(flooding) <= 30 * most
        assert seconds >= 6
        assert fed.coordinator.rejected.total > 500


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_repeated_manifest_of_an_old_round_gets_its_receipt_from_memory(fed, monkeypatch, is_accepted):
    """The journal is read for the first one only; the answer is the same."""
    (entry, *_) = fed.entries("update_accepted")
    digest = entry.digest if is_accepted else "2" * 64
    ref = fields.BlobRef(digest=digest, size_bytes=1000, chunk_bytes=1000)
    manifest = up.UpdateManifest(run=fed.run_id, round=1, blob=ref, samples=1, boot="b2", seq=1)
    agent = entry.agent
    boot = fed.agents[agent].boot
    payload = codec.encode(manifest.model_copy(update={"boot": boot}))
    fed.broker.captured.clear()
    fed.coordinator.handle(agent, "up", payload)
    monkeypatch.setattr(fed.state.journal, "entries", lambda *_, **__: pytest.fail("the journal is read"))
    monkeypatch.setattr(uploads, "replay", lambda *_, **__: pytest.fail("the journal is read"))
    fed.coordinator.handle(agent, "up", payload)
    first, second = fed.messages(fed.topics.down(agent), down.Receipt)
    assert first.accepted == second.accepted == is_accepted
    assert first.reason == second.reason
    assert second.seq == first.seq + 1
