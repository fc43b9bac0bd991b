from __future__ import annotations

import pytest
from federation_harness import Federation

from coordinator.fleet.members import Figures
from coordinator.fleet.roster import PATIENCE_S, RETURN_S, Roster
from coordinator.state.status_file import FleetAccuracy
from edge_agent.wire.messages import up
from edge_agent.wire.messages.up import Hello


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


def test_accuracies_of_the_fleet_follow_each_message_and_are_kept_between(roster):
    roster.hello("a", hello())
    assert roster.accuracies() == {}
    roster.trained("a", {"acc.personal": 0.5})
    roster.hello("b", hello())
    roster.trained("b", {"acc.personal": 1.0})
    first = roster.accuracies()
    assert first == {"personal": FleetAccuracy(0.75, 0.5, 2)}
    assert roster.accuracies() is first
    roster.reported("b", up.Report(run="r" * 32, samples=1, acc_personal=0.25))
    assert roster.accuracies() == {"personal": FleetAccuracy(0.375, 0.25, 2)}
    roster.remember({"c": Figures(acc={"personal": 0.75})}, {})
    roster.hello("c", hello())
    assert roster.accuracies()["personal"] == FleetAccuracy(0.5, 0.25, 3)


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


# --- figures of agents ----------------------------------------------------------------------------------------------


def report(**fields):
    return up.Report(run="run-0001", samples=40, **fields)


def test_figures_of_an_agent_are_those_of_its_newest_words(roster):
    roster.hello("a", up.Hello(software="x", tier="head", samples=1, boot="b1", facts={"rss_mb": 41.5}))
    member = roster.get("a")
    assert member.figures == Figures(rss_mb=41.5)
    roster.trained("a", {"acc.global": 0.5, "acc.personal": None, "loss": 2.0})
    assert member.figures.acc == {"global": 0.5}
    roster.reported("a", report(acc_personal=0.75, acc_local=0.25, head="lr", better_alone=True))
    assert member.figures == Figures({"global": 0.5, "personal": 0.75, "local": 0.25}, "lr", True, 41.5)
    roster.hello("a", up.Hello(software="x", tier="head", samples=1, boot="b2"))
    assert roster.get("a").figures.acc["personal"] == 0.75, "a restart changes no model"


@pytest.mark.parametrize("said", ["much", True, -1, float("inf"), 0, None])
def test_memory_that_is_none_is_not_shown(roster, said):
    roster.hello("a", up.Hello.model_construct(tier="head", boot="b", software="x", samples=0, facts={"rss_mb": said}))
    assert roster.get("a").figures.rss_mb is None


@pytest.mark.parametrize(
    "said, known",
    [(0, 0.0), (1.7e9, 1.7e9), (-1, None), (1e12, None), (float("nan"), None), ("today", None), (True, None)],
)
def test_when_inputs_changed_is_a_time_or_is_not_known(roster, said, known):
    facts = {"inputs_since": said}
    member = roster.hello("a", up.Hello.model_construct(tier="head", boot="b", software="x", samples=0, facts=facts))
    assert member.inputs_since == known
    assert member.is_well == (not known)


def test_accuracy_that_is_none_is_not_shown(roster):
    roster.hello("a", up.Hello(software="x", tier="train", samples=1, boot="b1"))
    roster.trained("a", {"acc.global": 1.5, "acc.personal": -0.1})
    roster.reported("a", up.Report(run="run-0001", samples=0, acc_personal=0.9))
    assert roster.get("a").figures.acc == {}


def test_figures_outlive_the_coordinator(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        fed.request(rounds=1)
        fed.finish()
        before = fed.coordinator.roster.get("a0").figures
        assert before.acc["personal"] > 0
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.wait(5)
        assert fed.coordinator.roster.get("a0").figures.acc == before.acc


def test_a_lease_is_judged_up_to_what_has_been_read(roster, clock):
    roster.hello("a", hello())
    clock.now += 60
    assert roster.expire(unread_s=20) == [], "its heartbeat of 20 s ago may wait to be read"
    assert roster.expire(unread_s=5) == ["a"]
