"""Devices that die in the middle of a round: the others do not wait for them, and nobody's work is lost.

All with the round settings that are shipped, on a virtual clock: each agent trains for 5 s.
"""

from __future__ import annotations

import pytest
from federation_disturbances import Stranger, killed_at_append
from federation_harness import Federation

from coordinator.cli.run import result_parts
from coordinator.config import RoundConfig
from coordinator.rounds.context import REPORT_DEADLINE_S
from coordinator.runs.run_summary import RunSummary

TRAINING_S = 5.0
SHIPPED = RoundConfig().model_dump()


def fleet(folder, size, **options):
    """``size`` agents of which all take part in round 1; rounds as they are shipped, one agent is enough for a run."""
    options = {"round": SHIPPED, "cohort": {"min_agents": 1}, **options}
    return Federation(folder, agents=(), **options)


def begin(fed, size, rounds=3):
    for number in range(size):
        fed.add(f"a{number}", seconds=TRAINING_S)
    fed.settle()
    fed.request(rounds=rounds)


def delay_of_round_2(fed, dead, after_s, *, will=True):
    """Simulated seconds from the last update of those who live to the end of round 2, in which ``dead`` agents die."""
    fed.until(lambda: fed.entries("round_closed", round=1))
    fed.wait(after_s)
    victims = sorted(fed.agents)[-dead:]
    for name in victims:
        fed.kill(name, will=will)
    living = set(fed.agents)
    fed.until(lambda: {entry.agent for entry in fed.entries("update_accepted", round=2)} >= living, 2000)
    return fed.until(lambda: fed.entries("round_closed", round=2), 2000)


SMALL_FLEETS = {2, 3, 5, 10}
FLEETS = [
    pytest.param(size, dead, marks=() if size in SMALL_FLEETS else pytest.mark.slow)
    for size in range(2, 11)
    for dead in sorted({1, size // 2, size - 1})
]


@pytest.mark.parametrize("size, dead", FLEETS)
def test_dead_agents_delay_a_round_by_less_than_three_seconds(tmp_path, size, dead):
    """They die 0.1 s before the others deliver: the worst moment, for their last will has just been heard."""
    with fleet(tmp_path, size) as fed:
        begin(fed, size)
        assert delay_of_round_2(fed, dead, TRAINING_S - 0.1) < 3
        fed.finish()
        assert fed.record.status == "finished"
        living = sorted(fed.agents)
        assert [line["agents"] for line in fed.metrics()][1:] == [living, living]
        for tasks in (fed.tasks[name] for name in living):
            assert [number for _, number, purpose in tasks.done if purpose == "train"] == [1, 2, 3], "once each"


def test_without_a_last_will_a_round_waits_for_three_times_the_past_and_no_longer(tmp_path):
    """The network of a device is cut and its broker has not noticed: 5 s in round 1, so 15 s in round 2."""
    with fleet(tmp_path, 3) as fed:
        begin(fed, 3)
        assert 9 < delay_of_round_2(fed, 1, 1.0, will=False) < 12
        fed.finish()


def test_without_a_last_will_a_round_that_is_not_adaptive_waits_for_the_lease_and_no_longer(tmp_path):
    """45 s of silence, then 2 s."""
    with fleet(tmp_path, 3, round={**SHIPPED, "adaptive": False}) as fed:
        begin(fed, 3)
        assert 35 < delay_of_round_2(fed, 1, 1.0, will=False) < 50
        fed.finish()


def test_an_agent_that_comes_back_in_time_takes_part_in_the_round(tmp_path):
    """It dies after 1 s and is back after 3 s: given up, and welcome; the others are done after 5 s, it after 8 s."""
    with fleet(tmp_path, 4) as fed:
        begin(fed, 4, rounds=1)
        fed.wait(1)
        fed.kill("a3")
        fed.wait(2.5)
        assert fed.coordinator.waiting.whom == ("a0", "a1", "a2")
        assert fed.coordinator.waiting.what == "round 1: 0 of 4 updates are here, without a3"
        fed.add("a3", seconds=TRAINING_S)
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2", "a3"]
        assert fed.metrics()[0]["seconds"] < 10


def test_an_agent_that_comes_back_and_is_slow_is_waited_for_as_long_as_the_grace(tmp_path):
    with fleet(tmp_path, 4) as fed:
        begin(fed, 4, rounds=1)
        fed.wait(1)
        fed.kill("a3")
        fed.wait(3)
        fed.add("a3", seconds=500)
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2"]
        assert TRAINING_S + 9 < fed.metrics()[0]["seconds"] < TRAINING_S + 12


def test_a_round_that_lacks_the_least_number_of_updates_waits_and_says_for_whom(tmp_path):
    with fleet(tmp_path, 3, cohort={"min_agents": 3}) as fed:
        begin(fed, 3, rounds=1)
        fed.wait(1)
        fed.kill("a2")
        fed.wait(800)
        waits = fed.coordinator.waiting
        assert waits.what.startswith("round 1: 2 of the 3 updates that it needs (cohort.min_agents) are here")
        assert (waits.whom, waits.until) == (("a2",), None)
        fed.add("a9", seconds=TRAINING_S)
        assert fed.until(lambda: fed.entries("round_closed")) < TRAINING_S + 3
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a9"]
        assert fed.metrics()[0]["missing"] == ["a2"]
        assert [fed.tasks[name].done.count((fed.run, 1, "train")) for name in ("a0", "a1", "a9")] == [1, 1, 1]


@pytest.mark.parametrize("cut", [1, 5])
def test_agents_that_lose_their_connection_and_work_on_count_in_the_quorum(tmp_path, cut):
    """4 s without network, with last wills, while one of five is done after 5 s and the others after 60 s."""
    with fleet(tmp_path, 5) as fed:
        for number in range(5):
            fed.add(f"a{number}", seconds=60 if number else 5)
        fed.settle()
        fed.request(rounds=1)
        fed.wait(1)
        transports = [fed.agents[f"a{number}"].transport for number in reversed(range(5))][:cut]
        for transport in transports:
            transport.cut()
        fed.wait(4)
        for transport in transports:
            transport.start()
        fed.finish()
        assert fed.metrics()[0]["agents"] == sorted(fed.agents)


def test_the_round_after_a_restart_of_the_coordinator_does_not_open_with_the_first_to_come(tmp_path):
    """It is killed at the end of round 1; of its four agents one is back at once, two after 5 s, and one is dead."""
    with fleet(tmp_path, 4) as fed:
        begin(fed, 4, rounds=2)
        with killed_at_append(fed, 6, before=False):
            fed.until(lambda: fed.coordinator is None)
        fed.kill("a3")
        for name in ("a1", "a2"):
            fed.agents[name].transport.cut()
        fed.start_coordinator()
        assert fed.entries()[-1].kind == "round_closed"
        fed.wait(5)
        assert fed.coordinator.waiting.whom == ("a1", "a2", "a3")
        for name in ("a1", "a2"):
            fed.agents[name].transport.start()
        fed.finish()
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2", "a3"], ["a0", "a1", "a2"]]


def test_an_agent_that_was_restarted_shortly_before_the_deadline_is_not_blamed_for_it(tmp_path):
    with fleet(tmp_path, 3) as fed:
        fed.add("hung", seconds=1e9)
        begin(fed, 3, rounds=2)
        fed.wait(1)
        fed.kill("a2")
        fed.wait(SHIPPED["deadline_s"] - 10)
        fed.add("a2", seconds=20)
        fed.finish()
        assert fed.metrics()[0]["missing"] == ["a2", "hung"]
        assert [[one["agent"] for one in line["left_out"]] for line in fed.metrics()] == [[], ["hung"]]


@pytest.mark.parametrize("size", [1, 2])
def test_an_agent_that_comes_back_after_the_deadline_has_a_whole_deadline(tmp_path, size):
    """It was given the time that was left, which is none: with ``max_attempts = 1`` that was the end of the run."""
    with fleet(tmp_path, size, cohort={"min_agents": size}, round={**SHIPPED, "max_attempts": 1}) as fed:
        begin(fed, size, rounds=1)
        fed.wait(1)
        fed.kill(f"a{size - 1}")
        fed.wait(SHIPPED["deadline_s"] + 100)
        fed.add(f"a{size - 1}", seconds=500)
        fed.finish()
        assert fed.record.status == "finished"
        assert fed.metrics()[0]["agents"] == sorted(fed.agents)


def test_an_update_that_was_under_way_counts_although_its_agent_was_given_up(tmp_path):
    with fleet(tmp_path, 1, cohort={"min_agents": 2}) as fed:
        late = Stranger(fed, "late")
        late.hello()
        begin(fed, 1, rounds=1)
        fed.until(lambda: fed.entries("update_accepted"))
        blob = late.offer(fed.final)
        fed.settle()
        fed.coordinator.roster.mark_offline("late")
        fed.wait(60)
        assert fed.coordinator.waiting.whom == ("late",)
        late.send(blob)
        fed.until(lambda: fed.entries("round_closed"))
        assert fed.metrics()[0]["agents"] == ["a0", "late"]


def test_a_broker_that_is_away_gives_nobody_up(tmp_path):
    """Two of three have delivered when the broker vanishes for five minutes; the third is working all the time."""
    with fleet(tmp_path, 3) as fed:
        for name, seconds in (("a0", 1), ("a1", 1), ("a2", 200)):
            fed.add(name, seconds=seconds)
        fed.settle()
        fed.request(rounds=1)
        fed.wait(5)
        fed.coordinator.transport.cut()
        fed.agents["a2"].transport.cut()
        fed.wait(300)
        assert not fed.entries("round_closed")
        fed.coordinator.transport.start()
        fed.agents["a2"].transport.start()
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2"]


def lose_broker(fed, seconds):
    """Nobody reaches the broker for so long; agents work on."""
    transports = [fed.coordinator.transport, *(agent.transport for agent in fed.agents.values())]
    for transport in transports:
        transport.cut()
    end = fed.clock.now + seconds
    fed.until(lambda: fed.clock.now >= end, seconds + 10)
    for transport in transports:
        transport.start()


@pytest.mark.parametrize("delivered", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_no_deadline_runs_while_the_broker_is_away(tmp_path, delivered):
    """It is away for longer than ``max_attempts`` deadlines; who works meanwhile is neither blamed nor left out."""
    with fleet(tmp_path, 3) as fed:
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=5 if name < f"a{delivered}" else 100)
        fed.settle()
        fed.request(rounds=2)
        fed.wait(10)
        assert len(fed.entries("update_accepted")) == delivered
        lose_broker(fed, 3 * SHIPPED["deadline_s"] + 100)
        fed.finish()
        assert fed.record.status == "finished"
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2"]] * 2
        assert len(fed.entries("round_opened")) == 2
        for tasks in fed.tasks.values():
            assert [number for _, number, purpose in tasks.done if purpose == "train"] == [1, 2], "once each"


def test_the_end_of_a_run_waits_for_reports_when_the_broker_is_back(tmp_path):
    with fleet(tmp_path, 2) as fed:
        begin(fed, 2, rounds=1)
        fed.until(lambda: fed.entries("round_closed"))
        lose_broker(fed, 2 * REPORT_DEADLINE_S)
        fed.finish()
        assert [agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]


@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_a_coordinator_killed_in_a_round_that_goes_on_with_others_ends_in_the_same_bits(tmp_path, moment):
    """Three updates are the least, one of three agents dies, another one comes instead: the updates are kept."""

    def run(folder, killed_when):
        with fleet(folder, 3, cohort={"min_agents": 3}) as fed:
            begin(fed, 3, rounds=2)
            fed.wait(1)
            fed.kill("a2")
            moments = {
                "before": lambda: len(fed.entries("update_accepted")) == 2,
                "in": lambda: len(fed.entries("round_opened")) == 2,
                "after": lambda: len(fed.entries("update_accepted")) == 3,
            }
            fed.until(moments["before"])
            if killed_when == "before":
                restart(fed)
            fed.wait(20)
            fed.add("a3", seconds=TRAINING_S)
            if killed_when in {"in", "after"}:
                fed.until(moments[killed_when])
                restart(fed)
            fed.finish(2000)
            for name in ("a0", "a1", "a3"):
                assert [number for _, number, purpose in fed.tasks[name].done if purpose == "train"] == [1, 2]
            return fed.encoder_sha256, [line["agents"] for line in fed.metrics()]

    def restart(fed):
        fed.kill_coordinator()
        fed.start_coordinator()

    assert run(tmp_path / "killed", moment) == run(tmp_path / "undisturbed", "never")


def test_an_agent_that_vanished_is_named_in_the_result_with_the_round_in_which_it_was_last_heard(tmp_path):
    """The result had no word of it: neither a row, nor a note, nor a warning."""
    with fleet(tmp_path, 3) as fed:
        begin(fed, 3, rounds=5)
        fed.until(lambda: fed.entries("round_closed", round=2))
        fed.wait(1)
        fed.kill("a2")
        fed.until(lambda: fed.entries("round_closed", round=4))
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        summary = fed.state.run(fed.run).summary()
        page = fed.state.run(fed.run).report_path.read_text()
    (warning,) = (one for one in summary["warnings"] if one["kind"] == "offline")
    assert warning["clients"] == ["a2"]
    assert warning["message"] == (
        "agent 'a2' went offline during the run, last heard in round 3 of 5; its last update is of round 2, and its "
        "figures are missing here"
    )
    assert "went offline during the run, last heard in round 3 of 5" in page
    assert f"warning: {warning['message']}" in [*result_parts(RunSummary.from_json(summary))]


def test_an_agent_that_comes_back_before_the_end_is_not_called_offline(tmp_path):
    with fleet(tmp_path, 3) as fed:
        begin(fed, 3, rounds=5)
        fed.until(lambda: fed.entries("round_closed", round=2))
        fed.kill("a2")
        fed.until(lambda: fed.entries("round_closed", round=3))
        fed.add("a2", seconds=TRAINING_S)
        fed.finish()
        assert [one["kind"] for one in fed.state.run(fed.run).summary()["warnings"]] == []
