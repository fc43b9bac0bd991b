"""Messages under the id of an agent that are not of the start that is on the roster, such as those of doctor."""

from __future__ import annotations

import pytest
from federation_harness import Federation

from coordinator.config import RoundConfig
from edge_agent.wire import messages as wire


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
        topic = fed.topics.heartbeat(agent) if isinstance(message, wire.Heartbeat) else fed.topics.up(agent)
        transport.publish(topic, wire.encode(message))
    fed.settle()


def test_heartbeats_of_another_start_leave_an_agent_in_its_round(fed):
    fed.add("a0", seconds=5)
    fed.add("a1", seconds=30)
    fed.settle()
    fed.request(rounds=3)
    fed.wait(10)
    asked = len(fed.messages(fed.topics.down("a1"), wire.Who))
    say(fed, "a1", *[wire.Heartbeat(boot="deadbeef")] * 5)
    assert len(fed.messages(fed.topics.down("a1"), wire.Who)) == asked + 5, "doctor waits for an answer"
    fed.finish()
    assert [entry.body["clients"] for entry in fed.entries("round_closed")] == [2, 2, 2]
    assert [entry.body["left_out"] for entry in fed.entries("round_opened")] == [{}, {}, {}]


@pytest.mark.parametrize(
    "stray",
    [wire.Heartbeat(boot="deadbeef"), wire.Fault(boot="deadbeef", error="TrainingFailed", message="of another start")],
    ids=["heartbeat", "fault"],
)
def test_words_of_another_start_leave_the_condition_of_an_agent(fed, stray):
    agent = fed.add("a0")
    fed.settle()
    agent._send(agent.condition.note("work", ValueError("of this one")).to_coordinator())
    fed.settle()
    member = fed.coordinator.roster.get("a0")
    before = member.fault
    fed.coordinator.inbox.take("a0", "up", wire.encode(stray))
    assert (member.condition, member.fault) == ("fault", before)
    assert before["error"] == "ValueError"


def test_a_fault_of_the_start_on_the_roster_counts_after_its_lease_ran_out(fed):
    fed.add("a0")
    fed.settle()
    member = fed.coordinator.roster.get("a0")
    fed.coordinator.roster.gone("a0")
    say(fed, "a0", wire.Fault(boot=member.boot, error="TrainingFailed", message="diverged"))
    assert member.fault["error"] == "TrainingFailed"
