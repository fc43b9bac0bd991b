"""What readers make of ``summary.json``: one that a run wrote, one of an earlier version, and a damaged one."""

from __future__ import annotations

import json

import pytest
from federation_harness import Federation

from coordinator.runs.run_summary import RunSummary
from coordinator.state.run_lines import AgentLine, RoundLine
from edge_agent.core.errors import StateError


def test_a_reader_gets_what_the_run_has_written(tmp_path):
    with Federation(tmp_path, agents=2) as fed:
        fed.request(rounds=2)
        fed.finish()
        folder = fed.coordinator.state.run(fed.run)
        body = folder.summary()
        written = folder.metrics()
        rounds = folder.round_lines()
    summary = RunSummary.from_json(body)
    assert (summary.run_id, summary.rounds, summary.seconds) == (body["run_id"], 2, body["seconds"])
    assert [agent.to_json() for agent in summary.agents] == body["agents"]
    for line in written:
        if line["kind"] == "agent":
            assert json.dumps({"kind": "agent", **AgentLine.from_json(line).to_json()}) == json.dumps(line)
    assert (summary.faults, summary.left_out, summary.without_update, summary.incomplete) == ({}, {}, frozenset(), None)
    assert [json.dumps(line.to_json()) for line in rounds] == [
        json.dumps(line) for line in written if line["kind"] == "round"
    ]
    assert [line.round for line in rounds] == [1, 2]
    assert [line.agents for line in rounds] == [("a0", "a1")] * 2


def test_what_an_earlier_version_did_not_write_has_its_default():
    assert RunSummary.from_json({}) == RunSummary()
    line = RoundLine.from_json({"kind": "round", "round": 3, "agents": ["a"], "of_a_later_version": 1})
    assert line == RoundLine(3, agents=("a",))
    assert AgentLine.from_json({"id": "a", "kind": "agent", "of_a_later_version": 1}) == AgentLine("a")


@pytest.mark.parametrize(
    "damaged", [{"warnings": 7}, {"agents": [{}]}, {"left_out": []}, {"bounded": {"a": {}}}, {"updates": [1]}], ids=repr
)
def test_a_summary_of_another_form_is_named(damaged):
    with pytest.raises(StateError, match=r"summary\.json of run-0007 cannot be understood"):
        RunSummary.from_json({"run_id": "run-0007", **damaged})
