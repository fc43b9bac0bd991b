"""Members of a round that fail are replaced by agents that were not asked, and a killed coordinator does the same.

With the round settings that are shipped, on a virtual clock; each agent trains for 5 s, three of six are asked.
"""

from __future__ import annotations

import pytest
from federation_disturbances import Stranger
from federation_duties import FakeDuties
from federation_harness import Federation

from coordinator.config import RoundConfig
from edge_agent.core.errors import TrainingFailed

TRAINING_S = 5.0
SHIPPED = RoundConfig().model_dump()


class FailingDuties(FakeDuties):
    """Training that fails in round 1 on the agents in ``failing``."""

    failing: tuple[str, ...] = ()

    def do(self, job, received, encoder=None):
        if job.purpose == "train" and job.round == 1 and self.config.id in self.failing:
            raise TrainingFailed("the loss became nan")
        return super().do(job, received, encoder)


def fleet(folder, size=6, **cohort):
    cohort = {"min_agents": 1, "max_agents": 3, **cohort}
    return Federation(folder, agents=(), round=SHIPPED, cohort=cohort, tasks=FailingDuties)


def begin(fed, size=6, rounds=1):
    """Request a run, and return the cohort of its first round."""
    for number in range(size):
        fed.add(f"a{number}", seconds=TRAINING_S)
    fed.settle()
    fed.request(rounds=rounds)
    fed.until(lambda: fed.entries("round_opened"))
    return fed.entries("round_opened")[0].body["cohort"]


def fail(fed, *agents):
    for name in agents:
        fed.tasks[name].failing = agents


def trained(fed):
    return sorted(name for name, tasks in fed.tasks.items() if (fed.run, 1, "train") in tasks.done)


@pytest.mark.parametrize("how", ["fault", "killed"])
def test_a_member_that_fails_is_replaced_by_an_agent_that_was_not_asked(tmp_path, how):
    with fleet(tmp_path) as fed:
        first, failed, *others = begin(fed)
        if how == "fault":
            fail(fed, failed)
        else:
            fed.wait(1)
            fed.kill(failed)
        fed.finish()
        (line,) = fed.metrics()
        (new,) = line["added"]
        assert new not in {first, failed, *others}
        assert line["agents"] == sorted([first, new, *others]), "as many updates as without the failure"
        assert trained(fed) == line["agents"], "the others trained once, and nobody else was asked"
        assert line["seconds"] < 2 * TRAINING_S + 3


def test_a_late_update_is_in_the_figures_of_a_round_in_which_a_member_is_replaced(tmp_path):
    """``slow`` is asked in round 1, and offers its update when round 2 is open."""
    with fleet(tmp_path) as fed:
        for name in ("a0", "a1"):
            fed.add(name, seconds=TRAINING_S)
        slow = Stranger(fed, "slow")
        slow.hello()
        fed.settle()
        fed.request(rounds=2)
        fed.until(lambda: fed.entries("round_opened"))
        for name in ("a2", "a3", "a4", "a5"):
            fed.add(name, seconds=TRAINING_S)
        fed.until(lambda: fed.entries("round_opened", round=2))
        slow.offer(fed.final)
        fed.settle()
        fed.kill(next(name for name in fed.entries("round_opened", round=2)[0].body["cohort"] if name != "slow"))
        fed.finish()
        first, second = fed.metrics()
        assert (first["late"], second["late"]) == ([], [{"agent": "slow", "round": 1}])
        assert len(second["added"]) == 1


def test_two_of_three_that_fail_are_replaced_one_after_another(tmp_path):
    with fleet(tmp_path) as fed:
        _, *failed = begin(fed)
        fed.wait(1)
        fed.kill(failed[0])
        fail(fed, failed[1])
        fed.finish()
        (line,) = fed.metrics()
        assert (len(line["agents"]), len(line["added"])) == (3, 2)
        assert [entry.body["cohort"][:3] for entry in fed.entries("round_opened")] == [[_, *failed]] * 3


def test_a_round_with_nobody_left_to_ask_closes_with_those_that_it_has(tmp_path):
    with fleet(tmp_path, size=3) as fed:
        first, failed, other = begin(fed, size=3)
        fail(fed, failed)
        fed.finish()
        (line,) = fed.metrics()
        assert (line["agents"], line["added"]) == ([first, other], [])
        assert line["seconds"] < TRAINING_S + 1


def test_nobody_is_asked_in_addition_where_over_selection_covers_the_failure(tmp_path):
    """Four are asked, three are wanted, one fails."""
    with fleet(tmp_path, over_selection=1.3) as fed:
        cohort = begin(fed)
        assert len(cohort) == 4
        fail(fed, cohort[0])
        fed.finish()
        (line,) = fed.metrics()
        assert (line["agents"], line["added"]) == (cohort[1:], [])


def test_a_failure_after_the_quorum_adds_nobody(tmp_path):
    """Four of five have delivered, which is the quorum, when the fifth fails."""
    with fleet(tmp_path, max_agents=5) as fed:
        for number in range(8):
            fed.add(f"a{number}", seconds=TRAINING_S)
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_opened"))
        slow = fed.entries("round_opened")[0].body["cohort"][2]
        fed.kill(slow)
        fed.add(slow, seconds=TRAINING_S + 2)
        fail(fed, slow)
        fed.finish()
        (line,) = fed.metrics()
        assert (len(line["agents"]), [one["agent"] for one in line["rejected"]], line["added"]) == (4, [slow], [])


@pytest.mark.parametrize("entries", [1, 2, 3, 4])
def test_a_coordinator_killed_around_a_replacement_ends_in_the_same_bits(tmp_path, entries):
    """``entries`` of journal lines after the round was opened: update, refusal, second attempt, update."""

    def run(folder, killed_after):
        with fleet(folder) as fed:
            _, failed, _ = begin(fed, rounds=2)
            fail(fed, failed)
            if killed_after:
                opened = fed.entries("round_opened")[0].id
                fed.until(lambda: fed.state.journal.last_id() >= opened + killed_after)
                fed.kill_coordinator()
                fed.start_coordinator()
            fed.finish()
            return fed.encoder_sha256, [(line["agents"], line["added"]) for line in fed.metrics()]

    assert run(tmp_path / "killed", entries) == run(tmp_path / "undisturbed", 0)
