"""Runs that are cancelled: queued or under way, with a coordinator at work or without one."""

from __future__ import annotations

import json

import pytest
from federation_disturbances import lose
from federation_harness import Federation

from coordinator.journal.entries import fact_of
from coordinator.report import write_report
from coordinator.runs.cancel import cancel_run
from coordinator.state.timeline import Timeline
from coordinator.views.runs import replay
from edge_agent.core.errors import UnknownName, UsageError
from edge_agent.wire.messages import down


def status_of(fed, run):
    return replay(fed.state.journal, run).status


def summary_of(fed, run):
    return json.loads(fed.state.run(run).summary_path.read_bytes())


def cancel(fed, run, looks=20):
    """As the command does it beside a coordinator at work, which goes on between two of its looks."""

    def wait():
        fed.settle()
        fed.clock.now += 0.3

    return cancel_run(fed.state, run, wait, looks, "'headwater cancel'")


def test_a_queued_run_is_cancelled_while_the_one_before_it_goes_on(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}) as fed:
        fed.add("a0", seconds=50)
        first = fed.request(rounds=1)
        second = fed.request(rounds=1)
        fed.wait(1)
        assert cancel(fed, second).status == "cancelled"
        assert status_of(fed, first) == "running"
        assert summary_of(fed, second)["status"] == "cancelled"
        fed.run = first
        fed._looked_at = -1
        fed.finish()
        assert fed.record.status == "finished"
        assert not fed.state.journal.entries(second, ("run_started",))


def test_a_run_under_way_ends_its_agents_are_told_and_the_next_run_begins(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}, capture=True) as fed:
        fed.add("a0", seconds=1)
        fed.add("slow", seconds=1000)
        first = fed.request(rounds=3)
        first_id = fed.run_id
        fed.wait(5)
        second = fed.request(rounds=1)
        assert cancel(fed, first).status == "cancelled"
        cancels = fed.messages(fed.topics.down("slow"), down.Cancel)
        assert [(message.run, message.round) for message in cancels] == [(first_id, 1)]
        assert fed.agents["slow"].jobs.job is None or fed.agents["slow"].jobs.job.run == fed.run_id
        assert summary_of(fed, first)["status"] == "cancelled"
        fed.wait(2)
        assert fed.coordinator.status()["run"]["id"] == second
        assert fed.entries("round_opened"), "the second run has begun"
        kinds = [entry.kind for entry in fed.state.journal.entries(first)]
        assert kinds[-2:] == ["cancel_requested", "run_cancelled"]
        levels = {event.kind: event.level for event in Timeline(fed.state, first).read_new()}
        assert (levels["cancel_requested"], levels["run_cancelled"]) == ("info", "warning"), "a wish is no error"


def test_the_rounds_that_were_closed_before_a_cancel_keep_their_figures(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}) as fed:
        fed.add("a0", seconds=10)
        run = fed.request(rounds=9)
        fed.until(lambda: len(fed.entries("round_closed")) == 2)
        record = cancel(fed, run)
        assert (record.status, record.round) == ("cancelled", 2)
        assert [line["round"] for line in fed.metrics()] == [1, 2]
        page = write_report(fed.state.run(run), record).read_text()
        assert "This run has not finished: round 2 of 9 is closed." in page
        assert "headwater cancel" in page


def test_a_run_is_cancelled_at_once_where_no_coordinator_is_at_work(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.add("a0", seconds=50)
        run = fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_opened"))
        fed.kill_coordinator()
        waits = []
        with fed.state.look():
            assert cancel_run(fed.state, run, lambda: waits.append(1), 5, "by a test").status == "cancelled"
            assert not fed.state.journal.entries(run, ("cancel_requested",))
        assert waits == []
        assert summary_of(fed, run)["status"] == "cancelled"
        fed.start_coordinator()
        fed.wait(5)
        assert fed.coordinator.loop is None


def test_a_request_that_nobody_read_before_the_coordinator_died_is_heeded_by_the_next(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.add("a0", seconds=50)
        run = fed.request(rounds=3)
        fed.until(lambda: fed.entries("round_opened"))
        fed.state.journal.append(fact_of("cancel_requested", {"reason": "x"}), run=run)
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.wait(1)
        assert status_of(fed, run) == "cancelled"
        assert fed.coordinator.loop is None


def test_a_cancel_that_has_to_wait_stays_a_request(tmp_path):
    with Federation(tmp_path, agents=0) as fed:
        run = fed.request(rounds=1)
        assert cancel_run(fed.state, run, lambda: None, 3, "by a test").status == "requested"
        fed.wait(1)
        assert status_of(fed, run) == "cancelled"


def test_what_cannot_be_cancelled_is_a_clear_mistake(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        run = fed.request(rounds=1)
        fed.finish()
        with pytest.raises(UsageError, match="run-0001 is finished already"):
            cancel(fed, run)
        with pytest.raises(UnknownName, match="did you mean 'run-0001'"):
            cancel(fed, "run-0002")
        assert not fed.state.journal.entries(kinds=("cancel_requested",))


def test_a_lost_word_to_an_agent_does_not_keep_it_from_the_next_run(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}, heartbeat_s=5) as fed:
        fed.add("a0", seconds=8)
        first = fed.request(rounds=2)
        fed.wait(1)
        lost = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Cancel))
        cancel(fed, first)
        assert len(lost) == 1
        fed.request(rounds=1)
        fed.finish()
        assert fed.record.status == "finished"
