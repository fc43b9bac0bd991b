"""Messages that are not about what an agent was asked: of another start of its id, such as doctor's, or other work."""

from __future__ import annotations

import pytest
from federation_harness import Federation

from coordinator.config import RoundConfig
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.messages.fields import new_id


@pytest.fixture
def fed(tmp_path):
    shipped = RoundConfig().model_dump()
    with Federation(tmp_path, agents=(), round=shipped, cohort={"min_agents": 1}, capture=True) as fed:
        yield fed


def say(fed, agent, *messages):
    """What another process under the id of ``agent`` sends."""
    transport = fed.broker.transport()
    transport.start()
    for message in messages:
        topic = fed.topics.heartbeat(agent) if isinstance(message, up.Heartbeat) else fed.topics.up(agent)
        transport.publish(topic, codec.encode(message))
    fed.settle()


def test_heartbeats_of_another_start_leave_an_agent_in_its_round(fed):
    fed.add("a0", seconds=5)
    fed.add("a1", seconds=30)
    fed.settle()
    fed.request(rounds=3)
    fed.wait(10)
    asked = len(fed.messages(fed.topics.down("a1"), down.Who))
    say(fed, "a1", *[up.Heartbeat(boot="deadbeef")] * 5)
    assert len(fed.messages(fed.topics.down("a1"), down.Who)) == asked + 5, "doctor waits for an answer"
    fed.finish()
    assert [entry.body["clients"] for entry in fed.entries("round_closed")] == [2, 2, 2]
    assert [entry.body["left_out"] for entry in fed.entries("round_opened")] == [{}, {}, {}]


@pytest.mark.parametrize(
    "stray",
    [up.Heartbeat(boot="deadbeef"), up.Fault(boot="deadbeef", error="TrainingFailed", message="of another start")],
    ids=["heartbeat", "fault"],
)
def test_words_of_another_start_leave_the_condition_of_an_agent(fed, stray):
    agent = fed.add("a0")
    fed.settle()
    agent.link.send(agent.condition.note("work", ValueError("of this one")).to_coordinator())
    fed.settle()
    member = fed.coordinator.roster.get("a0")
    before = member.fault
    fed.coordinator.handle("a0", "up", codec.encode(stray))
    assert (member.condition, member.fault) == ("fault", before)
    assert before.error == "ValueError"


def test_a_fault_of_the_start_on_the_roster_counts_after_its_lease_ran_out(fed):
    fed.add("a0")
    fed.settle()
    member = fed.coordinator.roster.get("a0")
    fed.coordinator.roster.mark_offline("a0")
    say(fed, "a0", up.Fault(boot=member.boot, error="TrainingFailed", message="diverged"))
    assert member.fault.error == "TrainingFailed"


FAILED = {"error": "TrainingFailed", "message": "diverged"}


def summary(fed):
    return fed.coordinator.state.run(fed.run).summary()


@pytest.mark.parametrize("number", [0, 1, 3, 9], ids=["release", "closed", "last", "beyond"])
def test_a_fault_about_other_work_of_the_run_leaves_the_agent_in_round_and_result(fed, number):
    fed.add("a0", seconds=5)
    late = fed.add("a1", seconds=30)
    fed.settle()
    fed.request(rounds=3)
    fed.until(lambda: len(fed.entries("round_opened")) == 2)
    fed.wait(1)
    late.link.send(up.Fault(**FAILED, run=fed.run_id, round=number))
    fed.settle()
    assert fed.coordinator.roster.get("a1").fault.error == "TrainingFailed", "it is its own last fault"
    fed.finish()
    assert [entry.body["clients"] for entry in fed.entries("round_closed")] == [2, 2, 2]
    assert fed.entries("update_refused") == []
    assert sorted(agent["id"] for agent in summary(fed)["agents"]) == ["a0", "a1"], "its report was waited for"
    assert summary(fed)["faults"] == {}


@pytest.mark.parametrize("case", ["other run", "other agent's order", "old run of that name"])
def test_a_fault_about_an_order_that_was_never_given_changes_nothing_of_the_run(fed, case):
    fed.add("a0", seconds=5)
    fed.add("h0", tier="head")
    fed.settle()
    fed.request(rounds=2)
    fed.until(lambda: fed.entries("round_opened"))
    who, run = ("h0", fed.run_id) if case == "other agent's order" else ("a0", f"run-0001-{new_id()}")
    run = f"run-0007-{new_id()}" if case == "other run" else run
    fed.agents[who].link.send(up.Fault(**FAILED, run=run, round=1))
    fed.settle()
    assert fed.coordinator.roster.get(who).fault.error == "TrainingFailed"
    fed.finish()
    assert [entry.body["clients"] for entry in fed.entries("round_closed")] == [1, 1]
    assert summary(fed)["faults"] == {}
    assert fed.coordinator.loop is None


def test_a_fault_while_reports_are_gathered_counts(fed):
    fed.add("a0")
    broken = fed.add("a1")
    fed.tasks["a1"].before = lambda job: (
        (_ for _ in ()).throw(ValueError("no")) if job.purpose == "personalize" else None
    )
    fed.settle()
    fed.request(rounds=1)
    fed.finish()
    assert list(summary(fed)["faults"]) == ["a1"]
    assert broken.condition.name == "fault"
