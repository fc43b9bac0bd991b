"""``headwater plan`` as people type it: needs, limits, the parts of the figures, own costs, mistakes in words."""

from __future__ import annotations

import json

import pytest

from coordinator.capacity.costs import OWN, own_costs
from coordinator.cli import main


def called(capsys, *words):
    """Exit code, stdout and stderr of ``headwater plan``."""
    code = 0
    try:
        main(["plan", *map(str, words)])
    except SystemExit as end:
        code = end.code
    result = capsys.readouterr()
    return code, result.out, result.err


def test_a_plan_says_what_is_needed_and_what_is_exhausted_first(capsys):
    code, out, _ = called(capsys, "--agents", 200_000, "--model", "5MB", "--rounds-per-day", 10)
    assert code == 0
    assert "200,000 agents, 200,000 in a round, 5MB, a round in 8,640 s" in out
    assert "a round, open for 300 s (--open-s), keeps one thread busy for " in out
    assert "first limit: " in out
    assert own_costs().origin.date in out
    assert "headwater bench costs" in out


def test_the_json_of_a_plan_has_the_figures_of_its_text(capsys):
    _, out, _ = called(capsys, "--agents", 200_000, "--cohort", 1000, "--partitions", 4, "--json")
    plan = json.loads(out)
    assert [load["role"] for load in plan["loads"]] == ["coordinator", "aggregators", "broker nodes"]
    assert plan["cohort"] == 1000
    assert plan["limits"][0]["name"]
    reached = [limit["agents"] for limit in plan["limits"] if limit["agents"] is not None]
    assert reached == sorted(reached)
    assert "terms" not in plan


def test_each_part_of_a_figure_has_its_source(capsys):
    code, out, _ = called(capsys, "--agents", 1000, "--explain", "--json")
    terms = json.loads(out)["terms"]
    assert code == 0
    assert all(term["product"] == pytest.approx(term["amount"] * term["each"]) for term in terms)
    assert all(own_costs().origin.processor in term["source"] for term in terms)
    _, text, _ = called(capsys, "--agents", 1000, "--explain")
    assert "parts of the figures" in text
    assert "rounds_per_day = 10.0" in text


def test_own_costs_take_the_place_of_those_of_the_package(capsys, tmp_path):
    costs = json.loads(OWN.read_text())
    costs["origin"]["processor"] = "a machine of mine"
    costs["coordinator_cpu_s"] = {"updates": 1.0}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(costs))
    _, out, _ = called(capsys, "--agents", 100, "--rounds-per-day", 86.4, "--costs", path, "--json")
    plan = json.loads(out)
    assert plan["origin"]["processor"] == "a machine of mine"
    assert plan["loads"][0]["cores"] == pytest.approx(0.1)  # 100 s in a round of 1,000 s


def test_all_mistakes_are_said_at_once(capsys):
    code, _, err = called(capsys, "--agents", 0, "--model", "5XB", "--busy", 2)
    assert code == 2
    assert all(name in err for name in ("agents", "5XB", "busy"))
    code, _, err = called(capsys, "--model", "5MB")
    assert code == 2
    assert "agents" in err


@pytest.mark.parametrize(
    "content",
    [b"{}", b"not json", b"\xff" * 100, b"[" * 100_000, b" " * (2 << 20), None],
    ids=["empty", "text", "bytes", "deep", "large", "missing"],
)
def test_what_holds_no_costs_is_refused_with_the_command_that_makes_them(capsys, tmp_path, content):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    code, _, err = called(capsys, "--agents", 10, "--costs", path)
    assert code == 2
    assert "costs.json" in err
    assert "headwater bench costs" in err
    assert "Traceback" not in err


def test_negative_costs_are_refused(capsys, tmp_path):
    costs = json.loads(OWN.read_text())
    costs["broker_cpu_s"]["updates"] = -1.0
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    code, _, err = called(capsys, "--agents", 10, "--costs", path)
    assert code == 2
    assert "broker_cpu_s.updates" in err


def test_a_measurement_of_nothing_is_refused_and_no_prediction_is_divided_by_it(capsys, tmp_path):
    costs = json.loads(OWN.read_text())
    costs["checks"][0]["measured"] = 0.0
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    code, _, err = called(capsys, "--agents", 10, "--costs", path)
    assert code == 2
    assert "checks.0.measured: Input should be greater than 0" in err
