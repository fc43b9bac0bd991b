"""Agents that are slower than the others: how long rounds wait for them, and what they contribute.

With the round settings that are shipped, on a virtual clock. Training takes an agent its seconds times the share of the
work that it is asked for, and ends when its round is over.
"""

from __future__ import annotations

import contextlib
import math
from statistics import NormalDist

import pytest
from federation_harness import Federation, Killed

from coordinator.config import RoundConfig
from coordinator.rounds.pace import DEADLINE_FACTOR, GRACE_FACTOR, HISTORY, LEAST_WORK, QUANTILE, Pace

SHIPPED = RoundConfig().model_dump()
USUAL_S = 10.0
FACTOR = 20


@contextlib.contextmanager
def fleet(folder, *, slow=FACTOR, agents=5, rounds=10, method="fedavg", **settings):
    """Five agents, of which ``a4`` takes ``slow`` times as long; a run has been requested."""
    with Federation(folder, agents=(), round={**SHIPPED, **settings}, cohort={"min_agents": 1}) as fed:
        for number in range(agents):
            fed.add(f"a{number}", training_s=USUAL_S * (slow if number == 4 else 1))
        fed.settle()
        fed.request(method, rounds=rounds)
        yield fed


def run_seconds(fed):
    fed.finish(20_000)
    return [line["seconds"] for line in fed.metrics()]


def delivered(fed, agent="a4"):
    return [line["round"] for line in fed.metrics() if agent in line["agents"]]


def test_one_device_20_times_slower_costs_nothing_from_round_4_on_and_contributes(tmp_path):
    """Every round took the whole grace period of 10 s, which is a whole training here, and it was in none."""
    with fleet(tmp_path / "undisturbed", slow=1) as fed:
        undisturbed = max(run_seconds(fed))
    with fleet(tmp_path / "slow") as fed:
        seconds = run_seconds(fed)
        lines = fed.metrics()
        contributed = delivered(fed)
    assert max(seconds[3:]) <= 1.5 * undisturbed
    assert sum(seconds[3:]) <= 1.1 * undisturbed * 7
    assert contributed == [3, 4, 5, 6, 7, 8, 9, 10]
    work = [line["work"]["a4"] for line in lines[3:]]
    assert all(0.6 / FACTOR < share <= 1.2 / FACTOR for share in work), work
    assert all(line["work"].keys() <= {"a4"} for line in lines)


def test_without_adaptive_rounds_it_costs_the_grace_and_contributes_nothing(tmp_path):
    with fleet(tmp_path, adaptive=False) as fed:
        seconds = run_seconds(fed)
        assert seconds[0] > 1.9 * USUAL_S
        assert delivered(fed) == []


def test_a_method_of_several_passes_does_not_wait_for_a_device_that_cannot_be_in_time(tmp_path):
    """FedRep is not shortened: the device is asked less and less often, and nobody waits for it."""
    with fleet(tmp_path, method="fedrep", rounds=12) as fed:
        seconds = run_seconds(fed)
        assert max(seconds[3:]) <= 1.5 * USUAL_S
        asked = [entry.round for entry in fed.entries("round_opened") if "a4" in entry.body["cohort"]]
        assert asked == [1, 2, 4, 7, 12]
        assert not any(line["work"] for line in fed.metrics())


def test_a_device_within_twice_the_usual_time_does_all_the_work_and_is_waited_for(tmp_path):
    with fleet(tmp_path, slow=1.8, rounds=5) as fed:
        seconds = run_seconds(fed)
        assert delivered(fed) == [1, 2, 3, 4, 5]
        assert max(seconds) < 1.9 * USUAL_S
        assert not any(line["work"] for line in fed.metrics())


def test_a_device_that_is_quick_again_does_all_the_work_again(tmp_path):
    with fleet(tmp_path, rounds=6 + HISTORY) as fed:
        fed.until(lambda: fed.entries("round_closed", round=5), 2000)
        fed.agents["a4"].worker.seconds = USUAL_S
        run_seconds(fed)
        assert "a4" in fed.metrics()[5]["work"]
        assert fed.metrics()[-1]["work"] == {}
        assert delivered(fed)[-1] == 6 + HISTORY


def test_an_agent_that_hangs_costs_three_times_its_own_past_times_and_not_the_deadline(tmp_path):
    """Two agents, so that without it the quorum is missed: the deadline of 600 s was waited for."""
    with fleet(tmp_path, agents=2, rounds=5) as fed:
        fed.until(lambda: fed.entries("round_closed", round=2))
        fed.agents["a1"].worker.seconds = 1e9
        fed.finish(2000)
        seconds = [line["seconds"] for line in fed.metrics()]
        assert seconds[3] == pytest.approx(3 * USUAL_S, abs=2)
        assert seconds[4] == pytest.approx(USUAL_S, abs=1)
        assert fed.entries("round_opened", round=5)[0].body["left_out"]["a1"].startswith("no update within 3")


def test_a_fleet_that_has_become_slow_altogether_fails_no_run(tmp_path):
    """Three deadlines in a row would end it; the short ones are for those who delay the others."""
    with fleet(tmp_path, agents=3, rounds=3) as fed:
        fed.until(lambda: fed.entries("round_closed", round=1))
        for agent in fed.agents.values():
            agent.worker.seconds = 50 * USUAL_S
        fed.finish(5000)
        assert fed.record.status == "finished"
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2"]] * 3


def test_the_wait_names_the_slow_agent_and_its_end(tmp_path):
    with fleet(tmp_path) as fed:
        fed.until(lambda: fed.entries("round_closed", round=4), 2000)
        fed.agents["a4"].worker.seconds *= 100
        fed.until(lambda: len(fed.entries("update_accepted", round=6)) == 4)
        waiting = fed.coordinator.waiting
        assert waiting.whom == ("a4",)
        assert 0 < waiting.until - fed.clock.now <= (GRACE_FACTOR - 1) * 1.2 * USUAL_S + 1


@pytest.mark.parametrize("moment", ["open", "closed"])
@pytest.mark.parametrize("number", [2, 4])
def test_a_restarted_coordinator_asks_for_the_same_work(tmp_path, moment, number):
    def run(folder, *, is_killed):
        with fleet(folder, rounds=5) as fed:
            kind = "round_opened" if moment == "open" else "round_closed"
            fed.until(lambda: fed.entries(kind, round=number), 2000)
            selection = fed.coordinator.runs.loop.selection
            if is_killed:
                fed.kill_coordinator()
                fed.start_coordinator()
                fed.until(lambda: fed.coordinator.runs.loop is not None)
                resumed = fed.coordinator.runs.loop.selection
                assert (resumed.pace, resumed.exclusions) == (selection.pace, selection.exclusions)
            fed.finish(2000)
            return [entry.body["work"] for entry in fed.entries("round_opened")][: number + (moment == "closed")]

    assert run(tmp_path / "killed", is_killed=True) == run(tmp_path / "undisturbed", is_killed=False)


def test_a_device_that_is_late_again_after_it_was_restarted_gets_the_same_work_from_a_restarted_coordinator(tmp_path):
    """``a4`` is late in round 1, where the others take longer, away in round 2, back in round 3, late in round 4."""

    def run(folder, *, is_killed):
        with fleet(folder, rounds=5) as fed:
            others = [agent for name, agent in fed.agents.items() if name != "a4"]
            for agent in others:
                agent.worker.seconds = 3 * USUAL_S
            fed.until(lambda: fed.entries("round_closed", round=1))
            for agent in others:
                agent.worker.seconds = USUAL_S
            fed.kill("a4")
            fed.until(lambda: fed.entries("round_closed", round=2))
            fed.add("a4", training_s=FACTOR * USUAL_S)
            append = fed.state.journal.append

            def killed(fact, **about):
                if (fact.kind, about.get("round")) == ("round_opened", 5) and is_killed:
                    raise Killed
                return append(fact, **about)

            fed.state.journal.append = killed
            fed.until(lambda: fed.coordinator is None or fed.entries("round_opened", round=5))
            assert (fed.coordinator is None) == is_killed
            if is_killed:
                cohort = fed.config.cohort.model_copy(update={"min_agents": 5})  # it waits until all are back
                fed.config = fed.config.model_copy(update={"cohort": cohort})
                fed.start_coordinator()
            fed.finish(2000)
            closed = [entry.body["times"].get("a4") for entry in fed.entries("round_closed")]
            assert [bool(times and times[2]) for times in closed[:4]] == [True, False, False, True]
            return [entry.body["work"] for entry in fed.entries("round_opened")]

    undisturbed = run(tmp_path / "undisturbed", is_killed=False)
    # The longest of the others' times is 30 s. Late after 40 s counts as 160 s, late after 20 s as 80 s.
    work = [{}, {"a4": 30 / 160}, {}, {}, {"a4": 30 / 80}]
    assert [pytest.approx(shares, rel=0.02) for shares in work] == undisturbed
    assert run(tmp_path / "killed", is_killed=True) == undisturbed


# --- the arithmetic -------------------------------------------------------------------------------------------------


def paced(**times):
    """Agent -> its times, each (seconds, work, late)."""
    pace = Pace()
    for number in range(max(map(len, times.values()))):
        pace.note_closed({agent: past[number] for agent, past in times.items() if number < len(past)})
    return pace


def test_the_expected_time_is_an_upper_quantile_of_the_last_ten_for_all_of_the_work():
    pace = paced(a=[(2, 1, 0), (3, 0.5, 0)], b=[*[(90, 1, 0)] * 2, *[(1, 1, 0)] * 8], c=[(9, 1, 0), *[(1, 1, 0)] * 4])
    assert pace.expected_s("a") == 6
    assert pace.expected_s("a", 0.25) == 1.5
    assert pace.expected_s("b") == 1, "two of ten are above the quantile"
    assert pace.expected_s("c") == 1, "one of five is"
    pace.note_closed({"b": (90, 1, 0)})
    assert pace.expected_s("b") == 1, "the first one is forgotten"
    assert pace.expected_s("d") is None


def test_a_late_agent_is_taken_to_need_four_times_as_long_until_its_time_is_known():
    pace = paced(a=[(1, 1, 0), (20, 1, 1)])
    assert pace.expected_s("a") == 80
    pace.note_closed({"a": (2, 0.1, 0)})
    assert pace.expected_s("a") == 20


def test_the_share_of_a_slow_agent_is_the_usual_time_by_its_own():
    others = {name: [(2, 1, 0)] for name in "abc"}
    # A fifth of the work in a second is all of it in five.
    assert paced(**others, slow=[(1, 0.2, 0)]).work(["a", "b", "c", "slow"]) == {"slow": 0.4}
    assert paced(**others, slow=[(2, 1, 1)]).work(["a", "b", "c", "slow"]) == {"slow": 0.25}, "late: 4 times 2 s"
    assert paced(**others, slow=[(2, 0.5, 0)]).work(["a", "b", "c", "slow"]) == {}
    assert paced(**others, slow=[(10, 0.01, 0)]).work(["a", "b", "c", "slow"]) == {"slow": LEAST_WORK}
    assert paced(**others, slow=[(1000, 1, 0)]).work(["a", "b", "c", "slow"]) == {}, "in time: it does all of its work"
    assert paced(a=[(0.1, 1, 0)], slow=[(0.45, 0.5, 0)]).work(["a", "slow"]) == {}, "less than a second"
    assert Pace().work(["a", "b"]) == {}


def test_grace_and_deadline_follow_the_slowest_that_can_be_expected():
    pace = paced(a=[(10, 1, 0)], b=[(20, 1, 0)], far=[(500, 1, 0)], quick=[(0.1, 1, 0)])
    until = pace.grace_until
    assert until({"a": 100, "b": 100}, {}, 1, 150) == 130
    assert until({"a": 100, "far": 100}, {}, 1, 150) == 115, "not worth waiting for"
    assert until({"far": 100}, {}, 1, 150) == float("-inf")
    assert until({"a": 100, "new": 100}, {}, 1, 150) == 150
    assert until({"b": 100}, {}, 1, 125) == 125
    assert until({"quick": 100}, {}, 1, 150) == pytest.approx(101.1)
    assert pace.deadline({"a": 100, "b": 100}, {}, 1, 10, 700) == 160
    assert pace.deadline({"quick": 100}, {}, 1, 10, 700) == 110
    assert pace.deadline({"a": 100, "new": 100}, {}, 1, 10, 700) == 700
    assert until({"a": 100}, {}, 2, 150) == 130, "today everybody takes twice as long"
    assert pace.deadline({"a": 100}, {}, 2, 10, 700) == 160
    assert pace.deadline({"far": 100}, {}, 1, 10, 700) == 700


def test_the_stretch_of_a_round_is_the_median_of_those_who_delivered():
    pace = paced(a=[(10, 1, 0)], b=[(20, 1, 0)], c=[(5, 1, 0)])
    assert pace.stretch({"a": 30, "b": 40, "c": 5}, {}) == 2
    assert pace.stretch({"a": 5, "b": 5, "c": 5}, {}) == 1
    assert pace.stretch({"a": 30}, {"a": 0.5}) == 6
    assert pace.stretch({"new": 30}, {}) == 1


def test_an_agent_on_a_slow_link_is_waited_for_as_long_as_it_took_whatever_its_share():
    """Less work hardly takes it less time."""
    pace = paced(a=[(10, 1, 0)], slow=[(20, 1, 0)])
    assert pace.grace_until({"a": 100, "slow": 100}, {"slow": 0.5}, 1, 150) == 130
    assert pace.deadline({"slow": 100}, {"slow": 0.5}, 1, 10, 700) == 160


@pytest.mark.parametrize(
    "factor, spread, missed",
    [(GRACE_FACTOR, 0.25, 0.007), (GRACE_FACTOR, 0.5, 0.049), (DEADLINE_FACTOR, 0.5, 0.001)],
)
def test_an_agent_whose_times_vary_as_usual_is_missed_as_seldom_as_the_factors_say(factor, spread, missed):
    """The agent's times are log-normal; what is expected of it is the quantile that the code takes of many of them."""
    expected = spread * NormalDist().inv_cdf(QUANTILE)
    beyond = (expected + math.log(factor)) / spread
    assert 1 - NormalDist().cdf(beyond) == pytest.approx(missed, abs=0.0005)
