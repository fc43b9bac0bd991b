"""``headwater compare --log``."""

from __future__ import annotations

import json

import pytest

from edge_agent.core.errors import ConfigError


def test_a_comparison_is_logged_with_a_child_for_each_run(place, run):
    result = run("fedprox", tune=0, log="csv:logs")
    assert all(outcome.is_complete for outcome in result.logs)
    (parent,) = (place / "logs").iterdir()
    described = json.loads((parent / "run.json").read_text())
    assert described["figures"].keys() >= {"fedprox.client_mean", "local.worst_tenth"}
    assert (parent / "table.md").exists()
    children = [json.loads((child / "run.json").read_text()) for child in parent.iterdir() if child.is_dir()]
    runs = sum(len(method.runs) for method in result.comparison.methods)
    assert len(children) == runs == len({child["name"] for child in children})


def test_a_log_that_cannot_be_used_is_refused_before_the_first_simulation(place, run):
    with pytest.raises(ConfigError, match="did you mean 'csv'"):
        run("fedprox", tune=0, log="cvs:logs")
    assert not (place / "comparison").exists()
