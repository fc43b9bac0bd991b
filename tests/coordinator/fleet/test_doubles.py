"""Two agents with one id: the later one is refused, and a restarted agent never is."""

from __future__ import annotations

import pytest
from federation_disturbances import restart_broker
from federation_harness import Federation, vanish

from edge_agent.core.errors import DuplicateId
from edge_agent.wire.messages import down, up


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=("porch",), cohort={"min_agents": 1}, capture=True) as federation:
        federation.settle()
        yield federation


def twin(fed, name="porch"):
    """A second agent with the id of one that lives; returns the first."""
    first = fed.agents.pop(name)
    fed.agents["first"] = first
    fed.folder = fed.folder / "elsewhere"
    fed.add(name)
    return first


def test_the_second_of_two_agents_with_one_id_is_refused_and_the_first_goes_on(fed, caplog):
    first = twin(fed)
    fed.wait(5)
    second = fed.agents["porch"]
    with pytest.raises(DuplicateId, match=r"the id 'porch' is in use: .* both answered .* another id") as told:
        second.raise_if_rejected()
    assert second.boot in str(told.value)
    assert first.boot in str(told.value)
    assert told.value.exit_code == 2
    first.raise_if_rejected()
    assert fed.coordinator.roster.get("porch").boot == first.boot
    assert f"duplicate_id agent=porch has={first.boot} rejected={second.boot}" in caplog.text
    assert "another agent with the id 'porch' was rejected" in caplog.text, "the first is warned, too"


def test_the_status_says_that_there_were_two(fed):
    first = twin(fed)
    fed.wait(5)
    second = fed.agents.pop("porch")
    second.close()
    fed.wait(5)
    (agent,) = fed.coordinator.status()["agents"]
    (note,) = agent["notes"]
    assert second.boot in note
    assert agent["present"], "the goodbye of the second is not that of the first"
    assert fed.coordinator.roster.get("porch").boot == first.boot


def test_the_second_one_stays_out_however_often_it_starts(fed):
    first = twin(fed)
    for _ in range(3):
        fed.wait(5)
        assert fed.agents["porch"].rejected is not None
        fed.agents.pop("porch").close()
        fed.add("porch")
    assert fed.coordinator.roster.get("porch").boot == first.boot


def test_after_a_restart_of_the_coordinator_there_is_still_only_one(fed):
    first = twin(fed)
    fed.kill_coordinator()
    fed.start_coordinator()
    fed.wait(5)
    assert sum(agent.rejected is not None for agent in (first, fed.agents["porch"])) == 1


@pytest.mark.parametrize("end", ["killed", "stopped", "without a will", "asleep and back"])
def test_a_restarted_agent_is_not_refused(fed, end):
    if end == "stopped":
        fed.agents.pop("porch").close()
    elif end != "asleep and back":
        fed.kill("porch", will=end == "killed")
    if end == "asleep and back":
        filters = list(fed.agents["porch"].transport._filters)
        vanish(fed.agents["porch"].transport)
        fed.wait(120)
        fed.agents["porch"].transport._filters = filters
        fed.agents["porch"].transport.start()
    else:
        fed.add("porch")
    agent = fed.agents["porch"]
    assert fed.until(lambda: agent.welcomed) <= 4.5
    fed.wait(60)
    assert agent.rejected is None
    assert fed.coordinator.roster.get("porch").boot == agent.boot
    assert fed.coordinator.roster.get("porch").notes == {}


def test_an_agent_that_restarts_again_while_it_is_asked_about_is_let_in(fed):
    for _ in range(4):
        fed.kill("porch", will=False)
        fed.add("porch")
        fed.wait(1)
    assert fed.until(lambda: fed.agents["porch"].welcomed) <= 4.5
    assert fed.agents["porch"].rejected is None


def test_a_broken_broker_makes_no_doubles(fed):
    for _ in range(5):
        restart_broker(fed)
        fed.wait(3)
    assert fed.agents["porch"].rejected is None
    assert fed.coordinator.status()["agents"][0]["notes"] == []


def test_a_question_is_answered_with_its_own_words(fed):
    fed.broker.route(fed.topics.down("porch"), fed.order(down.Who(question="q7")))
    fed.settle()
    assert fed.messages(fed.topics.up("porch"), up.Hello)[-1].answers == "q7"


def test_work_goes_on_while_a_second_one_is_being_refused(fed):
    fed.request(rounds=3)
    fed.until(lambda: fed.entries("round_closed"))
    first = twin(fed)
    fed.agents["first"] = first
    fed.finish()
    assert fed.record.status == "finished"
