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


def test_a_comparison_that_gets_a_method_stays_one_parent(place, run):
    run("fedprox", seeds=(0,), tune=0, log="csv:logs")
    result = run("fedprox", "ditto", seeds=(0, 1), tune=0, log="csv:logs")
    (parent,) = (place / "logs").iterdir()
    described = json.loads((parent / "run.json").read_text())
    assert described["params"]["seeds"] == "0, 1"
    assert "ditto.client_mean" in described["figures"]
    children = [child for child in parent.iterdir() if child.is_dir()]
    assert len(children) == sum(len(method.runs) for method in result.comparison.methods)


def test_the_id_of_a_comparison_that_an_earlier_version_has_logged_is_kept(place, run):
    run("fedprox", seeds=(0,), tune=0)
    (place / "comparison" / "log-id.json").write_text('{"id": "of before"}')
    result = run("fedprox", seeds=(0,), tune=0, log="csv:logs")
    (parent,) = (place / "logs").iterdir()
    described = json.loads((parent / "run.json").read_text())
    assert (described["uid"], described["name"]) == ("of before", result.comparison.title)


def test_a_log_that_cannot_be_used_is_refused_before_the_first_simulation(place, run):
    with pytest.raises(ConfigError, match="did you mean 'csv'"):
        run("fedprox", tune=0, log="cvs:logs")
    assert not (place / "comparison").exists()
