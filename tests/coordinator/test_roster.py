from __future__ import annotations

import pytest

from coordinator.fleet.registry import PATIENCE_S, RETURN_S, Roster
from edge_agent.wire.messages import Hello


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def roster(clock):
    return Roster(clock, lease_s=45)


def hello(boot="b1", tier="train", samples=5):
    return Hello(software="x", tier=tier, samples=samples, boot=boot)


def test_agents_are_listed_by_tier_and_sorted(roster):
    for name, tier in (("c", "train"), ("a", "train"), ("b", "head")):
        roster.hello(name, hello(tier=tier))
    assert roster.present() == ["a", "b", "c"]
    assert roster.present("train") == ["a", "c"]
    assert roster.present("head") == ["b"]


def test_a_silent_agent_is_lost_once_after_its_lease(roster, clock):
    roster.hello("a", hello())
    clock.now += 45
    assert roster.expire() == []
    clock.now += 0.1
    assert roster.expire() == ["a"]
    assert roster.expire() == []
    assert roster.present() == []


def test_any_word_renews_the_lease(roster, clock):
    roster.hello("a", hello())
    clock.now += 40
    assert roster.heard("a", "b1")
    clock.now += 40
    assert roster.expire() == []


@pytest.mark.parametrize("case", ["unknown", "rebooted", "gone"])
def test_whoever_is_not_known_as_they_are_has_to_say_hello(roster, case):
    if case != "unknown":
        roster.hello("a", hello())
    if case == "gone":
        roster.mark_offline("a")
    assert not roster.heard("a", "b2" if case == "rebooted" else "b1")
    roster.hello("a", hello(boot="b2" if case == "rebooted" else "b1"))
    assert roster.heard("a", "b2" if case == "rebooted" else "b1")


def test_patience_with_the_gone_ends_after_two_seconds(roster, clock):
    roster.hello("a", hello())
    assert roster.patience("a") is None
    clock.now += 7
    roster.mark_offline("a")
    assert roster.patience("a") == PATIENCE_S
    clock.now += 1.5
    roster.mark_offline("a")
    assert roster.patience("a") == pytest.approx(0.5), "gone once, not again"


def test_those_never_heard_have_time_to_return_counted_from_the_last_connection(roster, clock):
    clock.now += 4
    assert roster.patience("a") == pytest.approx(RETURN_S - 4)
    roster.connected()
    assert roster.patience("a") == RETURN_S
    roster.hello("a", hello())
    assert roster.patience("a") is None
