"""One agent that fails again and again: it is left out with growing pauses and named, and the run ends well.

With the round settings that are shipped, on a virtual clock; honest agents train for 5 s.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from federation_disturbances import Stranger
from federation_duties import FakeDuties, step_of
from federation_harness import Federation

from coordinator.cli.run import result_parts
from coordinator.config import RoundConfig
from coordinator.journal.entries import RoundOpened, fact_of
from coordinator.rounds.selection import Exclusions
from coordinator.runs.run_summary import RunSummary
from coordinator.views.runs import Accepted, OpenRound, Rejection
from edge_agent.core.errors import TrainingFailed
from edge_agent.wire.messages import up

SHIPPED = RoundConfig().model_dump()


class SpoilingDuties(FakeDuties):
    """Updates that no coordinator may accept."""

    spoils = ""

    def do(self, job, received, encoder=None):
        if self.spoils == "fault" and job.purpose == "train":
            raise TrainingFailed("the loss became nan", is_public=True)
        if self.spoils == "nan":
            received = {name: np.full_like(array, np.nan) for name, array in received.items()}
        if self.spoils == "names":
            received = {f"other.{name}": array for name, array in received.items()}
        return super().do(job, received, encoder)


def fleet(folder, honest, spoils="", **options):
    """Some honest agents, and ``mallory``, who is there as well where it spoils something."""
    fed = Federation(
        folder, agents=(), round=SHIPPED, cohort={"min_agents": 1}, tasks=SpoilingDuties, heartbeat_s=15, **options
    )
    fed.__enter__()
    for number in range(honest):
        fed.add(f"a{number}", seconds=5)
    if spoils:
        fed.add("mallory", seconds=5)
        fed.tasks["mallory"].spoils = spoils
    fed.settle()
    return fed


def asked(fed, agent="mallory"):
    return [entry.round for entry in fed.entries("round_opened") if agent in entry.body["cohort"]]


@pytest.mark.parametrize("honest, spoils", [(1, "nan"), (2, "names"), (3, "nan"), (1, "fault")])
def test_an_agent_whose_updates_are_always_rejected_costs_no_time_and_no_run(tmp_path, honest, spoils):
    """It fails in rounds 1, 3 and 6, so it is left out of 2, of 4 and 5, and of 7 to 10."""
    fed = fleet(tmp_path, honest, spoils)
    fed.request(rounds=10)
    assert fed.finish() < 10 * 6 + 6, "ten rounds and the end, of 5 s each"
    assert fed.record.status == "finished"
    assert asked(fed) == [1, 3, 6]
    names = [f"a{number}" for number in range(honest)]
    assert [line["agents"] for line in fed.metrics()] == [names] * 10
    assert [line["round"] for line in fed.metrics() if line["rejected"]] == [1, 3, 6]
    assert [line["round"] for line in fed.metrics() if line["left_out"]] == [2, 4, 5, 7, 8, 9, 10]
    summary = fed.state.run(fed.run).summary()
    reason = {"nan": "NaN", "names": "other.", "fault": "the loss became nan"}[spoils]
    assert summary["left_out"]["mallory"]["rounds"] == [2, 4, 5, 7, 8, 9, 10]
    assert reason in summary["left_out"]["mallory"]["reason"]
    told = [part for part in result_parts(RunSummary.from_json(summary)) if isinstance(part, str) and reason in part]
    assert len(told) == 1, "the reason is said once"
    assert "mallory" in told[0]
    fed.__exit__()


def test_the_result_is_that_of_the_honest_agents_alone(tmp_path):
    fed = fleet(tmp_path, 2, "nan")
    fed.request(rounds=3)
    fed.until(lambda: fed.record.checkpoint)
    start = fed.final
    fed.finish()
    mean = (step_of("a0") + step_of("a1")) / 2 * (1 + 2 + 3)
    for name, array in fed.final.items():
        np.testing.assert_allclose(array, start[name] + mean, rtol=1e-5)
    fed.__exit__()


def test_the_status_names_who_is_left_out_until_when_and_why(tmp_path):
    fed = fleet(tmp_path, 2, "nan")
    fed.request(rounds=5)
    fed.until(lambda: fed.entries("round_opened", round=2))
    fed.wait(1)
    said = json.loads((fed.config.state / "status.json").read_bytes())
    assert said["run"]["left_out"]["mallory"]["until_round"] == 3
    assert "NaN" in said["run"]["left_out"]["mallory"]["reason"]
    (mallory,) = [agent for agent in said["agents"] if agent["id"] == "mallory"]
    assert mallory["notes"][0].startswith("left out of run-0001 until round 3: ")
    fed.__exit__()


def test_an_agent_that_is_alive_and_never_takes_up_the_work_costs_three_heartbeats_and_then_the_grace(tmp_path):
    """45 s in round 1; in rounds 3 and 6 it is on trial, does not count, and is waited for as long as the grace."""
    fed = fleet(tmp_path, 2)
    mute = Stranger(fed, "mute")
    mute.hello()
    fed.request(rounds=7)
    beats = 0
    while not fed.record.is_over:
        fed.wait(5)
        beats += 1
        if beats % 3 == 0:
            mute.say(up.Heartbeat())
    assert fed.record.status == "finished"
    seconds = [line["seconds"] for line in fed.metrics()]
    assert seconds[0] < 60
    assert max(seconds[2], seconds[5]) < 5 + SHIPPED["grace_s"] + 3
    assert max(seconds[1], seconds[3], seconds[4], seconds[6]) < 8
    assert asked(fed, "mute") == [1, 3, 6]
    assert fed.state.run(fed.run).summary()["left_out"]["mute"]["reason"] == "no update in 3 rounds in a row"
    fed.__exit__()


def test_an_agent_that_works_for_ever_costs_one_deadline_and_then_the_grace(tmp_path):
    fed = fleet(tmp_path, 2)
    fed.add("hung", seconds=1e9)
    fed.settle()
    fed.request(rounds=4)
    fed.finish(3000)
    assert fed.record.status == "finished"
    seconds = [line["seconds"] for line in fed.metrics()]
    assert seconds[0] == pytest.approx(SHIPPED["deadline_s"], abs=3)
    assert seconds[1] < 8
    assert seconds[2] < 5 + SHIPPED["grace_s"] + 3
    assert asked(fed, "hung") == [1, 3]
    assert "no update within 600 s" in fed.entries("round_opened", round=2)[0].body["left_out"]["hung"]
    fed.__exit__()


def test_the_end_of_a_run_does_not_wait_for_an_agent_that_hangs(tmp_path):
    fed = fleet(tmp_path, 2)
    fed.add("hung", seconds=1e9)
    fed.settle()
    fed.request(rounds=2)
    fed.until(lambda: fed.entries("round_closed", round=2))
    assert fed.finish() < 8
    assert [agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]
    fed.__exit__()


def test_a_run_that_is_cancelled_or_fails_names_who_was_left_out(tmp_path):
    fed = fleet(tmp_path, 1, "nan")
    fed.request(rounds=8)
    fed.until(lambda: fed.entries("round_opened", round=5))
    fed.state.journal.append(fact_of("cancel_requested", {"reason": "enough"}), run=fed.run)
    fed.finish()
    summary = fed.state.run(fed.run).summary()
    assert summary["status"] == "cancelled"
    assert summary["left_out"]["mallory"]["rounds"] == [2, 4, 5]
    fed.__exit__()


def test_an_agent_that_a_later_attempt_at_a_round_asks_was_not_left_out_of_it(tmp_path):
    fed = fleet(tmp_path, 1, "nan")
    fed.request(rounds=4)
    fed.until(lambda: fed.entries("round_opened", round=2))
    fed.kill("a0")
    fed.wait(60)
    fed.add("a0", seconds=5)
    fed.finish()
    assert asked(fed)[:2] == [1, 2]
    left_out = fed.state.run(fed.run).summary()["left_out"]["mallory"]["rounds"]
    assert left_out == [3, 4]
    fed.__exit__()


def test_an_agent_that_is_repaired_and_restarted_is_asked_again_at_once(tmp_path):
    fed = fleet(tmp_path, 2, "nan")
    fed.request(rounds=8)
    fed.until(lambda: fed.entries("round_opened", round=7))
    fed.kill("mallory")
    fed.add("mallory", seconds=5)
    fed.finish()
    assert asked(fed) == [1, 3, 6, 8]
    assert fed.metrics()[-1]["agents"] == ["a0", "a1", "mallory"]
    fed.__exit__()


def test_an_agent_that_hung_and_was_restarted_is_asked_again_at_once(tmp_path):
    fed = fleet(tmp_path, 2)
    fed.add("hung", seconds=1e9)
    fed.settle()
    fed.request(rounds=7)
    fed.until(lambda: fed.entries("round_opened", round=4))
    assert asked(fed, "hung") == [1, 3]
    fed.kill("hung")
    fed.add("hung", seconds=5)
    fed.finish()
    assert asked(fed, "hung") == [1, 3, 5, 6, 7]
    fed.__exit__()


def restart_coordinator(fed):
    fed.kill_coordinator()
    fed.start_coordinator()


@pytest.mark.parametrize("restarts", ["the agent alone", "the coordinator before it", "the coordinator after it"])
def test_an_agent_that_is_restarted_while_its_round_waits_is_asked_again(tmp_path, restarts):
    """Two updates are the least. It fails after 5 s and is taken away before the other one has delivered."""
    with Federation(
        tmp_path, agents=(), round=SHIPPED, cohort={"min_agents": 2}, tasks=SpoilingDuties, heartbeat_s=15
    ) as fed:
        fed.add("a0", seconds=10)
        fed.add("mallory", seconds=5)
        fed.tasks["mallory"].spoils = "nan"
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("update_refused"))
        fed.kill("mallory")
        fed.wait(60)
        if restarts == "the coordinator before it":
            restart_coordinator(fed)
            fed.wait(30)
        fed.add("mallory", seconds=5)
        if restarts == "the coordinator after it":
            restart_coordinator(fed)
        assert fed.finish() < 20
        assert fed.metrics()[0]["agents"] == ["a0", "mallory"]


def test_an_agent_that_is_repaired_after_a_restart_of_the_coordinator_is_asked_again_at_once(tmp_path):
    fed = fleet(tmp_path, 2, "nan")
    fed.request(rounds=8)
    fed.until(lambda: fed.entries("round_opened", round=7))
    restart_coordinator(fed)
    fed.settle()
    fed.kill("mallory")
    fed.add("mallory", seconds=5)
    fed.finish()
    assert asked(fed) == [1, 3, 6, 8]
    fed.__exit__()


def test_a_restarted_coordinator_leaves_out_the_same_agents(tmp_path):
    fed = fleet(tmp_path, 2, "nan")
    fed.request(rounds=8)
    for number in (2, 4, 7):
        fed.until(lambda number=number: fed.entries("round_opened", round=number))
        fed.kill_coordinator()
        fed.start_coordinator()
    fed.finish()
    assert asked(fed) == [1, 3, 6]
    assert fed.state.run(fed.run).summary()["left_out"]["mallory"]["rounds"] == [2, 4, 5, 7, 8]
    fed.__exit__()


def test_a_run_in_which_every_agent_fails_ends_with_all_their_reasons(tmp_path):
    fed = fleet(tmp_path, 1, "fault")
    fed.tasks["a0"].spoils = "nan"
    fed.request(rounds=3)
    assert fed.finish() < 20
    assert fed.record.status == "failed"
    reason = fed.record.reason
    assert "every agent that was asked has failed" in reason
    assert "a0: " in reason
    assert "mallory: TrainingFailed: the loss became nan" in reason
    fed.__exit__()


def test_when_only_those_remain_who_fail_the_run_waits_for_the_one_that_has_delivered(tmp_path):
    fed = fleet(tmp_path, 1, "nan")
    fed.request(rounds=3)
    fed.until(lambda: fed.entries("round_opened", round=2))
    fed.kill("a0")
    fed.wait(300)
    assert not fed.record.is_over
    fed.add("a0", seconds=5)
    fed.finish()
    assert fed.record.status == "finished"
    fed.__exit__()


# --- pauses, by hand --------------------------------------------------------------------------------------------------


def closed(number, delivered=(), rejected=(), missing=()):
    updates = {agent: Accepted("00" * 32, 1.0, {}) for agent in delivered}
    cohort = (*delivered, *rejected, *missing)
    return OpenRound(number, 1, cohort, RoundOpened(), updates, dict.fromkeys(rejected, Rejection("not finite")))


def test_pauses_double_up_to_sixteen_rounds_and_one_update_settles_everything():
    book = Exclusions()
    number = 1
    pauses = []
    for _ in range(7):
        book.note_closed(closed(number, rejected=["m"]), {}, {})
        again = next(n for n in range(number + 1, number + 100) if not book.left_out(n))
        pauses.append(again - number - 1)
        number = again
    assert pauses == [1, 2, 4, 8, 16, 16, 16]
    assert book.on_trial == {"m"}
    book.note_closed(closed(number, delivered=["m"]), {}, {})
    assert book.on_trial == frozenset()
    book.note_closed(closed(number + 1, rejected=["m"]), {}, {})
    assert (book.left_out(number + 2), book.left_out(number + 3)) == ({"m": "not finite"}, {})


def test_one_missed_round_is_nothing_and_the_second_in_a_row_is_a_failure():
    book = Exclusions()
    book.note_closed(closed(1, missing=["m"]), {}, {})
    assert book.left_out(2) == {}
    book.note_closed(closed(2, delivered=["m"]), {}, {})
    book.note_closed(closed(3, missing=["m"]), {}, {})
    assert book.left_out(4) == {}
    book.note_closed(closed(4, missing=["m"]), {}, {})
    assert book.left_out(5) == {"m": "no update in 2 rounds in a row"}
