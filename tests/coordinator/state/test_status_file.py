"""What readers make of ``status.json``: of one that a coordinator wrote, and of values of another form."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone

import pytest
from federation_harness import Federation

from coordinator.state.fault_log import Fault
from coordinator.state.privacy_spent import PrivacySpent
from coordinator.state.status_file import (
    Awaited,
    BrokerTraffic,
    FleetCounts,
    RunUnderWay,
    Status,
    read_agents,
    read_status,
)
from coordinator.state.store import StateFolder
from edge_agent.wire.messages import codec, up

NOW = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


def test_a_reader_gets_what_the_coordinator_has_written(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 3}) as fed:
        fed.settle()
        for name in ("a0", "a1", "a2"):
            hello = up.Hello(software="x", tier="train", samples=1, boot="b1", connection=1)
            fed.coordinator.handle(name, "up", codec.encode(hello))
        fault = up.Fault(boot="b1", error="DataError", message="no samples", remedy="add some")
        fed.coordinator.handle("a1", "up", codec.encode(fault))
        run = fed.request(rounds=3)
        fed.until(lambda: fed.coordinator.collector.open_round)
        fed.wait(2)
        written = fed.coordinator.status()
        fed.coordinator.catch_up()
        status = read_status(fed.config.state)
        (agent,) = (row.agent for row in read_agents(fed.config.state) if row.agent.id == "a1")
    assert status.content.keys() == written.keys()
    assert status.run is not None
    assert (status.run.id, status.run.rounds, status.run.stall, status.run.privacy) == (run, 3, None, None)
    assert status.run.cohort == ("a0", "a1", "a2")
    assert status.run.cohort_size == 3
    assert status.fleet is not None
    assert (status.fleet.agents, status.fleet.online) == (3, 3)
    assert [row.agent.id for row in status.agents] == ["a0", "a1", "a2"]
    assert [row.content for row in status.agents] == status.content["agents"], (
        "--json prints agents as they were written"
    )
    assert agent.fault is not None
    assert (agent.fault.error, agent.fault.message, agent.fault.remedy) == ("DataError", "no samples", "add some")
    assert not status.is_broker_away
    assert status.traffic.messages_received > 0
    assert status.traffic.blob_bytes_published <= status.traffic.bytes_published


@pytest.mark.parametrize("value", [None, 7, "text", [], [7, None], {}, {"x": {}}, True], ids=repr)
def test_a_value_of_another_form_counts_as_absent(value):
    names = ("at", "run", "waiting", "fleet", "acc", "agents", "refused_agents", "rejected_most", "traffic", "process")
    status = Status(dict.fromkeys(names, value))
    assert status.at is None
    assert status.age_s(NOW) is None
    assert status.run in (None, RunUnderWay(""))
    assert status.awaited in (None, Awaited())
    assert status.fleet in (None, FleetCounts())
    assert status.accuracies == {}
    assert list(status.agents) == []
    assert [device for device in status.refused if device.id] == []
    assert (status.rejected("messages").total, status.rejected("messages").causes) == (0, {})
    assert status.traffic == BrokerTraffic(0, 0, 0, 0, 0)
    assert status.resident_bytes is None


def test_a_time_without_a_zone_has_no_age():
    assert Status({"at": "2030-01-01T11:59:00"}).age_s(NOW) is None
    assert Status({"at": (NOW - timedelta(seconds=60)).isoformat()}).age_s(NOW) == 60


def test_why_agents_are_left_out_is_read_from_this_version_and_from_earlier_ones():
    run = RunUnderWay.from_body(
        {"id": "run-0001", "left_out": {"a": {"until_round": 4, "reason": "fails"}, "b": "old"}}
    )
    assert run is not None
    assert run.left_out == {"a": "fails", "b": "old"}


@pytest.mark.parametrize("code", [None, "data"])
def test_a_fault_is_written_and_read_with_the_same_keys(code):
    body = {"error": "DataError", "code": code, "message": "m", "remedy": "r", "at": "2030-01-01T12:00:00+00:00"}
    if code is None:
        del body["code"]
    fault = Fault.from_body(body)
    assert fault is not None
    assert json.dumps(fault.to_json()) == json.dumps(body)
    assert Fault.from_body({}) is None


@pytest.mark.parametrize(
    "spent, text",
    [
        (PrivacySpent(1.5, 0.5, 1e-5), "epsilon 1.5 spent, 0.5 left (delta 1e-05)"),
        (PrivacySpent(None, None, 1e-5), "more spent than any epsilon bounds, no limit is set (delta 1e-05)"),
        (
            PrivacySpent(1.5, 0.5, 1e-5, 1),
            "epsilon 1.5 spent, 0.5 left (delta 1e-05); 1 round without noise, which epsilon does not cover",
        ),
    ],
)
def test_what_is_spent_of_the_privacy_budget_is_one_line(spent, text):
    assert spent.text == f"differential privacy: {text}"
    assert PrivacySpent.from_body(spent.to_json()) == spent
    assert PrivacySpent.from_body({"epsilon": 1.0}) is None


def test_the_status_says_where_blobs_are_fetched_and_what_is_wrong_there():
    assert Status({}).blobs_by_http == ""
    assert Status({"blobs": None}).blobs_by_http == ""
    blobs = {"by": "store", "where": "s3://models/x", "problem": ""}
    traffic = {"blob_bytes_fetched": 5 << 20}
    assert Status({"blobs": blobs, "traffic": traffic}).blobs_by_http == "s3://models/x, 5 MiB fetched"
    refused = {**blobs, "problem": "no rights"}
    assert Status({"blobs": refused}).blobs_by_http == "s3://models/x, – fetched; blobs go over MQTT: no rights"


@pytest.mark.parametrize("ahead_s", [7200.0, -3600.0, 0.0])
def test_a_clock_that_is_apart_from_that_of_the_folder_is_named(tmp_path, call, ahead_s):
    """As of a coordinator on another machine, whose clock is wrong; the folder has the time of its file server."""
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"at": NOW.isoformat()}))
    os.utime(path, (NOW.timestamp() - ahead_s,) * 2)
    assert read_status(tmp_path).clock_ahead_s == pytest.approx(ahead_s)
    with StateFolder(tmp_path).open("headwater serve"):
        _, out, _ = call("status", "--state", tmp_path)
    lines = [line for line in out.splitlines() if line.startswith("clock: ")]
    if ahead_s == 0:
        assert lines == []
    else:
        (line,) = lines
        words = "2 h ahead of" if ahead_s > 0 else "1 h behind"
        assert line.startswith(f"clock: the coordinator's is {words} that of the state folder; set both")
    assert "clock: " not in call("status", "--state", tmp_path)[1], "nobody serves: it may be a copy of long ago"
