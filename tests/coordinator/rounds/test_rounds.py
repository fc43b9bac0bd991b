"""When a round opens, whom it waits for, and when it closes: on a simulated clock."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from federation_disturbances import Stranger, lose
from federation_duties import TASK, step_of
from federation_harness import Federation

from edge_agent.core.errors import MessageError, TrainingFailed
from edge_agent.wire.blobs.chunks import Outgoing, decode_frame
from edge_agent.wire.messages import codec, fields
from edge_agent.wire.messages import down as down_module
from edge_agent.wire.messages import up as up_module


def opened(fed):
    return [(e.round, e.body["attempt"], e.body["cohort"]) for e in fed.entries("round_opened")]


def test_the_result_is_the_mean_that_a_calculator_gives(tmp_path):
    """Every number moves by step(agent) * round; weights are 10, 20, 30 samples: the mean is known without training."""
    with Federation(tmp_path, agents=(), cohort={"min_agents": 3}) as fed:
        for number, name in enumerate(("a0", "a1", "a2"), 1):
            fed.add(name, samples=10 * number)
        fed.request(rounds=3)
        fed.finish()
        mean = (10 * step_of("a0") + 20 * step_of("a1") + 30 * step_of("a2")) / 60
        start = fresh_weights(fed)
        for name, array in fed.final.items():
            np.testing.assert_allclose(array, start[name] + mean * (1 + 2 + 3), rtol=1e-6)


def fresh_weights(fed, seed=0):
    import torch

    from edge_agent import methods
    from edge_agent.training.parts import to_arrays

    torch.manual_seed(seed)
    model = methods.create("fedavg", {}).build(fed.task)
    return to_arrays(model, model.state_dict())


def test_a_late_joiner_takes_part_from_the_next_round_on(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}) as fed:
        fed.add("a0", seconds=5)
        fed.add("a1", seconds=5)
        fed.request(rounds=3)
        fed.wait(2)
        fed.add("late", seconds=5)
        fed.finish()
        assert [cohort for _, _, cohort in opened(fed)] == [["a0", "a1"], ["a0", "a1", "late"], ["a0", "a1", "late"]]


def test_a_run_waits_until_enough_agents_are_there_and_says_so(tmp_path):
    with Federation(tmp_path, agents=("a0",), cohort={"min_agents": 3}) as fed:
        fed.request(rounds=1)
        fed.wait(5)
        assert opened(fed) == []
        assert "2 more must come" in fed.coordinator.waiting.what
        assert fed.coordinator.waiting.what.endswith("here: a0")
        assert fed.coordinator.waiting.whom == (), "those who are here are not waited for"
        fed.add("a1")
        fed.add("a2")
        fed.finish()
        assert opened(fed) == [(1, 1, ["a0", "a1", "a2"])]


def test_head_tier_agents_are_never_in_a_cohort(tmp_path):
    with Federation(tmp_path, agents=2) as fed:
        fed.add("head", tier="head")
        fed.request()
        fed.finish()
        assert all(cohort == ["a0", "a1"] for _, _, cohort in opened(fed))
        assert fed.tasks["head"].done == []


def test_head_tier_agents_that_live_through_the_end_of_a_run_are_not_asked_to_train(tmp_path):
    """Heartbeats and hellos of a head-tier agent while train agents personalize must not bring it a training job."""
    with Federation(tmp_path, agents=(), heartbeat_s=1.0, cohort={"min_agents": 1}) as fed:
        fed.add("a0", seconds=10)
        fed.add("head", tier="head")
        fed.request(rounds=1)
        fed.until(
            lambda: (
                (loop := fed.coordinator.loop) is not None
                and loop.assignment
                and loop.assignment.spec.purpose == "personalize"
            )
        )
        fed.wait(3)
        fed.agents["head"]._hello()
        fed.finish()
        assert fed.tasks["head"].done == []
        assert fed.state.run(fed.run).summary()["faults"] == {}


def test_a_round_closes_at_quorum_and_grace_without_the_slow_one(tmp_path):
    """Quorum 0.8 of 5 = 4 updates after 1 s, grace 10 s: the round takes 11 s, not the 100 s of the slow one."""
    round_config = {"quorum": 0.8, "grace_s": 10, "deadline_s": 600}
    with Federation(tmp_path, agents=(), round=round_config, cohort={"min_agents": 5}) as fed:
        for name in ("a0", "a1", "a2", "a3"):
            fed.add(name, seconds=1)
        fed.add("slow", seconds=100)
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"))
        (line,) = fed.metrics()
        assert line["seconds"] == pytest.approx(11, abs=1)
        assert line["missing"] == ["slow"]
        assert line["agents"] == ["a0", "a1", "a2", "a3"]


def test_a_round_closes_at_once_when_everybody_has_answered(tmp_path):
    with Federation(tmp_path, agents=3, round={"quorum": 0.5, "grace_s": 100}) as fed:
        fed.request(rounds=4)
        assert fed.finish() < 1


def test_a_vanished_agent_does_not_hold_the_round(tmp_path):
    """Three train for 1 s, one of them dies after 0.5 s: done before 1 + 3 s although grace and deadline are long."""
    round_config = {"quorum": 0.6, "grace_s": 300}
    with Federation(tmp_path, agents=(), round=round_config, cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=1)
        fed.request(rounds=1)
        fed.wait(0.5)
        fed.kill("a1")
        fed.until(lambda: fed.entries("round_closed"))
        (line,) = fed.metrics()
        assert line["seconds"] < 4
        assert line["missing"] == ["a1"]


def test_a_vanished_agent_is_waited_for_when_the_quorum_needs_it(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=1)
        fed.request(rounds=1)
        fed.wait(0.5)
        fed.kill("a1")
        fed.wait(30)
        assert not fed.entries("round_closed")
        assert fed.coordinator.waiting.whom == ("a1",)
        fed.add("a1", seconds=1)
        fed.finish()
        assert opened(fed) == [(1, 1, ["a0", "a1", "a2"])]
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2"]


def test_an_agent_without_a_will_is_lost_by_its_lease(tmp_path):
    """A device whose network is cut says nothing: 45 s of silence, then patience, and the others go on."""
    with Federation(tmp_path, agents=(), round={"quorum": 0.6, "grace_s": 600}, cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=1)
        fed.request(rounds=1)
        fed.wait(0.5)
        fed.kill("a1", will=False)
        took = fed.until(lambda: fed.entries("round_closed"))
        assert 40 < took < 50


def test_a_round_that_nobody_can_do_is_not_tried_again(tmp_path):
    def diverge(job):
        raise TrainingFailed("the loss became nan at lambda 1e30", is_public=True)

    with Federation(tmp_path, agents=2, round={"max_attempts": 3}) as fed:
        for tasks in fed.tasks.values():
            tasks.before = diverge
        fed.request(rounds=2)
        fed.finish()
        assert [(number, attempt) for number, attempt, _ in opened(fed)] == [(1, 1)]
        reason = fed.record.reason
    assert "every agent that was asked has failed: a0, a1: TrainingFailed" in reason
    assert "lambda 1e30" in reason


def test_the_bytes_of_a_run_are_its_own_and_survive_a_kill(tmp_path):
    def moved(fed, run):
        return [(agent["bytes_up"], agent["bytes_down"]) for agent in fed.state.run(run).summary()["agents"]]

    with Federation(tmp_path, agents=2) as fed:
        runs = []
        for seed in range(2):  # equal seeds have equal bytes, which devices need not be sent again
            runs.append(fed.request(rounds=3, seed=seed))
            fed.finish()
        third = fed.request(rounds=3, seed=2)
        fed.until(lambda: fed.entries("round_closed", round=2))
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        first, second, killed = (moved(fed, run) for run in (*runs, third))
        closed = fed.entries("round_closed")
    assert first == second
    assert all(up > 0 and down > 0 for up, down in first)
    assert [up for up, _ in killed] == [up for up, _ in first]
    assert sum(entry.body["traffic"]["a0"][0] for entry in closed) == killed[0][0]


def test_a_round_that_misses_its_quorum_is_opened_again_and_then_the_run_fails_with_the_names(tmp_path):
    round_config = {"quorum": 1.0, "deadline_s": 20, "max_attempts": 2}
    with Federation(tmp_path, agents=2, round=round_config, cohort={"min_agents": 3}) as fed:
        Stranger(fed, "mute").hello()
        fed.request(rounds=1)
        fed.finish()
        assert [(number, attempt) for number, attempt, _ in opened(fed)] == [(1, 1), (1, 2)]
        assert fed.record.status == "failed"
        reason = fed.record.reason
        assert "missed its quorum 2 times" in reason
        assert "mute" in reason
        assert "lower round.quorum" in reason
        assert fed.coordinator.loop is None
        fed.add("a9")
        fed.request(rounds=1)
        fed.wait(1)
        assert fed.coordinator.loop is not None, "the next run goes on"


def test_somebody_new_takes_the_place_of_a_member_that_has_left_and_nobody_trains_twice(tmp_path):
    """Three updates are the least; one of three leaves, and the round waits for whoever comes instead."""
    with Federation(tmp_path, agents=2, round={"deadline_s": 20}, cohort={"min_agents": 3}) as fed:
        mute = Stranger(fed, "mute")
        mute.hello()
        fed.request(rounds=1)
        fed.wait(5)
        mute.say(up_module.Bye())
        fed.add("a2")
        fed.until(lambda: fed.entries("round_closed"))
        assert [cohort for _, _, cohort in opened(fed)] == [["a0", "a1", "mute"], ["a0", "a1", "mute", "a2"]]
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2"]
        assert fed.metrics()[0]["missing"] == ["mute"]
        assert fed.tasks["a0"].done.count((fed.run, 1, "train")) == 1


def test_a_failed_run_takes_back_what_it_asked(tmp_path):
    """Nobody goes on working for a run that has failed."""
    with Federation(tmp_path, agents=(), round={"deadline_s": 5, "max_attempts": 1}, cohort={"min_agents": 1}) as fed:
        agent = fed.add("a0", seconds=1000)
        fed.request(rounds=1)
        fed.finish()
        assert fed.record.status == "failed"
        fed.settle()
        assert agent.jobs.job is None
        assert fed.coordinator.distributor._offers == {}


def test_a_late_update_is_refused_as_late_and_counted(tmp_path):
    round_config = {"quorum": 0.6, "grace_s": 1}
    with Federation(tmp_path, agents=(), round=round_config, cohort={"min_agents": 3}) as fed:
        fed.add("a0", seconds=1)
        fed.add("a1", seconds=1)
        late = Stranger(fed, "late")
        late.hello()
        fed.request(rounds=3)
        fed.until(lambda: len(fed.entries("round_closed")) == 1)
        fed.settle()
        receipt = late.deliver(fed.final, round=1)
        assert not receipt.accepted
        assert receipt.reason.startswith("late: the update is for round 1")
        fed.finish()
        assert [line["late"] for line in fed.metrics()] == [[], [{"agent": "late", "round": 1}], []]
        (entry,) = [e for e in fed.entries("update_refused") if e.body["reason"].startswith("late")]
        assert (entry.agent, entry.round) == ("late", 1)
        assert all("late" not in line["agents"] for line in fed.metrics())


def test_the_same_update_twice_counts_once_and_is_receipted_twice(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}, capture=True) as fed:
        fed.add("a0", seconds=5)
        twin = Stranger(fed, "twin")
        twin.hello()
        fed.request(rounds=1)
        fed.wait(1)
        start = fed.final
        assert twin.deliver(start).accepted
        frames = len(fed.published(fed.topics.up_chunks("twin")))
        assert twin.deliver(start).accepted
        assert len(fed.published(fed.topics.up_chunks("twin"))) == frames, "nothing was asked for again"
        fed.until(lambda: fed.entries("round_closed"))
        assert len(fed.entries("update_accepted", agent="twin")) == 1


def test_a_second_different_update_of_one_agent_is_refused(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}) as fed:
        fed.add("a0", seconds=5)
        twin = Stranger(fed, "twin")
        twin.hello()
        fed.request(rounds=1)
        fed.wait(1)
        start = fed.final
        assert twin.deliver(start).accepted
        receipt = twin.deliver({name: array + 1 for name, array in start.items()})
        assert not receipt.accepted
        assert "already accepted" in receipt.reason
        fed.until(lambda: fed.entries("round_closed"))
        assert len(fed.entries("update_accepted", agent="twin")) == 1


def test_a_report_that_was_lost_is_asked_for_again(tmp_path):
    """The end of a run must not cost its whole deadline because one message was lost."""
    with Federation(tmp_path, agents=2, heartbeat_s=5) as fed:
        fed.request(rounds=1)
        lost = lose(fed.agents["a1"].transport, lambda message: isinstance(message, up_module.Report))
        assert fed.finish() < 15
        assert len(lost) == 1
        assert [a["id"] for a in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]


def test_a_finish_job_that_was_lost_is_sent_again(tmp_path):
    with Federation(tmp_path, agents=2, heartbeat_s=5) as fed:
        fed.request(rounds=1)
        lost = lose(fed.coordinator.transport, lambda m: isinstance(m, down_module.Job) and m.purpose == "personalize")
        assert fed.finish() < 15
        assert len(lost) == 1
        assert [a["id"] for a in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]


def test_an_agent_that_is_gone_at_the_end_does_not_hold_the_run(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}) as fed:
        fed.add("a0")
        fed.add("a1", seconds=50)
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"))
        fed.kill("a1")
        assert fed.finish() < 4
        assert [a["id"] for a in fed.state.run(fed.run).summary()["agents"]] == ["a0"]


def test_a_device_that_lost_its_network_for_a_moment_is_not_given_up(tmp_path):
    """Gone for 1 s of the 2 s of patience."""
    with Federation(tmp_path, agents=(), round={"quorum": 0.6, "grace_s": 300}, cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1"):
            fed.add(name, seconds=1)
        agent = fed.add("a2", seconds=3)
        fed.request(rounds=1)
        fed.wait(2)
        agent.transport.cut()
        fed.wait(1)
        agent.transport.start()
        fed.until(lambda: fed.entries("round_closed"))
        assert fed.metrics()[0]["missing"] == []


def test_a_fault_is_not_waited_for_and_its_reason_is_kept(tmp_path):
    def broken(job):
        raise ValueError("the camera is unplugged")

    with Federation(tmp_path, agents=3, round={"quorum": 0.6, "grace_s": 300}) as fed:
        fed.tasks["a1"].before = broken
        fed.request(rounds=1)
        assert fed.until(lambda: fed.entries("round_closed")) < 1
        assert fed.metrics()[0]["rejected"] == [{"agent": "a1", "reason": "ValueError: an unexpected error"}]


def test_work_that_fails_while_the_agent_is_asked_again_fails_once(tmp_path):
    """A repeated job during the work must not make the agent try again behind the coordinator's back."""
    tries = []

    def broken(job):
        tries.append(job.purpose)
        raise ValueError("no")

    with Federation(tmp_path, agents=(), round={"quorum": 0.5}, cohort={"min_agents": 2}) as fed:
        fed.add("a0")
        agent = fed.add("a1", seconds=5)
        fed.tasks["a1"].before = broken
        fed.request(rounds=1)
        fed.wait(1)
        agent._hello()
        fed.wait(12)
        assert tries.count("train") == 1


def test_a_round_is_timed_from_the_sending_of_work_and_the_waiting_is_told_apart(tmp_path):
    """Alone for 40 s, then two agents that train for 5 s: a round of 5 s after 40 s of waiting."""
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}) as fed:
        fed.add("a0", seconds=5)
        fed.request(rounds=2)
        fed.wait(40)
        fed.add("a1", seconds=5)
        fed.finish()
        first, second = fed.metrics()
        assert first["seconds"] == pytest.approx(5, abs=1)
        assert first["waiting_s"] == pytest.approx(40, abs=1)
        assert second["waiting_s"] == 0
        assert second["seconds"] == pytest.approx(5, abs=1)


def test_the_waits_between_attempts_are_no_part_of_the_round(tmp_path):
    """Work for 10 s until the deadline, nobody for 30 s, then 5 s of work: 15 s of round, 30 s of waiting."""
    limits = {"quorum": 1.0, "deadline_s": 10}
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}, round=limits) as fed:
        fed.add("a0", seconds=1000)
        fed.request(rounds=1)
        fed.wait(1)
        fed.kill("a0", will=False)
        fed.wait(8.5)
        fed.coordinator.roster.mark_offline("a0")
        fed.wait(30.5)
        fed.add("a1", seconds=5)
        fed.finish()
        (line,) = fed.metrics()
        assert line["seconds"] == pytest.approx(15, abs=1)
        assert line["waiting_s"] == pytest.approx(30, abs=1)


@pytest.mark.parametrize("classes", [3_000, 10_000])
def test_a_task_of_thousands_of_classes_travels_as_a_blob_once(tmp_path, classes):
    """In a message it would be 10 times too long, and go out with each round to each agent."""
    names = tuple(f"a class with a long name, number {number}" for number in range(classes))
    task = TASK.model_copy(update={"class_names": names})
    with Federation(tmp_path, task=task, capture=True) as fed:
        heard = []
        for tasks in fed.tasks.values():
            tasks.before = heard.append
        fed.request(rounds=3)
        fed.finish()
        assert len(heard) == 3 * 3 + 3
        assert all(job.task == task for job in heard)
        text = task.model_dump_json().encode()
        assert len(text) > 2 * fields.MAX_MESSAGE_BYTES
        sent = fed.published(fed.topics.broadcast(hashlib.sha256(text).hexdigest()))
        assert b"".join(bytes(decode_frame(payload).data) for payload in sent) == text, "each piece once"


def test_a_blob_that_is_no_task_is_a_fault_and_not_an_end(tmp_path):
    with Federation(tmp_path, agents=("a0",), cohort={"min_agents": 1}, capture=True) as fed:
        fed.settle()
        false = Outgoing.of(b'{"class_names": "' + b"x" * 50_000 + b'"}')
        job = down_module.Job(
            run="run-0666", round=1, rounds=1, seed=0, method="fedavg", given=false.ref, blobs=(), deadline_s=99
        )
        fed.coordinator.distributor.offer(false, ("a0",))
        fed.broker.route(fed.topics.down("a0"), fed.order(job))
        fed.wait(2)
        (fault, *_) = fed.messages(fed.topics.up("a0"), up_module.Fault)
        assert "the blob of the task holds no valid task" in fault.message
        with pytest.raises(MessageError, match="at most 8388608 are read"):
            codec.parse_from_coordinator(
                codec.encode(job).replace(b'"size_bytes":50019', b'"size_bytes":8388609').partition(b',"crc"')[0] + b"}"
            )
