"""Agents of a fleet of thousands send heartbeats less often while they have nothing to do, and leases follow."""

from __future__ import annotations

import pytest
from federation_harness import Clock, Federation

from coordinator.fleet import roster as roster_module
from coordinator.fleet.roster import Roster
from edge_agent.wire.messages import codec, up


def hello(boot="b1"):
    return up.Hello(software="x", tier="train", samples=1, boot=boot, connection=1)


def fleet(count, lease_s=45.0):
    clock = Clock(0.0)
    roster = Roster(clock, lease_s)
    for number in range(count):
        roster.hello(f"m{number:05d}", hello())
    return roster, clock


@pytest.mark.parametrize(
    "count, seconds", [(1, 0.0), (750, 0.0), (760, 15.2), (3000, 60.0), (6000, 120.0), (10_000, 120.0)]
)
def test_the_fleet_sends_some_fifty_heartbeats_a_second_from_750_agents_on(count, seconds):
    """Up to 750 agents every 15 s, as they are configured; 50 a second then; and every 120 s from 6,000 agents on."""
    roster, _ = fleet(count)
    assert roster.heartbeat_s() == pytest.approx(seconds)


def test_agents_are_told_again_when_the_fleet_has_grown_by_half():
    roster, _ = fleet(1000)
    assert roster.new_heartbeat_s("m00000") == pytest.approx(20.0)
    for number in range(1000, 1500):
        roster.hello(f"m{number:05d}", hello())
        assert roster.new_heartbeat_s("m00000") is None
    roster.hello("one-more", hello())
    assert roster.new_heartbeat_s("m00000") == pytest.approx(30.02)


def test_a_lease_is_three_heartbeats_of_what_the_agent_was_told():
    roster, clock = fleet(3000)
    for agent in roster.present():
        roster.new_heartbeat_s(agent)
    clock.now = 180.0
    assert roster.expire() == []
    assert roster.heard("m00007", "b1")
    clock.now = 180.1
    assert len(roster.expire()) == 2999
    assert roster.present() == ["m00007"]


def test_an_agent_with_a_task_has_the_configured_lease_from_then_on():
    roster, clock = fleet(3000)
    for agent in roster.present():
        roster.new_heartbeat_s(agent)
    clock.now = 100.0
    roster.note_asked("m00007")
    roster.note_asked("m00008")
    clock.now = 120.0
    roster.heard("m00008", "b1")
    roster.note_idle("m00008")
    clock.now = 145.0
    assert roster.expire() == []
    clock.now = 145.1
    assert roster.expire() == ["m00007"], "silent for 45 s since it was asked"
    clock.now = 180.1
    assert len(roster.expire()) == 2998
    clock.now = 300.0
    assert roster.expire() == []
    clock.now = 300.1
    assert roster.expire() == ["m00008"], "180 s after it was heard without a task"


@pytest.fixture
def fed(tmp_path, monkeypatch):
    """Three agents that the coordinator takes for thousands: heartbeats of 60 s."""
    monkeypatch.setattr(roster_module, "HEARTBEATS_PER_S", 3 / 60)
    with Federation(tmp_path, agents=3, capture=True) as federation:
        federation.until(lambda: len(federation.coordinator.roster.present()) == 3)
        federation.wait(200)  # agents that came first were told another interval
        yield federation


def beats(fed, name):
    return len(fed.published(fed.topics.heartbeat(name)))


def test_idle_agents_take_the_interval_that_they_are_told(fed):
    """The second one was told 40 s when there were two of them, which is not far from 60."""
    before = {name: beats(fed, name) for name in fed.agents}
    fed.wait(600)
    sent = {name: beats(fed, name) - before[name] for name in fed.agents}
    assert sent == pytest.approx({"a0": 10, "a1": 15, "a2": 10}, abs=1)
    assert fed.coordinator.roster.present() == ["a0", "a1", "a2"]


def test_an_agent_at_work_sends_them_as_it_is_configured_and_says_when_it_is_done(fed):
    fed.kill("a2")
    fed.add("a2", seconds=120.0)
    fed.until(lambda: len(fed.coordinator.roster.present()) == 3)
    before = beats(fed, "a2")
    fed.request(rounds=1)
    fed.until(lambda: fed.entries("round_closed"))
    at_work = beats(fed, "a2") - before
    assert 7 <= at_work <= 10, "every 15 s of 120 s"
    fed.finish()
    fed.wait(1)
    last = codec.parse_from_agent(fed.published(fed.topics.heartbeat("a2"))[-1])
    assert last.run == ""
    assert fed.coordinator.roster.get("a2").asked_at is None


def test_a_run_of_agents_with_long_heartbeats_starts_at_once(fed):
    """Jobs are not sent with heartbeats: that the next one is a minute away delays nothing."""
    fed.request(rounds=3)
    assert fed.finish() < 10
