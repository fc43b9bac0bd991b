"""The coordinator as a service: what it says of itself, and troubles that must not end it."""

from __future__ import annotations

import errno
import json
import os

import pytest
from federation_disturbances import Stranger
from federation_duties import WIDE_TASK
from federation_harness import Federation

from coordinator.rounds.context import Waiting
from coordinator.service.status import StatusWriter
from coordinator.state.status_file import Status
from edge_agent.wire.messages import down, up
from edge_agent.wire.transport import Connected, LeftBroker, Subscribed


def status_file(fed):
    return json.loads((fed.config.state / "status.json").read_bytes())


def test_the_status_says_what_is_waited_for_whom_and_until_when(tmp_path):
    with Federation(tmp_path, agents=(), round={"deadline_s": 100}, cohort={"min_agents": 2}) as fed:
        fed.wait(2)
        assert status_file(fed)["waiting"]["for"] == "no run is queued; start one with 'headwater run'"
        assert status_file(fed)["waiting"]["idle"] is True
        fed.add("a0", seconds=1)
        fed.add("slow", seconds=50)
        fed.request(rounds=1)
        fed.wait(10)
        found = status_file(fed)
        assert found["run"]["accepted"] == ["a0"]
        assert found["waiting"]["whom"] == ["slow"]
        assert found["waiting"]["for"] == "round 1: 1 of 2 updates are here"
        assert found["waiting"]["seconds_left"] == pytest.approx(90, abs=3)
        assert {agent["id"]: agent["present"] for agent in found["agents"]} == {"a0": True, "slow": True}


def test_runs_are_done_one_after_the_other_in_the_order_in_which_they_were_asked_for(tmp_path):
    with Federation(tmp_path) as fed:
        runs = [fed.request(rounds=1, seed=seed) for seed in range(3)]
        fed.finish()
        finished = [entry.run for entry in fed.state.journal.entries(kinds=("run_finished",))]
        assert finished == runs


def test_each_start_has_a_higher_epoch(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        epochs = [fed.agents["a0"].membership.epoch]
        for _ in range(3):
            fed.kill_coordinator()
            fed.start_coordinator()
            fed.settle()
            epochs.append(fed.agents["a0"].membership.epoch)
        assert epochs == sorted(set(epochs))


def test_what_agents_sent_before_a_restart_is_counted_after_it(tmp_path):
    def moved():
        return {agent["id"]: (agent["bytes_up"], agent["bytes_down"]) for agent in fed.coordinator.status()["agents"]}

    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        fed.finish()
        before = moved()
        assert all(up_bytes > 0 and down_bytes > 0 for up_bytes, down_bytes in before.values())
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.settle()
        assert moved() == before
        fed.request(rounds=1)
        fed.finish()
        assert all(moved()[agent][0] > up_bytes for agent, (up_bytes, _) in before.items())
        first, second = (entry.fact.bytes_up for entry in fed.state.journal.entries(kinds=("round_closed",)))
        assert first == second, "a round counts its own bytes alone"


def test_an_agent_that_the_coordinator_does_not_know_is_asked_who_it_is(tmp_path):
    with Federation(tmp_path, agents=0) as fed:
        stranger = Stranger(fed, "a7")
        stranger.say(up.Heartbeat())
        fed.settle()
        assert stranger.heard(down.Who)
        stranger.hello()
        stranger.say(up.Heartbeat())
        fed.settle()
        assert not stranger.heard(down.Who)


def test_a_goodbye_takes_an_agent_off_the_list_at_once(tmp_path):
    with Federation(tmp_path, agents=2) as fed:
        fed.settle()
        fed.agents["a0"].close()
        fed.settle()
        assert fed.coordinator.roster.present() == ["a1"]


def test_a_full_disk_costs_the_chunk_and_not_the_process(tmp_path, monkeypatch):
    """Writes fail while the update comes in; when there is space again it comes in after all."""
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}) as fed:
        agent = Stranger(fed, "a0")
        agent.hello()
        fed.request(rounds=1)
        fed.settle()
        blob = agent.offer(fed.final)
        fed.settle()
        real = os.pwrite

        def full(*arguments):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        agent.send(blob)
        fed.settle()
        assert fed.coordinator.rejected.counts
        assert {key.rpartition(" ")[2] for key in fed.coordinator.rejected.counts} <= {"OSError", "ChunkError"}
        assert not [r for r in agent.heard(down.Receipt) if r.accepted]
        monkeypatch.setattr(os, "pwrite", real)
        fed.clock.now += 2
        assert agent.deliver(fed.final).accepted


def test_a_status_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch):
    from coordinator.service import status

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(status, "write_atomic", full)
    with Federation(tmp_path) as fed:
        fed.request(rounds=1)
        fed.finish()
        assert fed.record.status == "finished"


def test_a_mistake_of_ours_in_handling_one_message_does_not_end_the_service(tmp_path, monkeypatch, caplog):
    with Federation(tmp_path) as fed:

        def broken(*arguments):
            raise ZeroDivisionError

        monkeypatch.setitem(fed.coordinator._handlers, up.Progress, broken)
        Stranger(fed, "x").say(up.Progress(digest="0" * 64, missing=((0, 1),)))
        fed.settle()
        assert fed.coordinator.rejected.counts == {"x: ZeroDivisionError": 1}
        assert "message_broke" in caplog.text
        fed.request(rounds=1)
        fed.finish()
        assert fed.record.status == "finished"


def test_a_broker_that_is_away_is_what_is_waited_for(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.coordinator.broker_url = "mqtt://hub:1883"
        fed.request(rounds=1)
        fed.wait(1)
        fed.coordinator.transport.cut()
        fed.wait(1)
        said = status_file(fed)
        assert said["broker_away"] is True
        assert said["waiting"]["for"] == (
            "the broker at mqtt://hub:1883 cannot be reached (cut by the test); trying again until it can"
        )
        fed.coordinator.transport.start()
        fed.wait(1)
        said = status_file(fed)
        assert (said["broker_away"], said["waiting"]["for"].partition(",")[0]) == (False, "round 1 needs 1 train agent")


def test_the_status_names_the_broker_of_a_list_and_why_another_one_was_left(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.coordinator.broker_url = "mqtts://a, mqtts://b"
        left = (LeftBroker("mqtts://a", "it has not answered for 3.5 s"),)
        fed.coordinator.transport._events.put(Connected(2, "mqtts://b", left))
        fed.wait(1)
        status = status_file(fed)
        assert status["broker"] == status["broker_connection"]["url"] == "mqtts://b"
        shown = Status(status).broker_connection
        assert shown.startswith("mqtts://b since 2")
        assert shown.endswith(" UTC; not mqtts://a: it has not answered for 3.5 s")
        fed.coordinator.transport.cut()
        fed.wait(1)
        status = status_file(fed)
        assert (status["broker"], status["broker_connection"]) == ("mqtts://a, mqtts://b", None)
        assert Status(status).broker_connection is None


def test_filters_that_a_broker_grants_late_do_not_unsay_what_it_has_granted_before(tmp_path, caplog):
    """NATS refuses some filters while its cluster elects a leader, and grants them when they are asked for again."""

    def warnings_after(*events):
        caplog.clear()
        for event in events:
            fed.coordinator.transport._events.put(event)
            fed.wait(1)
        return caplog.text.count("coordinators_unheard")

    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        assert warnings_after(Subscribed((fed.topics.presence("+"),))) == 0, "it is about other filters"
        assert warnings_after(Connected(2), Subscribed(())) == 1
        asked_at = fed.coordinator.peers._queried_at
        assert warnings_after(Subscribed(()), Subscribed((fed.topics.coordinators,))) == 0
        assert fed.coordinator.peers._queried_at > asked_at, "it asks for others once it can hear them"


def test_an_agent_that_comes_back_is_told_from_one_that_is_new(tmp_path, caplog):
    caplog.set_level("INFO")
    with Federation(tmp_path, agents=1, heartbeat_s=5) as fed:
        fed.settle()
        assert "agent_joined agent=a0" in caplog.text
        assert "agent_back" not in caplog.text
        fed.kill("a0")
        fed.settle()
        fed.add("a0")
        fed.settle()
        assert caplog.text.count("agent_back agent=a0") == 1
        assert caplog.text.count("agent_joined agent=a0") == 1


def test_a_round_of_many_agents_takes_few_lines_of_the_log(tmp_path, caplog):
    """Each update is told at DEBUG; at INFO a round is opened, waited for and closed: three lines, not one each."""
    caplog.set_level("DEBUG", logger="coordinator")
    with Federation(tmp_path, agents=(), cohort={"min_agents": 12}) as fed:
        for number in range(12):
            fed.add(f"a{number:02}", seconds=1 + number)
        fed.settle()
        caplog.clear()
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"))
        records = [r for r in caplog.records if r.name.startswith("coordinator")]
        updates = [r.levelname for r in records if "updates are here" in r.message]
        assert updates[0] == "INFO"
        assert updates[1:] == ["DEBUG"] * 11
        assert [r.message.split()[0] for r in records if r.levelname == "INFO" and "round" in r.message.split()[0]] == [
            "round_opened",
            "round_closed",
        ]
        assert all("and 2 more" in r.message for r in records if ": 0 of 12" in r.message)


def test_many_changes_in_a_moment_are_one_status_file_and_the_last_one_is_in_it(tmp_path):
    now = [0.0]
    path = tmp_path / "status.json"
    writer = StatusWriter(path, lambda: now[0])

    def say(place):
        writer.update(Waiting(f"update {place}"), lambda: {"waiting": place})
        return json.loads(path.read_bytes())["waiting"]

    assert [say(place) for place in range(5)] == [0] * 5
    now[0] = 0.25
    assert say(4) == 4, "what has changed meanwhile is told as soon as it may be"
    assert say(5) == 4
    now[0] = 0.5
    assert say(6) == 6


def test_what_is_not_written_yet_is_before_a_silence_but_not_too_often(tmp_path):
    now = [0.0]
    path = tmp_path / "status.json"
    writer = StatusWriter(path, lambda: now[0])

    def said():
        return json.loads(path.read_bytes())["waiting"]

    for place in range(3):
        writer.update(Waiting(f"update {place}"), lambda place=place: {"waiting": place})
    assert said() == 0
    writer.catch_up(lambda: {"waiting": 2}, 1.0)
    assert said() == 2
    now[0] = 0.1
    writer.update(Waiting("update 3"), lambda: {"waiting": 3})
    writer.catch_up(lambda: {"waiting": 3}, 1.0)
    assert said() == 2
    writer.catch_up(lambda: {"waiting": 3})
    assert said() == 3
    path.unlink()
    writer.catch_up(lambda: {"waiting": 3})
    assert not path.exists(), "there is no news"


def test_a_coordinator_that_ends_leaves_the_end_in_its_status(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        fed.request(rounds=1)
        fed.until(lambda: fed.record.is_over)
        fed.coordinator.close()
        assert status_file(fed)["run"] is None
